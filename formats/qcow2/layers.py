"""The tables of a chain of qcow2 files: for each part of the disk, the newest file that has it.

As in ``mapped.image``, nothing is fetched here and memory is bounded for any files: by the limits of
``chain.check`` and of each layout, by the tables that are kept, and by the size of a window.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final

from cdi_worker.formats import spans, views
from cdi_worker.formats.mapped import image, pieces
from cdi_worker.formats.mapped.pieces import Batch, Piece
from cdi_worker.formats.qcow2 import tables as qcow2_tables
from cdi_worker.formats.qcow2.chain import ChainFile
from cdi_worker.formats.qcow2.layout import Qcow2Layout
from cdi_worker.formats.spans import Span

#: The largest cluster; a window of the disk is a multiple of it.
_LARGEST: Final = 2 << 20
#: Bytes of second-level tables that are fetched ahead, of all files.
_TABLES: Final = 32 << 20
#: The most pieces of an extended entry.
_SUBCLUSTERS: Final = 16


class ChainTables:
    """The tables of ``files``, which ``chain.check`` accepted; see ``mapped.image.MappedImage``.

    ``reads``: a function for each file, which returns bytes of it. ``is_base``: the first file is a complete
    disk; else parts of the disk that no file has are not touched. ``ended`` is called after the last window
    with the bytes of the disk that come from each file.
    """

    def __init__(
        self,
        files: Sequence[ChainFile],
        reads: Sequence[views.Read],
        *,
        is_base: bool,
        ended: Callable[[list[int]], object],
    ) -> None:
        ahead = _TABLES // len(files)
        self._layers = [_Layer(file, read, ahead) for file, read in zip(files, reads, strict=True)]
        self._is_base = is_base
        self._ended = ended
        self.virtual_size = files[-1].virtual_size
        self._step = max(1, image.WINDOW // sum(layer.weight for layer in self._layers)) * _LARGEST

    def windows(self) -> Iterator[ChainWindow]:
        """Yield the windows of the disk in order, once. Finish with each before taking the next."""
        for start in range(0, self.virtual_size, self._step):
            end = min(start + self._step, self.virtual_size)
            is_last = end == self.virtual_size
            yield ChainWindow(self._layers, (start, end), is_base=self._is_base, is_last=is_last)
        self._ended([layer.shown for layer in self._layers])


class FilePart:
    """The part of a window that one file holds."""

    def __init__(self, layer: _Layer, span: Span) -> None:
        self.inflate = layer.inflate
        self.load = layer.load
        self.shown: list[Piece] = []
        self._end = layer.size
        self._tables = list(pieces.tables(layer.tables(*span), layer.size))

    def tables(self) -> Iterator[Batch]:
        """Yield the batches to fetch; each piece in them is a table to ``load``."""
        return iter(self._tables)

    def data(self) -> Iterator[Batch]:
        """Yield the batches of data to fetch and deliver, in file order."""
        return pieces.batches(self.shown, self._end)


class ChainWindow:
    """A part of the disk. Load the tables of each file, call ``check``, then use ``holes`` and the data."""

    def __init__(self, layers: Sequence[_Layer], span: Span, *, is_base: bool, is_last: bool) -> None:
        self.parts = [FilePart(layer, span) for layer in layers]
        self._layers = layers
        self._span = span
        self._is_base = is_base
        #: Whether nothing after this window has data.
        self.is_last = is_last
        self._holes: list[Span] = []

    def check(self) -> None:
        """Check the mapping of each file for overlaps, and find the pieces that no newer file hides.

        Call it once, before ``holes`` and the data of each part.
        """
        uncovered = [self._span]
        for layer, part in zip(reversed(self._layers), reversed(self.parts), strict=True):
            data, zeros = layer.decode(*self._span)
            covered = [(piece.guest, piece.guest + piece.size) for piece in data]
            part.shown = sorted(_visible(data, covered, uncovered))
            layer.shown += sum(sum(b - a for a, b in each.shown or [(0, each.size)]) for each in part.shown)
            self._holes += chain.from_iterable(parts for _, parts in spans.common(zeros, uncovered))
            below = list(spans.gaps(sorted(chain(covered, zeros)), *self._span))
            uncovered = list(chain.from_iterable(parts for _, parts in spans.common(below, uncovered)))
        if self._is_base:
            self._holes += uncovered

    def holes(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) of the parts of the disk that read as zeros, in order."""
        for start, end in spans.joined(sorted(self._holes)):
            yield start, end - start


class _Layer:
    """One file: its tables, also those fetched ahead, and its clusters in use.

    ``size``: in bytes. ``weight``: the most pieces in ``_LARGEST`` bytes of the disk.
    """

    def __init__(self, file: ChainFile, read: views.Read, ahead: int) -> None:
        self.size = file.size
        self.shown = 0
        self._file = file
        self._ahead = ahead
        self._loaded: dict[int, bytes] = {}
        self._used: collections.deque[Piece] = collections.deque()
        self._coming: Iterator[Piece] = iter(())
        self._next: Piece | None = None
        self._layout: Qcow2Layout | None = None
        self.weight = 2
        layout = file.facts.layout
        if isinstance(layout, Qcow2Layout):
            self._layout = layout
            self._allocation = layout.allocation(file.size)
            at, length = layout.directory
            directory = views.entries(read(at, length) if length else b"", layout.entry)
            self._allocation.take_tables(layout.tables(directory))
            self._coming = layout.tables(directory)
            self._next = next(self._coming, None)
            several = _SUBCLUSTERS if layout.header.extended_l2 else 1
            self.weight = (_LARGEST >> layout.header.cluster_bits) * several

    def tables(self, start: int, end: int) -> Iterator[Piece]:
        """Yield the tables to load for the disk from ``start`` to ``end``, and some that follow."""
        while self._used and self._used[0].guest + self._used[0].size <= start:
            del self._loaded[self._used.popleft().guest]
        if self._next is not None and self._next.guest < end:
            taken = 0
            while self._next is not None and (self._next.guest < end or taken < self._ahead):
                self._used.append(self._next)
                taken += self._next.length
                self._next = next(self._coming, None)
        for table in self._used:
            if table.guest not in self._loaded:
                yield table

    def load(self, table: Piece, data: bytes | memoryview) -> None:
        self._loaded[table.guest] = bytes(data)

    def inflate(self, data: bytes | memoryview, piece: Piece, /) -> bytes:
        return self._layout.inflate(data, piece) if self._layout is not None else bytes(data)

    def decode(self, start: int, end: int) -> tuple[list[Piece], list[Span]]:
        """Return the pieces and the zeros from ``start`` to ``end``, in disk order; take the pieces.

        Beyond its end a backing file reads as zeros, whatever is below it.
        """
        size = self._file.virtual_size
        data: list[Piece] = []
        zeros: list[Span] = []
        if self._layout is not None:
            header, most = self._layout.header, min(end, size)
            cluster, entry = header.cluster_size, header.cluster_size // header.table_entries
            for table in self._used:
                first, after = max(table.guest, start), min(table.guest + table.size, most)
                if first < after:
                    begin = (first - table.guest) // cluster
                    part = memoryview(self._loaded[table.guest])[
                        begin * entry : -(-(after - table.guest) // cluster) * entry
                    ]
                    guest = table.guest + begin * cluster
                    data += qcow2_tables.decode(header, part, guest)
                    known = qcow2_tables.zeros(header, part, guest)
                    zeros += ((zero, min(end, most)) for zero, end in known if zero < most)
            self._allocation.take_pieces(sorted(data))
        elif (length := min(end, self._file.size) - start) > 0:
            data.append(Piece(start, length, start, length, compressed=False))
        if size < end:
            zeros.append((max(start, size), end))
        return data, zeros


def _visible(data: Sequence[Piece], covered: Sequence[Span], uncovered: Sequence[Span]) -> Iterator[Piece]:
    """Yield the parts of pieces, in disk order, within ``uncovered``. A compressed one is not split.

    ``covered``: the spans of the pieces on the disk.
    """
    for number, parts in spans.common(covered, uncovered):
        piece, (first, after) = data[number], covered[number]
        if parts == [(first, after)]:
            yield piece
        elif piece.compressed:
            yield piece._replace(shown=tuple((start - first, end - first) for start, end in parts))
        else:
            for start, end in parts:
                yield Piece(piece.host + start - first, end - start, start, end - start, compressed=False)
