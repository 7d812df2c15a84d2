"""The zeroing ladder: the cheapest way to zeros that a storage accepts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from cdi_worker.images import directio, kernel

log = logging.getLogger(__name__)

Rung = Callable[[int, int, int], None]

#: Gives storage back; what a device cannot unmap it writes.
SPARSE: Final[tuple[Rung, ...]] = (kernel.punch_hole, kernel.zero_range, kernel.zero_out)
#: Gives storage to a part of a new file; it reads as zeros.
NEW: Final[tuple[Rung, ...]] = (kernel.allocate,)
#: Keeps the storage of a preallocated file.
ALLOCATED: Final[tuple[Rung, ...]] = (kernel.zero_range,)
#: Storage that must see every byte: a preallocated block device.
WRITTEN: Final[tuple[Rung, ...]] = ()


class Ladder:
    """Zeroes ranges by the first rung that is not refused, and remembers refusals. Thread-safe.

    ``sector``: what the rungs are aligned to; the edges around it, and everything after the last
    refusal, go to ``write``. Raises OSError for failures that are no refusal.
    """

    def __init__(
        self, fd: int, rungs: Sequence[Rung], sector: int, write: Callable[[int, memoryview], None]
    ) -> None:
        self._fd = fd
        self._rungs = tuple(rungs)
        self._sector = sector
        self._write = write

    def zero(self, start: int, end: int) -> None:
        first = min(end, -(-start // self._sector) * self._sector)
        last = max(first, end // self._sector * self._sector)
        self._write_zeros(start, first)
        if last > first:
            self._climb(first, last - first)
        self._write_zeros(last, end)

    def _climb(self, offset: int, length: int) -> None:
        for rung in self._rungs:
            try:
                rung(self._fd, offset, length)
            except OSError as err:
                if err.errno not in kernel.REFUSALS:
                    raise
                self._refused(rung, err)
            else:
                return
        self._write_zeros(offset, offset + length)

    def _refused(self, rung: Rung, err: OSError) -> None:
        if rung in self._rungs:
            self._rungs = tuple(other for other in self._rungs if other is not rung)
            log.debug("zeroing way=%r refused=%r", rung.__name__, err.strerror)

    def _write_zeros(self, start: int, end: int) -> None:
        zeros = directio.zeros()
        for offset in range(start, end, len(zeros)):
            self._write(offset, zeros[: end - offset])
