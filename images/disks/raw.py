"""Raw disks: blank, by ranges, by the extents that the source reports, and from one ordered stream."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, TypeAlias

from cdi_worker.formats import facts, vhd
from cdi_worker.images import extents
from cdi_worker.images.disks import base
from cdi_worker.images.engine import ahead, cancelling, fetch

if TYPE_CHECKING:
    from cdi_worker.formats import clone

#: Bytes zeroed between two progress updates.
ZERO_STEP: Final = 64 << 20
#: The most extents, and the seconds, for which data waits until the list of extents is known. VMware lists
#: them as slowly as 32 GiB per request.
LISTED: Final = 64 << 10
LISTING: Final = 5.0
#: The first bytes of a transfer come in shorter pieces: a kill loses the pieces that are not complete, with a
#: slow server most of what has arrived in the first seconds.
EARLY: Final = 32 << 20
_EARLY_PIECE: Final = 256 << 10
#: Holes whose missing parts are looked up at once.
_TOGETHER: Final = 64

#: Opens an image that is read by ranges.
Ranges: TypeAlias = Callable[[base.Advance], fetch.Fetcher]
#: The length of a hole in bytes, data, or a part that the target holds already.
Run: TypeAlias = "int | memoryview | clone.Kept"
#: Opens the runs of a disk, in order; see ``base.Opened``. A run is valid until the next.
OpenedRuns: TypeAlias = Callable[[base.Advance], AbstractContextManager[Iterator[Run]]]


class Blank(base.Disk):
    """A disk of zeros."""

    repeats = True

    def __init__(self, size: int) -> None:
        self.size: int = size

    def deliver(self, sink: base.Sink, missing: base.Missing, meter: base.Meter) -> int:
        """See ``base.Disk``."""
        for part in fetch.split(0, self.size, ZERO_STEP):
            for start, end in missing([(part.offset, part.offset + part.length)]):
                sink.zero(start, end - start)
            meter.advance(part.length)
        return self.size


class Extents(base.Disk):
    """A disk whose source lists data and holes; only data is read, by ranges.

    ``listed`` returns the extents in ascending order. Between two stages of a migration they are those that
    have changed; then they do not cover the disk.
    """

    repeats = True

    def __init__(
        self,
        ranges: Ranges,
        size: int,
        listed: Callable[[], Iterable[extents.Extent]],
        *,
        covers_all: bool = True,
    ) -> None:
        self._ranges = ranges
        self.size: int = size
        self._listed = listed
        self.covers_all = covers_all

    def deliver(self, sink: base.Sink, missing: base.Missing, meter: base.Meter) -> int:
        """See ``base.Disk``."""
        self.declared = 0
        listed = _soon(self._declaring(_before(self.size, self._listed())), meter)
        _fetch(self._ranges, _data(listed, sink, missing), sink, missing, meter)
        return self.size

    def _declaring(self, listed: Iterable[extents.Extent]) -> Iterator[extents.Extent]:
        for extent in listed:
            self.declared += extent.length
            yield extent


def whole(ranges: Ranges, size: int) -> Extents:
    """Return the disk that is the first ``size`` bytes of an image, all of them data."""
    return Extents(ranges, size, lambda: [extents.Extent(0, size, zero=False)])


class Stream(base.Disk):
    """A raw disk that is read as one ordered stream.

    ``footer``: the last sector may be the footer of a fixed VHD, which is known only at the end. ``size``:
    None if it is not known before.
    """

    def __init__(
        self, opened: base.Opened, scope: cancelling.Cancel, *, footer: bool, size: int | None = None
    ) -> None:
        self._opened = opened
        self._scope = scope
        self._footer = footer
        self.size = size

    def deliver(self, sink: base.Sink, missing: base.Missing, meter: base.Meter) -> int:
        """See ``base.Disk``."""
        with self._opened(meter.advance) as reader:
            if not self._footer:
                return copy(ahead.pieces(reader, self._scope), sink, meter, self._scope)
            # Known only at the end: until then the last sector is held back.
            disk = vhd.WithoutFooter(reader)
            size = copy(ahead.pieces(disk, self._scope), sink, meter, self._scope)
            if disk.footer:
                vhd.check_fixed(disk.footer, size)
        facts.check_size("raw", size)
        return size


class Runs(base.Disk):
    """A disk that comes as runs of data and holes, in order, such as that of a clone."""

    def __init__(
        self,
        opened: OpenedRuns,
        scope: cancelling.Cancel,
        *,
        size: int | None = None,
        keep: Callable[[int, int], None] | None = None,
    ) -> None:
        self._opened = opened
        self._scope = scope
        self.size = size
        self.keep = keep

    def deliver(self, sink: base.Sink, missing: base.Missing, meter: base.Meter) -> int:
        """See ``base.Disk``."""
        with self._opened(meter.advance) as runs:
            return copy(runs, sink, meter, self._scope)


def copy(
    runs: Iterator[Run],
    sink: base.Sink,
    meter: base.Meter,
    scope: cancelling.Cancel,
) -> int:
    """Deliver runs (the length of a hole, or data) one after the other; return the number of bytes.

    One thread reads ahead, the caller's writes. What the target holds already (``clone.Kept``) is passed
    over. A failure sets ``scope``, which must end the read in progress.
    """
    total = 0
    with ahead.Ahead(runs, scope) as coming:
        for run in coming:
            scope.check()
            if isinstance(run, int):
                sink.zero(total, run)
                total += run
                meter.moved(0)
            elif isinstance(run, memoryview):
                sink.write(total, run)
                total += len(run)
                meter.moved(len(run))
            else:
                total += run.length
    return total


def _fetch(
    ranges: Ranges,
    wanted: Iterable[fetch.Range],
    sink: base.Sink,
    missing: base.Missing,
    meter: base.Meter,
) -> None:
    """Fetch the missing parts of ``wanted``, in any order, to the same offsets of the disk."""
    fetcher = ranges(meter.advance)

    def place(offset: int, data: memoryview) -> None:
        sink.write(offset, data)
        meter.moved(len(data))

    def parts() -> Iterator[fetch.Range]:
        begun = 0
        for part in wanted:
            found = missing([(part.offset, part.offset + part.length)])
            meter.keep(part.length - sum(end - start for start, end in found))
            for start, end in found:
                for piece in _split(start, end, fetcher.step, max(0, EARLY - begun)):
                    begun += piece.length
                    yield piece

    fetcher.each(parts(), place)


def _split(start: int, end: int, step: int, early: int) -> Iterator[fetch.Range]:
    """Split a range into pieces of ``step`` bytes, the first ``early`` bytes into shorter ones."""
    if step <= fetch.PIECE:
        # One request for several pieces; otherwise each piece would be a request.
        middle = min(end, start + early)
        yield from fetch.split(start, middle, min(step, _EARLY_PIECE))
        start = middle
    yield from fetch.split(start, end, step)


def _data(listed: Iterable[extents.Extent], sink: base.Sink, missing: base.Missing) -> Iterator[fetch.Range]:
    """Yield the ranges of the data extents; deliver the zeros as they are met."""
    for extent in listed:
        if extent.zero:
            zero(sink, missing, [(extent.offset, extent.length)])
        else:
            yield fetch.Range(extent.offset, extent.length)


def zero(sink: base.Sink, missing: base.Missing, holes: Iterable[tuple[int, int]]) -> None:
    """Deliver the missing parts of ``holes`` (offset, length)."""
    coming = ((offset, offset + length) for offset, length in holes)
    while some := list(itertools.islice(coming, _TOGETHER)):
        for start, end in missing(some):
            sink.zero(start, end - start)


def _before(end: int, listed: Iterable[extents.Extent]) -> Iterator[extents.Extent]:
    """Yield the parts of the extents before ``end``."""
    for extent in listed:
        if extent.offset < end:
            yield dataclasses.replace(extent, length=min(extent.length, end - extent.offset))


def _soon(listed: Iterable[extents.Extent], meter: base.Meter) -> Iterator[extents.Extent]:
    """Yield extents; take the zeros off the total, before anything is moved if they are listed soon."""
    coming = iter(listed)
    until = time.monotonic() + LISTING
    first: list[extents.Extent] = []
    for extent in coming:
        first.append(extent)
        if extent.zero:
            meter.skip(extent.length)
        if len(first) >= LISTED or time.monotonic() > until:
            break
    yield from first
    for extent in coming:
        if extent.zero:
            meter.skip(extent.length)
        yield extent
