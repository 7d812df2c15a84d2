"""Ordered bytes onto a target: one thread reads, the caller's writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Final

from cdi_worker import errors
from cdi_worker.images import directio
from cdi_worker.images.engine import ahead, cancelling
from cdi_worker.images.target import base

#: Shorter runs of zeros are written: a call of the kernel for each costs more than their bytes.
SHORTEST_ZERO: Final = 64 << 10


def copy_ordered(
    reader: ahead.Source,
    target: base.Target,
    *,
    limit: int,
    cancel: cancelling.Flag,
    advance: Callable[[int], object] = lambda _: None,
    give_up: Callable[[], None] = lambda: None,
) -> int:
    """Write everything that comes, zeros as zeros, and return how many bytes it was.

    The reader stays the caller's to close; all else as with ``copy_runs``.
    """
    over = threading.Event()
    pieces = ahead.pieces(reader, cancel, over)
    return copy_runs(pieces, target, over=over, limit=limit, cancel=cancel, advance=advance, give_up=give_up)


def copy_runs(
    runs: Iterator[int | memoryview],
    target: base.Target,
    *,
    limit: int,
    cancel: cancelling.Flag,
    over: threading.Event | None = None,
    advance: Callable[[int], object] = lambda _: None,
    give_up: Callable[[], None] = lambda: None,
) -> int:
    """Write runs (the length of a hole, or data) one after the other; return how many bytes they are.

    Raises ``errors.TooLarge`` as soon as more than ``limit`` bytes come, before the run that goes over
    is written. ``over``, ``give_up``: see ``ahead.Ahead``.
    """
    total = 0
    with ahead.Ahead(runs, over or threading.Event(), give_up) as coming:
        for run in coming:
            if cancel.is_set():
                raise errors.Cancelled
            length = run if isinstance(run, int) else len(run)
            if total + length > limit:
                raise errors.TooLarge(virtual_size=total + length, available=limit)
            if isinstance(run, int):
                target.zero(total, length)
            else:
                place(target, total, run)
            total += length
            advance(length)
    return total


def place(target: base.Target, offset: int, data: memoryview) -> None:
    """Write bytes at an offset, runs of zeros as zeros."""
    for start, end, zero in directio.data_runs(data, SHORTEST_ZERO):
        if zero:
            target.zero(offset + start, end - start)
        else:
            target.write(offset + start, data[start:end])


def drain(reader: ahead.Source, cancel: cancelling.Flag) -> None:
    """Read to the end and throw away: what a reader checks there counts, too."""
    rest = memoryview(bytearray(1 << 20))
    while reader.readinto(rest):
        if cancel.is_set():
            raise errors.Cancelled
