"""Runs of a disk: put together where they are short, cut to areas that have changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from cdi_worker import errors
from cdi_worker.sources import base

#: A run of zeros, in bytes, that costs more to leave out between data than to read.
SHORTEST_ZERO = 128 << 10
#: Data that is enough, in bytes, to begin with before it is known where it ends.
ENOUGH = 1 << 30
#: Allocation between areas nearer than this, in bytes, is asked for with theirs.
NEAR = 1 << 30


def coarse(runs: Iterable[base.Extent]) -> Iterator[base.Extent]:
    """Return runs with the short zeros that follow data taken for data: a request more costs more."""
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
    """Return areas as (start, end), those that are near one another as one: each costs a question."""
    first, last = areas[0] if areas else (0, 0)
    last += first
    for start, length in areas:
        if start - last > NEAR:
            yield first, last
            first = start
        last = start + length
    if areas:
        yield first, last


def overlay(areas: list[tuple[int, int]], runs: Iterator[base.Extent]) -> Iterator[base.Extent]:
    """Return the parts of ``runs`` inside ``areas``, both in order; every byte of these is in one of them."""
    left = [*reversed(areas)]
    for run in runs:
        end = run.offset + run.length
        while left and left[-1][0] < end:
            start, length = left.pop()
            if start < run.offset:
                raise errors.SourceError(reason=f"no extents from byte {start} to {run.offset}")
            stop = min(start + length, end)
            yield dataclasses.replace(run, offset=start, length=stop - start)
            if stop < start + length:
                left.append((stop, start + length - stop))
    if left:
        raise errors.SourceError(reason=f"no extents from byte {left[-1][0]} on")
