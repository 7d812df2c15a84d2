"""The layout of a qcow2 image: which bytes of the file belong where on the disk.

Memory is bounded whatever the image says: 32 MiB of L1 table, and one byte for each cluster of the
file up to ``qcow2_claims.Claims.LIMIT``.
"""

from __future__ import annotations

import array
from collections.abc import Iterator

from formats import facts, mapped, passing, qcow2_claims, qcow2_clusters, qcow2_header, qcow2_tables
from formats.pieces import Piece


class Layout:
    """An image with this header; see ``mapped.Layout``."""

    format = "qcow2"
    entry = qcow2_tables.ENTRY

    def __init__(self, header: qcow2_header.Header) -> None:
        self.header = header
        self.virtual_size = header.virtual_size
        self.table_entries = header.table_entries
        self.directory = header.l1_offset, header.l1_needed * 8
        refcounts = header.refcount_clusters << header.cluster_bits
        self.fixed = (
            (0, header.cluster_size),
            (header.refcount_offset, header.refcount_offset + refcounts),
            (header.l1_offset, header.l1_offset + header.l1_entries * 8),
        )
        self._inflate = qcow2_clusters.inflater(header.compression, header.cluster_size)

    def claims(self, size: int, /) -> qcow2_claims.Claims:
        return qcow2_claims.Claims(self.header, size)

    def tables(self, directory: array.array[int], /) -> Iterator[Piece]:
        return qcow2_tables.tables(self.header, directory)

    def decode(self, data: bytes | memoryview, guest: int, /) -> list[Piece]:
        return qcow2_tables.decode(self.header, data, guest)

    def inflate(self, data: bytes | memoryview, _guest: int, /) -> bytes:
        return self._inflate(data)


def read_layout(head: bytes) -> Layout:
    """Return the layout that the first ``qcow2_header.HEAD_SIZE`` bytes of a file tell."""
    return Layout(qcow2_header.parse(head))


def read_image(read: facts.Read, size: int) -> mapped.Image:
    """Read header and L1 table of a file of ``size`` bytes.

    ``read(offset, length)`` returns all of the bytes or raises.
    """
    return mapped.read_image(read_layout(read(0, min(size, qcow2_header.HEAD_SIZE))), read, size)


def follow(head: bytes) -> passing.Passing:
    """Return what follows an image that comes in order and begins with ``head``."""
    return passing.Passing(read_layout(head))


def required_length(read: facts.Read, size: int) -> int:
    """Return how many bytes a file with these tables holds at least.

    Raises ``errors.Truncated`` if that is more than ``size``. (QEMU reads zeros where a cut file
    should have data.)
    """
    image = read_image(read, size)
    required = 0
    for window in image.windows():
        for batch in window.tables():
            data = memoryview(read(batch.offset, batch.length))
            for table in batch.pieces:
                start = table.host - batch.offset
                window.load(table, data[start : start + table.length])
        required = window.check()
    return required
