"""CRC-32C of an object whose parts are read in any order, some of them twice."""

from __future__ import annotations

import bisect
import threading

from cdi_worker.formats import crc32c

#: With more runs than this the object is not read completely; stop counting.
MOST_RUNS = 4096


class Coverage:
    """The parts of an object read so far, and their CRCs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Disjoint runs that do not touch: sorted starts, and (end, CRC) for each.
        self._starts: list[int] = []
        self._runs: list[tuple[int, int]] = []

    def add(self, offset: int, data: memoryview) -> None:
        """Add bytes at an offset; parts already added are skipped."""
        with self._lock:
            while len(data) and len(self._starts) <= MOST_RUNS:
                at = bisect.bisect_right(self._starts, offset)
                count = self._runs[at - 1][0] - offset if at else 0
                if count <= 0:
                    count = len(data)
                    if at < len(self._starts):
                        count = min(count, self._starts[at] - offset)
                    self._insert(at, offset, (offset + count, crc32c.MODEL.calc(data[:count])))
                offset, data = offset + count, data[count:]

    def value(self, size: int) -> int | None:
        """Return the CRC of all ``size`` bytes, or None if some are missing."""
        with self._lock:
            if not size:
                return 0
            return self._runs[0][1] if self._starts == [0] and self._runs[0][0] == size else None

    def _insert(self, at: int, start: int, run: tuple[int, int]) -> None:
        if at < len(self._starts) and self._starts[at] == run[0]:
            start_after = self._starts.pop(at)
            end, crc = self._runs.pop(at)
            run = (end, crc32c.MODEL.combine(run[1], crc, end - start_after))
        if at and self._runs[at - 1][0] == start:
            self._runs[at - 1] = (run[0], crc32c.MODEL.combine(self._runs[at - 1][1], run[1], run[0] - start))
        else:
            self._starts.insert(at, start)
            self._runs.insert(at, run)
