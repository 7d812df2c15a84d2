"""Ordered bytes onto a target: one thread reads, the caller's writes."""

from __future__ import annotations

import threading
from collections.abc import Callable
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

    Raises ``errors.TooLarge`` as soon as more than ``limit`` bytes come, before the piece that goes
    over is written. The reader stays the caller's to close. ``give_up`` is called where the read that is
    under way is wanted no more: it ends that soon.
    """
    total = 0
    over = threading.Event()
    with ahead.Ahead(ahead.pieces(reader, cancel, over), over, give_up) as pieces:
        for piece in pieces:
            if cancel.is_set():
                raise errors.Cancelled
            if total + len(piece) > limit:
                raise errors.TooLarge(virtual_size=total + len(piece), available=limit)
            place(target, total, piece)
            total += len(piece)
            advance(len(piece))
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
