"""The layout of a sparse VMDK extent: which bytes of the file belong where on the disk.

Memory is bounded for any image: at most 1 MiB of directory, and the memory of ``VmdkAllocation``.
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import cast

from isal import isal_zlib

from cdi_worker import errors
from cdi_worker.formats import views
from cdi_worker.formats.mapped import blocks, passing, pieces
from cdi_worker.formats.mapped.layout import Follower, Layout
from cdi_worker.formats.mapped.pieces import Piece
from cdi_worker.formats.vmdk import header as vmdk_header
from cdi_worker.formats.vmdk import markers
from cdi_worker.formats.vmdk.header import GRAIN_MARKER, SECTOR, VmdkHeader

#: A sector after every grain: grain tables have 32 bits per entry.
_AFTER_ALL = 1 << 33
# wbits of a zlib stream: with header and checksum (RFC 1950).
_ZLIB = 15
# isal's type stubs declare the class as an instance.
_IsalError = cast("type[Exception]", isal_zlib.error)


class VmdkLayout(Layout):
    """The layout of an image with this header; see ``mapped.layout.Layout``.

    ``footer``: required for random access if the header has no directory offset, not for a stream. Raises
    ``errors.Unsupported`` if the built-in reader does not support the image.
    """

    format = "vmdk"
    unit = "grains"
    entry = "<I"

    def __init__(self, header: VmdkHeader, footer: VmdkHeader | None = None) -> None:
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
        self.compressed = bool(header.flags & vmdk_header.COMPRESSED)
        # Entry 0: not allocated; 1: reads as zeros, if the header has the flag.
        self._first = 2 if header.flags & vmdk_header.ZERO_GRAINS else 1
        self._is_long = header.capacity // header.grain > passing.LIMIT
        # All tables are at the start of the file.
        self.crowded = self._is_long and not self.compressed

    def allocation(self, size: int, /) -> VmdkAllocation:
        return VmdkAllocation(self.header, self.fixed, size)

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
        if self.compressed:
            return list(self._compressed(table, guest))
        grain, result = self.header.grain * SECTOR, []
        for start, end in pieces.steady(table, self.header.grain, self._first):
            offset = guest + start * grain
            size = min((end - start) * grain, self.virtual_size - offset)
            result.append(Piece(table[start] * SECTOR, size, offset, size, compressed=False))
        return result

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
                length = min(lengths[entry], self.header.longest_grain)
                size = min(grain, self.virtual_size - offset)
                yield Piece(entry * SECTOR, length, offset, size, compressed=True)

    def inflate(self, data: bytes | memoryview, piece: Piece, /) -> bytes:
        """Decompress a grain; ``data``: the grain with its marker, may be longer.

        Raises ``errors.Corrupt``, also if the marker belongs to another grain.
        """
        guest, length = piece.guest, self.header.grain * SECTOR
        if len(data) < GRAIN_MARKER.size:
            raise _corrupt(guest, "is truncated")
        sector, size = GRAIN_MARKER.unpack_from(data)
        if sector * SECTOR != guest:
            raise _corrupt(guest, f"has the marker of the grain for byte {sector * SECTOR}")
        body = data[GRAIN_MARKER.size : GRAIN_MARKER.size + size]
        if not size or len(body) < size:
            raise _corrupt(guest, f"has a marker with a wrong size of {size} bytes")
        stream = isal_zlib.decompressobj(wbits=_ZLIB)
        try:
            # One byte more than expected: at its output limit isal does not look for the end of the stream.
            result: bytes = stream.decompress(body, length + 1)
        except _IsalError as err:
            raise _corrupt(guest, err) from err
        # The last grain may be stored whole or only to the end of the disk, depending on the program.
        if not stream.eof or len(result) not in {length, min(length, self.virtual_size - guest)}:
            raise _corrupt(guest, f"does not decompress to {length} bytes")
        return result

    def follow(self) -> Follower:
        header = self._first_header
        if header.directory == vmdk_header.AT_END or (self.compressed and self._is_long):
            return markers.MarkerFollower(header, self.inflate)
        return passing.StreamFollower(self)


class VmdkAllocation(blocks.BlockAllocation):
    """The bytes of the file in use by the header, the tables and the grains.

    Compressed grains may be anywhere: their markers say which part of the disk they hold.
    """

    def __init__(self, header: VmdkHeader, fixed: Iterable[tuple[int, int]], size: int) -> None:
        spans = tuple(fixed)
        super().__init__("vmdk", size, spans, header.grain * SECTOR)
        for end in (header.overhead * SECTOR, *(end for _, end in spans)):
            self.reach(end)

    def take_pieces(self, data: Iterable[Piece], /) -> None:
        for piece in data:
            if piece.compressed:
                # The length of a compressed grain is in its marker; at least one byte follows that.
                self.avoid_spans(piece.host, GRAIN_MARKER.size + 1)
            else:
                self.take(piece.host, piece.length)


def _corrupt(guest: int, reason: object) -> errors.Corrupt:
    return errors.Corrupt(format="vmdk", reason=f"the grain for byte {guest} {reason}")
