"""CRC-32C of bytes that come in pieces, in any order, some of them twice."""

from __future__ import annotations

import bisect
import sys
import threading

#: The polynomial of RFC 3720, 12.1, lowest power in the highest bit.
POLYNOMIAL = 0x82F63B78
ONE = 1 << 31
#: One call's worth: the library takes nothing but ``bytes``.
PIECE = 256 * 1024
#: More gaps than this are the mark of random reading, which does not end in a whole.
MOST_RUNS = 4096


def combine(first: int, second: int, length: int) -> int:
    """Return the CRC of two runs joined, from that of each and the length of the second in bytes.

    Appending zeros is multiplication by a power of x (as in zlib's ``crc32_combine``).
    """
    factor, power = ONE, 3
    while length:
        if length & 1:
            factor = _multiply(_POWERS[power], factor)
        length >>= 1
        power += 1
    return _multiply(factor, first) ^ second


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the CRC's."""
    product, bit = 0, ONE
    while bit:
        if a & bit:
            product ^= b
        bit >>= 1
        b = (b >> 1) ^ POLYNOMIAL if b & 1 else b >> 1
    return product


def _powers() -> list[int]:
    """Return x to the powers 1, 2, 4, 8, ... of as many bits as a size can have, and three."""
    powers = [ONE >> 1]
    for _ in range(66):
        powers.append(_multiply(powers[-1], powers[-1]))
    return powers


_POWERS = _powers()


class Coverage:
    """What has been seen of an object, and its CRC. Several threads may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Runs that touch or overlap nowhere: starts in order, with (end, CRC) of each.
        self._starts: list[int] = []
        self._runs: list[tuple[int, int]] = []

    def add(self, offset: int, data: memoryview) -> None:
        """Take in bytes at an offset; those already seen are left out."""
        with self._lock:
            while len(data) and len(self._starts) <= MOST_RUNS:
                at = bisect.bisect_right(self._starts, offset)
                seen = self._runs[at - 1][0] - offset if at else 0
                if seen <= 0:
                    after = self._starts[at] - offset if at < len(self._starts) else sys.maxsize
                    seen = min(len(data), after)
                    self._insert(at, offset, (offset + seen, _crc(data[:seen])))
                offset, data = offset + seen, data[seen:]

    def value(self, size: int) -> int | None:
        """Return the CRC of all ``size`` bytes, None while some have not been seen."""
        with self._lock:
            if not size:
                return 0
            return self._runs[0][1] if self._starts == [0] and self._runs[0][0] == size else None

    def _insert(self, at: int, start: int, run: tuple[int, int]) -> None:
        if at < len(self._starts) and self._starts[at] == run[0]:
            start_after = self._starts.pop(at)
            end, crc = self._runs.pop(at)
            run = (end, combine(run[1], crc, end - start_after))
        if at and self._runs[at - 1][0] == start:
            self._runs[at - 1] = (run[0], combine(self._runs[at - 1][1], run[1], run[0] - start))
        else:
            self._starts.insert(at, start)
            self._runs.insert(at, run)


def _crc(data: memoryview) -> int:
    import google_crc32c

    crc = 0
    for at in range(0, len(data), PIECE):
        crc = google_crc32c.extend(crc, bytes(data[at : at + PIECE]))
    return crc
