"""The zeroing ladder: zero ranges with the cheapest call that the storage supports."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from cdi_worker.images import directio, kernel
from cdi_worker.images.targets import writeback

log = logging.getLogger(__name__)

#: Bytes of adjacent ranges that are zeroed in one call.
TOGETHER: Final = 16 << 20

Rung = Callable[[int, int, int], None]

#: Free the storage; a device that cannot unmap writes zeros.
SPARSE: Final[tuple[Rung, ...]] = (kernel.punch_hole, kernel.zero_range, kernel.zero_out)
#: Keep the storage of a preallocated file.
ALLOCATED: Final[tuple[Rung, ...]] = (kernel.zero_range,)


class Ladder:
    """Zero ranges with the first rung that the storage supports, and remember refusals. Thread-safe.

    ``sector``: alignment of the rungs. Unaligned edges, and everything once all rungs are refused, are
    written with ``write``. Raises OSError for failures that are not refusals.
    """

    def __init__(
        self, fd: int, rungs: Sequence[Rung], sector: int, write: Callable[[int, memoryview], None]
    ) -> None:
        self._fd = fd
        self._rungs = tuple(rungs)
        self._sector = sector
        self._write = write
        self._ranges = writeback.Merger(TOGETHER)
        # A merged range holds zeros of several threads: ``drain`` must wait for the thread that zeroes it.
        self._merging = threading.Lock()

    def add(self, start: int, end: int) -> None:
        """Zero a range, at the latest on the next ``drain``: adjacent ranges are zeroed together."""
        with self._merging:
            for merged in self._ranges.add(start, end):
                self.zero(*merged)

    def drain(self) -> None:
        """Zero what was added."""
        with self._merging:
            for merged in self._ranges.drain():
                self.zero(*merged)

    def zero(self, start: int, end: int) -> None:
        """Zero a range now."""
        first = min(end, -(-start // self._sector) * self._sector)
        last = max(first, end // self._sector * self._sector)
        self._write_zeros(start, first)
        for rung in self._rungs if last > first else ():
            try:
                rung(self._fd, first, last - first)
                break
            except OSError as err:
                if err.errno not in kernel.REFUSALS:
                    raise
                if rung in self._rungs:
                    self._rungs = tuple(other for other in self._rungs if other is not rung)
                    log.debug("zeroing call not supported call=%r error=%r", rung.__name__, err.strerror)
        else:
            self._write_zeros(first, last)
        self._write_zeros(last, end)

    def _write_zeros(self, start: int, end: int) -> None:
        for offset, zeros in directio.zeros(start, end):
            self._write(offset, zeros)
