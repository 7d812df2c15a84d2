"""Hyper-V virtual hard disks, version 2 (VHDX): a region table, a metadata table, a block allocation table.

[MS-VHDX], sections 2.2 (header section), 2.5 (block allocation table) and 2.6 (metadata region). Like QEMU,
only the first of the two region tables is read.
"""

from __future__ import annotations

import struct
import uuid
from typing import NamedTuple

from cdi_worker.formats import facts, views

_HEADERS = (64 << 10, 128 << 10)
_LOG_LENGTH = 68  # in a header, section 2.2.2
_REGIONS = 192 << 10
_TABLE = 64 << 10
_ENTRY = 32
_MAX_ENTRIES = 2047
_MIB = 1 << 20

_REQUIRED_REGION, _REQUIRED_ITEM = 1, 4
_HAS_PARENT = 2
_PRESENT, _PARTLY_PRESENT = 6, 7


def _guid(text: str) -> bytes:
    return uuid.UUID(text).bytes_le


_BAT = _guid("2dc27766-f623-4200-9d64-115e9bfd4a08")
_METADATA = _guid("8b7ca206-4790-4b9a-b8fe-575f050f886e")

_PARAMETERS = _guid("caa16737-fa36-4d43-b3b6-33f0aa44e76b")
_SIZE = _guid("2fa54224-cd1b-4876-b211-5dbed83bf4b8")
_SECTOR = _guid("8141bf1d-a96f-4709-ba47-f233a8faab5f")
_PHYSICAL_SECTOR = _guid("cda348c7-445d-4471-9cc9-e9885251c556")
_IDENTITY = _guid("beca12ab-b2e6-4523-93ef-c309e000c746")
_PARENT = _guid("a8d35f2d-b30b-454d-abf7-d3d84834ab0c")


class _Disk(NamedTuple):
    """Sizes in bytes; ``bat``: offset and length of the block allocation table."""

    virtual_size: int
    block_size: int
    sector_size: int
    has_parent: bool
    bat: tuple[int, int]

    @property
    def chunk(self) -> int:
        """Number of payload blocks before each sector bitmap entry (chunk ratio, section 2.5)."""
        return (self.sector_size << 23) // self.block_size

    @property
    def blocks(self) -> int:
        return -(-self.virtual_size // self.block_size)

    @property
    def bat_entries(self) -> int:
        return self.blocks + (self.blocks - 1) // self.chunk


def check(view: views.View) -> facts.Facts:
    """Refuse images with a parent, unknown required regions or items, and tables too small for the size."""
    if not view.random:
        # Hyper-V and QEMU write the metadata region beyond the head.
        return facts.Facts("vhdx", None, complete=False)
    disk = _disk(view)
    facts.check_size("vhdx", disk.virtual_size)
    if disk.has_parent:
        raise facts.refuse("vhdx", "parent", "the image has a parent image; merge them first")
    if disk.sector_size not in {512, 4096} or disk.virtual_size % disk.sector_size:
        reason = f"a disk of {disk.virtual_size} bytes cannot have sectors of {disk.sector_size} bytes"
        raise facts.refuse("vhdx", "metadata", reason)
    size = disk.block_size
    if not _MIB <= size <= 256 * _MIB or size & (size - 1):
        reason = f"the block size is {size} bytes, expected a power of 2 from 1 MiB to 256 MiB"
        raise facts.refuse("vhdx", "metadata", reason)
    if disk.bat[1] < 8 * disk.bat_entries:
        reason = "the block allocation table is too small for the virtual size"
        raise facts.refuse("vhdx", "metadata", reason)
    facts.check_table("vhdx", disk.bat[1])
    _check_logs(view)
    return facts.Facts("vhdx", disk.virtual_size)


def _check_logs(view: views.View) -> None:
    """Refuse a log that takes more memory to read than Hyper-V and QEMU ever write (1 MiB)."""
    for header in _HEADERS:
        (length,) = struct.unpack("<I", view.at(header + _LOG_LENGTH, 4))
        if length > facts.MAX_TABLE:
            reason = f"the log has {length} bytes, at most {facts.MAX_TABLE} are supported"
            raise facts.refuse("vhdx", "table", reason)


def required_length(view: views.View) -> int:
    """Return the minimum length in bytes of a file with this block allocation table."""
    disk = _disk(view)
    required = disk.bat[0] + 8 * disk.bat_entries
    for first, entries in view.table(disk.bat[0], disk.bat_entries, "<Q"):
        for index, entry in enumerate(entries, first):
            if entry & 7 in {_PRESENT, _PARTLY_PRESENT}:
                block = index - index // (disk.chunk + 1)
                left = disk.virtual_size - block * disk.block_size
                required = max(required, (entry >> 20) * _MIB + min(disk.block_size, left))
    return required


def _disk(view: views.View) -> _Disk:
    regions = _table(view, _REGIONS, b"regi", "<4s4xI4x", "<16sQII")
    _refuse_unknown(regions, {_BAT, _METADATA}, _REQUIRED_REGION)
    (bat_offset, bat_length, _), (offset, _, _) = regions[_BAT], regions[_METADATA]
    items = _table(view, offset, b"metadata", "<8s2xH20x", "<16sIII4x")
    known = {_PARAMETERS, _SIZE, _SECTOR, _PHYSICAL_SECTOR, _IDENTITY, _PARENT}
    _refuse_unknown(items, known, _REQUIRED_ITEM)

    def item(guid: bytes, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, view.at(offset + items[guid][0], struct.calcsize(layout)))

    block_size, flags = item(_PARAMETERS, "<II")
    (virtual_size,) = item(_SIZE, "<Q")
    (sector_size,) = item(_SECTOR, "<I")
    has_parent = bool(flags & _HAS_PARENT) or _PARENT in items
    return _Disk(virtual_size, block_size, sector_size, has_parent, (bat_offset, bat_length))


def _table(
    view: views.View, offset: int, magic: bytes, head: str, entry: str
) -> dict[bytes, tuple[int, int, int]]:
    """Read a table with GUIDs as keys; return (offset, length, flags) of each entry."""
    header = struct.Struct(head)
    found, count = header.unpack(view.at(offset, header.size))
    if found != magic or count > _MAX_ENTRIES:
        raise facts.refuse("vhdx", "header", f"the table at byte {offset} is damaged")
    rows = struct.iter_unpack(entry, view.at(offset + header.size, count * _ENTRY))
    table = {guid: (offset, length, flags) for guid, offset, length, flags in rows}
    if len(table) != count:
        raise facts.refuse("vhdx", "header", f"the table at byte {offset} has a duplicate entry")
    return table


def _refuse_unknown(table: dict[bytes, tuple[int, int, int]], known: set[bytes], required: int) -> None:
    for guid, (_, _, flags) in table.items():
        if guid not in known and flags & required:
            name = uuid.UUID(bytes_le=guid)
            raise facts.refuse("vhdx", "unknown_features", f"the image needs the unknown feature {name}")
