"""What was checked stays as it was checked.

A source is read at its first contact, by the checks, and then by the reader or the program that the checks
protect. A server that answers the second time with another header would have been checked for nothing; and
what is in memory already need not be fetched again.
"""

from __future__ import annotations

from typing import Final

from cdi_worker.formats import views


class Remembered:
    """The bytes of a file that were read already, as they were first seen.

    ``head``: the file's beginning. Filled by one thread, before others read.
    """

    def __init__(self, head: bytes = b"") -> None:
        self._pieces = [(0, head)] if head else []

    def remembering(self, read: views.Read) -> views.Read:
        """Return ``read``, whose results are remembered from now on."""

        def reading(offset: int, length: int) -> bytes:
            data = read(offset, length)
            self._pieces.append((offset, data))
            return data

        return reading

    def run(self, offset: int, length: int) -> int:
        """Return how many of these bytes are known from ``offset`` on without a gap."""
        at, end = offset, offset + length
        while at < end:
            after = max((start + len(data) for start, data in self._pieces if start <= at), default=at)
            if after <= at:
                break
            at = after
        return min(at, end) - offset

    def lay_over(self, offset: int, into: memoryview) -> None:
        """Put the known bytes in their places in ``into``, which holds what is at ``offset``."""
        # The first reading of a byte wins: it is what the earliest check saw.
        for start, data in reversed(self._pieces):
            begin, end = max(start, offset), min(start + len(data), offset + len(into))
            if begin < end:
                into[begin - offset : end - offset] = memoryview(data)[begin - start : end - start]


#: For a file of which nothing was read yet.
NOTHING: Final = Remembered()
