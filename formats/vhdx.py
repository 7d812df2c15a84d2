"""Hyper-V virtual hard disks, version 2 (VHDX): a region table, a metadata table, a block allocation table.

[MS-VHDX], sections 2.2 (header section), 2.5 (block allocation table) and 2.6 (metadata region). Like QEMU,
only the first of the two region tables is read.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator
from typing import NamedTuple

from cdi_worker import errors
from cdi_worker.formats import crc32c, facts, views
from cdi_worker.formats.mapped import blocks, image, pieces

_HEADERS = (64 << 10, 128 << 10)
_HEADER = struct.Struct("<4s4xQ32x16sHHIQ")
_HEADER_SIZE = 4 << 10
_REGIONS = 192 << 10
_TABLE = 64 << 10
_ENTRY = 32
_MAX_ENTRIES = 2047
_MIB = 1 << 20

_REQUIRED_REGION, _REQUIRED_ITEM = 1, 4
_HAS_PARENT = 2
#: States of a block, section 2.5.1.1: these read as zeros. 5 is UNMAPPED in version 0.95.
_ZEROS = frozenset({0, 1, 2, 3, 5})
_PRESENT = 6
_STATE = 7


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
    """Sizes in bytes. ``bat``: offset and length of the block allocation table; ``others``: other regions."""

    virtual_size: int
    block_size: int
    sector_size: int
    bat: tuple[int, int]
    others: tuple[tuple[int, int], ...]
    metadata_end: int

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


class _Header(NamedTuple):
    magic: bytes
    sequence: int
    log: bytes
    log_version: int
    version: int
    log_length: int
    log_offset: int


def check(view: views.View) -> facts.ImageFacts:
    """Refuse images with a parent, unknown required regions or items, and tables too small for the size."""
    try:
        header, disk = _header(view), _disk(view)
    except views.Beyond as err:
        # Hyper-V and QEMU write the metadata region at 2 or 3 MiB.
        return facts.ImageFacts("vhdx", None, complete=False, needs=err.end)
    facts.check_size("vhdx", disk.virtual_size)
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
    facts.check_table("vhdx", disk.bat[1], max(facts.MAX_TABLE, 8 * disk.bat_entries + _MIB))
    if any(header.log) and header.log_length:
        facts.check_table("vhdx", disk.bat[1])
        reason = "it has a log that may have to be replayed"
        return facts.ImageFacts("vhdx", disk.virtual_size, unplaceable=reason, sector_size=disk.sector_size)
    layout = VhdxLayout(header, disk)
    return facts.ImageFacts("vhdx", disk.virtual_size, layout=layout, sector_size=disk.sector_size)


class VhdxLayout(blocks.BlockLayout):
    """The layout of an image with this header; see ``mapped.layout.Layout``."""

    format = "vhdx"
    entry = "<Q"

    def __init__(self, header: _Header, disk: _Disk) -> None:
        super().__init__(disk.bat[0], disk.block_size, disk.virtual_size)
        self._chunk = disk.chunk
        self._metadata_end = disk.metadata_end
        self.map_length = disk.bat[1]
        self.table_entries = max(1, self.table_entries // self._chunk) * self._chunk
        used = disk.bat[0] + 8 * disk.bat_entries
        spans = [(0, _MIB), (header.log_offset, header.log_offset + header.log_length), (used, sum(disk.bat))]
        self.fixed = tuple((start, end) for start, end in (*spans, *disk.others) if start < end)

    def allocation(self, size: int, /) -> blocks.BlockAllocation:
        taken = blocks.BlockAllocation("vhdx", size, self.fixed, self.block, _MIB)
        taken.reach(self._metadata_end)
        return taken

    def index(self, block: int) -> int:
        return block + block // self._chunk

    def runs(self, data: bytes) -> Iterator[tuple[int, int, int]]:
        table = views.entries(data, self.entry)
        # The entry of a sector bitmap follows those of a chunk. Only images with a parent have bitmaps.
        del table[self._chunk :: self._chunk + 1]
        for first, end in pieces.steady(table, self.block, lowest=4):
            state = table[first] & _STATE
            if state == _PRESENT:
                yield first, end, table[first] // _MIB * _MIB
            elif state not in _ZEROS:
                reason = f"the table entry {table[first]:#018x} has the state of an image with a parent"
                raise errors.Corrupt(format="vhdx", reason=reason)


def required_length(view: views.View) -> int:
    """Return the minimum length in bytes of a file with this block allocation table."""
    return image.required_length(VhdxLayout(_header(view), _disk(view)), view.at, view.size or 0)


def _header(view: views.View) -> _Header:
    """Return the current header (section 2.2.2): of the intact ones that with the higher sequence number."""
    intact: dict[bytes, _Header] = {}
    for at in _HEADERS:
        data = view.at(at, _HEADER_SIZE)
        header = _Header._make(_HEADER.unpack_from(data))
        if (header.magic, header.version) != (b"head", 1) or not _is_intact(data):
            continue
        if header.log_length > facts.MAX_TABLE:
            # Hyper-V and QEMU write 1 MiB.
            reason = f"the log has {header.log_length} bytes, at most {facts.MAX_TABLE} are supported"
            raise facts.refuse("vhdx", "table", reason)
        intact[data] = header  # Disk2vhd writes the same header twice
    if len({header.sequence for header in intact.values()}) != max(1, len(intact)):
        raise facts.refuse("vhdx", "header", "both headers are damaged")
    current = max(intact.values(), key=lambda header: header.sequence)
    if current.log_version or current.log_offset < _MIB or current.log_offset % _MIB:
        raise facts.refuse("vhdx", "header", "the log has an unknown version or a wrong offset")
    return current


def _disk(view: views.View) -> _Disk:
    regions = _table(view, _REGIONS, b"regi", "<4s4xI4x", "<16sQII")
    if not _is_intact(view.at(_REGIONS, _TABLE)):
        raise facts.refuse("vhdx", "header", "the region table has a wrong checksum")
    _refuse_unknown(regions, {_BAT, _METADATA}, _REQUIRED_REGION)
    if not {_BAT, _METADATA} <= regions.keys():
        raise facts.refuse("vhdx", "header", "a required region is missing")
    (bat_offset, bat_length, _), (offset, _, _) = regions[_BAT], regions[_METADATA]
    items = _table(view, offset, b"metadata", "<8s2xH20x", "<16sIII4x")
    known = {_PARAMETERS, _SIZE, _SECTOR, _PHYSICAL_SECTOR, _IDENTITY, _PARENT}
    _refuse_unknown(items, known, _REQUIRED_ITEM)
    if _PARENT in items:
        raise _parent()
    if not known - {_PARENT} <= items.keys():
        raise facts.refuse("vhdx", "metadata", "a required item is missing")

    def item(guid: bytes, fields: str) -> tuple[int, ...]:
        return struct.unpack(fields, view.at(offset + items[guid][0], struct.calcsize(fields)))

    block_size, flags = item(_PARAMETERS, "<II")
    (virtual_size,) = item(_SIZE, "<Q")
    (sector_size,) = item(_SECTOR, "<I")
    if flags & _HAS_PARENT:
        raise _parent()
    others = tuple((start, start + length) for guid, (start, length, _) in regions.items() if guid != _BAT)
    end = offset + max(start + length for start, length, _ in items.values())
    return _Disk(virtual_size, block_size, sector_size, (bat_offset, bat_length), others, end)


def _parent() -> errors.Refused:
    return facts.refuse("vhdx", "parent", "the image has a parent image; merge them first")


def _table(
    view: views.View, offset: int, magic: bytes, head: str, entry: str
) -> dict[bytes, tuple[int, int, int]]:
    """Read a table with GUIDs as keys; return (offset, length, flags) of each entry."""
    header = struct.Struct(head)
    signature, count = header.unpack(view.at(offset, header.size))
    if signature != magic or count > _MAX_ENTRIES:
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


def _is_intact(data: bytes) -> bool:
    """Return whether the CRC-32C of a header or table is that in its second word."""
    (stored,) = struct.unpack_from("<I", data, 4)
    return bool(crc32c.MODEL.calc(data[:4] + bytes(4) + data[8:]) == stored)
