"""Compressed streams: members whose lengths are known, frames of zstd and blocks of bgzip; xz of noise."""

from __future__ import annotations

import lzma
import struct
import zlib
from collections.abc import Callable

from cdi_worker.formats.zstd import zstd


def frame(data: bytes, **options: int) -> bytes:
    """Return a frame of zstd with a checksum; ``options``: those of ``zstd.CompressionParameter``."""
    chosen = {zstd.CompressionParameter[name]: value for name, value in options.items()}
    return zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1, **chosen})


def skippable(size: int) -> bytes:
    """Return a skippable frame of zstd."""
    return struct.pack("<II", 0x184D2A5E, size) + bytes(size)


def block(data: bytes, size: int | None = None) -> bytes:
    """Return a block of bgzip (SAM specification, 4.1); ``size``: the length it claims to have."""
    packed = zlib.compressobj(6, zlib.DEFLATED, -15)
    body = packed.compress(data) + packed.flush()
    whole = 18 + len(body) + 8
    fields = struct.pack("<BBHH", 66, 67, 2, (whole if size is None else size) - 1)
    head = struct.pack("<4BIBBH", 31, 139, 8, 4, 0, 0, 255, len(fields))
    return head + fields + body + struct.pack("<II", zlib.crc32(data), len(data))


def xz(data: bytes) -> bytes:
    """Compress noise as xz in a third of the time: nothing is repeated that a longer search would find."""
    search = {"mf": lzma.MF_HC3, "nice_len": 4, "depth": 1, "dict_size": 4096}
    return lzma.compress(data, filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, **search}])


MEMBER: dict[str, Callable[[bytes], bytes]] = {"zst": frame, "gz": block}
#: bgzip ends a file with an empty block.
END = block(b"")


def split(kind: str, data: bytes, size: int = 60_000) -> list[bytes]:
    """Return the members, each of ``size`` bytes of ``data``."""
    return [MEMBER[kind](data[at : at + size]) for at in range(0, len(data), size)]
