"""Write a stream of the whole disk to a target that already has a part of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Self

from cdi_worker import errors
from cdi_worker.images.targets import base, compare, copy, journaled
from cdi_worker.scratch import journal


class Continued:
    """Write to ``into`` what is missing in the journal, and what differs from the bytes in storage.

    ``differed``: bytes in the journal that were written again. Thread-safe. Raises ``errors.TargetError``.
    """

    def __init__(self, target: base.Target, noted: journal.Journal, into: copy.Writable) -> None:
        self._path = target.path
        self._noted = noted
        self._into = into
        self.differed = 0
        target.drop_cache()
        with self._reading():
            self._fd = os.open(target.readable, os.O_RDONLY | os.O_CLOEXEC)
        self._stored = compare.Stored(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, offset: int, data: memoryview, /) -> None:
        """Write ``data``, which may be reused on return."""

        def differing(start: int, end: int) -> list[journal.Range]:
            parts = self._stored.differing(start, data[start - offset : end - offset])
            return [(start + first, start + after) for first, after in parts]

        for start, end in self._unfinished(offset, offset + len(data), differing):
            self._into.write(start, data[start - offset : end - offset])

    def zero(self, offset: int, length: int, /) -> None:
        """Make a range read as zeros, at the latest on the next flush."""
        for start, end in self._unfinished(offset, offset + length, self._stored.data):
            self._into.zero(start, end - start)

    def _unfinished(
        self, start: int, end: int, differing: Callable[[int, int], list[journal.Range]]
    ) -> list[journal.Range]:
        """Return the parts of a range that storage does not contain."""
        missing = self._noted.missing(start, end)
        found = list(missing)
        for first, after in [*missing, (end, end)]:
            if start < first:
                with self._reading():
                    wrong = differing(start, first)
                for part in wrong:
                    self._noted.discard(*part)
                    self.differed += part[1] - part[0]
                found += wrong
            start = after
        return found

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as err:
            raise errors.target_error(self._path, err, "read back") from err


class Saving(journaled.Journaled):
    """Also saves the journal at its interval."""

    def write(self, offset: int, data: memoryview, /) -> None:
        super().write(offset, data)
        self.checkpoint(len(data))

    def zero(self, offset: int, length: int, /) -> None:
        super().zero(offset, length)
        self.checkpoint(0)
