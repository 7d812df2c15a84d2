"""CRC-32C of bytes that come in pieces, in any order, some of them twice."""

from __future__ import annotations

import bisect
import functools
import sys
import threading
from typing import Any

#: More gaps than this are the mark of random reading, which does not end in a whole.
MOST_RUNS = 4096


class Coverage:
    """What has been seen of an object, and its CRC. Several threads may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Runs that touch or overlap nowhere: starts in order, with (end, CRC) of each.
        self._starts: list[int] = []
        self._runs: list[tuple[int, int]] = []

    def add(self, offset: int, data: memoryview) -> None:
        """Take in bytes at an offset; those already seen are left out."""
        with self._lock:
            while len(data) and len(self._starts) <= MOST_RUNS:
                at = bisect.bisect_right(self._starts, offset)
                seen = self._runs[at - 1][0] - offset if at else 0
                if seen <= 0:
                    after = self._starts[at] - offset if at < len(self._starts) else sys.maxsize
                    seen = min(len(data), after)
                    self._insert(at, offset, (offset + seen, _crc().calc(data[:seen])))
                offset, data = offset + seen, data[seen:]

    def value(self, size: int) -> int | None:
        """Return the CRC of all ``size`` bytes, None while some have not been seen."""
        with self._lock:
            if not size:
                return 0
            return self._runs[0][1] if self._starts == [0] and self._runs[0][0] == size else None

    def _insert(self, at: int, start: int, run: tuple[int, int]) -> None:
        if at < len(self._starts) and self._starts[at] == run[0]:
            start_after = self._starts.pop(at)
            end, crc = self._runs.pop(at)
            run = (end, _crc().combine(run[1], crc, end - start_after))
        if at and self._runs[at - 1][0] == start:
            self._runs[at - 1] = (run[0], _crc().combine(self._runs[at - 1][1], run[1], run[0] - start))
        else:
            self._starts.insert(at, start)
            self._runs.insert(at, run)


@functools.cache
def _crc() -> Any:
    """Return CRC-32C (RFC 3720, 12.1) with ``combine``, which joins the CRCs of two runs by their lengths.

    google-crc32c and crc32c cannot join CRCs. awscrt can, with seven times the size.
    """
    import anycrc

    return anycrc.Model("CRC32C")
