"""The first bytes of a reader, looked at without losing them."""

from __future__ import annotations

from formats import readers
from importer import errors


def fill(reader: readers.Reader, into: memoryview) -> int:
    """Read until ``into`` is full or the reader ends; return the bytes read."""
    count = 0
    while count < len(into) and (got := reader.readinto(into[count:])):
        count += got
    return count


def sample(reader: readers.Reader, size: int) -> bytes:
    """Return up to ``size`` first bytes of a reader over a cut-off sample: its early end is no error."""
    buffer = bytearray(size)
    view = memoryview(buffer)
    count = 0
    try:
        while count < size and (got := reader.readinto(view[count:])):
            count += got
    except errors.Truncated:
        pass
    return bytes(view[:count])


class Peek:
    """Reads ahead up to ``size`` bytes into ``head``, then serves everything from the start."""

    def __init__(self, reader: readers.Reader, size: int) -> None:
        self._reader = reader
        buffer = bytearray(size)
        self.head = bytes(memoryview(buffer)[: fill(reader, memoryview(buffer))])
        self._replay = readers.Bytes(self.head)

    def readinto(self, into: memoryview, /) -> int:
        return self._replay.readinto(into) or self._reader.readinto(into)

    def close(self) -> None:
        self._reader.close()
