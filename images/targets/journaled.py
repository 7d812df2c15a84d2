"""A target whose finished ranges are noted in a journal."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final, Protocol

from cdi_worker.images.targets import copy
from cdi_worker.scratch import journal

#: Holes that are noted at once.
_TOGETHER: Final = 64


class Flushable(copy.Writable, Protocol):
    """A target that can be synced."""

    def flush(self) -> None: ...


class Journaled:
    """Pass bytes on to ``target`` and note them in the journal with their digests. Thread-safe."""

    def __init__(self, target: Flushable, noted: journal.Journal) -> None:
        self._target = target
        self._noted = noted

    def write(self, offset: int, data: memoryview, /) -> None:
        """Write ``data``, which may be reused on return."""
        tags = self._noted.digest(offset, data)
        self._target.write(offset, data)
        self._noted.wrote(offset, data, tags)

    def zero(self, offset: int, length: int, /) -> None:
        """Make a range read as zeros, at the latest on the next flush."""
        self._target.zero(offset, length)
        self._noted.zeroed(offset, offset + length)

    def missing(self, start: int, end: int) -> list[journal.Range]:
        """Return the unfinished parts of a range."""
        return self._noted.missing(start, end)

    def zero_missing(self, holes: Iterable[tuple[int, int]]) -> None:
        """Zero the parts of ``holes`` (offset, length) that are not finished."""
        coming = ((offset, offset + length) for offset, length in holes)
        while some := list(itertools.islice(coming, _TOGETHER)):
            missing = self._noted.missing_of(some)
            for start, end in missing:
                self._target.zero(start, end - start)
            self._noted.zeroed_all(missing)

    def checkpoint(self, moved: int) -> None:
        """Count ``moved`` bytes of the source that have been written; save the journal if it is time."""
        self._noted.moved(moved)
        self._noted.checkpoint(self._target.flush)
