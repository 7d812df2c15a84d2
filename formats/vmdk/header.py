"""The header of a hosted sparse extent: VMware's disk in one file, with its own descriptor.

Virtual Disk Format 5.0, VMware 2011. Limits that it leaves open are those of QEMU's block/vmdk.c.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from cdi_worker import errors
from cdi_worker.formats import facts

MAGIC = b"KDMV"
SECTOR = 512
#: The directory's offset where the header at the end of the file, the footer, tells it.
AT_END = (1 << 64) - 1
#: Marker, footer, end-of-stream marker: a sector each, at the end of the file.
FOOTER = 3 * SECTOR
#: Where QEMU looks for a parent, whatever length the header gives the descriptor.
DESCRIPTOR = slice(512, 512 + 20 * SECTOR)
#: Bytes of the file's beginning that hold all we look at.
HEAD_SIZE = 64 * 1024

#: Of a compressed grain: its first sector on the disk, and the bytes that follow.
GRAIN_MARKER = struct.Struct("<QI")
#: Of anything else: its length in sectors, zero, and its kind.
MARKER = struct.Struct("<QII")
FOOTER_KIND = 3

LINE_ENDS, REDUNDANT, ZERO_GRAINS, COMPRESSED, MARKERS = (1 << bit for bit in (0, 1, 2, 16, 17))
_KNOWN = LINE_ENDS | REDUNDANT | ZERO_GRAINS | COMPRESSED | MARKERS
_DEFLATE = 1

_HEADER = struct.Struct("<4sIIQQQQIQQQB4sH")
_LINE_ENDS = b"\n \r\n"  # broken by any transfer that takes the file for text
_MAX_GRAIN = 128 << 11
_MAX_TABLE = 512

# VMware knows no longer grains, and no other tables.
_GRAIN, _TABLE = 128, 512
#: Entries: 8 TiB in the usual grains, more than VMware gives such a disk.
_DIRECTORY = 256 << 10


class Header(NamedTuple):
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

    @property
    def directory_entries(self) -> int:
        return -(-self.capacity // (self.table_entries * self.grain))


def parse(data: bytes) -> Header:
    """Read a header that is sound in itself. Raises ``errors.Refused`` or ``errors.Truncated``."""
    if len(data) < _HEADER.size:
        raise errors.Truncated(format="vmdk", reason=f"{len(data)} bytes, shorter than a header")
    header = Header._make(_HEADER.unpack_from(data))
    if header.version not in {1, 2, 3} or header.line_ends != _LINE_ENDS:
        raise facts.refuse("vmdk", "header", "its header is damaged or of an unknown version")
    grain, entries = header.grain, header.table_entries
    if not 8 <= grain <= _MAX_GRAIN or grain & (grain - 1) or not 0 < entries <= _MAX_TABLE:
        reason = f"its grains are of {grain} sectors, its tables of {entries} entries"
        raise facts.refuse("vmdk", "header", reason)
    return header


def parse_footer(header: Header, tail: bytes) -> Header:
    """Read the last ``FOOTER`` bytes of a file with that header. Raises as ``parse`` does."""
    if len(tail) < FOOTER:
        raise errors.Truncated(format="vmdk", reason=f"{len(tail)} bytes, shorter than a footer")
    footer = parse(tail[SECTOR:])
    _, *marker = MARKER.unpack_from(tail)
    faults = {
        "its footer contradicts its header": _identity(footer) != _identity(header),
        "its footer tells of another footer": footer.directory == AT_END,
        "the marker of its footer is damaged": marker != [0, FOOTER_KIND] or any(tail[MARKER.size : SECTOR]),
        "it does not end with its footer": any(tail[2 * SECTOR :]),
    }
    for reason, wrong in faults.items():
        if wrong:
            raise facts.refuse("vmdk", "footer", reason)
    return footer


def _identity(header: Header) -> tuple[object, ...]:
    return (
        *(header.magic, header.version, header.capacity),
        *(header.descriptor_offset, header.descriptor_size),
    )


def check_placeable(header: Header) -> None:
    """Raise ``errors.Unsupported`` for what our own reader leaves to another program."""
    packed = bool(header.flags & COMPRESSED)
    faults = {
        f"unknown flags ({header.flags & ~_KNOWN:#x})": header.flags & ~_KNOWN,
        f"compression {header.compression}": header.compression != (_DEFLATE if packed else 0),
        "compressed grains without markers": packed and not header.flags & MARKERS,
        "a footer and no markers": header.directory == AT_END and not packed,
        f"grains of {header.grain} sectors": header.grain > _GRAIN,
        f"tables of {header.table_entries} entries": header.table_entries != _TABLE,
        f"a directory of {header.directory_entries} entries": header.directory_entries > _DIRECTORY,
    }
    for reason, wrong in faults.items():
        if wrong:
            raise errors.Unsupported(reason=f"vmdk with {reason}")
