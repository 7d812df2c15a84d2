"""What was checked stays as it was checked.

A source at random is read twice: by the checks, then by the program that they protect. A server that
answers the second time with another header would have checked for nothing.
"""

from __future__ import annotations

from cdi_worker.formats import facts


class Pinned:
    """Remembers every byte that is read through it. Filled by one thread; laid over by any."""

    def __init__(self, read: facts.Read) -> None:
        self._read = read
        self._pieces: list[tuple[int, bytes]] = []

    def read(self, offset: int, length: int) -> bytes:
        """Read by the callable given, and remember."""
        data = self._read(offset, length)
        self._pieces.append((offset, data))
        return data

    def lay_over(self, offset: int, into: memoryview) -> None:
        """Put the remembered bytes in their places in what was read again from ``offset``."""
        # The first reading of a byte wins: it is what the earliest check saw.
        for start, data in reversed(self._pieces):
            begin, end = max(start, offset), min(start + len(data), offset + len(into))
            if begin < end:
                into[begin - offset : end - offset] = data[begin - start : end - start]
