"""The layout of a qcow2 image: which bytes of the file belong where on the disk.

Nothing is fetched here: callers bring what a ``Window`` asks for, in any order and in parallel.
Memory is bounded whatever the image says: 32 MiB of L1 table, one byte for each cluster of the file
up to ``qcow2_claims.Claims.LIMIT``, and the pieces of one window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice

from formats import qcow2_claims, qcow2_clusters, qcow2_header, qcow2_pieces, qcow2_tables
from formats.qcow2_pieces import Batch, Piece

#: L2 entries of one window. Its pieces, at worst one for each entry, take some 100 MiB as objects.
WINDOW = 512 << 10

Read = Callable[[int, int], bytes]


class Image:
    """A qcow2 image of ``size`` bytes, whose header and L1 table are known."""

    def __init__(self, header: qcow2_header.Header, l1: bytes, size: int) -> None:
        self.header = header
        self.size = size
        self.inflate = qcow2_clusters.inflater(header.compression, header.cluster_size)
        self._l1 = qcow2_tables.entries(l1)

    def windows(self) -> Iterator[Window]:
        """Yield the windows of the disk in order; each must be done with before the next.

        The same file gives the same windows and batches each time.
        """
        header = self.header
        claims = qcow2_claims.Claims(header, self.size)
        for table in qcow2_tables.tables(header, self._l1):
            claims.take(table.host, table.length)
        remaining = qcow2_tables.tables(header, self._l1)
        count = max(1, WINDOW // header.table_entries)
        start = 0
        while True:
            tables = tuple(islice(remaining, count))
            last = len(tables) < count
            end = header.virtual_size if last else tables[-1].guest + tables[-1].size
            yield Window(header, claims, tables, (start, end))
            if last:
                return
            start = end


class Window:
    """A part of the disk: once its L2 tables are loaded, it tells holes and data."""

    def __init__(
        self,
        header: qcow2_header.Header,
        claims: qcow2_claims.Claims,
        tables: tuple[Piece, ...],
        span: tuple[int, int],
    ) -> None:
        self._header = header
        self._claims = claims
        self._tables = tables
        self._span = span
        self._loaded: dict[int, list[Piece]] = {}

    def tables(self) -> Iterator[Batch]:
        """Yield what must be fetched; each of its pieces is a table to ``load``."""
        return qcow2_pieces.batches(sorted(self._tables), self._claims.size)

    def load(self, table: Piece, data: bytes | memoryview) -> None:
        """Take in one L2 table. Threads may load different tables at once."""
        self._loaded[table.guest] = qcow2_tables.decode(self._header, data, table.guest)

    def check(self) -> int:
        """Check the mapping as a whole; return how long the file is at least, by all seen so far.

        To be called once, before ``holes`` and ``data`` are used.
        """
        self._claims.take_pieces(sorted(chain.from_iterable(self._loaded.values())))
        return self._claims.required

    def holes(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) on the disk of what reads as zeros, in order."""
        in_order = chain.from_iterable(self._loaded[table.guest] for table in self._tables)
        return qcow2_pieces.holes(in_order, *self._span)

    def data(self) -> Iterator[Batch]:
        """Yield what must be fetched and put in place, in the file's order."""
        return qcow2_pieces.batches(sorted(chain.from_iterable(self._loaded.values())), self._claims.size)


def read_image(read: Read, size: int) -> Image:
    """Read header and L1 table of a file of ``size`` bytes.

    ``read(offset, length)`` returns all of the bytes or raises.
    """
    header = qcow2_header.parse(read(0, min(size, qcow2_header.HEAD_SIZE)))
    qcow2_claims.Claims(header, size)  # the L1 table is within the file, or this raises
    length = header.l1_needed * 8
    return Image(header, read(header.l1_offset, length) if length else b"", size)


def required_length(read: Read, size: int) -> int:
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
