"""Virtual Hard Disk images, which QEMU calls vpc: a footer, and in dynamic ones its copy, a header and a map.

Virtual Hard Disk Image Format Specification, Microsoft 2006; the size as in QEMU's block/vpc.c.
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
_LARGEST_GEOMETRY = 65535 * 16 * 255

#: Programs that mean the size they write; the others mean the geometry, which is often smaller.
_HONEST = (b"win ", b"qem2", b"d2v ", b"CTXS", b"tap\0", b"wa\0")


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
    def virtual_size(self) -> int:
        geometry = self.cylinders * self.heads * self.sectors
        if self.creator.startswith(_HONEST) or geometry == _LARGEST_GEOMETRY:
            return self.current_size // _SECTOR * _SECTOR
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
    """Tell whether a file that ends with ``tail`` is a fixed VHD: raw but for its last 512 bytes."""
    footer = tail[-FOOTER:]
    if len(footer) < FOOTER or not footer.startswith(MAGIC):
        return False
    return _footer(footer).type == _FIXED and _checksum(footer, 64) == _footer(footer).checksum


class WithoutFooter:
    """Give what ``reader`` gives, but for the footer if that is how it ends: the disk in a fixed VHD.

    Read in order, it shows what it was with its very last bytes: those are always held back.
    """

    def __init__(self, reader: readers.Reader) -> None:
        self._reader = reader
        self._held = b""
        self._ended = False

    def readinto(self, into: memoryview, /) -> int:
        while not self._ended:
            held = len(self._held)
            # Read behind what is held; a small ``into`` has no room for both.
            space = into if len(into) > FOOTER else memoryview(bytearray(FOOTER + len(into)))
            space[:held] = self._held
            count = self._reader.readinto(space[held:])
            if not count:
                self._ended = True
                if is_fixed_vhd(self._held):
                    self._held = b""
                break
            given = max(0, held + count - FOOTER)
            self._held = bytes(space[given : held + count])
            if given:
                into[:given] = space[:given]
                return given
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
    data = view.at(0, FOOTER)
    footer = _footer(data)
    if _checksum(data, 64) != footer.checksum:
        raise facts.refuse("vhd", "footer", "the checksum of its footer is wrong")
    if footer.type != _DYNAMIC:
        raise facts.refuse("vhd", "parent", f"it is of type {footer.type}, not dynamic")
    facts.check_size("vhd", footer.virtual_size)
    data = view.at(footer.data_offset, _HEADER_SIZE)
    header = _header(data)
    if header.magic != b"cxsparse" or _checksum(data, 36) != header.checksum:
        raise facts.refuse("vhd", "header", "the checksum of its header is wrong")
    if any(header.parent) or any(header.parent_name) or any(header.locators):
        raise facts.refuse("vhd", "parent", "it names a parent image")
    block = header.block_size
    if block < _SECTOR or block & (block - 1) or header.entries * block < footer.virtual_size:
        raise facts.refuse("vhd", "header", "its block map is too small for its size")
    return facts.Facts("vhd", footer.virtual_size)


def _check_fixed(view: views.View) -> facts.Facts:
    if not view.random:
        return facts.Facts("vhd", None, complete=False)
    footer = view.tail(FOOTER)
    if not is_fixed_vhd(footer):
        raise facts.refuse("vhd", "footer", "its footer is missing or damaged")
    size = _footer(footer).virtual_size
    facts.check_size("vhd", size)
    if size > (view.size or 0) - FOOTER:
        raise facts.refuse("vhd", "footer", f"its footer tells a size of {size}, more than the file holds")
    return facts.Facts("vhd", size)


def required_length(view: views.View) -> int:
    """Return the bytes that a file with this block map holds at least."""
    if not view.head.startswith(MAGIC):
        return _footer(view.tail(FOOTER)).virtual_size + FOOTER
    footer = _footer(view.at(0, FOOTER))
    header = _header(view.at(footer.data_offset, _HEADER_SIZE))
    block = header.block_size
    # One bit for each sector of the block, in whole sectors, comes before the block's data.
    bitmap = -(-block // (_SECTOR * 8 * _SECTOR)) * _SECTOR
    count = -(-footer.virtual_size // block)
    required = header.map_offset + 4 * count
    for _, entries in view.table(header.map_offset, count, ">I"):
        last = max((entry for entry in entries if entry != _ABSENT), default=None)
        if last is not None:
            required = max(required, last * _SECTOR + bitmap + block)
    return required


def _checksum(data: bytes, at: int) -> int:
    """Return the one's complement of the sum of all bytes but those of the checksum itself."""
    return ~(sum(data) - sum(data[at : at + 4])) & 0xFFFFFFFF


def _footer(data: bytes) -> _Footer:
    return _Footer._make(_FOOTER.unpack_from(data))


def _header(data: bytes) -> _Header:
    return _Header._make(_HEADER.unpack_from(data))
