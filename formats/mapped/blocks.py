"""Data in blocks of one length: their allocation, and images with one table of all blocks (VDI, VHD, VHDX).

Slices of such a table take the place of second-level tables, so that memory is bounded for any image: by
``BlockAllocation`` and the size of a window.
"""

from __future__ import annotations

import abc
import array
import bisect
import itertools
import struct
from collections.abc import Iterable, Iterator

from cdi_worker import errors
from cdi_worker.formats import spans
from cdi_worker.formats.mapped import passing
from cdi_worker.formats.mapped.layout import Allocation, Layout
from cdi_worker.formats.mapped.pieces import Piece

SECTOR = 512
#: Inverts all bits of a table in which all ones is an entry without data: then it is 0, as in other formats.
INVERTED = bytes(range(256))[::-1]
#: Blocks of one slice of a table.
_SLICE = 8 << 10


class BlockAllocation(Allocation):
    """The bytes of the file in use by header and tables, as spans, and by blocks of one length.

    ``fixed``: spans (start, end) of header and directory. ``block``: length of a block; blocks begin at
    multiples of ``step``. Adjacent spans are joined. Blocks take 1, 2 or 4 bytes (by the number of steps in
    a block) for each block that the file can hold, at most ``LIMIT``.
    """

    LIMIT = 64 << 20

    def __init__(
        self, name: str, size: int, fixed: Iterable[tuple[int, int]], block: int, step: int = SECTOR
    ) -> None:
        super().__init__(name, size)
        self._block = block
        self._step = step
        # The file is divided into slots of a block's length. One number per slot: the step of the slot in
        # which a block begins, counted from 1; 0: none. Blocks in adjacent slots overlap if the second one
        # begins in an earlier step of its slot.
        steps = block // step
        self._begins = array.array("B" if steps < 1 << 8 else "H" if steps < 1 << 16 else "I")
        self._spans = sorted(fixed)
        self._join_spans()

    def take_tables(self, tables: Iterable[Piece], /) -> None:
        for table in tables:
            self.reach(table.host + table.length)
            self._spans.append((table.host, table.host + table.length))
        self._spans.sort()
        self._join_spans()

    def _join_spans(self) -> None:
        for (_, end), (start, _) in itertools.pairwise(self._spans):
            if start < end:
                raise self._twice(start)
        self._spans = list(spans.joined(self._spans))

    def take_pieces(self, data: Iterable[Piece], /) -> None:
        for piece in data:
            self.take(piece.host, piece.length)

    def take(self, host: int, length: int) -> None:
        """Take adjacent blocks. The last one may be shorter, but no other block may begin in its rest."""
        self.avoid_spans(host, length)
        first, within = divmod(host, self._block)
        begin = within // self._step + 1
        end = first - (-length // self._block)
        begins = self._begins
        if (end + 1) * begins.itemsize > self.LIMIT:
            limit = self.LIMIT // begins.itemsize
            raise errors.Unsupported(reason=f"{self._name} file of more than {limit} blocks")
        if end >= len(begins):
            begins.frombytes(bytes((end + 1 - len(begins)) * begins.itemsize))
        before = begins[first - 1] if first else 0
        if any(begins[first:end].tobytes()) or before > begin or 0 < begins[end] < begin:
            raise self._twice(host)
        begins[first:end] = array.array(begins.typecode, [begin]) * (end - first)

    def avoid_spans(self, host: int, length: int) -> None:
        """Raise an error if these bytes are beyond the end of the file, or in a span."""
        end = host + length
        self.reach(end)
        index = bisect.bisect_left(self._spans, (end, 0))
        if index and self._spans[index - 1][1] > host:
            raise self._twice(host)

    def _twice(self, host: int) -> errors.Corrupt:
        reason = f"the data at byte {host} of the file is used twice"
        return errors.Corrupt(format=self._name, reason=reason)


class BlockLayout(Layout):
    """The layout of an image whose one table has an entry for each block of the disk.

    ``table``: offset of the table; ``block``: bytes of the disk in a block.
    """

    unit = "blocks"
    directory = 0, 0

    def __init__(self, table: int, block: int, virtual_size: int) -> None:
        self.virtual_size = virtual_size
        self.block = block
        self.count = -(-virtual_size // block)
        # All entries come before the data, which may be in any order.
        self.crowded = self.count > passing.LIMIT
        self.table_entries = _SLICE
        self._table = table

    def index(self, block: int) -> int:
        """Return the index of a block's entry in the table."""
        return block

    @abc.abstractmethod
    def runs(self, data: bytes) -> Iterator[tuple[int, int, int]]:
        """Yield (first, end, offset in the file) of the adjacent blocks with data in a slice of the table.

        Blocks are counted from the first one of the slice.
        """

    def tables(self, _directory: array.array[int], /) -> Iterator[Piece]:
        size = struct.calcsize(self.entry)
        for first in range(0, self.count, self.table_entries):
            end = min(first + self.table_entries, self.count)
            start, guest = self.index(first), first * self.block
            length = (self.index(end - 1) + 1 - start) * size
            covered = min(end * self.block, self.virtual_size) - guest
            yield Piece(self._table + start * size, length, guest, covered, compressed=False)

    def decode(self, data: bytes | memoryview, guest: int, /) -> list[Piece]:
        result: list[Piece] = []
        for first, end, host in self.runs(bytes(data)):
            start = guest + first * self.block
            size = min(guest + end * self.block, self.virtual_size) - start
            result.append(Piece(host, size, start, size, compressed=False))
        return result

    def inflate(self, data: bytes | memoryview, _piece: Piece, /) -> bytes:
        return bytes(data)

    def follow(self) -> passing.StreamFollower:
        return passing.StreamFollower(self)
