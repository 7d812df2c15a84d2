"""Keep the page cache small while a disk is written."""

from __future__ import annotations

import collections
import threading
from typing import Final

from cdi_worker.images import kernel

# Measured on ext4 and a loop device: ranges longer than 1 MiB are not faster.
_RANGE: Final = 1 << 20


class Window:
    """Start writeback of written ranges at once, and limit the bytes in writeback to ``limit``. Thread-safe.

    A container's memory limit counts dirty pages: with a slow device they would grow until the worker is
    killed. Here the writers wait for the device instead. Up to 16 MiB of short writes are collected before
    their writeback starts.
    """

    def __init__(self, fd: int, limit: int = 32 << 20) -> None:
        self._fd = fd
        self._limit = limit
        self._ranges = Merger(_RANGE)
        self._pushed: collections.deque[Range] = collections.deque()
        self._bytes = 0
        self._lock = threading.Lock()

    def wrote(self, start: int, end: int) -> None:
        for merged in self._ranges.add(start, end):
            self._push(merged)

    def _push(self, merged: Range) -> None:
        start, end = merged
        kernel.start_writeback(self._fd, start, end - start)
        with self._lock:
            self._pushed.append(merged)
            self._bytes += end - start
        while oldest := self._over():
            start, end = oldest
            kernel.finish_writeback(self._fd, start, end - start)

    def _over(self) -> Range | None:
        with self._lock:
            if self._bytes <= self._limit:
                return None
            start, end = self._pushed.popleft()
            self._bytes -= end - start
            return start, end


Range = tuple[int, int]


class Merger:
    """Merge ranges that begin where an earlier one ended. Thread-safe.

    ``add`` returns the merged ranges ``(start, end)`` that have reached ``longest`` bytes, or are the oldest
    of more than ``side_by_side``, one per parallel writer. ``drain`` returns the rest.
    """

    def __init__(self, longest: int, side_by_side: int = 16) -> None:
        self._longest = longest
        self._side_by_side = side_by_side
        self._starts: dict[int, int] = {}  # by end; the oldest first
        self._lock = threading.Lock()

    def add(self, start: int, end: int) -> list[Range]:
        with self._lock:
            start = self._starts.pop(start, start)
            if end - start >= self._longest:
                return [(start, end)]
            self._starts[end] = min(start, self._starts.get(end, start))
            if len(self._starts) <= self._side_by_side:
                return []
            oldest = next(iter(self._starts))
            return [(self._starts.pop(oldest), oldest)]

    def drain(self) -> list[Range]:
        with self._lock:
            runs = [(start, end) for end, start in self._starts.items()]
            self._starts.clear()
        return runs
