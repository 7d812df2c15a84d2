"""The steps of a soak: imports and uploads of every kind, and their failures."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract, progress
from tests.support import clones, uploads


@dataclasses.dataclass(frozen=True)
class Step:
    """One import or upload.

    ``expected``: the disk, None where it must fail. ``device``: the target instead of a file. ``request`` of
    an import: its target is replaced; ``cancel_after``: bytes after which it is cancelled. ``body`` of an
    upload, or None for a clone of ``expected``; ``cut``: bytes after which the client disconnects.
    """

    name: str
    expected: Path | None = None
    device: Path | None = None
    request: cdi_worker.Request | None = None
    cancel_after: int | None = None
    body: Path | None = None
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    cut: int | None = None


class CancelAfter(progress.NullProgress):
    """Set a cancel after ``left`` bytes were read; None: never."""

    def __init__(self, left: int | None, cancel: cancelling.Cancel) -> None:
        self._left = left
        self._cancel = cancel
        self._lock = threading.Lock()

    def read(self, count: int) -> None:
        with self._lock:
            if self._left is not None:
                self._left -= count
                if self._left < 0:
                    self._cancel.set()


def run_import(step: Step, target: Path) -> None:
    """Run the import of a step."""
    assert step.request is not None
    scratch = target.parent / "scratch" if step.device is None else None
    if scratch is not None:
        scratch.mkdir(exist_ok=True)
    request = dataclasses.replace(
        step.request,
        target=str(target),
        scratch=None if scratch is None else str(scratch),
        existing="replace",
    )
    cancel = cancelling.Cancel()
    try:
        cdi_worker.run(request, CancelAfter(step.cancel_after, cancel), cancel)
    except errors.Error:
        if step.expected is not None:
            raise
        # What a retryable failure keeps for the next attempt.
        target.with_name("disk.img.part").unlink(missing_ok=True)
    else:
        assert step.expected is not None, f"{step.name}: did not fail"


class Uploads:
    """Runs each upload on a server of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._certificates = uploads.certificates(directory / "certificates")

    def run(self, step: Step, target: Path) -> None:
        """Run the upload of a step, and the server to its end."""
        paths = contract.Paths(
            data=str(target.parent),
            block="/no",
            scratch=str(self._directory / "scratch"),
            termination_log=str(self._directory / "termination-log"),
            metrics_port=0,
        )
        (self._directory / "scratch").mkdir(exist_ok=True)
        env = {} if step.device is None else {"DESTINATION": str(step.device)}
        with uploads.Server(self._certificates, env, paths) as server:
            if step.body is None:
                clones.run(clones.environment(server, "block", step.expected or target))
            elif step.cut is not None:
                self._cut(server, step)
                return
            else:
                answer = server.ask("POST", uploads.SYNC, step.body.read_bytes(), step.headers)
                assert (answer.status == 200) == (step.expected is not None), answer.text
                if step.expected is None:
                    return
            assert server.result().status == 0

    def _cut(self, server: uploads.Server, step: Step) -> None:
        assert step.body is not None
        data = step.body.read_bytes()
        with server.connect() as connection:
            server.begin(connection, uploads.SYNC, len(data))
            connection.send(data[: step.cut])
            server.wait_until_busy()
