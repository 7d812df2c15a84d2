"""Correct the checksums of changed inputs: behind a wrong one, a parser sees nothing else."""

from __future__ import annotations

import struct

import xxhash

_RECORD = struct.Struct("<IIQ")


def tar(data: bytes) -> bytes:
    """Return an archive whose headers have correct checksums."""
    fixed = bytearray(data)
    for start in range(0, len(data) - 511, 512):
        block = fixed[start : start + 512]
        if b"ustar" in block:
            block[148:156] = b" " * 8
            fixed[start + 148 : start + 156] = b"%06o\0 " % (sum(block) & 0o777777)
    return bytes(fixed)


def clone(data: bytes) -> bytes:
    """Return a clone stream of zeros and plain data whose last record has the right digest."""
    digest, at, total = xxhash.xxh3_128(), 14, 0
    while at + _RECORD.size <= len(data):
        kind, stored, length = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        body = data[at : at + stored]
        if kind == 0:
            digest.update(struct.pack("<cQ", b"Z", length))
        elif kind == 1:
            digest.update(struct.pack("<cQ", b"D", length) + body)
        elif kind == 4:
            digest.update(struct.pack("<cQ", b"F", length) + body)
        elif kind == 3:
            return data[: at - _RECORD.size] + _RECORD.pack(3, 16, total) + digest.digest()
        else:
            break
        total += length if kind < 2 else 0
        at += stored
    return data


def vhd(data: bytes) -> bytes:
    """Return an image whose header and footer have correct checksums."""
    changed = bytearray(data.ljust(2048, b"\0"))
    for start, end, at in ((0, 512, 64), (512, 1536, 548)):
        changed[at : at + 4] = bytes(4)
        struct.pack_into(">I", changed, at, ~sum(changed[start:end]) & 0xFFFFFFFF)
    return bytes(changed)
