"""Extents of a disk: merged when short, cut to the changed areas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from cdi_worker import errors
from cdi_worker.sources import base

#: A shorter hole between data, in bytes, is read: another request costs more.
SHORTEST_ZERO = 128 << 10
#: Merged data of this size, in bytes, is yielded at once, before all extents are known.
ENOUGH = 1 << 30
#: Areas closer than this, in bytes, share one query for their allocation.
NEAR = 1 << 30


def coarse(runs: Iterable[base.Extent]) -> Iterator[base.Extent]:
    """Yield ``runs`` with adjacent data merged. Holes shorter than ``SHORTEST_ZERO`` count as data."""
    last: base.Extent | None = None
    for run in runs:
        if last is not None and _grows(last, run):
            last = dataclasses.replace(last, length=last.length + run.length)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last


def _grows(data: base.Extent, run: base.Extent) -> bool:
    if data.zero or data.offset + data.length != run.offset or data.length >= ENOUGH:
        return False
    return not run.zero or run.length < SHORTEST_ZERO


def pieces(areas: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield ``areas``, given as (start, length), as (start, end), with those closer than ``NEAR`` merged."""
    first, last = areas[0] if areas else (0, 0)
    last += first
    for start, length in areas:
        if start - last > NEAR:
            yield first, last
            first = start
        last = start + length
    if areas:
        yield first, last


def complete(areas: list[tuple[int, int]], size: int) -> Iterator[base.Extent]:
    """Yield ``areas`` (start, length) as data, and the rest of a disk of ``size`` bytes as zeros."""
    at = 0
    for start, length in [*areas, (size, 0)]:
        if start > at:
            yield base.Extent(at, start - at, zero=True)
        if length:
            yield base.Extent(start, length, zero=False)
        at = start + length


def overlay(areas: list[tuple[int, int]], runs: Iterator[base.Extent]) -> Iterator[base.Extent]:
    """Yield the parts of ``runs`` inside ``areas``; both are in ascending order.

    Raises ``errors.SourceError`` if a byte of ``areas`` is in no run.
    """
    left = [*reversed(areas)]
    for run in runs:
        end = run.offset + run.length
        while left and left[-1][0] < end:
            start, length = left.pop()
            if start < run.offset:
                raise errors.SourceError(reason=f"extents are missing from byte {start} to {run.offset}")
            stop = min(start + length, end)
            yield dataclasses.replace(run, offset=start, length=stop - start)
            if stop < start + length:
                left.append((stop, start + length - stop))
    if left:
        raise errors.SourceError(reason=f"extents are missing from byte {left[-1][0]} to the end")
