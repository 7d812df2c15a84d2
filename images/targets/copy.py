"""Copy a stream to a target: one thread reads, the caller's thread writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Protocol

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images import directio
from cdi_worker.images.engine import ahead, cancelling

if TYPE_CHECKING:
    from cdi_worker.formats import clone

#: Shorter ranges of zeros are written: that is cheaper than a system call to zero them.
SHORTEST_ZERO: Final = 64 << 10


class Writable(Protocol):
    """The part of a target that receives the bytes of a disk."""

    def write(self, offset: int, data: memoryview, /) -> None: ...
    def zero(self, offset: int, length: int, /) -> None: ...


def copy_ordered(
    reader: readers.Reader,
    target: Writable,
    *,
    limit: int,
    scope: cancelling.Cancel,
    thin: bool = False,
) -> int:
    """Write all bytes of a reader, detecting zeros; return the number of bytes.

    The caller closes the reader. Everything else as in ``copy_runs``.
    """
    runs = ahead.pieces(reader, scope)
    return copy_runs(runs, target, limit=limit, scope=scope, thin=thin)


def copy_runs(
    runs: Iterator[int | memoryview | clone.Kept],
    target: Writable,
    *,
    limit: int,
    scope: cancelling.Cancel,
    thin: bool = False,
    shortest_zero: int = SHORTEST_ZERO,
) -> int:
    """Write extents (the length of a hole, or data) one after the other; return the number of bytes.

    What the target holds already (``clone.Kept``) is passed over.
    Zeros in the data are found in blocks of ``shortest_zero`` bytes. Raises ``errors.TooLarge`` if there are
    more than ``limit`` bytes, before the extent beyond the limit is written; with ``thin``, if more than
    ``limit`` bytes are not zero. A failure here sets ``scope``, which must end the read in progress.
    """
    total = stored = 0
    with ahead.Ahead(runs, scope) as coming:
        for run in coming:
            scope.check()
            length = run if isinstance(run, int) else _length(run)
            if not thin and total + length > limit:
                raise errors.TooLarge(virtual_size=total + length, available=limit)
            if isinstance(run, int):
                target.zero(total, length)
            elif isinstance(run, memoryview):
                stored += write(target, total, run, shortest_zero)
            if stored > limit:
                raise errors.TooLarge(virtual_size=stored, available=limit)
            total += length
    return total


def _length(run: memoryview | clone.Kept) -> int:
    return len(run) if isinstance(run, memoryview) else run.length


def write(target: Writable, offset: int, data: memoryview, shortest_zero: int = SHORTEST_ZERO) -> int:
    """Write bytes at an offset, detecting zeros; return how many are not zero."""
    stored = 0
    for start, end, zero in directio.extents(data, shortest_zero):
        if zero:
            target.zero(offset + start, end - start)
        else:
            target.write(offset + start, data[start:end])
            stored += end - start
    return stored


def drain(reader: readers.Reader, cancel: cancelling.Cancel, limit: int | None = None) -> None:
    """Read to the end and discard: readers check their data at the end.

    Raises ``errors.Refused`` after more than ``limit`` bytes.
    """
    rest = memoryview(bytearray(1 << 20))
    done = 0
    while count := reader.readinto(rest):
        cancel.check()
        done += count
        if limit is not None and done > limit:
            reason = f"more than {limit} bytes follow the end of the image"
            raise errors.Refused(format="stream", rule="endless", reason=reason)
