"""The footer of Virtual Hard Disk images (VHD, QEMU's vpc), and fixed images: a raw disk and a footer.

Virtual Hard Disk Image Format Specification, Microsoft 2006. The footer has two sizes, which often differ:
Virtual PC uses the geometry (cylinders, heads, sectors), others the size field. The rule by creator is that
of QEMU's block/vpc.c. A fixed VHD is a raw disk, whatever size the footer has.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from cdi_worker.formats import facts, readers

FOOTER = 512
MAGIC = b"conectix"
SECTOR = 512

_FOOTER = struct.Struct(">8sI4xQ4x4s8x8xQHBBII")
_FIXED = 2
_LARGEST_GEOMETRY = 65535 * 16 * 255

#: Creators whose size field is valid. For all others QEMU uses the geometry, which is often smaller.
_VALID_SIZE = (b"win ", b"qem2", b"d2v ", b"CTXS", b"tap\0", b"wa\0")


class Footer(NamedTuple):
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
        return self.current_size // SECTOR * SECTOR

    @property
    def size_by_creator(self) -> int:
        geometry = self.cylinders * self.heads * self.sectors
        if self.creator.startswith(_VALID_SIZE) or geometry == _LARGEST_GEOMETRY:
            return self.size_field
        return geometry * SECTOR


def checksum(data: bytes, at: int) -> int:
    """Return the one's complement of the sum of all bytes except the checksum field at ``at``."""
    return ~(sum(data) - sum(data[at : at + 4])) & 0xFFFFFFFF


def parse(data: bytes) -> Footer:
    return Footer._make(_FOOTER.unpack_from(data))


def is_fixed(tail: bytes) -> bool:
    """Return whether a raw file that ends with ``tail`` is a fixed VHD: a raw disk and a footer of 512 bytes.

    Raises ``errors.Refused`` for the footer of another type, whose copy in the first sector is missing: QEMU
    refuses such a file, too.
    """
    footer = tail[-FOOTER:]
    if len(footer) < FOOTER or not footer.startswith(MAGIC):
        return False
    if checksum(footer, 64) != parse(footer).checksum:
        return False
    if parse(footer).type != _FIXED:
        cure = "restore it from the footer: tail -c 512 disk.vhd | dd of=disk.vhd conv=notrunc"
        reason = f"the footer is that of a dynamic or differencing disk, the first sector is damaged; {cure}"
        raise facts.refuse("vhd", "footer", reason)
    return True


def check_fixed(footer: bytes, length: int) -> None:
    """Check the footer of a fixed VHD whose disk, the bytes before the footer, has ``length`` bytes."""
    size = parse(footer).size_by_creator
    if size > length:
        reason = f"the footer specifies a disk of {size} bytes, more than the file holds"
        raise facts.refuse("vhd", "footer", reason)
    facts.check_size("vhd", length)


class WithoutFooter(readers.Wrapper):
    """Read a stream without the footer, if it is a fixed VHD: the raw disk.

    Only the last 512 bytes show whether it is one, so they are held back until the stream ends. Then
    ``footer`` has the footer, for ``check_fixed``.
    """

    def __init__(self, reader: readers.Reader) -> None:
        super().__init__(reader)
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
                if is_fixed(self._held):
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
