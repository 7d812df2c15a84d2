"""Virtual Hard Disk images (VHD, QEMU's vpc): a footer; dynamic images also have its copy, a header, a map.

Virtual Hard Disk Image Format Specification, Microsoft 2006. The footer has two sizes, which often differ:
Virtual PC uses the geometry (cylinders, heads, sectors), others the size field. The rule by creator is that
of QEMU's block/vpc.c, but a disk is never shorter than its data: the geometry often cuts off a backup GPT.
A fixed VHD is a raw disk and a footer, whatever size the footer has.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from cdi_worker.formats import facts, readers, views

FOOTER = 512
MAGIC = b"conectix"

_FOOTER = struct.Struct(">8sI4xQ4x4s8x8xQHBBII")
_HEADER = struct.Struct(">8s8xQ4xIII16s8x512s192s")
_HEADER_SIZE = 1024
_FIXED, _DYNAMIC = 2, 3
_ABSENT = 0xFFFFFFFF
_SECTOR = 512
#: Larger blocks are not searched for data: usual are 512 KiB and 2 MiB.
_LONGEST_BLOCK = 2 << 20
_LARGEST_GEOMETRY = 65535 * 16 * 255

#: Creators whose size field is valid. For all others QEMU uses the geometry, which is often smaller.
_VALID_SIZE = (b"win ", b"qem2", b"d2v ", b"CTXS", b"tap\0", b"wa\0")


class _Footer(NamedTuple):
    magic: bytes
    features: int
    data_offset: int
    creator: bytes
    current_size: int
    cylinders: int
    heads: int
    sectors: int
    type: int
    checksum: int

    @property
    def size_field(self) -> int:
        return self.current_size // _SECTOR * _SECTOR

    @property
    def size_by_creator(self) -> int:
        geometry = self.cylinders * self.heads * self.sectors
        if self.creator.startswith(_VALID_SIZE) or geometry == _LARGEST_GEOMETRY:
            return self.size_field
        return geometry * _SECTOR


class _Header(NamedTuple):
    magic: bytes
    map_offset: int
    entries: int
    block_size: int
    checksum: int
    parent: bytes
    parent_name: bytes
    locators: bytes


def is_fixed_vhd(tail: bytes) -> bool:
    """Return whether a file that ends with ``tail`` is a fixed VHD: a raw disk and a footer of 512 bytes."""
    footer = tail[-FOOTER:]
    if len(footer) < FOOTER or not footer.startswith(MAGIC):
        return False
    return _footer(footer).type == _FIXED and _checksum(footer, 64) == _footer(footer).checksum


def check_fixed(footer: bytes, length: int) -> None:
    """Check the footer of a fixed VHD whose disk, the bytes before the footer, has ``length`` bytes."""
    size = _footer(footer).size_by_creator
    if size > length:
        reason = f"the footer specifies a disk of {size} bytes, more than the file holds"
        raise facts.refuse("vhd", "footer", reason)
    facts.check_size("vhd", length)


class WithoutFooter:
    """Read a stream without the footer, if it is a fixed VHD: the raw disk.

    Only the last 512 bytes show whether it is one, so they are held back until the stream ends. Then
    ``footer`` has the footer, for ``check_fixed``.
    """

    def __init__(self, reader: readers.Reader) -> None:
        self._reader = reader
        self._held = b""
        self.footer = b""
        self._ended = False

    def readinto(self, into: memoryview, /) -> int:
        while not self._ended:
            held = len(self._held)
            # New bytes are read after the held ones; a small ``into`` has no room for both.
            space = into if len(into) > FOOTER else memoryview(bytearray(FOOTER + len(into)))
            space[:held] = self._held
            count = self._reader.readinto(space[held:])
            if not count:
                self._ended = True
                if is_fixed_vhd(self._held):
                    self.footer, self._held = self._held, b""
                break
            ready = max(0, held + count - FOOTER)
            self._held = bytes(space[ready : held + count])
            if ready:
                into[:ready] = space[:ready]
                return ready
        count = min(len(into), len(self._held))
        into[:count] = self._held[:count]
        self._held = self._held[count:]
        return count

    def close(self) -> None:
        self._reader.close()


def check(view: views.View) -> facts.Facts:
    """Refuse differencing images, wrong checksums and a map that contradicts the size."""
    if not view.head.startswith(MAGIC):
        return _check_fixed(view)
    footer = _dynamic_footer(view)
    if footer.data_offset + _HEADER_SIZE > len(view.head) and not view.random:
        return facts.Facts("vhd", None, complete=False)
    if footer.size_by_creator > facts.MAX_VIRTUAL_SIZE:
        facts.check_size("vhd", footer.size_by_creator)
    header = _dynamic_header(view, footer)
    size = _disk_size(view, footer, header)
    if size is None:
        return facts.Facts("vhd", None, complete=False)
    facts.check_size("vhd", size)
    if header.entries * header.block_size < size:
        raise facts.refuse("vhd", "header", "the block map is too small for the virtual size")
    return facts.Facts("vhd", size, geometry=size != footer.size_field)


def _dynamic_footer(view: views.View) -> _Footer:
    data = view.at(0, FOOTER)
    footer = _footer(data)
    if _checksum(data, 64) != footer.checksum:
        raise facts.refuse("vhd", "footer", "the footer has a wrong checksum")
    if footer.type != _DYNAMIC:
        raise facts.refuse(
            "vhd", "parent", f"the image has type {footer.type}, expected dynamic ({_DYNAMIC})"
        )
    return footer


def _dynamic_header(view: views.View, footer: _Footer) -> _Header:
    data = view.at(footer.data_offset, _HEADER_SIZE)
    header = _header(data)
    if header.magic != b"cxsparse" or _checksum(data, 36) != header.checksum:
        raise facts.refuse("vhd", "header", "the header is damaged or has a wrong checksum")
    if any(header.parent) or any(header.parent_name) or any(header.locators):
        raise facts.refuse("vhd", "parent", "the image has a parent image; merge them first")
    block = header.block_size
    if block < _SECTOR or block & (block - 1):
        raise facts.refuse("vhd", "header", f"the block size is {block} bytes, expected a power of 2")
    facts.check_table("vhd", 4 * header.entries)
    return header


def _disk_size(view: views.View, footer: _Footer, header: _Header) -> int | None:
    """Return the virtual size: by the creator, or the size field if there is data beyond it.

    None: the block map must be read, which is beyond the head.
    """
    size, field = footer.size_by_creator, footer.size_field
    if field <= size:
        return size
    if not view.random:
        return None
    return field if _has_data(view, header, size, field) else size


def _has_data(view: views.View, header: _Header, start: int, end: int) -> bool:
    """Return whether there are blocks from ``start`` to ``end``, except zeros in the block at ``start``."""
    block = header.block_size
    first, last = start // block, min(-(-end // block), header.entries)
    for index, entries in view.table(header.map_offset + 4 * first, last - first, ">I"):
        for number, entry in enumerate(entries, first + index):
            if entry == _ABSENT:
                continue
            at = max(0, start - number * block)
            data = entry * _SECTOR + _bitmap(header)
            if not at or block > _LONGEST_BLOCK or any(view.at(data + at, block - at)):
                return True
    return False


def _bitmap(header: _Header) -> int:
    """Return the length of the bitmap before each block: one bit per sector, padded to whole sectors."""
    return -(-header.block_size // (_SECTOR * 8 * _SECTOR)) * _SECTOR


def _check_fixed(view: views.View) -> facts.Facts:
    if not view.random:
        return facts.Facts("vhd", None, complete=False)
    footer = view.tail(FOOTER)
    if not is_fixed_vhd(footer):
        raise facts.refuse("vhd", "footer", "the footer is missing or damaged")
    length = (view.size or 0) - FOOTER
    check_fixed(footer, length)
    return facts.Facts("vhd", -(-length // _SECTOR) * _SECTOR, raw=length)


def required_length(view: views.View) -> int:
    """Return the minimum length in bytes of a file with this block map."""
    if not view.head.startswith(MAGIC):
        return 0
    footer = _footer(view.at(0, FOOTER))
    header = _header(view.at(footer.data_offset, _HEADER_SIZE))
    block, bitmap = header.block_size, _bitmap(header)
    count = -(-max(footer.size_by_creator, footer.size_field) // block)
    count = min(count, header.entries)
    required = header.map_offset + 4 * count
    for _, entries in view.table(header.map_offset, count, ">I"):
        last = max((entry for entry in entries if entry != _ABSENT), default=None)
        if last is not None:
            required = max(required, last * _SECTOR + bitmap + block)
    return required


def _checksum(data: bytes, at: int) -> int:
    """Return the one's complement of the sum of all bytes except the checksum field at ``at``."""
    return ~(sum(data) - sum(data[at : at + 4])) & 0xFFFFFFFF


def _footer(data: bytes) -> _Footer:
    return _Footer._make(_FOOTER.unpack_from(data))


def _header(data: bytes) -> _Header:
    return _Header._make(_HEADER.unpack_from(data))
