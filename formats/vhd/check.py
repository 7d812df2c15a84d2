"""Checks of Virtual Hard Disk images (VHD). Dynamic ones have a copy of the footer, a header and a map.

Virtual Hard Disk Image Format Specification, Microsoft 2006. A disk is never shorter than its data, whatever
the footer says: the geometry often cuts off a backup GPT.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cdi_worker.formats import facts, vhd, views
from cdi_worker.formats.mapped import blocks, image, pieces
from cdi_worker.formats.vhd import FOOTER, MAGIC, SECTOR, Footer

_HEADER = struct.Struct(">8s8xQ4xIII16s8x512s192s")
_HEADER_SIZE = 1024
_DYNAMIC = 3
_ABSENT = 0xFFFFFFFF
#: Larger blocks are not searched for data: usual are 512 KiB and 2 MiB.
_LONGEST_BLOCK = 2 << 20


class _Header(NamedTuple):
    magic: bytes
    map_offset: int
    entries: int
    block_size: int
    checksum: int
    parent: bytes
    parent_name: bytes
    locators: bytes


def check(view: views.View) -> facts.ImageFacts:
    """Refuse differencing images, wrong checksums and a map that contradicts the size."""
    if not view.head.startswith(MAGIC):
        if not view.random:
            return facts.ImageFacts("vhd", None, complete=False)
        tail = view.tail(FOOTER)
        if not vhd.is_fixed(tail):
            raise facts.refuse("vhd", "footer", "the footer is missing or damaged")
        length = (view.size or 0) - FOOTER
        vhd.check_fixed(tail, length)
        return facts.ImageFacts("vhd", -(-length // SECTOR) * SECTOR, raw=length)
    try:
        layout = _layout(view)
    except views.Beyond as err:
        return facts.ImageFacts("vhd", None, complete=False, needs=err.end)
    size = layout.virtual_size
    return facts.ImageFacts("vhd", size, geometry=size != layout.size_field, layout=layout)


def _layout(view: views.View) -> VhdLayout:
    data = view.at(0, FOOTER)
    footer = vhd.parse(data)
    if vhd.checksum(data, 64) != footer.checksum:
        raise facts.refuse("vhd", "footer", "the footer has a wrong checksum")
    if footer.type != _DYNAMIC:
        reason = f"the image has type {footer.type}, expected dynamic ({_DYNAMIC})"
        raise facts.refuse("vhd", "parent", reason)
    if footer.size_by_creator > facts.MAX_VIRTUAL_SIZE:
        facts.check_size("vhd", footer.size_by_creator)
    data = view.at(footer.data_offset, _HEADER_SIZE)
    header = _Header._make(_HEADER.unpack_from(data))
    if header.magic != b"cxsparse" or vhd.checksum(data, 36) != header.checksum:
        raise facts.refuse("vhd", "header", "the header is damaged or has a wrong checksum")
    if any(header.parent) or any(header.parent_name) or any(header.locators):
        raise facts.refuse("vhd", "parent", "the image has a parent image; merge them first")
    block = header.block_size
    if block < SECTOR or block & (block - 1):
        raise facts.refuse("vhd", "header", f"the block size is {block} bytes, expected a power of 2")
    facts.check_table("vhd", 4 * header.entries)
    size, field = footer.size_by_creator, footer.size_field
    if field > size and _has_data(view, header, size, field):
        size = field
    facts.check_size("vhd", size)
    if header.entries * block < size:
        raise facts.refuse("vhd", "header", "the block map is too small for the virtual size")
    return VhdLayout(footer, header, size)


class VhdLayout(blocks.BlockLayout):
    """The layout of a dynamic image with this footer and header; see ``mapped.layout.Layout``.

    As in QEMU, a block that has an entry is read whole: the bitmaps do not count.
    """

    format = "vhd"
    entry = ">I"

    def __init__(self, footer: Footer, header: _Header, size: int) -> None:
        super().__init__(header.map_offset, header.block_size, size)
        self.fixed = ((0, FOOTER), (footer.data_offset, footer.data_offset + _HEADER_SIZE))
        self.size_field = footer.size_field
        self._bitmap = _bitmap(header)

    def allocation(self, size: int, /) -> _Allocation:
        return _Allocation(size, self.fixed, self._bitmap, self.block)

    def runs(self, data: bytes) -> Iterator[tuple[int, int, int]]:
        table = views.entries(data.translate(blocks.INVERTED), self.entry)
        for first, end in pieces.steady(table, -((self._bitmap + self.block) // SECTOR)):
            for index in range(first, end):
                yield index, index + 1, (table[index] ^ _ABSENT) * SECTOR + self._bitmap


class _Allocation(blocks.BlockAllocation):
    """The bytes of the file in use: blocks are complete, and each has its bitmap before it."""

    def __init__(self, size: int, fixed: Iterable[tuple[int, int]], bitmap: int, block: int) -> None:
        super().__init__("vhd", size, fixed, bitmap + block)
        self._bitmap, self._length = bitmap, bitmap + block

    def take_pieces(self, data: Iterable[pieces.Piece], /) -> None:
        for piece in data:
            self.take(piece.host - self._bitmap, self._length)


def _has_data(view: views.View, header: _Header, start: int, end: int) -> bool:
    """Return whether there are blocks from ``start`` to ``end``, except zeros in the block at ``start``."""
    block = header.block_size
    first, last = start // block, min(-(-end // block), header.entries)
    rest = 0, 0
    for index, entries in view.table(header.map_offset + 4 * first, last - first, ">I"):
        for number, entry in enumerate(entries, first + index):
            if entry == _ABSENT:
                continue
            at = max(0, start - number * block)
            if not at or block > _LONGEST_BLOCK:
                return True
            rest = entry * SECTOR + _bitmap(header) + at, block - at
    return any(view.at(*rest))


def _bitmap(header: _Header) -> int:
    """Return the length of the bitmap before each block: one bit per sector, padded to whole sectors."""
    return -(-header.block_size // (SECTOR * 8 * SECTOR)) * SECTOR


def required_length(view: views.View) -> int:
    """Return the minimum length in bytes of a file with this block map."""
    if not view.head.startswith(MAGIC):
        return 0
    return image.required_length(_layout(view), view.at, view.size or 0)
