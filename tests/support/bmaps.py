"""Block maps of disks, made in the simplest way, and a disk in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from cdi_worker.formats import bmap
from cdi_worker.images.sinks import base

BLOCK, MiB = 4096, 1 << 20


def expected(data: bytes) -> bmap.Map:
    """Return the map of a disk, made in the simplest way."""
    found = []
    for start in range(0, len(data), MiB):
        piece = data[start : start + MiB]
        full = [at for at in range(0, len(piece), BLOCK) if piece[at : at + BLOCK].strip(b"\0")]
        if full:
            low, high = start + full[0], min(len(data), start + full[-1] + BLOCK)
            found.append((low, high, hashlib.sha256(data[low:high]).digest()))
    return bmap.Map(len(data), BLOCK, tuple(found))


class Disk:
    """What a sink has written, and storage to read it."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.read_bytes = 0

    def write(self, offset: int, data: memoryview) -> None:
        self.data[offset : offset + len(data)] = data

    def zero(self, offset: int, length: int) -> None:
        self.data[offset : offset + length] = bytes(length)

    def read(self, offset: int, length: int) -> bytes:
        self.read_bytes += length
        return bytes(self.data[offset : offset + length])

    def allocated(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        for at in range(start, end, BLOCK):
            if any(self.data[at : min(end, at + BLOCK)]):
                yield at, min(end, at + BLOCK)


def deliver(sink: base.Sink, data: bytes, start: int, end: int) -> None:
    """Deliver a part of a disk, as data or as zeros, from a buffer that is used again."""
    if any(data[start:end]):
        buffer = bytearray(data[start:end])
        sink.write(start, memoryview(buffer))
        buffer[:] = b"\xaa" * len(buffer)
    else:
        sink.zero(start, end - start)
