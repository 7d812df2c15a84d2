"""Stream-optimized VMDK images with the tables at the end, as VMware's programs write them.

QEMU writes the tables first.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence

SECTOR = 512
GRAIN = 64 << 10
#: Bytes of disk that one grain table maps.
REACH = 512 * GRAIN
#: Kinds of metadata.
TABLE, DIRECTORY, PROGRESS = 1, 2, 4

_HEADER = struct.Struct("<4sIIQQQQIQQQB4sH")
_AT_END = (1 << 64) - 1


def streamed(
    disk: bytes,
    *,
    zeros: bool = False,
    unmarked: Collection[int] = (),
    flags: int = 0,
    level: int = 1,
    progress: int = 0,
) -> bytes:
    """Return an image whose grain tables follow their grains, and whose directory follows them all.

    ``zeros``: mark grains of zeros as zeroed instead of leaving them unallocated. ``unmarked``: kinds of
    metadata without a marker before them. ``flags``: more of them in the header. ``level``: of compression.
    ``progress``: markers of progress before each grain and each table, as ESXi sends them.
    """
    disk = _padded(disk)
    sectors = len(disk) // SECTOR
    flags |= 0x30001 | (4 if zeros else 0)
    out = bytearray(_header(flags, sectors, _AT_END) + descriptor(sectors)).ljust(128 * SECTOR, b"\0")
    directory = []
    for start in range(0, len(disk), REACH):
        end = min(start + REACH, len(disk))
        table = []
        for at in range(start, end, GRAIN):
            out += marker_of_progress(at) * progress
            table.append(_add_grain(out, disk, at, level, zeros=zeros))
        if any(entry > 1 for entry in table) or zeros:
            _add_marker(out, 4, TABLE, unmarked)
            directory.append(len(out) // SECTOR)
            out += struct.pack(f"<{len(table)}I", *table).ljust(4 * SECTOR, b"\0")
        else:
            directory.append(0)
    return bytes(out) + _ending(len(out), sectors, directory, flags, unmarked)


def arranged(disk: bytes, parts: Sequence[tuple[str, int]], chosen: Mapping[int, int] | None = None) -> bytes:
    """Return an image with these parts in this order, then the directory and the footer.

    Parts: ("grain", number); ("table", number) maps the grains before it; ("progress", count) is that many
    markers. The directory has the last table of each number, or the one with the index ``chosen`` among them.
    """
    sectors = len(disk) // SECTOR
    out = bytearray(_header(0x30001, sectors, _AT_END) + descriptor(sectors)).ljust(128 * SECTOR, b"\0")
    grains: dict[int, int] = {}
    tables: dict[int, list[int]] = {}
    for kind, number in parts:
        if kind == "grain":
            body = zlib.compress(disk[number * GRAIN : (number + 1) * GRAIN].ljust(GRAIN, b"\0"), 1)
            grains[number] = len(out) // SECTOR
            out += _padded(struct.pack("<QI", number * GRAIN // SECTOR, len(body)) + body)
        elif kind == "table":
            _add_marker(out, 4, TABLE)
            tables.setdefault(number, []).append(len(out) // SECTOR)
            out += struct.pack("<512I", *(grains.get(number * 512 + index, 0) for index in range(512)))
        else:
            out += marker_of_progress(0) * number
    places = {number: found[(chosen or {}).get(number, -1)] for number, found in tables.items()}
    directory = [places.get(number, 0) for number in range(-(-len(disk) // REACH))]
    return bytes(out) + _ending(len(out), sectors, directory)


def sparse(size: int, grain: bytes) -> Iterator[bytes]:
    """Yield an image, in parts, of a disk that begins with ``grain`` in each table and has nothing else."""
    sectors = size // SECTOR
    body = zlib.compress(grain, 1)
    yield (_header(0x30001, sectors, _AT_END) + descriptor(sectors)).ljust(128 * SECTOR, b"\0")
    at, directory = 128 * SECTOR, []
    for start in range(0, size, REACH):
        out = bytearray(_padded(struct.pack("<QI", start // SECTOR, len(body)) + body))
        _add_marker(out, 4, TABLE)
        directory.append((at + len(out)) // SECTOR)
        out += struct.pack("<I", at // SECTOR).ljust(4 * SECTOR, b"\0")
        at += len(out)
        yield bytes(out)
    yield _ending(at, sectors, directory)


def _ending(
    at: int, sectors: int, directory: Collection[int], flags: int = 0x30001, unmarked: Collection[int] = ()
) -> bytes:
    """Return the directory and the footer of an image, at this offset."""
    entries = struct.pack(f"<{len(directory)}I", *directory)
    out = bytearray()
    _add_marker(out, -(-len(entries) // SECTOR), DIRECTORY, unmarked)
    footer = _header(flags, sectors, (at + len(out)) // SECTOR)
    out += _padded(entries)
    _add_marker(out, 1, 3)
    out += footer
    _add_marker(out, 0, 0)
    return bytes(out)


def marker_of_progress(at: int) -> bytes:
    """Return the sector that ESXi sends when it has sent nothing else for long: it has read up to ``at``."""
    return struct.pack("<QIIQ", 0, 0, PROGRESS, at // SECTOR).ljust(SECTOR, b"\0")


def _add_grain(out: bytearray, disk: bytes, at: int, level: int, *, zeros: bool) -> int:
    grain = disk[at : at + GRAIN].ljust(GRAIN, b"\0")
    if not any(grain):
        return int(zeros)
    body = zlib.compress(grain, level)
    where = len(out) // SECTOR
    out += _padded(struct.pack("<QI", at // SECTOR, len(body)) + body)
    return where


def _add_marker(out: bytearray, length: int, kind: int, unmarked: Collection[int] = ()) -> None:
    if kind not in unmarked:
        out += struct.pack("<QII", length, 0, kind).ljust(SECTOR, b"\0")


def _header(flags: int, sectors: int, directory: int) -> bytes:
    fields = (3, flags, sectors, GRAIN // SECTOR, 1, 20, 512, 0, directory, 128, 0, b"\n \r\n", 1)
    return _HEADER.pack(b"KDMV", *fields).ljust(SECTOR, b"\0")


def descriptor(sectors: int) -> bytes:
    """Return the embedded descriptor of a disk, padded to its 20 sectors."""
    text = f"""# Disk DescriptorFile
version=1
CID=7e5b80a7
parentCID=ffffffff
createType="streamOptimized"

# Extent description
RW {sectors} SPARSE "disk.vmdk"

# The Disk Data Base
#DDB

ddb.adapterType = "lsilogic"
"""
    return text.encode().ljust(20 * SECTOR, b"\0")


def _padded(data: bytes) -> bytes:
    return data.ljust(-(-len(data) // SECTOR) * SECTOR, b"\0")
