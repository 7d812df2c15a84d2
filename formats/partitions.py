"""Where the partitions of a disk begin: the tables of MBR (BIOS) and of GPT (UEFI, section 5.3)."""

from __future__ import annotations

from typing import Final

#: Bytes of the disk that contain both tables, also with sectors of 4096 bytes.
HEAD: Final = 64 << 10
_ENTRIES: Final = 128


def starts(head: bytes) -> list[int]:
    """Return the offset of each partition, in bytes, that the first ``HEAD`` bytes of a disk list."""
    for sector in (512, 4096):
        if head[sector : sector + 8] == b"EFI PART":
            return _gpt(head, sector)
    if head[510:512] != b"\x55\xaa":
        return []
    entries = (head[at : at + 16] for at in range(446, 510, 16))
    return [_number(entry[8:12]) * 512 for entry in entries if entry[4]]


def _gpt(head: bytes, sector: int) -> list[int]:
    header = head[sector : sector + 92]
    table, count, size = _number(header[72:80]) * sector, _number(header[80:84]), _number(header[84:88])
    found = []
    for index in range(min(count, _ENTRIES) if size >= 128 else 0):
        entry = head[table + index * size : table + index * size + 128]
        if len(entry) == 128 and any(entry[:16]):
            found.append(_number(entry[32:40]) * sector)
    return found


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")
