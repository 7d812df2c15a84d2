"""Inflating of compressed qcow2 clusters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import zstandard
from isal import isal_zlib

from importer import errors

Inflate = Callable[["bytes | memoryview"], bytes]

# QEMU compresses with a window of 4 KiB, other programs with up to 32 KiB.
_RAW_DEFLATE = -15
_MAX_ZSTD_WINDOW = 8 << 20
# Its own types take the class for an instance.
_IsalError = cast("type[Exception]", isal_zlib.error)


def inflater(compression: str, cluster_size: int) -> Inflate:
    """Return a function that inflates one cluster, or raises ``errors.Corrupt``. Thread-safe.

    Bytes after the end of the compressed data are ignored: its length is known in sectors only.
    """
    inflate = _zlib if compression == "zlib" else _Zstd().inflate

    def checked(data: bytes | memoryview) -> bytes:
        try:
            result = inflate(data, cluster_size)
        except (_IsalError, zstandard.ZstdError) as err:
            raise _corrupt(err) from err
        if len(result) != cluster_size:
            raise _corrupt(f"does not end at {cluster_size} bytes")
        return result

    return checked


def _zlib(data: bytes | memoryview, size: int) -> bytes:
    stream = isal_zlib.decompressobj(wbits=_RAW_DEFLATE)
    # One byte more than wanted: to see the end of the stream, or that it has none there.
    result: bytes = stream.decompress(data, size + 1)
    return result if stream.eof else b""


class _Zstd(threading.local):
    """One decompression context for each thread: a context must not be shared."""

    def __init__(self) -> None:
        self._context = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW)

    def inflate(self, data: bytes | memoryview, size: int) -> bytes:
        # A frame that tells its size would be inflated whole, whatever the limit says.
        if zstandard.frame_content_size(data) > size:
            return b""
        return self._context.decompress(data, max_output_size=size, allow_extra_data=True)


def _corrupt(reason: object) -> errors.Corrupt:
    return errors.Corrupt(format="qcow2", reason=f"a compressed cluster {reason}")
