"""Make several disks usable together: none before all are complete and verified."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Self

from cdi_worker import errors
from cdi_worker.images.targets import base, claim


class Group:
    """The claims and the written targets of several disks, until the end of the ``with`` block.

    Before the first disk becomes usable, each lock file gets a record of its new disk. So a run with the same
    ``claim.Terms.key`` recognises the disks of a run that was killed in between, and replaces them. Threads
    may add and keep targets at the same time. ``workers``: threads of each disk that decompress and write.
    """

    def __init__(self, workers: int = 2) -> None:
        self.workers = workers
        self._stack = contextlib.ExitStack()
        self._claims: dict[str, claim.Claim] = {}
        self._targets: list[tuple[base.Target, int, Callable[[], object]]] = []
        self._resumable: list[tuple[base.Target, Callable[[errors.Error], bool]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for out, outlives in self._resumable:
            if isinstance(error, errors.Error) and outlives(error):
                out.keep()
        with self._stack:
            for out, *_ in self._targets:
                out.close()

    def hold(self, path: str, taking: contextlib.AbstractContextManager[claim.Claim]) -> None:
        """Take the claim of a target, and hold it until the end of the group."""
        self._claims[path] = self._stack.enter_context(taking)

    def claim(self, path: str) -> claim.Claim:
        """Return the claim of a target."""
        return self._claims[path]

    def add(self, out: base.Target, size: int, settle: Callable[[], object] = lambda: None) -> None:
        """Take over a completely written target; ``size``: see ``base.Target.commit``.

        ``settle``: notes what the disk holds, which is certain only when all are verified.
        """
        out.is_detached = True
        self._targets.append((out, size, settle))

    def keep(self, out: base.Target, outlives: Callable[[errors.Error], bool]) -> None:
        """Keep the bytes of a target with a journal if the group fails and they outlive that error.

        ``outlives``: returns whether a later run can resume them after this error.
        """
        self._resumable.append((out, outlives))

    def publish(self) -> None:
        """Make all disks durable, check them, and make them usable: all are verified."""
        for out, size, settle in self._targets:
            settle()
            out.prepare(size)
        for out, *_ in self._targets:
            self._claims[out.path].note(out.written_path)
        for out, *_ in self._targets:
            out.publish()
        for each in self._claims.values():
            each.settle()
