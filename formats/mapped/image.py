"""Disk images with a two-level mapping table: which bytes of the file belong where on the disk.

Nothing is fetched here: callers fetch the batches of a ``Window``, in any order and in parallel. Memory is
bounded for any image: by the limits of its ``layout.Layout`` for the directory and ``Allocation``, and by the
size of a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from cdi_worker.formats import views
from cdi_worker.formats.mapped import pieces
from cdi_worker.formats.mapped.layout import Allocation, Layout
from cdi_worker.formats.mapped.pieces import Batch, Piece

#: Table entries of one window. Its pieces, at most one per entry, take about 100 MiB as Python objects.
WINDOW = 512 << 10
#: Bytes of the first-level table in one read: a disk of 16 TiB may have 16 MiB, of which a read makes copies.
_PART = 2 << 20


class MappedImage:
    """An image in a file of ``size`` bytes, whose first-level table is read now.

    ``read(offset, length)`` returns all of the bytes or raises.
    """

    def __init__(self, layout: Layout, read: views.Read, size: int) -> None:
        layout.allocation(size)  # raises if the directory is not within the file
        offset, length = layout.directory
        self.layout = layout
        self._size = size
        self._directory = views.entries(b"", layout.entry)
        for start in range(0, length, _PART):
            part = read(offset + start, min(_PART, length - start))
            self._directory += views.entries(part, layout.entry)

    def windows(self) -> Iterator[Window]:
        """Yield the windows of the disk in order. Finish with each before taking the next.

        The windows and batches of a file are the same each time.
        """
        layout = self.layout
        allocation = layout.allocation(self._size)
        allocation.take_tables(layout.tables(self._directory))
        remaining = layout.tables(self._directory)
        count = max(1, WINDOW // layout.table_entries)
        start = 0
        while True:
            tables = tuple(islice(remaining, count))
            last = len(tables) < count
            end = layout.virtual_size if last else tables[-1].guest + tables[-1].size
            yield Window(layout, allocation, tables, (start, end))
            if last:
                return
            start = end


class Window:
    """A part of the disk. Load its tables, call ``check``, then use ``holes`` and ``data``."""

    def __init__(
        self, layout: Layout, allocation: Allocation, tables: tuple[Piece, ...], span: tuple[int, int]
    ) -> None:
        self._layout = layout
        self._allocation = allocation
        self._tables = tables
        self._span = span
        self._loaded: dict[int, list[Piece]] = {}
        self.inflate = layout.inflate

    @property
    def parts(self) -> tuple[Window]:
        """The only file's part of this window."""
        return (self,)

    @property
    def is_last(self) -> bool:
        """Whether nothing after this window has data."""
        return self._span[1] >= self._layout.virtual_size

    def tables(self) -> Iterator[Batch]:
        """Yield the batches to fetch; each piece in them is a table to ``load``."""
        return pieces.tables(self._tables, self._allocation.size)

    def load(self, table: Piece, data: bytes | memoryview) -> None:
        """Decode one table. Thread-safe for different tables."""
        self._loaded[table.guest] = self._layout.decode(data, table.guest)

    def check(self) -> int:
        """Check the mapping for overlaps; return the minimum length of the file, by all windows so far.

        Call it once, before ``holes`` and ``data``.
        """
        self._allocation.take_pieces(sorted(chain.from_iterable(self._loaded.values())))
        return self._allocation.required

    def holes(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) of the parts of the disk that read as zeros, in order."""
        in_order = chain.from_iterable(self._loaded[table.guest] for table in self._tables)
        return pieces.holes(in_order, *self._span)

    def data(self) -> Iterator[Batch]:
        """Yield the batches of data to fetch and place, in file order."""
        return pieces.batches(sorted(chain.from_iterable(self._loaded.values())), self._allocation.size)


def required_length(layout: Layout, read: views.Read, size: int) -> int:
    """Return the minimum length in bytes of a file with these tables; ``size``: its actual length.

    Raises ``errors.Truncated`` if that is more: QEMU would read zeros past the end of the file.
    """
    required = 0
    for window in MappedImage(layout, read, size).windows():
        for batch in window.tables():
            data = memoryview(read(batch.offset, batch.length))
            for table in batch.pieces:
                start = table.host - batch.offset
                window.load(table, data[start : start + table.length])
        required = window.check()
    return required
