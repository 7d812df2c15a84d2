"""VirtualBox disk images (VDI): a header, a block map, and blocks of a fixed size.

Checks and limits are those of QEMU's block/vdi.c.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from cdi_worker.formats import facts, views
from cdi_worker.formats.mapped import blocks, image, pieces
from cdi_worker.formats.mapped.blocks import SECTOR

_HEADER = struct.Struct("<68xI4xI260xII12xI4xQIII36x16s16s")
_VERSION = 0x00010001
_TYPES = (1, 2)  # dynamic, static
_BLOCK = 1 << 20  # the only size that VirtualBox writes and QEMU reads


class _Header(NamedTuple):
    version: int
    type: int
    map_offset: int
    data_offset: int
    sector_size: int
    virtual_size: int
    block_size: int
    block_extra: int
    blocks: int
    linked: bytes
    parent: bytes


def check(view: views.View) -> facts.ImageFacts:
    """Refuse differencing images, other versions and a map that contradicts the size."""
    header = _header(view)
    facts.check_size("vdi", header.virtual_size)
    if header.version != _VERSION:
        raise facts.refuse("vdi", "header", f"version {header.version:#x} is not supported")
    if header.type not in _TYPES or any(header.linked) or any(header.parent):
        reason = f"the image depends on another image or its type is {header.type}, not dynamic or static"
        raise facts.refuse("vdi", "parent", reason)
    if header.sector_size != SECTOR or header.block_size != _BLOCK or header.block_extra:
        raise facts.refuse("vdi", "header", "the block size is not 1 MiB")
    if header.map_offset % SECTOR or header.data_offset % SECTOR:
        raise facts.refuse("vdi", "header", "the block map or the data does not begin at a sector")
    layout = VdiLayout(header)
    if header.blocks < layout.count:
        raise facts.refuse("vdi", "header", "the block map is too small for the virtual size")
    facts.check_table("vdi", layout.map_length, max(facts.MAX_TABLE, 4 * layout.count))
    return facts.ImageFacts("vdi", layout.virtual_size, layout=layout)


class VdiLayout(blocks.BlockLayout):
    """The layout of an image with this header; see ``mapped.layout.Layout``."""

    format = "vdi"
    entry = "<I"

    def __init__(self, header: _Header) -> None:
        # QEMU rounds up too: VirtualBox writes disks of any size.
        super().__init__(header.map_offset, _BLOCK, -(-header.virtual_size // SECTOR) * SECTOR)
        self.fixed = ((0, SECTOR),)
        # QEMU reads the map of all blocks, not only of those that the disk has.
        self.map_length = 4 * header.blocks
        self._data = header.data_offset

    def allocation(self, size: int, /) -> blocks.BlockAllocation:
        return blocks.BlockAllocation("vdi", size, self.fixed, _BLOCK)

    def runs(self, data: bytes) -> Iterator[tuple[int, int, int]]:
        # A block without data is 0 then (never written) or 1 (discarded).
        table = views.entries(data.translate(blocks.INVERTED), self.entry)
        for first, end in pieces.steady(table, -1, lowest=2):
            yield first, end, self._data + (table[first] ^ 0xFFFFFFFF) * _BLOCK


def required_length(view: views.View) -> int:
    """Return the minimum length in bytes of a file with this block map."""
    return image.required_length(VdiLayout(_header(view)), view.at, view.size or 0)


def _header(view: views.View) -> _Header:
    return _Header._make(_HEADER.unpack(view.at(0, _HEADER.size)))
