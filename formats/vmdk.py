"""VMware disks in one file: a sparse extent that carries its own descriptor.

Virtual Disk Format 5.0, VMware 2011; what QEMU makes of it is in its block/vmdk.c. Every other kind
names its data by path and is refused.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from formats import facts

MAGIC = b"KDMV"

_HEADER = struct.Struct("<4sIIQQQQIQQQB4sH")
_MARKER = struct.Struct("<QI")
_SECTOR = 512
_LINE_ENDS = b"\n \r\n"  # broken by any transfer that takes the file for text
_COMPRESSED = 1 << 16
_AT_END = (1 << 64) - 1
#: Marker, footer, end-of-stream marker: a sector each, at the end of the file.
FOOTER = 3 * _SECTOR
#: Where QEMU looks for a parent, whatever length the header gives the descriptor.
_DESCRIPTOR = slice(512, 512 + 20 * _SECTOR)
_MAX_GRAIN = 128 << 11
_MAX_TABLE = 512
#: Entries. 64 TiB in the usual grains of 64 KiB take 2 Mi.
_MAX_DIRECTORY = 16 << 20


class _Header(NamedTuple):
    """Sizes and offsets in sectors, as in the file."""

    magic: bytes
    version: int
    flags: int
    capacity: int
    grain: int
    descriptor_offset: int
    descriptor_size: int
    table_entries: int
    redundant_directory: int
    directory: int
    overhead: int
    unclean: int
    line_ends: bytes
    compression: int


def check(view: facts.View) -> facts.Facts:
    """Refuse all but one sparse extent without a parent. What oslo.utils looks at is left to it."""
    if not view.head.startswith(MAGIC):
        raise facts.refuse(
            "vmdk", "subformat", "its data is in other files, or it is of an ESX server's own kind"
        )
    header = _header(view.at(0, _SECTOR))
    # With a capacity of 0 QEMU opens the files that the descriptor names.
    facts.check_size("vmdk", header.capacity * _SECTOR)
    _check_geometry(header)
    _check_descriptor(view.head[_DESCRIPTOR])
    at_end = header.directory == _AT_END
    if at_end and view.random:
        footer = _footer(view)
        _check_geometry(footer)
        if footer.capacity != header.capacity or footer.magic != MAGIC:
            raise facts.refuse("vmdk", "footer", "its footer contradicts its header")
    return facts.Facts("vmdk", header.capacity * _SECTOR, complete=view.random or not at_end)


def _check_geometry(header: _Header) -> None:
    if header.version not in {1, 2, 3} or header.line_ends != _LINE_ENDS:
        raise facts.refuse("vmdk", "header", "its header is damaged or of an unknown version")
    grain, entries = header.grain, header.table_entries
    if not 8 <= grain <= _MAX_GRAIN or grain & (grain - 1) or not 0 < entries <= _MAX_TABLE:
        reason = f"its grains are of {grain} sectors, its tables of {entries} entries"
        raise facts.refuse("vmdk", "header", reason)


def _check_descriptor(text: bytes) -> None:
    if re.search(rb"parentfilenamehint", text, re.IGNORECASE):
        raise facts.refuse("vmdk", "parent", "it names a parent image")
    text = text.partition(b"\0")[0]
    parent = re.search(rb"^\s*parentCID\s*=\s*(\w+)", text, re.IGNORECASE | re.MULTILINE)
    if parent and parent[1].lower() != b"ffffffff":
        raise facts.refuse("vmdk", "parent", "it depends on a parent image")
    extents = re.findall(rb"^\s*(?:RW|RDONLY|NOACCESS)\s.*$", text, re.IGNORECASE | re.MULTILINE)
    if len(extents) != 1 or not re.fullmatch(
        rb'\s*\w+\s+\d+\s+SPARSE\s+"[^"/\\]+"\s*', extents[0], re.IGNORECASE
    ):
        raise facts.refuse("vmdk", "extents", "it does not consist of one sparse extent in this file")


def required_length(view: facts.View) -> int:
    """Return the bytes that a file with these grain directory and tables holds at least."""
    header = _header(view.at(0, _SECTOR))
    if header.directory == _AT_END:
        header = _footer(view)
    reach = header.table_entries * header.grain
    count = -(-header.capacity // reach)
    if count > _MAX_DIRECTORY:
        raise facts.refuse("vmdk", "header", "its grains are too small for its size")
    required = header.directory * _SECTOR + 4 * count
    last = 0
    for _, directory in view.table(header.directory * _SECTOR, count, "<I"):
        places = {entry * _SECTOR for entry in directory if entry}
        for table in view.tables(places, 4 * header.table_entries):
            last = max(last, *facts.entries(table, "<I"))
    # 0: never written, 1: reads as zeros.
    return max(required, _grain_end(view, header, last * _SECTOR)) if last > 1 else required


def _grain_end(view: facts.View, header: _Header, offset: int) -> int:
    if header.flags & _COMPRESSED:
        size: int = _MARKER.unpack(view.at(offset, _MARKER.size))[1]
        return offset + _MARKER.size + size
    return offset + header.grain * _SECTOR


def _footer(view: facts.View) -> _Header:
    return _header(view.tail(FOOTER)[_SECTOR:])


def _header(data: bytes) -> _Header:
    return _Header._make(_HEADER.unpack_from(data))
