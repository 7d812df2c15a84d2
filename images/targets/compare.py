"""Compare what would be written with what a disk holds, for an update in place."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Iterator
from typing import Final

from cdi_worker.images import directio
from cdi_worker.images.targets import writeback

#: Bytes that are compared and written as one: a sector of 4096 bytes is the largest.
_BLOCK: Final = directio.UNIT
#: Writing so many equal bytes is cheaper than another write.
_GAP: Final = 64 << 10
_PIECE: Final = 1 << 20


@dataclasses.dataclass(slots=True)
class Changes:
    """What an update found, in bytes of the disk: ``compared``, ``differed``, and ``written`` or zeroed.

    ``differed`` and ``written`` are whole blocks, and what is written includes short parts between them.
    """

    compared: int = 0
    differed: int = 0
    written: int = 0


class Stored:
    """The bytes of an open file or device, as they are before the update. Thread-safe. Raises ``OSError``."""

    def __init__(self, fd: int) -> None:
        self.changes = Changes()
        self._fd = fd
        self._lock = threading.Lock()

    def count(self, compared: int, differed: int, written: int) -> None:
        """Count bytes that were compared elsewhere."""
        with self._lock:
            self.changes.compared += compared
            self.changes.differed += differed
            self.changes.written += written

    def differing(self, offset: int, data: memoryview) -> list[writeback.Range]:
        """Return the parts (start, end) of ``data`` to write at ``offset``."""
        stored = self._read(offset, len(data)).ljust(len(data), b"\0")
        runs = []
        # ``bytes.startswith`` is a memcmp; comparing two views is a loop.
        if not stored.startswith(data):
            start = 0
            while start < len(data):
                end = min(len(data), start + _BLOCK - (offset + start) % _BLOCK)
                if not stored.startswith(data[start:end], start):
                    runs.append((start, end))
                start = end
        return self._counted(len(data), runs)

    def data(self, start: int, end: int) -> list[writeback.Range]:
        """Return the parts from ``start`` to ``end`` that hold other bytes than zeros."""
        return self._counted(end - start, self._nonzero(start, end))

    def is_zero(self, start: int, end: int) -> bool:
        """Return whether a part holds zeros, or is behind the end of a file. It is not counted."""
        return not self._nonzero(start, end)

    def _nonzero(self, start: int, end: int) -> list[writeback.Range]:
        runs = []
        for first, after in self._allocated(start, end):
            for at in range(first, after, _PIECE):
                piece = memoryview(self._read(at, min(_PIECE, after - at)))
                runs += [(at + a, at + b) for a, b, zero in directio.extents(piece, _BLOCK) if not zero]
        return runs

    def _read(self, offset: int, length: int) -> bytes:
        """Read up to the end of the disk. A read that meets a bad sector returns what is before it."""
        stored = os.pread(self._fd, length, offset)
        while len(stored) < length and (
            more := os.pread(self._fd, length - len(stored), offset + len(stored))
        ):
            stored += more
        return stored

    def _counted(self, compared: int, runs: list[writeback.Range]) -> list[writeback.Range]:
        joined = list(_joined(runs))
        self.count(compared, *(sum(end - start for start, end in found) for found in (runs, joined)))
        return joined

    def _allocated(self, start: int, end: int) -> Iterator[writeback.Range]:
        """Yield the parts that are not holes; everything if the storage does not know its holes."""
        while start < end:
            try:
                data = os.lseek(self._fd, start, os.SEEK_DATA)
                hole = os.lseek(self._fd, data, os.SEEK_HOLE)
            except OSError as err:
                if err.errno == errno.ENXIO:
                    return  # no data after ``start``
                data, hole = start, end
            if data < end:
                yield data, min(hole, end)
            start = hole


def _joined(runs: list[writeback.Range]) -> Iterator[writeback.Range]:
    last: writeback.Range | None = None
    for start, end in runs:
        if last is not None and start - last[1] <= _GAP:
            last = last[0], end
            continue
        if last is not None:
            yield last
        last = start, end
    if last is not None:
        yield last
