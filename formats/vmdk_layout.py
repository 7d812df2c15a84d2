"""The layout of a sparse VMDK extent: which bytes of the file belong where on the disk.

Memory is bounded whatever the image says: 1 MiB of directory, and what ``vmdk_claims`` keeps.
"""

from __future__ import annotations

import array
from collections.abc import Iterator
from itertools import pairwise

from formats import facts, mapped, passing, pieces, vmdk, vmdk_claims, vmdk_grains, vmdk_header, vmdk_markers
from formats.pieces import Piece
from formats.vmdk_header import SECTOR
from importer import errors

#: A sector that no grain is in.
_BEHIND = 1 << 33


class Layout:
    """An image with this header, or footer; see ``mapped.Layout``."""

    format = "vmdk"
    entry = "<I"

    def __init__(self, header: vmdk_header.Header) -> None:
        vmdk_header.check_placeable(header)
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
        self._grains = vmdk_grains.Grains(header)
        self.inflate = self._grains.inflate
        self.packed = bool(header.flags & vmdk_header.COMPRESSED)
        # 0: never written; 1: reads as zeros, where the header allows it.
        self._first = 2 if header.flags & vmdk_header.ZERO_GRAINS else 1

    def claims(self, size: int, /) -> vmdk_claims.Claims:
        return vmdk_claims.Claims(self.header, self.fixed, size)

    def tables(self, directory: array.array[int], /) -> Iterator[Piece]:
        length = self.table_entries * 4
        reach = self.table_entries * self.header.grain * SECTOR
        for index, entry in enumerate(directory):
            if entry:
                guest = index * reach
                size = min(reach, self.virtual_size - guest)
                yield Piece(entry * SECTOR, length, guest, size, packed=False)

    def decode(self, data: bytes | memoryview, guest: int, /) -> list[Piece]:
        count = -(-(self.virtual_size - guest) // (self.header.grain * SECTOR))
        table = facts.entries(data, self.entry)[:count]
        if not any(table):
            return []
        return list(self._compressed(table, guest) if self.packed else self._runs(table, guest))

    def _runs(self, table: array.array[int], guest: int) -> Iterator[Piece]:
        grain = self.header.grain * SECTOR
        for first, end in pieces.steady(table, self.header.grain):
            # A hole may be one grain's length before what the next entry tells.
            start = first if table[first] >= self._first else first + 1
            if start < end:
                offset = guest + start * grain
                size = min((end - start) * grain, self.virtual_size - offset)
                yield Piece(table[start] * SECTOR, size, offset, size, packed=False)

    def _compressed(self, table: array.array[int], guest: int) -> Iterator[Piece]:
        """Yield compressed grains. Each ends at the next one of this table or is as long as one can be."""
        grain = self.header.grain * SECTOR
        used = sorted(entry for entry in table if entry >= self._first)
        lengths = {entry: (after - entry) * SECTOR for entry, after in pairwise([*used, _BEHIND])}
        if len(lengths) < len(used):
            raise errors.Corrupt(format="vmdk", reason=f"two grains behind {guest} are one")
        for index, entry in enumerate(table):
            if entry >= self._first:
                offset = guest + index * grain
                length = min(lengths[entry], self._grains.longest)
                size = min(grain, self.virtual_size - offset)
                yield Piece(entry * SECTOR, length, offset, size, packed=True)


def read_image(read: facts.Read, size: int) -> mapped.Image:
    """Read header and directory of a file of ``size`` bytes.

    ``read(offset, length)`` returns all of the bytes or raises.
    """
    header = vmdk.parse(read(0, min(size, vmdk_header.HEAD_SIZE)))
    if header.directory == vmdk_header.AT_END:
        if size % SECTOR:
            raise errors.Truncated(format="vmdk", reason=f"its footer is not the last of {size} bytes")
        length = min(size, vmdk_header.FOOTER)
        header = vmdk_header.parse_footer(header, read(size - length, length))
    return mapped.read_image(Layout(header), read, size)


def look(head: bytes) -> None:
    """Raise ``errors.Unsupported`` for what is left to another program, as far as the head tells."""
    vmdk_header.check_placeable(vmdk.parse(head))


def follow(head: bytes) -> passing.Follower:
    """Return what follows an image that comes in order and begins with ``head``."""
    header = vmdk.parse(head)
    layout = Layout(header)
    if header.directory == vmdk_header.AT_END or (layout.packed and _is_long(header)):
        return vmdk_markers.Marked(header)
    return passing.Passing(layout)


def is_crowded(head: bytes) -> bool:
    """Tell whether a stream that begins with ``head`` may name more grains than are remembered."""
    header = vmdk.parse(head)
    return not header.flags & vmdk_header.COMPRESSED and _is_long(header)


def _is_long(header: vmdk_header.Header) -> bool:
    return header.capacity // header.grain > passing.LIMIT
