"""Keep the bytes read by detection and checks, and use them again for the import.

A server that returns another header the second time would bypass the checks. Bytes in memory also need no
second request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cdi_worker.formats import views


class Remembered:
    """The bytes of a file that have been read, with the values of the first read.

    ``head``: the first bytes of the file. Thread-safe once no more bytes are added.
    """

    def __init__(self, head: bytes = b"") -> None:
        self._pieces = [(0, head)] if head else []

    def remembering(self, read: views.Read) -> views.Read:
        """Return a function that calls ``read`` and remembers the result."""

        def reading(offset: int, length: int) -> bytes:
            data = read(offset, length)
            self._pieces.append((offset, data))
            return data

        return reading

    def known_length(self, offset: int, length: int) -> int:
        """Return how many of these bytes are remembered, from ``offset`` to the first gap."""
        at, end = offset, offset + length
        while at < end:
            after = max((start + len(data) for start, data in self._pieces if start <= at), default=at)
            if after <= at:
                break
            at = after
        return min(at, end) - offset

    def agrees(self, offset: int, data: memoryview) -> bool:
        """Return whether bytes read again from ``offset`` are the remembered ones."""
        return all(known == bytes(data[part]) for part, known in self._overlaps(offset, len(data)))

    def restore(self, offset: int, into: memoryview) -> None:
        """Replace bytes of ``into``, read again from ``offset`` in the file, by the remembered ones."""
        # The first value of a byte wins: the earliest check saw it.
        for part, known in reversed(list(self._overlaps(offset, len(into)))):
            into[part] = known

    def _overlaps(self, offset: int, length: int) -> Iterator[tuple[slice, bytes]]:
        """Yield the parts of these bytes that are remembered, relative to ``offset``, in order of reading."""
        for start, data in self._pieces:
            begin, end = max(start, offset), min(start + len(data), offset + length)
            if begin < end:
                yield slice(begin - offset, end - offset), data[begin - start : end - start]


#: For a file that has not been read yet.
NOTHING: Final = Remembered()
