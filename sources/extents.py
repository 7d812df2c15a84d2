"""Extents of a disk: merged when short, cut to the changed areas, kept in bounded memory."""

from __future__ import annotations

import array
import logging
from collections.abc import Iterable, Iterator
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import spans
from cdi_worker.sources import base

#: A shorter hole between data, in bytes, is read: another request costs more.
SHORTEST_ZERO = 128 << 10
#: Merged data of this size, in bytes, is yielded at once, before all extents are known.
ENOUGH = 1 << 30
#: Areas closer than this, in bytes, share one query for their allocation.
NEAR = 1 << 30
#: Extents that are kept in memory, 17 bytes each: a disk of 256 GiB of which every other 64 KiB have changed,
#: the granularity of QEMU's bitmaps, has so many areas.
MOST: Final = 1 << 21
#: With too many extents, gaps shorter than this are read first, in bytes.
_FINEST: Final = 64 << 10

log = logging.getLogger(__name__)


class Kept:
    """Extents in ascending order, at most ``most``.

    If a source lists more, short gaps and short zeros become data: they are read, which is always right. What
    counts as short grows until there are at most half as many.
    """

    def __init__(self, listed: Iterable[base.Extent] = (), most: int = MOST) -> None:
        self._most = most
        self._short = 0
        self._clear()
        for extent in listed:
            self.add(extent)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[base.Extent]:
        for start, end, zero in zip(self._starts, self._ends, self._zeros, strict=True):
            yield base.Extent(start, end - start, bool(zero))

    @property
    def end(self) -> int:
        """The end of the last extent, in bytes."""
        return self._ends[-1] if self._ends else 0

    def add(self, extent: base.Extent) -> None:
        """Add an extent that begins where the last one ended, or later."""
        self._add(extent.offset, extent.offset + extent.length, extent.zero)
        if len(self) <= self._most:
            return
        while len(self) > self._most // 2:
            spread = (self._ends[-1] - self._starts[0]) // self._most
            self._short = max(_FINEST, 2 * self._short, spread)
            listed = zip(self._starts, self._ends, self._zeros, strict=True)
            self._clear()
            for start, end, zero in listed:
                self._add(start, end, bool(zero))
        log.warning("more than %d extents: gaps under %d bytes are read", self._most, self._short)

    def _clear(self) -> None:
        self._starts, self._ends, self._zeros = array.array("Q"), array.array("Q"), bytearray()

    def _add(self, start: int, end: int, zero: bool) -> None:
        if self._ends:
            same = self._ends[-1] == start and self._zeros[-1] == zero
            # Little is between the last extent and this one, and neither is a long zero.
            longest = max((self._ends[-1] - self._starts[-1]) * self._zeros[-1], (end - start) * zero)
            is_near = 0 <= start - self._ends[-1] < self._short and longest < self._short
            if same or is_near:
                self._ends[-1] = end
                self._zeros[-1] = same and zero
                return
        self._starts.append(start)
        self._ends.append(end)
        self._zeros.append(zero)


def coarse(runs: Iterable[base.Extent]) -> Iterator[base.Extent]:
    """Yield ``runs`` with adjacent ones merged. Holes after data shorter than ``SHORTEST_ZERO`` are data."""
    last: base.Extent | None = None
    for run in runs:
        if last is not None:
            is_data = last.length < ENOUGH and (not run.zero or run.length < SHORTEST_ZERO)
            if last.offset + last.length == run.offset and (run.zero if last.zero else is_data):
                last = last._replace(length=last.length + run.length)
                continue
            yield last
        last = run
    if last is not None:
        yield last


def pieces(areas: Iterable[base.Extent]) -> Iterator[tuple[int, int]]:
    """Yield ``areas`` as (start, end), with those closer than ``NEAR`` merged."""
    return spans.joined(((area.offset, area.offset + area.length) for area in areas), NEAR)


def complete(areas: Iterable[base.Extent], size: int) -> Iterator[base.Extent]:
    """Yield ``areas`` as data, and the rest of a disk of ``size`` bytes as zeros."""
    at = 0
    for area in areas:
        if area.offset > at:
            yield base.Extent(at, area.offset - at, zero=True)
        yield area
        at = area.offset + area.length
    if size > at:
        yield base.Extent(at, size - at, zero=True)


def overlay(areas: Iterable[base.Extent], runs: Iterator[base.Extent]) -> Iterator[base.Extent]:
    """Yield the parts of ``runs`` inside ``areas``; both are in ascending order.

    Raises ``errors.SourceError`` if a byte of ``areas`` is in no run.
    """
    run: base.Extent | None = None
    for area in areas:
        start, stop = area.offset, area.offset + area.length
        while start < stop:
            while run is None or run.offset + run.length <= start:
                run = next(runs, None)
                if run is None:
                    raise errors.SourceError(reason=f"extents are missing from byte {start} to the end")
            if start < run.offset:
                raise errors.SourceError(reason=f"extents are missing from byte {start} to {run.offset}")
            end = min(stop, run.offset + run.length)
            yield run._replace(offset=start, length=end - start)
            start = end
