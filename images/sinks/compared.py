"""Sinks that compare what is delivered with what storage holds."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import spans
from cdi_worker.images import directio
from cdi_worker.images.sinks import base
from cdi_worker.images.targets.base import Target
from cdi_worker.images.targets.storage import Storage
from cdi_worker.scratch import journal
from cdi_worker.scratch.ranges import Range

#: Bytes that are compared and written as one: a sector of 4096 bytes is the largest.
_BLOCK: Final = directio.UNIT
#: Writing so many equal bytes is cheaper than another write.
_GAP: Final = 64 << 10


def differing(storage: Storage, offset: int, data: memoryview) -> list[Range]:
    """Return the ranges of the disk, in whole blocks, whose bytes differ from ``data`` at ``offset``."""
    return unlike(storage.read(offset, len(data)), offset, data)


def unlike(stored: bytes | memoryview, offset: int, data: memoryview) -> list[Range]:
    """Return the blocks in which ``data`` at ``offset`` differs from ``stored``, which may end early."""
    if directio.equal(stored, data):
        return []
    stored = bytes(stored).ljust(len(data), b"\0")
    runs = []
    start = 0
    while start < len(data):
        end = min(len(data), start + _BLOCK - (offset + start) % _BLOCK)
        if not stored.startswith(data[start:end], start):
            runs.append((offset + start, offset + end))
        start = end
    return runs


@dataclasses.dataclass
class Changes:
    """What an update found, in bytes of the disk: ``compared``, ``differed``, and ``written`` or zeroed.

    ``differed`` and ``written`` are whole blocks, and what is written includes short parts between them.
    """

    compared: int = 0
    differed: int = 0
    written: int = 0


class UpdatingSink:
    """Write what differs from a finished disk, and nothing else. Thread-safe."""

    def __init__(self, to: Target) -> None:
        self._to = to
        #: What was found so far.
        self.changes = Changes()
        self._lock = threading.Lock()

    def write(self, offset: int, data: memoryview, /) -> None:
        self._to.reach(offset + len(data))
        for start, end in self._count(len(data), differing(self._to.storage, offset, data)):
            self._to.write(start, data[start - offset : end - offset])

    def zero(self, offset: int, length: int, /) -> None:
        self._to.reach(offset + length)
        for start, end in self._count(length, list(self._to.storage.nonzero(offset, offset + length))):
            self._to.zero(start, end - start)

    def _count(self, compared: int, runs: list[Range]) -> list[Range]:
        written = list(spans.joined(runs, _GAP))
        with self._lock:
            self.changes.compared += compared
            self.changes.differed += sum(end - start for start, end in runs)
            self.changes.written += sum(end - start for start, end in written)
        return written


class ContinuingSink:
    """Write what the journal lacks, and what it lists but storage does not hold.

    For a stream of a whole disk that resumes an earlier attempt. ``into``: the sink that writes to
    ``stored``. ``differed``: bytes in the journal that were written again; ``spared``: bytes of data that
    need not be written. Thread-safe.
    """

    def __init__(self, stored: Storage, noted: journal.Journal, into: base.Sink) -> None:
        self._stored = stored
        self._noted = noted
        self._into = into
        self.differed = 0
        self.spared = 0
        self._lock = threading.Lock()

    def write(self, offset: int, data: memoryview, /) -> None:
        def wrong(start: int, end: int) -> list[Range]:
            return differing(self._stored, start, data[start - offset : end - offset])

        parts = self._unfinished(offset, offset + len(data), wrong)
        for start, end in parts:
            self._into.write(start, data[start - offset : end - offset])
        with self._lock:
            self.spared += len(data) - sum(end - start for start, end in parts)

    def zero(self, offset: int, length: int, /) -> None:
        for start, end in self._unfinished(offset, offset + length, self._stored.nonzero):
            self._into.zero(start, end - start)

    def _unfinished(self, start: int, end: int, wrong: Callable[[int, int], Iterable[Range]]) -> list[Range]:
        """Return the parts of a range that storage does not contain."""
        missing = self._noted.missing(start, end)
        parts = list(missing)
        for first, after in spans.gaps(missing, start, end):
            for part in spans.joined(wrong(first, after), _GAP):
                self._noted.discard(*part)
                with self._lock:
                    self.differed += part[1] - part[0]
                parts.append(part)
        return parts


class SampleSink:
    """Compare what the journal lists with storage, instead of writing it.

    Raises ``errors.SourceChanged`` and sets ``differs`` at the first difference.
    """

    def __init__(self, stored: Storage, noted: journal.Journal) -> None:
        self._stored = stored
        self._noted = noted
        self.differs = False

    def write(self, offset: int, data: memoryview, /) -> None:
        end = offset + len(data)
        for first, after in spans.gaps(self._noted.missing(offset, end), offset, end):
            if self._stored.read(first, after - first) != data[first - offset : after - offset]:
                self.differs = True
                what = f"content at byte {first} of the disk"
                raise errors.SourceChanged(url=self._stored.path, what=what, before="stored", now="different")

    def zero(self, offset: int, length: int, /) -> None:
        for start, zeros in directio.zeros(offset, offset + length):
            self.write(start, zeros)
