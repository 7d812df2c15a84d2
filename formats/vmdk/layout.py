"""The layout of a sparse VMDK extent: which bytes of the file belong where on the disk.

Memory is bounded for any image: at most 1 MiB of directory, and the memory of ``Claims``.
"""

from __future__ import annotations

import array
import bisect
from collections.abc import Iterable, Iterator
from itertools import pairwise

from cdi_worker import errors
from cdi_worker.formats import views
from cdi_worker.formats.mapped import layout as mapped
from cdi_worker.formats.mapped import passing, pieces
from cdi_worker.formats.mapped.pieces import Piece
from cdi_worker.formats.vmdk import grains, markers
from cdi_worker.formats.vmdk import header as vmdk_header
from cdi_worker.formats.vmdk.header import SECTOR

#: A sector after every grain: grain tables have 32 bits per entry.
_AFTER_ALL = 1 << 33


class Layout(mapped.Layout):
    """The layout of an image with this header; see ``mapped.layout.Layout``.

    ``footer``: required for random access if the header has no directory offset, not for a stream. Raises
    ``errors.Unsupported`` if the built-in reader does not support the image.
    """

    format = "vmdk"
    unit = "grains"
    entry = "<I"

    def __init__(self, header: vmdk_header.Header, footer: vmdk_header.Header | None = None) -> None:
        vmdk_header.check_placeable(header)
        self._first_header = header
        if footer is not None:
            vmdk_header.check_placeable(footer)
            header = footer
        self.header = header
        self.virtual_size = header.capacity * SECTOR
        self.table_entries = header.table_entries
        self.directory = header.directory * SECTOR, 4 * header.directory_entries
        descriptor = header.descriptor_offset * SECTOR
        self.fixed = (
            (0, SECTOR),
            (descriptor, descriptor + header.descriptor_size * SECTOR),
            (self.directory[0], sum(self.directory)),
        )
        self._grains = grains.Grains(header)
        self.inflate = self._grains.inflate
        self.compressed = bool(header.flags & vmdk_header.COMPRESSED)
        # Entry 0: not allocated; 1: reads as zeros, if the header has the flag.
        self._first = 2 if header.flags & vmdk_header.ZERO_GRAINS else 1
        self._is_long = header.capacity // header.grain > passing.LIMIT
        # All tables are at the start of the file.
        self.crowded = self._is_long and not self.compressed

    def claims(self, size: int, /) -> Claims:
        return Claims(self.header, self.fixed, size)

    def tables(self, directory: array.array[int], /) -> Iterator[Piece]:
        length = self.table_entries * 4
        reach = self.table_entries * self.header.grain * SECTOR
        for index, entry in enumerate(directory):
            if entry:
                guest = index * reach
                size = min(reach, self.virtual_size - guest)
                yield Piece(entry * SECTOR, length, guest, size, compressed=False)

    def decode(self, data: bytes | memoryview, guest: int, /) -> list[Piece]:
        count = -(-(self.virtual_size - guest) // (self.header.grain * SECTOR))
        table = views.entries(data, self.entry)[:count]
        if not any(table):
            return []
        return list(self._compressed(table, guest) if self.compressed else self._runs(table, guest))

    def _runs(self, table: array.array[int], guest: int) -> Iterator[Piece]:
        grain = self.header.grain * SECTOR
        for start, end in pieces.steady(table, self.header.grain, self._first):
            offset = guest + start * grain
            size = min((end - start) * grain, self.virtual_size - offset)
            yield Piece(table[start] * SECTOR, size, offset, size, compressed=False)

    def _compressed(self, table: array.array[int], guest: int) -> Iterator[Piece]:
        """Yield compressed grains. Each ends at the next one in this table, or has the maximum length."""
        grain = self.header.grain * SECTOR
        used = sorted(entry for entry in table if entry >= self._first)
        lengths = {entry: (after - entry) * SECTOR for entry, after in pairwise([*used, _AFTER_ALL])}
        if len(lengths) < len(used):
            raise errors.Corrupt(format="vmdk", reason=f"two table entries from byte {guest} use one grain")
        for index, entry in enumerate(table):
            if entry >= self._first:
                offset = guest + index * grain
                length = min(lengths[entry], self._grains.longest)
                size = min(grain, self.virtual_size - offset)
                yield Piece(entry * SECTOR, length, offset, size, compressed=True)

    def follow(self) -> mapped.Follower:
        header = self._first_header
        if header.directory == vmdk_header.AT_END or (self.compressed and self._is_long):
            return markers.Marked(header)
        return passing.Passing(self)


class Claims(mapped.Claims):
    """The bytes of the file in use by the header, the tables and the grains.

    Tables are kept as spans, adjacent ones joined. Uncompressed grains take one byte for each grain that the
    file can hold, at most ``LIMIT`` (4 TiB of 64 KiB grains). Compressed grains need none: their markers say
    which part of the disk they hold.
    """

    LIMIT = 64 << 20

    def __init__(self, header: vmdk_header.Header, fixed: Iterable[tuple[int, int]], size: int) -> None:
        super().__init__("vmdk", size)
        self._grain = header.grain * SECTOR
        # The file is divided into slots of a grain's length. One byte per slot: the sector of the slot in
        # which a grain begins, counted from 1; 0: none. Grains in adjacent slots overlap if the second one
        # begins in an earlier sector of its slot.
        self._begins = bytearray()
        self._spans = sorted(fixed)
        self.reach(header.overhead * SECTOR)
        self._join_spans()

    def take_tables(self, tables: Iterable[Piece], /) -> None:
        """Claim the grain tables."""
        self._spans += [(table.host, table.host + table.length) for table in tables]
        self._spans.sort()
        self._join_spans()

    def _join_spans(self) -> None:
        joined: list[tuple[int, int]] = []
        for start, end in self._spans:
            self.reach(end)
            if joined and start < joined[-1][1]:
                raise _twice(start)
            if joined and start == joined[-1][1]:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((start, end))
        self._spans = joined

    def take_pieces(self, found: Iterable[Piece], /) -> None:
        """Claim data, given in file order."""
        for piece in found:
            # The length of a compressed grain is in its marker; at least one byte follows that.
            length = vmdk_header.GRAIN_MARKER.size + 1 if piece.compressed else piece.length
            end = piece.host + length
            self.reach(end)
            index = bisect.bisect_left(self._spans, (end, 0))
            if index and self._spans[index - 1][1] > piece.host:
                raise _twice(piece.host)
            if not piece.compressed:
                self._take_grains(piece)

    def _take_grains(self, piece: Piece) -> None:
        first, within = divmod(piece.host, self._grain)
        begin = within // SECTOR + 1
        end = first - (-piece.length // self._grain)
        if end >= self.LIMIT:
            raise errors.Unsupported(reason=f"vmdk file of more than {self.LIMIT} grains")
        if end >= len(self._begins):
            self._begins.extend(bytes(end + 1 - len(self._begins)))
        begins = self._begins
        before = begins[first - 1] if first else 0
        if begins.count(0, first, end) < end - first or before > begin or 0 < begins[end] < begin:
            raise _twice(piece.host)
        begins[first:end] = bytes([begin]) * (end - first)


def _twice(host: int) -> errors.Corrupt:
    return errors.Corrupt(format="vmdk", reason=f"the data at byte {host} of the file is used twice")
