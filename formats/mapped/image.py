"""Disk images that map the disk through tables in two levels: which bytes of the file belong where.

Nothing is fetched here: callers bring what a ``Window`` asks for, in any order and in parallel.
Memory is bounded whatever the image says: what its ``layout.Layout`` allows for the directory and
for ``Claims``, and the pieces of one window.
"""

from __future__ import annotations

import array
from collections.abc import Iterator
from itertools import chain, islice

from cdi_worker.formats import views
from cdi_worker.formats.mapped import layout as mapped
from cdi_worker.formats.mapped import pieces
from cdi_worker.formats.mapped.pieces import Batch, Piece

#: Entries of one window. Its pieces, at worst one for each entry, take some 100 MiB as objects.
WINDOW = 512 << 10


class Image:
    """An image in a file of ``size`` bytes, whose layout and directory are known."""

    def __init__(self, layout: mapped.Layout, directory: array.array[int], size: int) -> None:
        self.layout = layout
        self.inflate = layout.inflate
        self._directory = directory
        self._size = size

    def windows(self) -> Iterator[Window]:
        """Yield the windows of the disk in order; each must be done with before the next.

        The same file gives the same windows and batches each time.
        """
        layout = self.layout
        claims = layout.claims(self._size)
        claims.take_tables(layout.tables(self._directory))
        remaining = layout.tables(self._directory)
        count = max(1, WINDOW // layout.table_entries)
        start = 0
        while True:
            tables = tuple(islice(remaining, count))
            last = len(tables) < count
            end = layout.virtual_size if last else tables[-1].guest + tables[-1].size
            yield Window(layout, claims, tables, (start, end))
            if last:
                return
            start = end


class Window:
    """A part of the disk: once its tables are loaded, it tells holes and data."""

    def __init__(
        self, layout: mapped.Layout, claims: mapped.Claims, tables: tuple[Piece, ...], span: tuple[int, int]
    ) -> None:
        self._layout = layout
        self._claims = claims
        self._tables = tables
        self._span = span
        self._loaded: dict[int, list[Piece]] = {}

    def tables(self) -> Iterator[Batch]:
        """Yield what must be fetched; each of its pieces is a table to ``load``."""
        return pieces.whole(sorted(self._tables), self._claims.size)

    def load(self, table: Piece, data: bytes | memoryview) -> None:
        """Take in one table. Threads may load different tables at once."""
        self._loaded[table.guest] = self._layout.decode(data, table.guest)

    def check(self) -> int:
        """Check the mapping as a whole; return how long the file is at least, by all seen so far.

        To be called once, before ``holes`` and ``data`` are used.
        """
        self._claims.take_pieces(sorted(chain.from_iterable(self._loaded.values())))
        return self._claims.required

    def holes(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) on the disk of what reads as zeros, in order."""
        in_order = chain.from_iterable(self._loaded[table.guest] for table in self._tables)
        return pieces.holes(in_order, *self._span)

    def data(self) -> Iterator[Batch]:
        """Yield what must be fetched and put in place, in the file's order."""
        return pieces.batches(sorted(chain.from_iterable(self._loaded.values())), self._claims.size)


def read_image(layout: mapped.Layout, read: views.Read, size: int) -> Image:
    """Read the directory of an image in a file of ``size`` bytes.

    ``read(offset, length)`` returns all of the bytes or raises.
    """
    layout.claims(size)  # the directory is within the file, or this raises
    offset, length = layout.directory
    return Image(layout, views.entries(read(offset, length) if length else b"", layout.entry), size)
