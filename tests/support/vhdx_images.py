"""VHDX images with changed headers and correct checksums ([MS-VHDX], section 2.2)."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import google_crc32c

from tests.support import processes

HEADERS = (64 << 10, 128 << 10)
REGIONS = 192 << 10
LOG = 48  # the GUID in a header
#: The GUID of the size of a sector.
SECTOR = bytes.fromhex("1dbf41816fa90947ba47f233a8faab5f")


def with_sums(data: bytes) -> bytes:
    """Return an image whose headers and first region table have correct checksums."""
    changed = bytearray(data)
    for start, length in (*((at, 4 << 10) for at in HEADERS), (REGIONS, 64 << 10)):
        if start + length <= len(changed):
            changed[start + 4 : start + 8] = bytes(4)
            crc = google_crc32c.value(bytes(changed[start : start + length]))
            struct.pack_into("<I", changed, start + 4, crc)
    return bytes(changed)


def with_headers(data: bytes) -> bytes:
    """Return an image with two equal headers, without a log, and correct checksums."""
    changed = bytearray(data)
    for at in HEADERS:
        struct.pack_into("<4s4xQ48xHHIQ", changed, at, b"head", 1, 0, 1, 1 << 20, 1 << 20)
    return with_sums(bytes(changed))


def regions(data: bytes) -> tuple[int, int]:
    """Return the offsets of the block allocation table and of the metadata region, as QEMU writes them."""
    first, second = (struct.unpack_from("<Q", data, REGIONS + 16 + 32 * row + 16)[0] for row in (0, 1))
    return first, second


def metadata(data: bytes, item: bytes) -> int:
    """Return the offset of an item of the metadata region, by its GUID."""
    start = regions(data)[1]
    (offset,) = struct.unpack_from("<I", data, data.index(item, start) + 16)
    return int(start + offset)


def with_log(data: bytes, headers: tuple[int, ...] = HEADERS) -> bytes:
    """Return an image whose headers announce a log. It is empty, so that QEMU reads the same disk."""
    changed = bytearray(data)
    for header in headers:
        changed[header + LOG : header + LOG + 16] = b"announced log ok"
    return with_sums(bytes(changed))


def logged(disk: bytes) -> bytes:
    """Return a VHDX of a raw disk that only qemu-img reads, because it announces a log."""
    with tempfile.TemporaryDirectory() as folder:
        raw, image = Path(folder, "raw"), Path(folder, "image")
        raw.write_bytes(disk)
        processes.need("qemu-img")
        processes.run("qemu-img", "convert", "-f", "raw", "-O", "vhdx", raw, image)
        return with_log(image.read_bytes())


def unreplayed(disk: bytes) -> bytes:
    """Return ``logged`` with a log that is not empty: one entry that zeros 4 KiB at the end of the file."""
    data = bytearray(logged(disk))
    place, size = 1 << 20, len(data)
    entry = bytearray(4 << 10)
    (identity,) = struct.unpack_from("16s", data, HEADERS[0] + LOG)
    struct.pack_into("<4s4xIIQI4x16sQQ", entry, 0, b"loge", 4 << 10, 0, 1, 1, identity, size, size)
    struct.pack_into("<4s4xQQQ", entry, 64, b"zero", 4 << 10, size, 1)
    struct.pack_into("<I", entry, 4, google_crc32c.value(bytes(entry)))
    data[place : place + len(entry)] = entry
    return bytes(data)
