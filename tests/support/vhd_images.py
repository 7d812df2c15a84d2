"""VHDs as other programs than QEMU write them: with their creator, and a geometry smaller than the disk."""

from __future__ import annotations

import struct
from pathlib import Path

from tests.support import processes

CREATORS = (b"vpc ", b"qemu", b"vbox", b"win ", b"wa\0\0")
_FOOTER = struct.Struct(">8sIIQI4sI4sQQHBBII16sx427x")
_FIXED = 2


def geometry(size: int) -> tuple[int, int, int]:
    """Return cylinders, heads and sectors of a disk by the algorithm of the specification (appendix)."""
    total = min(size // 512, 65535 * 16 * 255)
    sectors, heads = 17, max(4, -(-(total // 17) // 1024))
    if total // 17 >= heads * 1024 or heads > 16:
        sectors, heads = 31, 16
    if total // sectors >= heads * 1024:
        sectors, heads = 63, 16
    return total // sectors // heads, heads, sectors


def cut(size: int) -> int:
    """Return the bytes of a disk that its geometry covers."""
    cylinders, heads, sectors = geometry(size)
    return cylinders * heads * sectors * 512


def fixed(disk: bytes, creator: bytes, *, size: int | None = None) -> bytes:
    """Return a fixed VHD. ``size``: the size in the footer."""
    size = len(disk) if size is None else size
    return disk + _with_sum(
        _FOOTER.pack(
            *(b"conectix", 2, 0x10000, (1 << 64) - 1, 0, creator, 0x50003, b"Wi2k", size, size),
            *geometry(size),
            *(_FIXED, 0, bytes(16)),
        ),
        64,
    )


def dynamic(disk: Path, creator: bytes, image: Path) -> Path:
    """Write a dynamic VHD to ``image``, by qemu-img, with the creator and the geometry of another program."""
    options = ("-O", "vpc", "-o", "subformat=dynamic,force_size=on")
    processes.run("qemu-img", "convert", "-f", "raw", *options, disk, image)
    data = bytearray(image.read_bytes())
    data[28:32] = creator
    struct.pack_into(">HBB", data, 56, *geometry(disk.stat().st_size))
    footer = _with_sum(bytes(data[:512]), 64)
    data[:512] = data[-512:] = footer
    image.write_bytes(data)
    return image


def of_type(image: bytes, kind: int) -> bytes:
    """Return a VHD whose footer, and the copy of it in the first sector, has another type of disk."""
    footer = bytearray(image[-512:])
    struct.pack_into(">I", footer, 60, kind)
    data = _with_sum(bytes(footer), 64)
    return data + image[512:-512] + data


def with_sums(image: bytes) -> bytes:
    """Return a dynamic VHD of QEMU whose footer and header have correct checksums."""
    return _with_sum(image[:512], 64) + _with_sum(image[512:1536], 36) + image[1536:]


def with_entries(image: bytes, entries: int) -> bytes:
    """Return a dynamic VHD whose block map has so many entries, by its header."""
    data = bytearray(image)
    struct.pack_into(">I", data, 512 + 28, entries)
    data[512:1536] = _with_sum(bytes(data[512:1536]), 36)
    return bytes(data)


def _with_sum(data: bytes, at: int) -> bytes:
    """Store the one's complement of the sum of all bytes at ``at``."""
    bare = data[:at] + bytes(4) + data[at + 4 :]
    return data[:at] + struct.pack(">I", ~sum(bare) & 0xFFFFFFFF) + data[at + 4 :]
