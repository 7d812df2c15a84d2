"""Decompress several members of a stream at the same time, where their borders are known before.

They are known for zstd, whose blocks have their lengths before them (pzstd, the seekable format), and for
the gzip members of bgzip. One member, as gzip, pigz and zstd write it, can use only one thread.

A wrong border cannot change the result: a group counts only if the serial reader finds that it consists of
whole members, and has bytes. From the first group that does not, the serial reader reads everything.
"""

from __future__ import annotations

import collections
import dataclasses
import struct
import sys
from collections.abc import Callable
from concurrent import futures
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.formats.compressed import decompress

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

#: Compressed bytes of a group, unless its first member is longer.
GROUP: Final = 1 << 20
#: The longest compressed and decompressed group; a longer one is left to the serial reader. With at most
#: THREADS and one more group waiting, this bounds the memory.
LONGEST: Final = 4 << 20
MOST: Final = 16 << 20
THREADS: Final = 4
#: With fewer CPUs the rest of the import needs them: receiving, digests, the kernel.
FEWEST: Final = 4
#: zstd's window: a decompressor allocates it for each group.
_WINDOW_LOG: Final = 23
_SKIPPABLE_MOST: Final = 64 << 10

_READ: Final = 1 << 20
#: The length of the first member is not known.
_UNKNOWN: Final = -1


def open(  # noqa: A001 - read as groups.open
    kind: str,
    reader: readers.Reader,
    *,
    limit: int | None = None,
    tool: decompress.Tool | None = None,
    cpus: int = 1,
) -> readers.Reader:
    """Return a reader that decompresses ``reader`` (``decompress.open``), in threads with enough ``cpus``."""
    if cpus < FEWEST or kind not in _LENGTHS:
        return decompress.open(kind, reader, limit=limit, tool=tool)
    plain = Groups(kind, reader)
    return plain if limit is None else readers.Limited(plain, limit)


class Groups:
    """Decompress groups of members in ``threads``; the reader of ``reader`` is the caller's thread."""

    def __init__(self, kind: str, reader: readers.Reader, threads: int = THREADS) -> None:
        self._kind = kind
        self._length = _LENGTHS[kind]
        self._reader = reader
        self._threads = threads
        self._executor = futures.ThreadPoolExecutor(threads, "decompress")
        self._jobs: collections.deque[tuple[bytes, futures.Future[bytes]]] = collections.deque()
        self._input = bytearray()
        self._is_begun = False
        self._plain = memoryview(b"")
        self._serial: readers.Reader | None = None

    def readinto(self, into: memoryview, /) -> int:
        while self._serial is None:
            if self._plain:
                count = min(len(into), len(self._plain))
                into[:count] = self._plain[:count]
                self._plain = self._plain[count:]
                return count
            self._next()
        return self._serial.readinto(into)

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)
        self._jobs.clear()
        self._reader.close()

    def _next(self) -> None:
        """Take the bytes of the next group, or let the serial reader continue."""
        while len(self._jobs) <= self._threads and (group := self._group()):
            self._jobs.append((group, self._executor.submit(_decompressed, self._kind, group)))
        group, job = self._jobs.popleft() if self._jobs else (b"", None)
        plain = job.result() if job is not None else b""
        if plain:
            self._plain, self._is_begun = memoryview(plain), True
            return
        rest = b"".join((group, *(later for later, _ in self._jobs), bytes(self._input)))
        self._jobs.clear()
        self._input.clear()
        self._serial = decompress.Members(
            decompress.KINDS[self._kind], _Replay(rest, self._reader), continued=self._is_begun
        )

    def _group(self) -> bytes:
        """Return the next members, of about ``GROUP`` bytes; empty if their lengths are not known."""
        end = 0
        while end < GROUP:
            length = self._length(memoryview(self._input)[end:].toreadonly())
            if length > 0:
                end += length
            elif length == _UNKNOWN or len(self._input) - end >= LONGEST or not self._more():
                break
        group = bytes(memoryview(self._input)[:end])
        del self._input[:end]
        return group

    def _more(self) -> bool:
        """Read more input; return False at its end."""
        buffer = memoryview(bytearray(_READ))
        count = self._reader.readinto(buffer)
        self._input += buffer[:count]
        return bool(count)


class _Replay:
    """Return ``first``, then read ``reader``."""

    def __init__(self, first: bytes, reader: readers.Reader) -> None:
        self._first = readers.Bytes(first)
        self._reader = reader

    def readinto(self, into: memoryview, /) -> int:
        return self._first.readinto(into) or self._reader.readinto(into)

    def close(self) -> None:
        self._reader.close()


def _decompressed(kind: str, group: bytes) -> bytes:
    """Return the bytes of whole members; empty if the serial reader must read them."""
    # Padding is allowed only at the end of the stream.
    strict = dataclasses.replace(decompress.KINDS[kind], padding=0)
    reader, found = decompress.Members(strict, readers.Bytes(group)), bytearray()
    into = memoryview(bytearray(_READ))
    try:
        while count := reader.readinto(into):
            found += into[:count]
            if len(found) > MOST:
                return b""
    except errors.Error:
        return b""
    return bytes(found)


def _zst(data: memoryview) -> int:
    """Return the length of a frame (RFC 8878, 3.1.1 and 3.1.2), 0 if more bytes are needed."""
    if len(data) < 18:
        return 0
    magic, descriptor, window = struct.unpack_from("<IBB", data)
    if magic & 0xFFFFFFF0 == 0x184D2A50:
        length = 8 + int(struct.unpack_from("<4xI", data)[0])
        return _UNKNOWN if length > _SKIPPABLE_MOST else length if length <= len(data) else 0
    is_single = descriptor & 0x20
    if magic != 0xFD2FB528 or (not is_single and 10 + (window >> 3) >= _WINDOW_LOG):
        return _UNKNOWN
    try:
        size = zstd.get_frame_info(data[:18]).decompressed_size
        return _UNKNOWN if size is not None and size > MOST else zstd.get_frame_size(data)
    except zstd.ZstdError:
        return 0


def _bgzf(data: memoryview) -> int:
    """Return the length of a block of bgzip (SAM specification, 4.1), 0 if more bytes are needed."""
    if len(data) < 12:
        return 0
    if bytes(data[:4]) != b"\x1f\x8b\x08\x04":
        return _UNKNOWN
    fields = data[12 : 12 + int(struct.unpack_from("<H", data, 10)[0])]
    while len(fields) >= 4:
        name, length = struct.unpack_from("<2sH", fields)
        if name == b"BC" and length == 2 and len(fields) >= 6:
            size = int(struct.unpack_from("<H", fields, 4)[0]) + 1
            return size if size <= len(data) else 0
        fields = fields[4 + length :]
    return _UNKNOWN


_LENGTHS: Final[dict[str, Callable[[memoryview], int]]] = {"zst": _zst, "gz": _bgzf}
