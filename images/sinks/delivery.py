"""The sink in front of every target: zeros in the data, the limit, what was delivered, and the journals."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Final

from cdi_worker import errors
from cdi_worker.images import directio
from cdi_worker.images.sinks import base
from cdi_worker.scratch import journal

#: Shorter ranges of zeros are written: that is cheaper than a system call to zero them.
SHORTEST_ZERO: Final = 64 << 10
#: Holes that are noted together: other threads wait for a journal's lock once, not for each.
_TOGETHER: Final = 64
#: A hole of so many bytes is noted at once: it may be most of the disk.
_LONG: Final = 16 << 20


class DeliverySink:
    """Pass a disk on to ``to``. Thread-safe.

    Zeros in the data, in blocks of ``shortest_zero`` bytes, become ranges to zero. ``limit``: a disk with
    more bytes is refused before the range beyond the limit is written (``errors.TooLarge``), of a ``thin``
    disk one with more bytes of data. ``journals`` note what ``to`` has taken; ``flush`` writes that to stable
    storage before a journal is saved.
    """

    def __init__(
        self,
        to: base.Sink,
        limit: int | None = None,
        *,
        thin: bool = False,
        shortest_zero: int = SHORTEST_ZERO,
        journals: Sequence[journal.Journal] = (),
        flush: Callable[[], None] = lambda: None,
        data: Callable[[int], None] = lambda _: None,
        holes: Callable[[int], None] = lambda _: None,
    ) -> None:
        #: Bytes of the disk delivered so far, as data and as zeros.
        self.delivered = 0
        #: Bytes of these that were data.
        self.written = 0
        self._to = to
        self._limit = None if thin else limit
        self._most_data = limit if thin else None
        self._shortest = shortest_zero
        self._journals = journals
        self._flush = flush
        self._count_data, self._count_hole = data, holes
        self._holes: collections.deque[journal.Range] = collections.deque()
        self._lock = threading.Lock()

    def write(self, offset: int, data: memoryview, /) -> None:
        self._check(offset + len(data))
        for start, end, is_zero in directio.extents(data, self._shortest):
            if is_zero:
                self._zero(offset + start, end - start)
            else:
                self._write(offset + start, data[start:end])

    def zero(self, offset: int, length: int, /) -> None:
        self._check(offset + length)
        self._zero(offset, length)

    def moved(self, count: int) -> None:
        """Count ``count`` bytes of the image that are on the disk; save the journals if it is time."""
        self.note_holes()
        for noted in self._journals:
            noted.moved(count)
            noted.checkpoint(self._flush)

    def note_holes(self) -> None:
        """Note the holes that were delivered."""
        # Other threads append meanwhile. ``popleft`` is atomic: each hole is noted by one thread.
        holes = []
        with contextlib.suppress(IndexError):
            while True:
                holes.append(self._holes.popleft())
        if holes:
            for noted in self._journals:
                noted.zeroed(holes)

    def _check(self, end: int) -> None:
        if self._limit is not None and end > self._limit:
            raise errors.TooLarge(virtual_size=end, available=self._limit)

    def _write(self, offset: int, data: memoryview) -> None:
        tags = [noted.digest(offset, data) for noted in self._journals]
        self._to.write(offset, data)
        for noted, each in zip(self._journals, tags, strict=True):
            noted.wrote(offset, data, each)
        with self._lock:
            self.delivered += len(data)
            self.written += len(data)
        self._count_data(len(data))
        if self._most_data is not None and self.written > self._most_data:
            raise errors.TooLarge(virtual_size=self.written, available=self._most_data)

    def _zero(self, offset: int, length: int) -> None:
        self._to.zero(offset, length)
        with self._lock:
            self.delivered += length
        self._count_hole(length)
        if self._journals:
            self._holes.append((offset, offset + length))
            if length >= _LONG or len(self._holes) >= _TOGETHER:
                self.note_holes()
