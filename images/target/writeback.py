"""The page cache, kept small while a disk is written."""

from __future__ import annotations

import collections
import threading
from typing import Final

from cdi_worker.images import kernel

# Measured on ext4 and a loop device: from 1 MiB on, longer runs are not faster.
_RUN: Final = 1 << 20


class Window:
    """Pushes written ranges out at once and lets at most ``limit`` bytes be on their way. Thread-safe.

    A container's memory limit counts dirty pages; a slow device lets them grow until the worker is
    killed. Here the writers wait for the device instead. Up to 16 MiB more gather unpushed in short
    writes.
    """

    def __init__(self, fd: int, limit: int = 32 << 20) -> None:
        self._fd = fd
        self._limit = limit
        self._runs = Runs(_RUN)
        self._pushed: collections.deque[Run] = collections.deque()
        self._bytes = 0
        self._lock = threading.Lock()

    def wrote(self, start: int, end: int) -> None:
        for run in self._runs.add(start, end):
            self._push(run)

    def _push(self, run: Run) -> None:
        start, end = run
        kernel.start_writeback(self._fd, start, end - start)
        with self._lock:
            self._pushed.append(run)
            self._bytes += end - start
        while oldest := self._over():
            start, end = oldest
            kernel.finish_writeback(self._fd, start, end - start)

    def _over(self) -> Run | None:
        with self._lock:
            if self._bytes <= self._limit:
                return None
            start, end = self._pushed.popleft()
            self._bytes -= end - start
            return start, end


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
