"""Write a disk to standard output: in order, and the end of it only when everything is verified."""

from __future__ import annotations

import os
import sys
from typing import Final

from cdi_worker import errors, units
from cdi_worker.images import directio
from cdi_worker.images.engine import cancelling
from cdi_worker.images.targets import base, claim, storage

_STDOUT: Final = 1
#: Bytes that are written together, and at least held back until the commit: a reader that ignores the exit
#: status sees that the disk is not whole.
_HELD: Final = 1 << 20


class Pipe(storage.Storage):
    """Standard output. Bytes must be written in order, each once; nothing can be taken back."""

    def __init__(self, held: claim.OutputClaim, cancel: cancelling.Cancel) -> None:
        super().__init__(held, os.dup(_STDOUT), cancel)
        self._output = held
        self._waiting: list[bytes | memoryview] = []
        self._length = 0

    def write(self, offset: int, data: memoryview) -> None:
        with self.guard("write"):
            self._push(offset, bytes(data))

    def zero(self, start: int, end: int) -> None:
        with self.guard("write"):
            for offset, zeros in directio.zeros(start, end):
                self._push(offset, zeros)

    def sync(self) -> None:
        """Do nothing: a pipe cannot be synced."""

    def _push(self, offset: int, data: bytes | memoryview) -> None:
        if offset != self._length:
            raise AssertionError(f"{offset} is not the next byte of the stream, {self._length}")
        if sum(map(len, self._waiting)) >= _HELD:
            self.drain()
        self._waiting.append(data)
        self._length += len(data)

    def drain(self) -> None:
        """Write what was held back."""
        parts, self._waiting = self._waiting, []
        self._output.begun = True

        def write_all() -> None:
            try:
                for part in parts:
                    left = memoryview(part)
                    while left:
                        left = left[os.write(self.fd, left) :]
            except BrokenPipeError as err:
                raise errors.OutputClosed(path=claim.STDOUT) from err

        # A write to a full pipe cannot be ended: its reader may sleep for hours.
        cancelling.run_apart(write_all, self._cancel)


class StreamTarget(base.Target):
    """Standard output, which gets the end of the disk when it is published."""

    storage: Pipe

    def __init__(self, held: claim.OutputClaim, size: int | None, options: base.TargetOptions) -> None:
        if sys.stdout is None:
            raise errors.TargetError(path=claim.STDOUT, reason="is closed")
        if os.isatty(_STDOUT):
            raise errors.RequestError("standard output is a terminal; redirect it to a file or a pipe")
        if held.begun:
            # The first attempt may have written wrong bytes.
            reason = "a part of the disk was written before the source had to be read again; run it again"
            raise errors.TargetError(path=claim.STDOUT, reason=reason)
        super().__init__(Pipe(held, options.cancel), size, options)

    def _ready(self, size: int) -> None:
        self.storage.zero(units.whole_sectors(self._end), size)

    def _finish(self) -> None:
        self.storage.drain()

    def _abandon(self) -> None:
        """Do nothing: what is held back is lost."""
