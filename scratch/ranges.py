"""Sets of bytes, as ranges."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

Range = tuple[int, int]


class Ranges:
    """A set of bytes, as ascending half-open ranges ``(start, end)`` that neither overlap nor touch."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self.add(start, end)

    def __iter__(self) -> Iterator[Range]:
        return zip(self._starts, self._ends, strict=True)

    def __len__(self) -> int:
        return len(self._starts)

    def is_all(self, size: int) -> bool:
        """Return whether the set is exactly the bytes before ``size``."""
        return list(self) == ([(0, size)] if size else [])

    def covered(self) -> int:
        """Return the number of bytes in the set."""
        return sum(self._ends) - sum(self._starts)

    def add(self, start: int, end: int) -> None:
        if start >= end:
            return
        first = bisect.bisect_left(self._ends, start)
        after = bisect.bisect_right(self._starts, end)
        if first < after:
            start = min(start, self._starts[first])
            end = max(end, self._ends[after - 1])
        self._starts[first:after] = [start]
        self._ends[first:after] = [end]

    def remove(self, start: int, end: int) -> None:
        first = bisect.bisect_right(self._ends, start)
        after = bisect.bisect_left(self._starts, end)
        if start >= end or first >= after:
            return
        before, behind = (self._starts[first], start), (end, self._ends[after - 1])
        left = [item for item in (before, behind) if item[0] < item[1]]
        self._starts[first:after] = [item[0] for item in left]
        self._ends[first:after] = [item[1] for item in left]

    def holds(self, start: int, end: int) -> bool:
        """Return whether all of a range that is not empty is in the set."""
        index = bisect.bisect_right(self._starts, start) - 1
        return index >= 0 and self._ends[index] >= end

    def missing(self, start: int, end: int) -> list[Range]:
        """Return the parts of a range that are not in the set."""
        gaps = []
        for index in range(bisect.bisect_right(self._ends, start), len(self._starts)):
            if self._starts[index] >= end:
                break
            if start < self._starts[index]:
                gaps.append((start, self._starts[index]))
            start = self._ends[index]
        if start < end:
            gaps.append((start, end))
        return gaps
