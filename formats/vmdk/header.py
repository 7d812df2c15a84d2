"""The header of a hosted sparse extent: a VMware disk in one file, with an embedded descriptor.

Virtual Disk Format 5.0, VMware 2011. Limits that it leaves open are those of QEMU's block/vmdk.c.
"""

from __future__ import annotations

import operator
import struct
from typing import NamedTuple

from cdi_worker import errors
from cdi_worker.formats import facts

MAGIC = b"KDMV"
SECTOR = 512
#: Directory offset in a header whose footer, at the end of the file, has the real one (GD_AT_END).
AT_END = (1 << 64) - 1
#: Marker, footer, end-of-stream marker: a sector each, at the end of the file.
FOOTER = 3 * SECTOR
#: Bytes in which QEMU looks for a parent, whatever the descriptor's length in the header.
DESCRIPTOR = slice(512, 512 + 20 * SECTOR)
#: First bytes of the file that hold everything read here.
HEAD_SIZE = 64 * 1024

#: Marker of a compressed grain: its first sector on the disk, and the length of its data in bytes.
GRAIN_MARKER = struct.Struct("<QI")
#: Marker of metadata: its length in sectors, 0, and its type.
MARKER = struct.Struct("<QII")
END_KIND, TABLE_KIND, FOOTER_KIND = 0, 1, 3
#: A sector without metadata: a host that has sent nothing for 10 s sends how far it is (in no specification).
PROGRESS_KIND = 4

LINE_ENDS, REDUNDANT, ZERO_GRAINS, COMPRESSED, MARKERS = (1 << bit for bit in (0, 1, 2, 16, 17))
_KNOWN = LINE_ENDS | REDUNDANT | ZERO_GRAINS | COMPRESSED | MARKERS
_DEFLATE = 1

_HEADER = struct.Struct("<4sIIQQQQIQQQB4sH")
_LINE_ENDS = b"\n \r\n"  # changed by a transfer in text mode
_MAX_GRAIN = 128 << 11
_MAX_TABLE = 512

# Limits of the built-in reader: VMware writes no larger grains, and no other tables.
_GRAIN, _TABLE = 128, 512
#: Maximum directory entries: 8 TiB with the usual grains, more than VMware allows for such a disk.
_DIRECTORY = 256 << 10


#: Fields that the footer repeats.
_identity = operator.attrgetter("magic", "version", "capacity", "descriptor_offset", "descriptor_size")


class VmdkHeader(NamedTuple):
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
    def longest_grain(self) -> int:
        """Maximum bytes of a compressed grain in the file, with its marker, as in QEMU's block/vmdk.c."""
        return 2 * self.grain * SECTOR

    @property
    def directory_entries(self) -> int:
        return -(-self.capacity // (self.table_entries * self.grain))


def parse(data: bytes) -> VmdkHeader:
    """Parse and check a header. Raises ``errors.Refused`` or ``errors.Truncated``."""
    if len(data) < _HEADER.size:
        raise errors.Truncated(format="vmdk", reason=f"the file has {len(data)} bytes, less than a header")
    header = VmdkHeader._make(_HEADER.unpack_from(data))
    if header.version not in {1, 2, 3} or header.line_ends != _LINE_ENDS:
        raise facts.refuse("vmdk", "header", "the header is damaged or has an unknown version")
    grain, entries = header.grain, header.table_entries
    if not 8 <= grain <= _MAX_GRAIN or grain & (grain - 1) or not 0 < entries <= _MAX_TABLE:
        reason = f"invalid geometry: grains of {grain} sectors, tables of {entries} entries"
        raise facts.refuse("vmdk", "header", reason)
    return header


def parse_footer(header: VmdkHeader, tail: bytes) -> VmdkHeader:
    """Parse the last ``FOOTER`` bytes of a file with this header. Raises the same errors as ``parse``."""
    if len(tail) < FOOTER:
        raise errors.Truncated(format="vmdk", reason=f"the file has {len(tail)} bytes, less than a footer")
    footer = parse(tail[SECTOR:])
    _, *marker = MARKER.unpack_from(tail)
    faults = {
        "the footer contradicts the header": _identity(footer) != _identity(header),
        "the footer has no directory offset": footer.directory == AT_END,
        "the marker of the footer is damaged": marker != [0, FOOTER_KIND] or any(tail[MARKER.size : SECTOR]),
        "the file does not end with the footer": any(tail[2 * SECTOR :]),
    }
    for reason, wrong in faults.items():
        if wrong:
            raise facts.refuse("vmdk", "footer", reason)
    return footer


def check_placeable(header: VmdkHeader) -> None:
    """Raise ``errors.Unsupported`` if the built-in reader does not support the image."""
    compressed = bool(header.flags & COMPRESSED)
    faults = {
        f"unknown flags ({header.flags & ~_KNOWN:#x})": header.flags & ~_KNOWN,
        f"compression {header.compression}": header.compression != (_DEFLATE if compressed else 0),
        "compressed grains without markers": compressed and not header.flags & MARKERS,
        "a footer but no markers": header.directory == AT_END and not compressed,
        f"grains of {header.grain} sectors": header.grain > _GRAIN,
        f"tables of {header.table_entries} entries": header.table_entries != _TABLE,
        f"a directory of {header.directory_entries} entries": header.directory_entries > _DIRECTORY,
    }
    for reason, wrong in faults.items():
        if wrong:
            raise errors.Unsupported(reason=f"vmdk with {reason}")
