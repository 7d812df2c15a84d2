"""Sinks that compare what is delivered with a finished disk, and change nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from cdi_worker.formats import spans
from cdi_worker.images import directio
from cdi_worker.images.engine import cancelling
from cdi_worker.images.sinks import compared
from cdi_worker.images.targets import storage
from cdi_worker.scratch import ranges

#: The most ranges that are kept. A disk that has nothing in common with its image has one for each cluster;
#: those beyond are counted, but not read again.
MOST: Final = 64 << 10
#: A hole is compared in steps of so many bytes, between which it can be cancelled.
_STEP: Final = 64 << 20
#: A sum modulo 2^127 - 1, of the bytes as one number: that of a disk is the same whatever pieces are summed,
#: in any order, and zeros add nothing.
_MODULUS: Final = (1 << 127) - 1


def parts(within: ranges.Ranges, found: Iterable[ranges.Range]) -> list[ranges.Range]:
    """Return the parts of ranges that are ``within`` others; see ``disks.base.Missing``."""
    return [part for start, end in found for part in spans.gaps(within.missing(start, end), start, end)]


class ComparingSink:
    """Compare ``within`` (None: everything) with a disk of ``size`` bytes. Thread-safe.

    ``finish`` compares what follows the end of the image. ``ranges``: those that differ, in whole blocks of
    4096 bytes, at most ``MOST``; ``differed``: bytes in all of them, also those that are not kept. ``first``:
    the first byte that differs. ``from_zero``, ``to_zero``: the ranges in which the source, and the disk, is
    all zeros. ``sums``: of the bytes in ``ranges``, of the source and of the disk. ``compared``: bytes of the
    image; ``read``: bytes read from the disk, where holes are not read, each of which ``tell`` counts.
    """

    def __init__(
        self,
        stored: storage.Storage,
        size: int,
        within: ranges.Ranges | None,
        scope: cancelling.Cancel,
        tell: Callable[[int], object],
    ) -> None:
        self.size = size
        self.ranges = ranges.Ranges()
        self.from_zero, self.to_zero = ranges.Ranges(), ranges.Ranges()
        self.sums = [0, 0]
        self.first: int | None = None
        self.compared = self.differed = self.read = 0
        #: The size of the image in bytes, and whether the disk is a device: set by ``finish``.
        self.image_size = 0
        self.is_device = False
        self._stored = stored
        self._within = within
        self._scope = scope
        self._tell = tell
        self._lock = threading.Lock()

    @property
    def is_equal(self) -> bool:
        """Whether no byte differs and no byte is missing at the end of the disk."""
        return not self.differed and self.image_size <= self.size

    def write(self, offset: int, data: memoryview, /) -> None:
        for start, end in self._parts(offset, offset + len(data)):
            self._data(start, data[start - offset : end - offset])
            with self._lock:
                self.compared += end - start

    def zero(self, offset: int, length: int, /) -> None:
        for start, end in self._parts(offset, offset + length):
            self._zeros(start, min(end, self.size))
            with self._lock:
                self.compared += end - start

    def finish(self, size: int, *, is_device: bool) -> None:
        """Compare the rest of a file with zeros: the image ends at ``size``. That of a device is free."""
        self.image_size, self.is_device = size, is_device
        if size < self.size and not is_device:
            for start, end in self._parts(size, self.size):
                self._zeros(start, end)
        for start, end in self._parts(self.size, size) if size > self.size else ():
            for part in self.ranges.missing(start, end):
                # Zeros that the disk does not have.
                self._differs(*part, b"", b"")

    def _parts(self, start: int, end: int) -> list[ranges.Range]:
        return [(start, end)] if self._within is None else parts(self._within, [(start, end)])

    def _read(self, start: int, length: int) -> bytes | memoryview:
        with self._lock:
            self.read += length
        self._tell(length)
        return self._stored.view(start, length)

    def _data(self, start: int, data: memoryview) -> None:
        stored = self._read(start, len(data))
        for first, end in spans.joined(compared.unlike(stored, start, data)):
            span = slice(first - start, end - start)
            self._differs(first, end, data[span], stored[span])

    def _zeros(self, start: int, end: int) -> None:
        for first, stored in self._nonzero(start, end):
            self._differs(first, first + len(stored), b"", stored)

    def _nonzero(self, start: int, end: int) -> Iterator[tuple[int, bytes | memoryview]]:
        """Yield offset and bytes of what is not zero on the disk; its holes are not read."""
        for at in range(start, end, _STEP):
            self._scope.check()
            for first, after in self._stored.allocated(at, min(end, at + _STEP)):
                for low in range(first, after, directio.LARGE):
                    stored = self._read(low, min(directio.LARGE, after - low))
                    for begin, stop, is_zero in directio.extents(memoryview(stored)):
                        if not is_zero:
                            yield low + begin, stored[begin:stop]

    def _differs(self, start: int, end: int, data: memoryview | bytes, stored: memoryview | bytes) -> None:
        """Note a range; ``data`` empty: the source has zeros. The disk may end within it."""
        with self._lock:
            self.differed += end - start
            length = max(len(data), len(stored))
            one, other = (
                int.from_bytes(bytes(each).ljust(length, b"\0"), "little") for each in (data, stored)
            )
            # The lowest bit in which they differ; the shorter one is padded with zeros.
            bits = one ^ other
            first = start + ((bits & -bits).bit_length() - 1) // 8 if bits else start
            self.first = first if self.first is None else min(self.first, first)
            if len(self.ranges) >= MOST:
                return
            self.ranges.add(start, end)
            if not data or directio.is_zero(memoryview(data)):
                self.from_zero.add(start, end)
            if directio.is_zero(memoryview(stored)):
                self.to_zero.add(start, end)
            self.sums[0] += checksum(start, data)
            self.sums[1] += checksum(start, stored)


class SummingSink(ComparingSink):
    """Sum the bytes of both sides in ``within``, the ranges that a comparison found different."""

    def _data(self, start: int, data: memoryview) -> None:
        self._add(start, data, self._read(start, len(data)))

    def _zeros(self, start: int, end: int) -> None:
        for first, stored in self._nonzero(start, end):
            self._add(first, b"", stored)

    def _add(self, start: int, data: memoryview | bytes, stored: memoryview | bytes) -> None:
        added = checksum(start, data), checksum(start, stored)
        with self._lock:
            self.sums = [each + more for each, more in zip(self.sums, added, strict=True)]


def checksum(start: int, data: memoryview | bytes) -> int:
    """Return what bytes at an offset add to the sum of a disk, which is taken modulo 2^127 - 1."""
    return (int.from_bytes(data, "little") % _MODULUS) << (8 * start % 127)


def same(one: ComparingSink, other: ComparingSink, side: int) -> bool:
    """Return whether both have read the same bytes of the source (0) or of the disk (1)."""
    return (one.sums[side] - other.sums[side]) % _MODULUS == 0
