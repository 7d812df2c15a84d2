"""Access to a file for the safety checks, and the decoding of tables."""

from __future__ import annotations

import array
import bisect
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
    """The head of a stream is too short: the check needs the bytes up to ``end``."""

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
        """Whether every offset can be read."""
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

    def end_of_data(self, most: int) -> int:
        """Return the offset after the last byte that is not zero; 0 if the last ``most`` bytes are zeros."""
        size = end = self.size or 0
        while end > max(0, size - most):
            start = max(0, end - _WINDOW)
            data = self._at(start, end - start, self._read).rstrip(b"\0")
            if data:
                return start + len(data)
            end = start
        return 0

    def table(self, offset: int, count: int, entry: str) -> Iterator[tuple[int, array.array[int]]]:
        """Yield (index of the first entry, entries) for each part of a table of any length."""
        size = struct.calcsize(entry)
        step = _WINDOW // size
        for first in range(0, count, step):
            yield first, entries(self.at(offset + first * size, min(step, count - first) * size), entry)

    def tables(self, offsets: Iterable[int], length: int) -> Iterator[bytes]:
        """Yield many small tables of the same ``length`` in file order, reading neighbours together."""
        ordered, at = sorted(offsets), 0
        while at < len(ordered):
            first = ordered[at]
            near = ordered[at : bisect.bisect_right(ordered, first + _WINDOW - length, at + 1)]
            data = self._at(first, near[-1] + length - first, self._read)
            yield from (data[offset - first : offset - first + length] for offset in near)
            at += len(near)


def entries(data: bytes | memoryview, entry: str) -> array.array[int]:
    """Decode a table. ``entry``: byte order and type of an entry in ``struct`` notation (``<I``)."""
    table = array.array(entry[1])
    table.frombytes(data)
    if entry[0] != ("<" if sys.byteorder == "little" else ">"):
        table.byteswap()
    return table
