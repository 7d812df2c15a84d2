"""Pieces of a disk in an image file, and the batches in which they are fetched."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, compress
from typing import NamedTuple

from cdi_worker.formats import spans

#: Maximum bytes of a batch with compressed clusters: the length of the longest compressed cluster.
BATCH = 4 << 20
#: Maximum bytes of a batch without them, which is written unchanged: memory of this size stays in the CPU
#: cache. Adjacent batches are fetched with one request.
PLAIN = 1 << 20

#: Reading this many unused bytes between two pieces is cheaper than another request.
GAP = 256 << 10

#: Entries of a table that are compared with zeros at once.
_BLOCK = 64
_ZEROS = bytes(_BLOCK * 8)


class Piece(NamedTuple):
    """``length`` bytes at ``host`` in the file that hold ``size`` bytes at ``guest`` on the disk.

    Pieces sort in file order. ``compressed``: the piece is a compressed cluster; of the decompressed data the
    first ``size`` bytes are used, or only the parts (start, end) in ``shown``.
    """

    host: int
    length: int
    guest: int
    size: int
    compressed: bool
    shown: tuple[tuple[int, int], ...] = ()


#: Decompress a piece, given its bytes. May return more than the piece's size.
Inflate = Callable[[bytes | memoryview, Piece], bytes]


class Batch(NamedTuple):
    """``length`` bytes to fetch at ``offset``, and the pieces within them."""

    offset: int
    length: int
    pieces: list[Piece]


def batches(pieces: Iterable[Piece], size: int, gap: int = GAP) -> Iterator[Batch]:
    """Group sorted pieces into batches of at most ``BATCH`` or ``PLAIN`` bytes that end before ``size``.

    ``gap``: maximum unused bytes between two pieces. Uncompressed pieces are split to ``PLAIN`` bytes.
    """
    return whole(chain.from_iterable(map(_split, pieces)), size, gap)


def whole(pieces: Iterable[Piece], size: int, gap: int = GAP) -> Iterator[Batch]:
    """Group like ``batches``, but split no piece: a table is decoded as a whole."""
    group: list[Piece] = []
    start = end = 0
    for piece in pieces:
        piece_end = piece.host + piece.length
        if group and (piece.host - end > gap or piece_end - start > (BATCH if piece.compressed else PLAIN)):
            yield Batch(start, min(end, size) - start, group)
            group = []
        if not group:
            start = end = piece.host
        group.append(piece)
        end = max(end, piece_end)
    if group:
        yield Batch(start, min(end, size) - start, group)


def tables(tables: Iterable[Piece], size: int) -> Iterator[Batch]:
    """Group tables into batches. One with others nearby reaches to the next: the data between is read, too.

    Programs write a table before the data that it maps.
    """
    last: Batch | None = None
    for batch in whole(sorted(tables), size):
        if last is not None:
            is_near = batch.offset - last.offset - last.length <= GAP
            yield last._replace(length=batch.offset - last.offset) if is_near else last
        last = batch
    if last is not None:
        yield last


def _split(piece: Piece) -> Iterator[Piece]:
    host, length, guest, _, compressed, _ = piece
    if compressed or length <= PLAIN:
        yield piece
        return
    for offset in range(0, length, PLAIN):
        part = min(PLAIN, length - offset)
        yield Piece(host + offset, part, guest + offset, part, compressed=False)


def merge(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join uncompressed pieces that are adjacent both in the file and on the disk."""
    last: Piece | None = None
    for piece in pieces:
        if (
            last is not None
            and (last.host + last.length, last.guest + last.size) == (piece.host, piece.guest)
            and not (last.compressed or piece.compressed)
        ):
            last = last._replace(length=last.length + piece.length, size=last.size + piece.size)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def steady(table: array.array[int], step: int, lowest: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of the longest ranges of ``table`` in which entries increase by ``step``.

    Entries below ``lowest`` are holes. Zeros are skipped in C: a disk of 1 TiB may have 100 million of them.
    """
    for first, last in _used(table):
        start = end = first
        before = 0
        for index in compress(range(first, last), table[first:last]):
            entry = table[index]
            if index != end or entry - before != step or entry < lowest:
                if start < end:
                    yield start, end
                start = index
            before, end = entry, index + 1
            if entry < lowest:
                start = end
        if start < end:
            yield start, end


def _used(table: array.array[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of the parts of a table between blocks of zeros, which a disk of few extents has."""
    view, step = memoryview(table).cast("B"), _BLOCK * table.itemsize
    first: int | None = None
    for block in range(-(-len(view) // step)):
        if _ZEROS.startswith(view[block * step : (block + 1) * step]):
            if first is not None:
                yield first, block * _BLOCK
            first = None
        elif first is None:
            first = block * _BLOCK
    if first is not None:
        yield first, len(table)


def holes(pieces: Iterable[Piece], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of the parts of the disk from ``start`` to ``end`` without a piece.

    ``pieces`` are in disk order.
    """
    covered = ((piece.guest, piece.guest + piece.size) for piece in pieces)
    return ((first, after - first) for first, after in spans.gaps(covered, start, end))
