"""Puts the pieces of a mapped image, qcow2 or vmdk, where they belong on the target.

What the image is and how its pieces are inflated, ``formats.mapped`` knows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from cdi_worker.formats.mapped import image as mapped
from cdi_worker.formats.mapped.pieces import Batch, Inflate, Piece
from cdi_worker.images import directio
from cdi_worker.images.engine import fetch
from cdi_worker.images.target import base, copy
from cdi_worker.scratch import journal

# Short pieces that follow each other on the disk are written together. The largest cluster fits, and
# from 1 MiB on longer writes are not faster.
_GATHER = 2 << 20
# To copy so much costs less than a write of its own.
_SHORT = 256 << 10

_guest = attrgetter("guest")


def from_ranges(
    image: mapped.Image,
    fetcher: fetch.Fetcher,
    target: base.Target,
    noted: journal.Journal,
    advance: Callable[[int], object] = lambda _: None,
) -> None:
    """Place a whole image that can be read at random.

    What ``noted`` has as done is neither fetched nor written. ``advance`` is told, from several
    threads, of bytes of the disk.
    """
    placer = Placer(image.inflate, target)

    def place(batch: Batch, data: memoryview) -> None:
        placer.put(batch, data)
        for start, end in _runs(batch.pieces):
            noted.done(start, end)
        noted.checkpoint(target.flush)
        advance(size(batch))

    for window in image.windows():
        _each(fetcher, window.tables(), _loader(window))
        window.check()
        for offset, length in window.holes():
            _clear(target, noted, offset, length)
            advance(length)
        _each(fetcher, _missing(window.data(), noted, advance), place)


def _clear(target: base.Target, noted: journal.Journal, offset: int, length: int) -> None:
    for start, end in noted.missing(offset, offset + length):
        target.zero(start, end - start)
        noted.done(start, end)


def _missing(
    batches: Iterable[Batch], noted: journal.Journal, advance: Callable[[int], object]
) -> Iterator[Batch]:
    for batch in batches:
        if any(noted.missing(piece.guest, piece.guest + piece.size) for piece in batch.pieces):
            yield batch
        else:
            advance(size(batch))


def _runs(pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """Yield where the pieces are on the disk, neighbours joined."""
    start = end = 0
    for piece in sorted(pieces, key=_guest):
        if piece.guest != end:
            yield start, end
            start = piece.guest
        end = piece.guest + piece.size
    yield start, end


def _each(
    fetcher: fetch.Fetcher, batches: Iterable[Batch], deliver: Callable[[Any, memoryview], None]
) -> None:
    underway: dict[int, Batch] = {}

    def ranges() -> Iterator[fetch.Range]:
        for batch in batches:
            underway[batch.offset] = batch
            yield fetch.Range(batch.offset, batch.length)

    fetcher.each(ranges(), lambda offset, data: deliver(underway.pop(offset), data))


def _loader(window: mapped.Window) -> Callable[[Batch, memoryview], None]:
    def load(batch: Batch, data: memoryview) -> None:
        for table in batch.pieces:
            start = table.host - batch.offset
            window.load(table, data[start : start + table.length])

    return load


def size(batch: Batch) -> int:
    """Return how many bytes of the disk a batch makes."""
    return sum(piece.size for piece in batch.pieces)


class Placer:
    """Writes pieces to a target, zeros as zeros. Thread-safe."""

    def __init__(self, inflate: Inflate, target: base.Target) -> None:
        self._inflate = inflate
        self._target = target
        self._local = threading.local()

    def put(self, batch: Batch, data: memoryview) -> None:
        """Place the pieces of a batch whose bytes are ``data``."""
        gathered = self._gathered()
        # Programs that compress in parallel store clusters out of the disk's order.
        for piece in sorted(batch.pieces, key=_guest):
            start = piece.host - batch.offset
            body = data[start : start + piece.length]
            if piece.compressed:
                gathered.add(piece.guest, self._inflate(body, piece.guest)[: piece.size])
            elif piece.size < _SHORT:
                gathered.add(piece.guest, body)
            else:
                copy.write(self._target, piece.guest, body)
        gathered.flush()

    def _gathered(self) -> _Gathered:
        if not hasattr(self._local, "gathered"):
            self._local.gathered = _Gathered(self._target)
        found: _Gathered = self._local.gathered
        return found


class _Gathered:
    """Bytes that follow each other on the disk, copied to memory that every device accepts."""

    def __init__(self, target: base.Target) -> None:
        self._target = target
        self._view = directio.Buffer(_GATHER).view
        self._start = 0
        self._used = 0

    def add(self, offset: int, data: bytes | memoryview) -> None:
        if offset != self._start + self._used or self._used + len(data) > _GATHER:
            self.flush()
            self._start = offset
        self._view[self._used : self._used + len(data)] = data
        self._used += len(data)

    def flush(self) -> None:
        used, self._used = self._used, 0
        copy.write(self._target, self._start, self._view[:used])
