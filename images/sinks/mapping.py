"""A sink that makes the block map of the disk that passes.

The map depends on the disk alone, not on the way it came: each piece, an aligned MiB (``bmap.longest``), is
one range, from its first block that is not zero to its last one. So maps of two disks are compared range by
range.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Final, Self

from cdi_worker import units
from cdi_worker.formats import bmap
from cdi_worker.images import directio
from cdi_worker.images.sinks import base
from cdi_worker.images.targets.storage import Storage
from cdi_worker.scratch import ranges

#: Shorter data is hashed without another thread.
_SHORT: Final = 128 << 10
#: Data that is hashed beside the write of it, in threads: a route may write from as many.
_PARALLEL: Final = 3
#: Bytes of all pieces that wait for what is before them in their piece. Beyond, a piece is read again.
_MOST: Final = 48 << 20


class Mapping(base.Passing):
    """Hash what passes to ``to``. Thread-safe.

    Within a piece, data is hashed in order; what arrives too early is copied and waits. Pieces that did not
    pass whole are read at the end: what an earlier attempt wrote, or another program.
    """

    def __init__(self, to: base.Sink) -> None:
        super().__init__(to)
        self._pieces: dict[int, _Piece] = {}
        self._ranges: dict[int, bmap.Range] = {}
        #: Zeros that have passed, and whole pieces.
        self._known = ranges.Ranges()
        self._waiting = 0
        self._lock = threading.Lock()
        self._executor = futures.ThreadPoolExecutor(_PARALLEL, "mapping")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()

    def write(self, offset: int, data: memoryview, /) -> None:
        """See ``base.Sink``."""
        if len(data) < _SHORT:
            self._to.write(offset, data)
            self._take(offset, data)
            return
        work = self._executor.submit(self._take, offset, data)
        try:
            self._to.write(offset, data)
        finally:
            # Until then the data must stay as it is.
            futures.wait([work])
        work.result()

    def zero(self, offset: int, length: int, /) -> None:
        """See ``base.Sink``."""
        self._to.zero(offset, length)
        self._take_zeros(offset, offset + length)

    def missing(self, end: int, size: int) -> list[ranges.Range]:
        """Return the whole pieces to be read: the disk was delivered to ``end``, and has ``size`` bytes."""
        self._take_zeros(end, size)
        for piece in list(self._pieces.values()):
            self._drain(piece, size)
        found = ranges.Ranges()
        for start, stop in self._known.missing(0, size):
            found.add(_start(start), min(size, _end(stop - 1)))
        with self._lock:
            for start, stop in found:
                self._forget(start, stop)
        return list(found)

    def read(self, stored: Storage, start: int, end: int, advance: Callable[[int], object]) -> None:
        """Read whole pieces of the disk. ``advance`` counts bytes."""
        at = start
        for first, after in stored.allocated(start, end):
            self._take_zeros(at, first)
            for low in range(first, after, units.MIB):
                data = stored.read(low, min(units.MIB, after - low))
                self._take(low, memoryview(data))
                advance(low + len(data) - at)
                at = low + len(data)
        self._take_zeros(at, end)
        advance(end - at)

    def map(self, size: int) -> bmap.Map:
        """Return the map of a disk of ``size`` bytes, when all has passed or was read."""
        for piece in list(self._pieces.values()):
            self._drain(piece, size)
        if missing := self._known.missing(0, size):
            raise AssertionError(f"{missing[:3]} was not mapped")
        return bmap.Map(size, bmap.BLOCK, tuple(self._ranges[at] for at in sorted(self._ranges)))

    def _take(self, offset: int, data: memoryview) -> None:
        end = offset + len(data)
        for start, stop in _split(offset, end):
            with self._lock:
                if self._known.missing(start, stop) != [(start, stop)]:
                    # Delivered again: what was hashed is not what the disk holds.
                    self._forget(start, stop)
                piece = self._pieces.setdefault(_start(start), _Piece(_start(start)))
            with piece.lock:
                self._add(piece, start, data[start - offset : stop - offset])
            self._drain(piece)

    def _add(self, piece: _Piece, offset: int, data: memoryview) -> None:
        if piece.is_lost:
            return
        if offset == piece.at or (offset > piece.at and self._is_zero(piece.at, offset)):
            piece.take(offset, data)
        elif offset < piece.at or offset in piece.waiting or self._waiting + len(data) > _MOST:
            self._lose(piece)
        else:
            piece.waiting[offset] = bytes(data)
            self._waits(len(data))

    def _take_zeros(self, start: int, end: int) -> None:
        if start >= end:
            return
        with self._lock:
            # Pieces between these two are all zeros.
            ends = {_start(start), _start(end - 1)}
            touched = [self._pieces[at] for at in ends if at in self._pieces]
            # What is hashed ends here at most: these zeros are not known before.
            is_again = any(max(start, piece.start) < piece.at for piece in touched)
            if is_again or self._known.missing(start, end) != [(start, end)]:
                self._forget(start, end)
            self._known.add(start, end)
        for piece in touched:
            self._drain(piece)

    def _drain(self, piece: _Piece, size: int | None = None) -> None:
        """Hash what has waited and is next; note the piece if it is complete, at most up to ``size``."""
        with piece.lock:
            while piece.waiting and not piece.is_lost:
                offset = min(piece.waiting)
                if offset > piece.at and not self._is_zero(piece.at, offset):
                    return
                if offset < piece.at:
                    self._lose(piece)
                    return
                data = piece.waiting.pop(offset)
                self._waits(-len(data))
                piece.take(offset, memoryview(data))
            end = piece.end if size is None else min(piece.end, size)
            if piece.is_lost or not self._is_zero(piece.at, end):
                return
            found = piece.finish(end)
            with self._lock:
                if self._pieces.get(piece.start) is piece:
                    del self._pieces[piece.start]
                    self._known.add(piece.start, end)
                    if found:
                        self._ranges[piece.start] = found

    def _is_zero(self, start: int, end: int) -> bool:
        with self._lock:
            return not self._known.missing(start, end)

    def _waits(self, count: int) -> None:
        with self._lock:
            self._waiting += count

    def _lose(self, piece: _Piece) -> None:
        """Leave a piece to be read at the end."""
        self._waits(-sum(map(len, piece.waiting.values())))
        piece.waiting.clear()
        piece.is_lost = True

    def _forget(self, start: int, end: int) -> None:
        """Forget all pieces of a range. Under the lock."""
        start, end = _start(start), _end(end - 1)
        self._known.remove(start, end)
        self._ranges = {at: each for at, each in self._ranges.items() if not start <= at < end}
        for at in [at for at in self._pieces if start <= at < end]:
            self._waiting -= sum(map(len, tuple(self._pieces.pop(at).waiting.values())))


class _Piece:
    """A piece of which some data has passed. ``at``: the end of what is hashed. Under its lock."""

    def __init__(self, start: int) -> None:
        self.lock = threading.Lock()
        self.start = self.at = start
        self.end = _end(start)
        #: What came before that which precedes it, by offset.
        self.waiting: dict[int, bytes] = {}
        self.is_lost = False
        self._digest = hashlib.sha256()
        #: The first and the last byte of the range; none as long as all is zero.
        self._first: int | None = None
        self._last = start

    def take(self, offset: int, data: memoryview) -> None:
        """Hash what is next; zeros precede it."""
        self.at = offset + len(data)
        if self._first is None:
            skipped = _leading(offset, data)
            if skipped == len(data):
                return
            offset, data = offset + skipped, data[skipped:]
            self._first = self._last = offset - offset % bmap.BLOCK
        if length := len(data) - _trailing(offset, data):
            self._pad(offset)
            self._digest.update(data[:length])
            self._last = offset + length

    def finish(self, end: int) -> bmap.Range | None:
        """Return the range; None if all is zero up to ``end``."""
        if self._first is None:
            return None
        self._pad(min(end, -(-self._last // bmap.BLOCK) * bmap.BLOCK))
        return self._first, self._last, self._digest.digest()

    def _pad(self, end: int) -> None:
        """Hash the zeros up to ``end``, of which it is known now that they are in the range."""
        zeros = directio.zeros()
        while self._last < end:
            length = min(len(zeros), end - self._last)
            self._digest.update(zeros[:length])
            self._last += length


def _start(offset: int) -> int:
    """Return the start of the piece with this offset."""
    return offset - offset % bmap.longest(offset)


def _end(offset: int) -> int:
    """Return the end of the piece with this offset."""
    return _start(offset) + bmap.longest(offset)


def _split(start: int, end: int) -> Iterator[ranges.Range]:
    """Split a range by pieces."""
    while start < end:
        stop = min(end, _end(start))
        yield start, stop
        start = stop


def _leading(offset: int, data: memoryview) -> int:
    """Return the length of the zeros before the first block with data."""
    at = 0
    while at < len(data):
        part = data[at : at + bmap.BLOCK - (offset + at) % bmap.BLOCK]
        if not directio.is_zero(part):
            break
        at += len(part)
    return at


def _trailing(offset: int, data: memoryview) -> int:
    """Return the length of the zeros behind the last block with data."""
    at = len(data)
    while at:
        part = data[max(0, at - ((offset + at) % bmap.BLOCK or bmap.BLOCK)) : at]
        if not directio.is_zero(part):
            break
        at -= len(part)
    return len(data) - at
