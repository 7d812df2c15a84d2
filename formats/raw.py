"""A raw disk, or an ISO image used as one: there is no header to check."""

from __future__ import annotations

import struct
import zlib

from cdi_worker.formats import facts, views

#: The start of a GPT header: signature, revision, header size, checksum, and its own block, which is 1 (UEFI
#: 2.10, section 5.3.2).
_GPT = struct.Struct("<8sIII4xQ")

#: What a disk begins with: the offset and the bytes of each signature, as libblkid knows them.
_SIGNATURES = (
    (510, b"\x55\xaa"),  # a boot sector: also of FAT, exFAT, NTFS and BitLocker
    (512, b"EFI PART"),
    (4096, b"EFI PART"),
    (0, b"ER"),  # Apple's partition map
    (508, b"\xda\xbe"),  # a label of Sun
    (0, b"\x0b\xe5\xa9\x41"),  # of SGI
    (512, b"\x57\x45\x56\x82"),  # a label of BSD
    (8192, b"\xe5\xd6\xd3\xf1"),  # VOL1 in EBCDIC, of a DASD
    (0, b"LUKS\xba\xbe"),
    *((at, b"LABELONE") for at in range(0, 2048, 512)),  # LVM
    (0, b"\xfc\x4e\x2b\xa9"),  # Linux RAID, metadata 1.1
    (4096, b"\xfc\x4e\x2b\xa9"),  # 1.2
    *((size - 10, b"SWAPSPACE2") for size in (4096, 8192, 16384, 65536)),  # pages
    (1080, b"\x53\xef"),  # ext2, ext3, ext4
    (0, b"XFSB"),
    (65600, b"_BHRfS_M"),  # btrfs
    (1024, b"\x10\x20\xf5\xf2"),  # F2FS
    (1024, b"\xe2\xe1\xf5\xe0"),  # EROFS
    (0, b"hsqs"),  # squashfs
    (0, b"\x45\x3d\xcd\x28"),  # cramfs
    (32, b"NXSB"),  # APFS
    (1024, b"H+\0\4"),  # HFS+
    (1024, b"HX\0\5"),
    (4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca"),  # bcache, bcachefs
    (32768, b"JFS1"),
    (65588, b"ReIsEr"),
    (0, b"-rom1fs-"),
    (32, b"ORCLDISK"),  # Oracle ASM
    (0, b"bluestore block device"),  # Ceph
    *((32769, name) for name in (b"CD001", b"BEA01", b"NSR02", b"NSR03")),  # ISO 9660, UDF
)


def is_plausible(head: bytes) -> bool:
    """Return whether a disk begins with ``head``, at least its first 65 KiB, or all of a smaller one.

    It does if there is a partition table, a file system or a boot sector, and if the first 65 KiB are only
    zeros: a new data disk.
    """
    is_empty = not head[: 65 << 10].strip(b"\0")
    return is_empty or any(head.startswith(magic, at) for at, magic in _SIGNATURES)


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
    return facts.ImageFacts(
        "raw",
        view.size,
        sector_size=partition_sector_size(view.head),
        unrecognised=not is_plausible(view.head),
    )


def required_length(_view: views.View) -> int:
    """Return 0: a raw disk of any length is complete."""
    return 0
