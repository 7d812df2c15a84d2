"""Keep the bytes read by detection and checks, and use them again for the import.

A server that returns another header the second time would bypass the checks. Bytes in memory also need no
second request.
"""

from __future__ import annotations

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

    def has(self, start: int, end: int) -> bool:
        """Return whether a byte from ``start`` to ``end`` is remembered."""
        return any(offset < end and start < offset + len(data) for offset, data in self._pieces)

    def agrees(self, offset: int, data: memoryview) -> bool:
        """Return whether bytes read again from ``offset`` are the remembered ones."""
        for start, piece in self._pieces:
            begin, end = max(start, offset), min(start + len(piece), offset + len(data))
            if begin < end and piece[begin - start : end - start] != bytes(
                data[begin - offset : end - offset]
            ):
                return False
        return True

    def restore(self, offset: int, into: memoryview) -> None:
        """Replace bytes of ``into``, read again from ``offset`` in the file, by the remembered ones."""
        # Of a byte that was read several times the first value is used: the earliest check saw it.
        for start, data in reversed(self._pieces):
            begin, end = max(start, offset), min(start + len(data), offset + len(into))
            if begin < end:
                into[begin - offset : end - offset] = memoryview(data)[begin - start : end - start]


#: For a file that has not been read yet.
NOTHING: Final = Remembered()
