"""A raw disk, or an ISO image used as one: there is no header to check."""

from __future__ import annotations

import struct
import zlib

from cdi_worker.formats import facts, views

#: The start of a GPT header: signature, revision, header size, checksum, and its own block, which is 1 (UEFI
#: 2.10, section 5.3.2).
_GPT = struct.Struct("<8sIII4xQ")


def partition_sector_size(head: bytes) -> int | None:
    """Return the bytes of a sector (512 or 4096) by the GPT in the first bytes of a disk.

    None: there is no intact GPT, or one for either size of sectors. The first sector of a GPT, or an MBR
    alone, does not say for which size it is made.
    """
    sizes = [size for size in (512, 4096) if _is_gpt(head[size : 2 * size])]
    return sizes[0] if len(sizes) == 1 else None


def _is_gpt(sector: bytes) -> bool:
    if len(sector) < 512:
        return False
    magic, _, length, checksum, block = _GPT.unpack_from(sector)
    if magic != b"EFI PART" or block != 1 or not 92 <= length <= len(sector):
        return False
    return bool(zlib.crc32(sector[:16] + bytes(4) + sector[20:length]) == checksum)


def check(view: views.View) -> facts.ImageFacts:
    """Refuse a disk without a sector, and one larger than any volume."""
    if view.size is not None:
        facts.check_size("raw", view.size)
    return facts.ImageFacts("raw", view.size)


def required_length(_view: views.View) -> int:
    """Return 0: a raw disk of any length is complete."""
    return 0
