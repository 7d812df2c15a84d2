"""Our own clone stream as the clone source sends it: extents, resumable from any offset."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import pathlib
import stat
import time
from collections.abc import Generator, Iterator
from typing import Final, NamedTuple

from cdi_worker import errors, units
from cdi_worker.formats import clone
from cdi_worker.images import directio, volume
from cdi_worker.images.tools import gnu_tar
from cdi_worker.importer import progress
from cdi_worker.importer.send import sender
from cdi_worker.importer.upload import headers

#: Bytes between two marks that a stream can resume from, and how many marks are kept: 1 GiB, more than can be
#: in flight between two machines.
STEP = 16 << 20
KEPT = 64
#: Steps without compression until it is tried again; a trial compresses one of ``TRIED`` records.
PAUSE = 32
TRIED = 4
#: The longest run of zeros in one record, so that progress is shown within a long hole.
LONGEST_ZERO = 1 << 30
#: The disk image of a file system.
DISK: Final = "disk.img"

Chunks = Generator["bytes | memoryview", None, None]


class Mark(NamedTuple):
    """A point to resume from: bytes of the stream and of the disk before it, and the encoder's state."""

    sent: int
    offset: int
    encoder: clone.Encoder


class Gap(NamedTuple):
    """A part of the disk that the receiver has, and that is not sent."""

    offset: int
    length: int


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


class Stream(sender.Stream):
    """A disk as a stream: its extents, between the bytes ``head`` and what ``_others`` yields.

    ``encoder``: its state after ``head``. No length: holes and compression make it unpredictable.
    """

    def __init__(
        self,
        disk: volume.Volume | None,
        reporter: progress.Progress,
        head: bytes = clone.MAGIC,
        encoder: clone.Encoder | None = None,
    ) -> None:
        super().__init__(reporter)
        self._disk = disk
        self._head = head
        #: Bytes of the stream before the piece that is sent next.
        self._sent = 0
        #: Bytes of the disk between two marks; see ``STEP``.
        self.step = STEP
        self._pays = Pays()
        self._first = Mark(len(head), 0, encoder or clone.Encoder(TRIED))
        self._marks = collections.deque([self._first], KEPT)
        #: The part of the disk that the receiver has: start and end.
        self._kept = 0, 0

    def chunks(self, offset: int) -> Chunks:
        """Yield the stream from ``offset`` on; see ``send.sender.Stream``."""
        while self._marks and self._marks[-1].sent > offset:
            # Bytes that were not received may be encoded differently this time.
            self._marks.pop()
        if not self._marks:
            self._marks.append(self._first)
        mark = self._marks[-1]
        self._sent = mark.sent if offset >= mark.sent else 0
        pieces = self._from(mark) if self._sent else itertools.chain([self._head], self._from(mark))
        for piece in pieces:
            skip = max(0, offset - self._sent)
            if skip < len(piece):
                yield memoryview(piece)[skip:]
            self._sent += len(piece)

    def restart(self, kept: str) -> None:
        """Send all but a part of the disk; see ``send.sender.Stream``."""
        start, end = map(headers.number, kept.partition("-")[::2])
        self._kept = 0, 0
        if self._disk is not None and start is not None and end is not None:
            part = start, min(end, self._disk.size)
            if part[0] < part[1] and all(
                each % volume.GRAIN == 0 or each == self._disk.size for each in part
            ):
                self._kept = part
        self._marks = collections.deque([self._first], KEPT)

    def _parts(self, disk: volume.Volume, offset: int) -> Iterator[volume.Part | Gap]:
        """Yield the parts of the disk from ``offset`` on."""
        start, end = self._kept
        if offset < start:
            yield from disk.pieces(offset, start)
        if offset <= start < end:
            yield Gap(start, end - start)
        yield from disk.pieces(max(offset, end))

    def _from(self, mark: Mark) -> Chunks:
        encoder = mark.encoder.copy()
        if self._disk is not None:
            yield from self._extents(self._disk, encoder, mark.offset)
            if self._sent > self._marks[-1].sent:
                self._marks.append(Mark(self._sent, self._disk.size, encoder.copy()))
        yield from self._others(encoder)
        yield encoder.end()

    def _extents(self, disk: volume.Volume, encoder: clone.Encoder, marked: int) -> Chunks:
        """Yield the records of the disk from ``marked`` on, the offset of the last mark."""
        zeros = 0
        for part in self._parts(disk, marked):
            is_zero = isinstance(part, volume.Hole)
            if zeros and (not is_zero or zeros + part.length > LONGEST_ZERO):
                yield encoder.zeros(zeros)
                zeros = 0
            if not zeros and part.offset >= marked + self.step:
                marked = part.offset
                if self._sent > self._marks[-1].sent:
                    encoder.every = self._pays.decide()
                    self._marks.append(Mark(self._sent, marked, encoder.copy()))
            count = self._reporter.skip
            if isinstance(part, volume.Hole):
                zeros += part.length
            elif isinstance(part, Gap):
                yield encoder.kept(part.length)
            else:
                count = self._reporter.advance
                started = time.perf_counter()
                records = encoder.data(part.data)
                encoded = time.perf_counter()
                packed = sum(map(len, records))
                self._pays.encoded(len(part.data), packed, encoded - started)
                yield from records
                self._pays.sent(packed, time.perf_counter() - encoded)
            self._report(part.offset + part.length, count)
        if zeros:
            yield encoder.zeros(zeros)
        disk.check_unchanged()

    def _others(self, _encoder: clone.Encoder) -> Chunks:
        """Yield the records of what follows the disk."""
        yield from ()


class Directory(Stream):
    """A file system as a stream: the extents of ``disk``, then a tar archive of all other files.

    Without ``disk`` all files are in the archive. An archive is resumed by creating it again from its first
    byte; the digest at the end detects a change.
    """

    def __init__(
        self, path: str, disk: volume.Volume | None, reporter: progress.Progress, *, sparse: bool
    ) -> None:
        self._path = path
        self._sparse = sparse
        about, encoder = clone.FolderDisk(), clone.Encoder()
        if disk is not None:
            mode, mtime = stat.S_IMODE(disk.stat.st_mode), max(0, int(disk.stat.st_mtime))
            about, encoder = clone.FolderDisk(disk.size, mode, mtime, not sparse), clone.Encoder(TRIED)
        super().__init__(disk, reporter, clone.MAGIC + encoder.disk(about), encoder)

    def _others(self, encoder: clone.Encoder) -> Chunks:
        done = 0 if self._disk is None else self._disk.size
        names = gnu_tar.names(self._path, frozenset() if self._disk is None else frozenset({DISK}))
        if not names:
            return
        buffer = memoryview(bytearray(volume.CHUNK))
        with contextlib.closing(gnu_tar.TarReader(self._path, names, sparse=self._sparse)) as tar:
            while count := tar.readinto(buffer):
                data = buffer[:count]
                if directio.is_zero(data):
                    yield encoder.zeros(count)
                else:
                    yield from encoder.data(data)
                done += count
                self._report(done, self._reporter.advance)


@contextlib.contextmanager
def open_disk(directory: str) -> Iterator[volume.Volume | None]:
    """Yield the disk image of a file system; None if it has none that can be sent as extents.

    A link would have two files, a hard link two names; a disk of no whole sectors is padded by the receiver.
    """
    path = pathlib.Path(directory, DISK)
    try:
        found = path.lstat()
    except FileNotFoundError:
        yield None
        return
    except OSError as err:
        raise errors.Unreachable(url=str(path), reason=errors.words(err)) from err
    is_whole = found.st_size and found.st_size % units.SECTOR == 0
    if not (stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and is_whole):
        yield None
        return
    with volume.Volume(str(path)) as disk:
        if not os.path.samestat(found, disk.stat):
            raise errors.SourceChanged(url=str(path), what="file", before=found.st_ino, now=disk.stat.st_ino)
        yield disk
