"""CRC-32C of an object whose parts are read in any order, some of them twice."""

from __future__ import annotations

import threading

from cdi_worker.formats import crc32c
from cdi_worker.scratch import ranges

#: With more parts than this the object is not read completely; stop counting.
MOST_PARTS = 4096


class Coverage:
    """The parts read so far of an object of ``size`` bytes, and the sum of their CRCs. Thread-safe.

    CRCs are linear: that of the whole is the exclusive or of those of its parts, each shifted by the bytes
    that follow the part.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._read = ranges.Ranges()
        self._crc = 0

    def add(self, offset: int, data: memoryview) -> None:
        """Add bytes at an offset; parts already added are skipped."""
        with self._lock:
            if len(self._read) > MOST_PARTS:
                return
            for start, end in self._read.missing(offset, offset + len(data)):
                part = crc32c.MODEL.calc(data[start - offset : end - offset])
                self._crc ^= crc32c.MODEL.combine(part, 0, max(0, self._size - end))
                self._read.add(start, end)

    def value(self) -> int | None:
        """Return the CRC of all bytes, or None if some are missing, or more were read."""
        with self._lock:
            return self._crc if self._read.is_all(self._size) else None
