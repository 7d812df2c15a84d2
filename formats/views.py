"""The view of a file from which the checks read, and decoding of tables."""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Callable, Iterable, Iterator

from cdi_worker import errors

#: ``read(offset, length)`` returns these bytes of the file, fewer only at its end.
Read = Callable[[int, int], bytes]

#: Tables are read in windows of this many bytes, which bounds memory.
_WINDOW = 1 << 20
#: Bytes of one read in a header: a VHDX has its metadata within 128 KiB.
_NEAR = 128 << 10


class Beyond(errors.Truncated):
    """The bytes up to ``end`` are needed, and the head of a stream is shorter."""

    def __init__(self, end: int, **fields: object) -> None:
        super().__init__(**fields)
        self.end = end


class View:
    """The readable part of a file: its head, and with ``read`` every other offset.

    ``size``: length of the file in bytes, required with ``read``. ``allow_backing``: the base name of the
    one backing file that the image may have. ``layer``: it may name any backing file, which the caller
    compares with the other files of the chain.
    """

    def __init__(
        self,
        head: bytes,
        read: Read | None = None,
        size: int | None = None,
        allow_backing: str | None = None,
        *,
        layer: bool = False,
    ) -> None:
        self.head = head
        self.allow_backing = allow_backing
        self.layer = layer
        self.size = size
        self._read = read
        self._near = (0, b"")

    @property
    def random(self) -> bool:
        """Return whether every offset can be read."""
        return self._read is not None and self.size is not None

    def at(self, offset: int, length: int) -> bytes:
        """Return exactly these bytes. Raises ``errors.Truncated`` at the end of the file, or ``Beyond``."""
        return self._at(offset, length, self._read and self._read_near)

    def _at(self, offset: int, length: int, read: Read | None) -> bytes:
        data = self.head[offset : offset + length]
        if len(data) < length and read is not None:
            data = read(offset, length)
        if len(data) < length:
            reason = f"the bytes from {offset} to {offset + length} are missing; transfer the image again"
            if read is None:
                raise Beyond(offset + length, format="image", reason=reason)
            raise errors.Truncated(format="image", reason=reason)
        return data

    def _read_near(self, offset: int, length: int) -> bytes:
        """Read these bytes. The fields of a header are close together: one request returns several."""
        assert self._read is not None  # noqa: S101  (the caller has checked)
        start, data = self._near
        if offset < start or offset + length > start + len(data):
            longest = max(length, min(_NEAR, (self.size or 0) - offset))
            start, data = self._near = offset, self._read(offset, longest)
        return data[offset - start :][:length]

    def tail(self, length: int) -> bytes:
        """Return the last ``length`` bytes of the file, or all of a shorter one."""
        size = self.size or 0
        length = min(length, size)
        return self.at(size - length, length)

    def table(self, offset: int, count: int, layout: str) -> Iterator[tuple[int, array.array[int]]]:
        """Yield (index of the first entry, entries) for each part of a table of any length."""
        step = _WINDOW // struct.calcsize(layout)
        for first in range(0, count, step):
            length = min(step, count - first) * struct.calcsize(layout)
            yield first, entries(self.at(offset + first * struct.calcsize(layout), length), layout)

    def tables(self, offsets: Iterable[int], length: int) -> Iterator[bytes]:
        """Yield many small tables of the same ``length`` in file order, reading neighbours together."""
        near: list[int] = []
        for offset in sorted(offsets):
            if near and offset + length - near[0] > _WINDOW:
                yield from self._together(near, length)
                near = []
            near.append(offset)
        if near:
            yield from self._together(near, length)

    def _together(self, offsets: list[int], length: int) -> Iterator[bytes]:
        first = offsets[0]
        data = self._at(first, offsets[-1] + length - first, self._read)
        return (data[offset - first : offset - first + length] for offset in offsets)


def entries(data: bytes | memoryview, layout: str) -> array.array[int]:
    """Decode a table. ``layout``: byte order and type of an entry in ``struct`` notation (``<I``)."""
    table = array.array(layout[1])
    table.frombytes(data)
    if layout[0] != ("<" if sys.byteorder == "little" else ">"):
        table.byteswap()
    return table
