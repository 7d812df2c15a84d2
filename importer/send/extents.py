"""Our own clone stream as the clone source sends it: extents, resumable from any offset."""

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

#: Bytes between two marks that a stream can resume from, and how many marks are kept: 1 GiB, more than can be
#: in flight between two machines.
STEP = 16 << 20
KEPT = 64
#: Steps without compression until it is tried again; a trial compresses one of ``TRIED`` records.
PAUSE = 32
TRIED = 4
#: The longest run of zeros in one record, so that progress is shown within a long hole.
LONGEST_ZERO = 1 << 30

Chunks = Generator["bytes | memoryview", None, None]


class Mark(NamedTuple):
    """A point to resume from: bytes of the stream and of the device before it, and the encoder's state."""

    sent: int
    offset: int
    encoder: clone.Encoder


class Pays:
    """Decides at each step whether compression takes less time than it saves, from the steps before.

    Until enough was measured, only one record of ``TRIED`` is compressed: on a fast network compression costs
    more than it saves.
    """

    def __init__(self) -> None:
        self._every = TRIED
        self._steps = 0
        self._clear()

    def encoded(self, length: int, packed: int, seconds: float) -> None:
        """Count ``length`` bytes that compression made ``packed`` bytes."""
        self._seen += length
        self._saved += length - packed
        self._packing += seconds

    def sent(self, count: int, seconds: float) -> None:
        """Count bytes sent, and the time that sending took, including waits for the receiver."""
        self._sent += count
        self._sending += seconds

    def decide(self) -> int:
        """Return n, to compress every n-th record of the next step; 0: none."""
        if not self._every:
            self._steps += 1
            self._every = TRIED if self._steps >= PAUSE else 0
            self._clear()
        elif self._seen >= STEP:
            # At the measured rate, sending the saved bytes would take saved * sending / sent seconds.
            pays = self._packing * self._sent < self._saved * self._sending
            self._every, self._steps = int(pays), 0
            self._clear()
        return self._every

    def _clear(self) -> None:
        self._seen = self._saved = self._sent = 0
        self._packing = self._sending = 0.0


class Device(sender.Stream):
    """A block device as a stream; ``length`` is None: holes and compression make it unpredictable."""

    length = None

    def __init__(self, device: volume.Volume, reporter: progress.Progress) -> None:
        self._device = device
        self._reporter = reporter
        self._reported = 0
        #: Bytes of the device between two marks; see ``STEP``.
        self.step = STEP
        self._pays = Pays()
        self._marks = collections.deque([Mark(len(clone.MAGIC), 0, clone.Encoder(TRIED))], KEPT)
        self._first = self._marks[0]

    def chunks(self, offset: int) -> Chunks:
        """Yield the stream from ``offset`` on; see ``send.sender.Stream``."""
        while self._marks and self._marks[-1].sent > offset:
            # Bytes that were not received may be encoded differently this time.
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
            self._report(part)
        if zeros:
            yield encoder.zeros(zeros)
        yield encoder.end()

    def _encoded(self, encoder: clone.Encoder, data: memoryview) -> tuple[bytes, bytes | memoryview]:
        started = time.perf_counter()
        record = encoder.data(data)
        self._pays.encoded(len(data), sum(map(len, record)), time.perf_counter() - started)
        return record

    def _report(self, part: volume.Part) -> None:
        end = part.offset + part.length
        if end > self._reported:
            count = self._reporter.skip if isinstance(part, volume.Hole) else self._reporter.advance
            count(end - self._reported)
            self._reported = end


class Directory(sender.Stream):
    """A file system as a tar stream.

    It is resumed by reading it again from its first byte; the digest at the end detects a change.
    """

    length = None

    def __init__(self, path: str, reporter: progress.Progress, *, sparse: bool) -> None:
        self._path = path
        self._reporter = reporter
        self._sparse = sparse
        self._reported = 0

    def chunks(self, offset: int) -> Chunks:
        """Yield the stream from ``offset`` on; see ``send.sender.Stream``."""
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
                if total > self._reported:
                    self._reporter.advance(total - self._reported)
                    self._reported = total
        yield encoder.end()


def _after(parts: Iterable[bytes | memoryview], skip: int) -> Chunks:
    """Yield ``parts`` without their first ``skip`` bytes."""
    for part in parts:
        if skip < len(part):
            yield memoryview(part)[skip:]
        skip = max(0, skip - len(part))
