"""The disk that each of our ways makes of a qcow2 or vmdk image in memory."""

from __future__ import annotations

import contextlib
import threading

from cdi_worker import errors
from cdi_worker.formats.mapped import readers
from cdi_worker.images.engine import fetch
from cdi_worker.images.place import ranges, stream
from cdi_worker.scratch import journal, space
from tests.support import disks

#: Of the disks of the tests.
VARIANTS = [name for name in disks.FORMATS if name.startswith(("qcow2", "vmdk"))]


class Dirty:
    """A disk in memory that was full of 0xFF, and knows what was written twice or not at all."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(b"\xff") * size
        self.covered = bytearray(size // 512)
        self._lock = threading.Lock()

    def write(self, offset: int, data: memoryview) -> None:
        assert len(data)
        self._cover(offset, len(data))
        self.data[offset : offset + len(data)] = data

    def zero(self, offset: int, length: int) -> None:
        assert length
        self._cover(offset, length)
        self.data[offset : offset + length] = bytes(length)

    def flush(self) -> None:
        pass

    def _cover(self, offset: int, length: int) -> None:
        first, end = offset // 512, (offset + length) // 512
        assert offset % 512 == length % 512 == 0
        assert end <= len(self.covered), "behind the end of the disk"
        with self._lock:
            assert not any(self.covered[first:end]), "twice"
            self.covered[first:end] = b"\1" * (end - first)


class Bytes:
    """A file in memory, read at random."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read_range(self, offset: int, into: memoryview, /) -> int:
        data = self._data[offset : offset + len(into)]
        into[: len(data)] = data
        return len(data)

    def interrupt(self) -> None:
        pass


def fetcher(file: Bytes) -> fetch.Fetcher:
    return fetch.Fetcher(file, file.size, fetch.Options(connections=2), cancel=threading.Event())


def unjournalled() -> journal.Journal:
    return journal.Journal(None, "", 0)


def placed(data: bytes, form: str = "qcow2") -> bytes:
    """Return the disk that our own reader makes of a file's bytes."""
    source = fetcher(Bytes(data))
    image = readers.FORMATS[form].read_image(source.read, source.size)
    target = Dirty(image.layout.virtual_size)
    ranges.from_ranges(image, source, target, unjournalled())
    assert all(target.covered), "left out"
    return bytes(target.data)


class Ordered:
    """Bytes in order, in portions of many sizes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def readinto(self, into: memoryview, /) -> int:
        count = min(len(into), len(self._data) - self._at, 1 + self._at * 7 % 300_000)
        into[:count] = self._data[self._at : self._at + count]
        self._at += count
        return count


def streamed(data: bytes, scratch: space.Spill | None = None, form: str = "qcow2") -> bytes:
    """Return the disk that comes of a file's bytes read once, in order."""
    follower = readers.FORMATS[form].follow(data[: readers.HEAD_SIZE])
    target = Dirty(follower.virtual_size)
    length = stream.from_stream(follower, Ordered(data), target, cancel=threading.Event(), spill=scratch)
    assert length == len(data)
    assert all(target.covered), "left out"
    return bytes(target.data)


def passed(data: bytes, chunk: int, recent: int, form: str = "qcow2") -> bytes:
    """Return the disk; only what was kept and the ``recent`` last chunks can be read again."""
    follower = readers.FORMATS[form].follow(data[: readers.HEAD_SIZE])
    disk = bytearray(b"\xff") * follower.virtual_size
    kept = bytearray(len(data))
    start = -chunk

    def read(offset: int, length: int) -> bytes:
        old = max(0, start - recent * chunk - offset)
        assert all(kept[offset : offset + min(old, length)]), "neither recent nor kept"
        return data[offset : offset + length]

    while start + chunk <= len(data):
        start += chunk
        end = min(start + chunk, len(data))
        arrival = follower.arrive(start, end, read, last=start + chunk > len(data))
        for offset, length in arrival.holes:
            disk[offset : offset + length] = bytes(length)
        for piece in (piece for batch in arrival.ready for piece in batch.pieces):
            body = read(piece.host, min(piece.length, len(data) - piece.host))
            disk[piece.guest : piece.guest + piece.size] = (
                follower.inflate(body, piece.guest)[: piece.size] if piece.packed else body
            )
            if piece.packed:
                # What fits behind it without a sector of its own is taken for its end. Where it is another
                # cluster, whose table comes much later, an import has to ask for scratch.
                after = piece.host + piece.length
                kept[after - 512 : after + 511] = b"\1" * 1023
        for first, after in arrival.keep:
            assert start <= first < after <= end
            kept[first:after] = b"\1" * (after - first)
    return bytes(disk)


def attempts(data: bytes, form: str) -> set[bytes]:
    """Return the disks that the two ways of an import make, but for those that end in a clean error."""
    found = set()
    for way in (placed, streamed):
        with contextlib.suppress(errors.ImageError, errors.ScratchRequired):
            found.add(way(data, form=form))
    return found
