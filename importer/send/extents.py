"""What a clone source sends to a target of ours: extents, and from any offset again."""

from __future__ import annotations

import collections
import contextlib
import itertools
import time
from collections.abc import Generator, Iterable
from typing import NamedTuple

from cdi_worker import progress
from cdi_worker.formats import clone
from cdi_worker.images import directio, volume
from cdi_worker.images.tools import gnu_tar
from cdi_worker.send import sender

#: How far apart the places are that a stream can begin again from, and how many are kept: more than can be
#: on the way between two machines.
STEP = 16 << 20
KEPT = 64
#: Steps without compression until it is tried again, and of how many records one is compressed then.
PAUSE = 32
TRIED = 4
#: The longest run of zeros told at once: progress shall be seen.
LONGEST_ZERO = 1 << 30

Chunks = Generator["bytes | memoryview", None, None]


class Mark(NamedTuple):
    """A place to begin again: bytes sent before it, bytes of the device before it, the state there."""

    sent: int
    offset: int
    encoder: clone.Encoder


class Pays:
    """Does compression take less time than it saves? Asked at each step, of what went before.

    Until there is an answer, one record of TRIED is compressed: on a fast network each costs more than it
    saves.
    """

    def __init__(self) -> None:
        self._every = TRIED
        self._steps = 0
        self._clear()

    def encoded(self, length: int, packed: int, seconds: float) -> None:
        """Count data and how much was made of it."""
        self._seen += length
        self._saved += length - packed
        self._packing += seconds

    def sent(self, count: int, seconds: float) -> None:
        """Count bytes that were sent, however long the other end made them wait."""
        self._sent += count
        self._sending += seconds

    def decide(self) -> int:
        """Tell which records to compress in the next step: every so many, 0: none."""
        if not self._every:
            self._steps += 1
            self._every = TRIED if self._steps >= PAUSE else 0
            self._clear()
        elif self._seen >= STEP:
            # Without it, the bytes saved would have been sent in this time.
            pays = self._packing * self._sent < self._saved * self._sending
            self._every, self._steps = int(pays), 0
            self._clear()
        return self._every

    def _clear(self) -> None:
        self._seen = self._saved = self._sent = 0
        self._packing = self._sending = 0.0


class Device(sender.Stream):
    """A block device; ``length`` is None: how much is sent is known at the end."""

    length = None

    def __init__(self, device: volume.Volume, shown: progress.Progress) -> None:
        self._device = device
        self._shown = shown
        self._told = 0
        #: Bytes of the device between two places that the stream can begin again from.
        self.step = STEP
        self._pays = Pays()
        self._marks = collections.deque([Mark(len(clone.MAGIC), 0, clone.Encoder(TRIED))], KEPT)
        self._first = self._marks[0]

    def chunks(self, offset: int) -> Chunks:
        """Yield what follows ``offset``; see ``send.sender.Stream``."""
        while self._marks and self._marks[-1].sent > offset:
            # What was not received may be sent in another way.
            self._marks.pop()
        if not self._marks:
            self._marks.append(self._first)
        mark = self._marks[-1]
        at = mark.sent if offset >= mark.sent else 0
        parts = self._from(mark) if at else itertools.chain([clone.MAGIC], self._from(mark))
        yield from _after(parts, offset - at)

    def _from(self, mark: Mark) -> Chunks:
        encoder, sent = mark.encoder.copy(), mark.sent
        zeros, marked = 0, mark.offset
        for part in self._device.pieces(mark.offset):
            is_zero = isinstance(part, volume.Hole)
            if zeros and (not is_zero or zeros + part.length > LONGEST_ZERO):
                record = encoder.zeros(zeros)
                zeros = 0
                yield record
                sent += len(record)
            if not zeros and part.offset >= marked + self.step and part.offset % volume.CHUNK == 0:
                marked = part.offset
                if sent > self._marks[-1].sent:
                    encoder.every = self._pays.decide()
                    self._marks.append(Mark(sent, marked, encoder.copy()))
            if isinstance(part, volume.Hole):
                zeros += part.length
            else:
                records = self._encoded(encoder, part.data)
                started = time.perf_counter()
                yield from records
                count = sum(map(len, records))
                self._pays.sent(count, time.perf_counter() - started)
                sent += count
            self._tell(part.offset + part.length)
        if zeros:
            yield encoder.zeros(zeros)
        yield encoder.end()

    def _encoded(self, encoder: clone.Encoder, data: memoryview) -> tuple[bytes, bytes | memoryview]:
        started = time.perf_counter()
        record = encoder.data(data)
        self._pays.encoded(len(data), sum(map(len, record)), time.perf_counter() - started)
        return record

    def _tell(self, end: int) -> None:
        if end > self._told:
            self._shown.advance(end - self._told)
            self._told = end


class Directory(sender.Stream):
    """A file system, as a tar. It begins again from its first byte: the digest tells if it has changed."""

    length = None

    def __init__(self, path: str, shown: progress.Progress, *, sparse: bool) -> None:
        self._path = path
        self._shown = shown
        self._sparse = sparse
        self._told = 0

    def chunks(self, offset: int) -> Chunks:
        """Yield what follows ``offset``; see ``send.sender.Stream``."""
        yield from _after(itertools.chain([clone.MAGIC], self._records()), offset)

    def _records(self) -> Chunks:
        encoder, total = clone.Encoder(), 0
        buffer = memoryview(bytearray(volume.CHUNK))
        with contextlib.closing(gnu_tar.Reader(self._path, sparse=self._sparse)) as tar:
            while count := tar.readinto(buffer):
                data = buffer[:count]
                if directio.is_zero(data):
                    yield encoder.zeros(count)
                else:
                    yield from encoder.data(data)
                total += count
                if total > self._told:
                    self._shown.advance(total - self._told)
                    self._told = total
        yield encoder.end()


def _after(parts: Iterable[bytes | memoryview], skip: int) -> Chunks:
    """Pass over the first ``skip`` bytes."""
    for part in parts:
        if skip < len(part):
            yield memoryview(part)[skip:]
        skip = max(0, skip - len(part))
