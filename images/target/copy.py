"""Ordered bytes onto a target: one thread reads, the caller's writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images import directio
from cdi_worker.images.engine import ahead, cancelling
from cdi_worker.images.target import base

#: Shorter runs of zeros are written: a call of the kernel for each costs more than their bytes.
SHORTEST_ZERO: Final = 64 << 10


def copy_ordered(
    reader: readers.Reader,
    target: base.Target,
    *,
    limit: int,
    scope: cancelling.Cancel,
    advance: Callable[[int], object] = lambda _: None,
) -> int:
    """Write everything that comes, zeros as zeros, and return how many bytes it was.

    The reader stays the caller's to close; all else as with ``copy_runs``.
    """
    return copy_runs(ahead.pieces(reader, scope), target, limit=limit, scope=scope, advance=advance)


def copy_runs(
    runs: Iterator[int | memoryview],
    target: base.Target,
    *,
    limit: int,
    scope: cancelling.Cancel,
    advance: Callable[[int], object] = lambda _: None,
) -> int:
    """Write runs (the length of a hole, or data) one after the other; return how many bytes they are.

    Raises ``errors.TooLarge`` as soon as more than ``limit`` bytes come, before the run that goes over
    is written. A failure here sets ``scope``, which has to end the read that is under way.
    """
    total = 0
    with ahead.Ahead(runs, scope) as coming:
        for run in coming:
            scope.check()
            length = run if isinstance(run, int) else len(run)
            if total + length > limit:
                raise errors.TooLarge(virtual_size=total + length, available=limit)
            if isinstance(run, int):
                target.zero(total, length)
            else:
                write(target, total, run)
            total += length
            advance(length)
    return total


def write(target: base.Target, offset: int, data: memoryview) -> None:
    """Write bytes at an offset, runs of zeros as zeros."""
    for start, end, zero in directio.data_runs(data, SHORTEST_ZERO):
        if zero:
            target.zero(offset + start, end - start)
        else:
            target.write(offset + start, data[start:end])


def drain(reader: readers.Reader, cancel: cancelling.Cancel) -> None:
    """Read to the end and throw away: what a reader checks there counts, too."""
    rest = memoryview(bytearray(1 << 20))
    while reader.readinto(rest):
        cancel.check()
