"""Requests that follow each other, made one."""

from __future__ import annotations

import threading

Run = tuple[int, int]


class Runs:
    """Merges ranges that begin where an earlier one ended. Thread-safe.

    ``add`` and ``drain`` return the runs ``(start, end)`` that will grow no further, which are then
    forgotten. Several runs grow at once, one for each of the workers that write side by side.
    """

    def __init__(self, longest: int, side_by_side: int = 16) -> None:
        self._longest = longest
        self._side_by_side = side_by_side
        self._starts: dict[int, int] = {}  # by end; the oldest first
        self._lock = threading.Lock()

    def add(self, start: int, end: int) -> list[Run]:
        with self._lock:
            start = self._starts.pop(start, start)
            if end - start >= self._longest:
                return [(start, end)]
            self._starts[end] = min(start, self._starts.get(end, start))
            if len(self._starts) <= self._side_by_side:
                return []
            oldest = next(iter(self._starts))
            return [(self._starts.pop(oldest), oldest)]

    def drain(self) -> list[Run]:
        with self._lock:
            runs = [(start, end) for end, start in self._starts.items()]
            self._starts.clear()
        return runs
