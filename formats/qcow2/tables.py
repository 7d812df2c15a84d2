"""Decode the qcow2 mapping tables (L1, L2) into pieces, checking each entry."""

from __future__ import annotations

import array
from collections.abc import Iterator
from itertools import compress

from cdi_worker import errors
from cdi_worker.formats import views
from cdi_worker.formats.mapped import pieces
from cdi_worker.formats.mapped.pieces import Piece
from cdi_worker.formats.qcow2.header import Qcow2Header

#: For ``views.entries``.
ENTRY = ">Q"

_OFFSET = (1 << 56) - (1 << 9)
_COPIED = 1 << 63
_COMPRESSED = 1 << 62
_ZERO = 1
_SECTOR = 512


def tables(header: Qcow2Header, l1: array.array[int]) -> Iterator[Piece]:
    """Yield the L2 tables as pieces; ``guest`` and ``size`` are the part of the disk that each maps."""
    for index, entry in enumerate(l1):
        if not entry:
            continue
        offset = entry & _OFFSET
        if entry & ~(_OFFSET | _COPIED) or offset & (header.cluster_size - 1):
            raise errors.Corrupt(format="qcow2", reason=f"L1 entry {entry:#018x} is malformed")
        if offset:
            guest = index * header.reach
            size = min(header.reach, header.virtual_size - guest)
            yield Piece(offset, header.cluster_size, guest, size, compressed=False)


def decode(header: Qcow2Header, data: bytes | memoryview, guest: int) -> list[Piece]:
    """Return the pieces, in disk order, of the L2 table that maps the disk from ``guest``.

    Parts of the disk without a piece read as zeros.
    """
    count = min(header.table_entries, -(-(header.virtual_size - guest) // header.cluster_size))
    table = views.entries(data, ENTRY)
    if header.extended_l2:
        result = list(pieces.merge(_subclusters(header, table[: 2 * count], guest)))
    else:
        result = list(_clusters(header, table[:count], guest))
    while result and result[-1].guest >= header.virtual_size:
        result.pop()  # the last cluster may have subclusters beyond the end of the disk
    if result and result[-1].guest + result[-1].size > header.virtual_size:
        # The file may end there, too.
        last, size = result[-1], header.virtual_size - result[-1].guest
        result[-1] = last._replace(size=size, length=last.length if last.compressed else size)
    return result


def zeros(header: Qcow2Header, data: bytes | memoryview, guest: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the parts of the disk that a table marks as zeros, in disk order.

    ``data``: the entries from that of ``guest``. In a chain these parts hide those of older files, which
    unallocated parts do not.
    """
    cluster = header.cluster_size
    table = views.entries(data, ENTRY)
    if header.extended_l2:
        for index, (entry, bitmap) in enumerate(zip(table[::2], table[1::2], strict=True)):
            if not entry & _COMPRESSED:
                start = guest + index * cluster
                yield from (
                    (start + a * cluster // 32, start + b * cluster // 32) for a, b in _ones(bitmap >> 32)
                )
    elif header.version > 2:
        for index in compress(range(len(table)), table):
            if table[index] & (_ZERO | _COMPRESSED) == _ZERO:
                yield guest + index * cluster, guest + (index + 1) * cluster


def _clusters(header: Qcow2Header, table: array.array[int], guest: int) -> Iterator[Piece]:
    cluster = header.cluster_size
    # Without an offset, a cluster of zeros is the flag alone. Version 2 does not know the flag.
    lowest = _ZERO + 1 if header.version > 2 else 1
    for first, end in pieces.steady(table, cluster, lowest):
        start = first
        entry = table[first]
        if not entry & (_OFFSET | _COMPRESSED):
            # No offset, but flags: ``steady`` joins it with a following entry for the file's second cluster.
            _check(header, entry)
            start, entry = first + 1, table[min(first + 1, len(table) - 1)]
        if start == end:
            continue
        if entry & _COMPRESSED:
            for index in range(start, end):
                yield _compressed(header, table[index], guest + index * cluster)
            continue
        _check(header, entry)
        _check(header, table[end - 1])
        if not entry & _ZERO:
            size = (end - start) * cluster
            yield Piece(entry & _OFFSET, size, guest + start * cluster, size, compressed=False)


def _check(header: Qcow2Header, entry: int) -> None:
    zero = _ZERO if header.version > 2 and not header.extended_l2 else 0
    if entry & ~(_OFFSET | _COPIED | zero) or entry & _OFFSET & (header.cluster_size - 1):
        raise errors.Corrupt(format="qcow2", reason=f"L2 entry {entry:#018x} is malformed")


def _compressed(header: Qcow2Header, entry: int, guest: int) -> Piece:
    shift = 70 - header.cluster_bits
    host = entry & ((1 << shift) - 1)
    sectors = ((entry & (_COMPRESSED - 1)) >> shift) + 1
    return Piece(host, sectors * _SECTOR - host % _SECTOR, guest, header.cluster_size, compressed=True)


def _subclusters(header: Qcow2Header, table: array.array[int], guest: int) -> Iterator[Piece]:
    """Decode extended L2 entries: an offset, and 32 allocated and 32 zero bits, one per subcluster."""
    cluster = header.cluster_size
    part = cluster // 32
    for index, (entry, bitmap) in enumerate(zip(table[::2], table[1::2], strict=True)):
        start = guest + index * cluster
        if entry & _COMPRESSED:
            yield _compressed(header, entry, start)
            continue
        _check(header, entry)
        allocated, zero, host = bitmap & 0xFFFFFFFF, bitmap >> 32, entry & _OFFSET
        if allocated & zero or (allocated and not host):
            raise errors.Corrupt(format="qcow2", reason=f"subcluster bitmap {bitmap:#018x} is malformed")
        for first, end in _ones(allocated):
            size = (end - first) * part
            yield Piece(host + first * part, size, start + first * part, size, compressed=False)


def _ones(bits: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of the ranges of set bits, lowest first."""
    base = 0
    while bits:
        skip = (bits & -bits).bit_length() - 1
        bits >>= skip
        length = (~bits & (bits + 1)).bit_length() - 1
        yield base + skip, base + skip + length
        bits >>= length
        base += skip + length
