"""A sink that notes in the journal what its target has finished."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Final

from cdi_worker.images.sinks import base
from cdi_worker.scratch import journal

#: Holes that are noted together: other threads wait for the journal's lock once, not for each.
_TOGETHER: Final = 64
#: A hole of so many bytes is noted at once: it may be most of the disk.
_LONG: Final = 16 << 20


class JournalSink(base.ForwardingSink):
    """Note the ranges that ``to`` has taken, with their digests. Thread-safe.

    ``flush`` writes them to stable storage, before the journal is saved.
    """

    def __init__(self, to: base.Sink, noted: journal.Journal, flush: Callable[[], None]) -> None:
        super().__init__(to)
        self._flush = flush
        self._noted = noted
        self._holes: collections.deque[journal.Range] = collections.deque()

    def write(self, offset: int, data: memoryview, /) -> None:
        tags = self._noted.digest(offset, data)
        self._to.write(offset, data)
        self._noted.wrote(offset, data, tags)

    def zero(self, offset: int, length: int, /) -> None:
        self._to.zero(offset, length)
        self._holes.append((offset, offset + length))
        if length >= _LONG or len(self._holes) >= _TOGETHER:
            self._note_holes()

    def moved(self, count: int) -> None:
        """Count ``count`` bytes of the image that are on the disk; save the journal if it is time."""
        self._note_holes()
        self._noted.moved(count)
        self._noted.checkpoint(self._flush)

    def _note_holes(self) -> None:
        # Other threads append meanwhile. ``popleft`` is atomic: each hole is noted by one thread.
        holes = []
        with contextlib.suppress(IndexError):
            while True:
                holes.append(self._holes.popleft())
        if holes:
            self._noted.zeroed(holes)


class DigestSink(JournalSink):
    """Keep the digests of all bytes in memory, to compare the finished disk with them. Thread-safe.

    ``limit``: the largest size of the disk.
    """

    def __init__(self, to: base.Sink, limit: int) -> None:
        self.noted = journal.Journal.in_memory(limit)
        super().__init__(to, self.noted, lambda: None)

    def end(self, size: int) -> None:
        """Note the end of a disk of ``size`` bytes."""
        self._note_holes()
        self.noted.end(size)
