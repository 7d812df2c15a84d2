"""VirtualBox disk images (VDI): a header, a block map, and blocks of a fixed size.

Checks and limits are those of QEMU's block/vdi.c.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from cdi_worker.formats import facts, views

_HEADER = struct.Struct("<68xI4xI260xII12xI4xQIII36x16s16s")
_VERSION = 0x00010001
_TYPES = (1, 2)  # dynamic, static
_BLOCK = 1 << 20  # the only size that VirtualBox writes and QEMU reads
_ABSENT = 0xFFFFFFFE  # discarded; 0xFFFFFFFF: never written


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


def check(view: views.View) -> facts.Facts:
    """Refuse differencing images, other versions and a map that contradicts the size."""
    header = _header(view)
    facts.check_size("vdi", header.virtual_size)
    if header.version != _VERSION:
        raise facts.refuse("vdi", "header", f"version {header.version:#x} is not supported")
    if header.type not in _TYPES or any(header.linked) or any(header.parent):
        reason = f"the image depends on another image or its type is {header.type}, not dynamic or static"
        raise facts.refuse("vdi", "parent", reason)
    if header.sector_size != 512 or header.block_size != _BLOCK or header.block_extra:
        raise facts.refuse("vdi", "header", "the block size is not 1 MiB")
    if header.blocks * _BLOCK < header.virtual_size:
        raise facts.refuse("vdi", "header", "the block map is too small for the virtual size")
    # QEMU reads the map of all blocks, not only of those that the disk has.
    facts.check_table("vdi", 4 * header.blocks)
    return facts.Facts("vdi", header.virtual_size)


def required_length(view: views.View) -> int:
    """Return the minimum length in bytes of a file with this block map."""
    header = _header(view)
    size = header.virtual_size
    count = -(-size // _BLOCK)
    required = header.map_offset + 4 * count
    for first, entries in view.table(header.map_offset, count, "<I"):
        for block, entry in enumerate(entries, first):
            if entry < _ABSENT:
                end = header.data_offset + entry * _BLOCK + min(_BLOCK, size - block * _BLOCK)
                required = max(required, end)
    return required


def _header(view: views.View) -> _Header:
    return _Header._make(_HEADER.unpack(view.at(0, _HEADER.size)))
