"""Write a disk to standard output: in order, and the end of it only when everything is verified."""

from __future__ import annotations

import os
import sys
from typing import Final

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.images.targets import base, claim

_STDOUT: Final = 1
#: Bytes that are written together, and at least held back until the commit: a reader that ignores the exit
#: status sees that the disk is not whole.
_HELD: Final = 1 << 20
_ZEROS: Final = memoryview(bytes(_HELD))


class StreamTarget(base.Target):
    """Standard output. Bytes must be written in order, each once; nothing can be taken back."""

    def __init__(self, held: claim.Output, size: int | None, options: base.Options) -> None:
        if sys.stdout is None:
            raise errors.TargetError(path=claim.STDOUT, reason="is closed")
        if os.isatty(_STDOUT):
            raise errors.RequestError("standard output is a terminal; redirect it to a file or a pipe")
        if held.begun:
            # The first attempt may have written wrong bytes.
            reason = "a part of the disk was written before the source had to be read again; run it again"
            raise errors.TargetError(path=claim.STDOUT, reason=reason)
        super().__init__(held, os.dup(_STDOUT), size, options)
        self._output = held
        self._waiting: list[bytes | memoryview] = []
        self._length = 0

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data``, which may be reused on return."""
        with self._storage("write"):
            self._reach(offset + len(data))
            self._push(offset, bytes(data))

    def zero(self, offset: int, length: int) -> None:
        """Write zeros."""
        with self._storage("write"):
            self._reach(offset + length)
            self._fill(offset, offset + length)

    def flush(self) -> None:
        """Do nothing: it is not known what is behind a pipe."""

    def _fill(self, start: int, end: int) -> None:
        for offset in range(start, end, _HELD):
            self._push(offset, _ZEROS[: end - offset])

    def _push(self, offset: int, data: bytes | memoryview) -> None:
        if offset != self._length:
            raise AssertionError(f"{offset} is not the next byte of the stream, {self._length}")
        if sum(map(len, self._waiting)) >= _HELD:
            self._drain()
        self._waiting.append(data)
        self._length += len(data)

    def _drain(self) -> None:
        parts, self._waiting = self._waiting, []
        self._output.begun = True
        # A write to a full pipe cannot be ended: its reader may sleep for hours.
        cancelling.apart(lambda: _write_all(self._fd, parts), self._options.cancel)

    def _ready(self, size: int) -> None:
        self._fill(self._length, size)

    def _finish(self) -> None:
        self._drain()
        self._release()

    def _abandon(self) -> None:
        self._waiting = []


def _write_all(fd: int, parts: list[bytes | memoryview]) -> None:
    try:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[os.write(fd, left) :]
    except BrokenPipeError as err:
        raise errors.OutputClosed(path=claim.STDOUT) from err
