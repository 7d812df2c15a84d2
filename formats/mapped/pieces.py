"""Pieces of a disk in a file, and the requests that fetch them."""

from __future__ import annotations

import array
import operator
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, pairwise
from typing import NamedTuple

#: The most bytes of a batch with compressed clusters; the longest of them is this long.
BATCH = 4 << 20
#: The most bytes of one with none, which is written as it comes: memory of this size stays in a processor's
#: cache. Several such batches that follow each other are one request.
PLAIN = 1 << 20

#: Bytes between two pieces that are cheaper read than skipped with another request.
GAP = 256 << 10

#: What a packed piece makes, or more, of its bytes and of its offset on the disk.
Inflate = Callable[[bytes | memoryview, int], bytes]


class Piece(NamedTuple):
    """``length`` bytes at ``host`` of the file that make ``size`` bytes at ``guest`` of the disk.

    Pieces sort in the file's order. A ``packed`` one is a compressed cluster; of what it inflates
    to, the first ``size`` bytes are wanted.
    """

    host: int
    length: int
    guest: int
    size: int
    packed: bool


class Batch(NamedTuple):
    """``length`` bytes to fetch at ``offset``, and the pieces within them."""

    offset: int
    length: int
    pieces: list[Piece]


def batches(pieces: Iterable[Piece], size: int, gap: int = GAP) -> Iterator[Batch]:
    """Gather sorted pieces into batches of at most ``BATCH`` or ``PLAIN`` bytes, none behind ``size``.

    ``gap``: so many bytes between two pieces may be read with them. What is not packed is cut to
    ``PLAIN`` bytes; see ``whole`` for what must not be.
    """
    return whole(chain.from_iterable(map(_split, pieces)), size, gap)


def whole(pieces: Iterable[Piece], size: int, gap: int = GAP) -> Iterator[Batch]:
    """Gather as ``batches`` does, but cut no piece: a table is understood as one."""
    group: list[Piece] = []
    start = end = 0
    for piece in pieces:
        piece_end = piece.host + piece.length
        if group and (piece.host - end > gap or piece_end - start > (BATCH if piece.packed else PLAIN)):
            yield Batch(start, min(end, size) - start, group)
            group = []
        if not group:
            start = end = piece.host
        group.append(piece)
        end = max(end, piece_end)
    if group:
        yield Batch(start, min(end, size) - start, group)


def _split(piece: Piece) -> Iterator[Piece]:
    host, length, guest, _, packed = piece
    if packed or length <= PLAIN:
        yield piece
        return
    for offset in range(0, length, PLAIN):
        part = min(PLAIN, length - offset)
        yield Piece(host + offset, part, guest + offset, part, packed=False)


def merge(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join what is next to each other both in the file and on the disk."""
    last: Piece | None = None
    for piece in pieces:
        if last is not None and _joins(last, piece):
            last = last._replace(length=last.length + piece.length, size=last.size + piece.size)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _joins(first: Piece, second: Piece) -> bool:
    ends = (first.host + first.length, first.guest + first.size)
    return ends == (second.host, second.guest) and not first.packed and not second.packed


def steady(table: array.array[int], step: int) -> Iterator[tuple[int, int]]:
    """Cut ``table`` where an entry is not the one before it plus ``step``: yield (first, end)."""
    deltas = map(operator.sub, islice(table, 1, None), table)
    cuts = [index for index, delta in enumerate(deltas, 1) if delta != step]
    return pairwise([0, *cuts, len(table)])


def holes(pieces: Iterable[Piece], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) on the disk, from ``start`` to ``end``, of what no piece covers.

    ``pieces`` are in the disk's order.
    """
    spans = ((piece.guest, piece.guest + piece.size) for piece in pieces)
    return ((first, after - first) for first, after in gaps(spans, start, end))


def gaps(spans: Iterable[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield what ascending half-open ``spans`` leave out between ``start`` and ``end``."""
    for first, after in spans:
        if first > start:
            yield start, min(first, end)
        start = max(start, after)
        if start >= end:
            return
    if start < end:
        yield start, end
