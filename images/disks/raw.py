"""Raw disks: blank, by ranges, by the extents that the source reports, and from one ordered stream."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Final, TypeAlias

from cdi_worker.formats import facts, vhd
from cdi_worker.images import extents
from cdi_worker.images.disks import base
from cdi_worker.images.engine import ahead, cancelling, fetch

#: Bytes zeroed between two progress updates.
ZERO_STEP: Final = 64 << 20
#: Data waits for the list of extents, so that the total is known first: for at most so many extents, and
#: seconds. VMware lists at most 32 GiB per request.
LISTED: Final = 64 << 10
LISTING: Final = 5.0
#: The first bytes are fetched in shorter pieces: a kill loses incomplete pieces, and from a slow server most
#: pieces of the first seconds are incomplete.
EARLY: Final = 32 << 20
_EARLY_PIECE: Final = 256 << 10
#: Holes whose missing parts are looked up at once.
_TOGETHER: Final = 64

#: Opens an image that is read by ranges.
OpenRanges: TypeAlias = Callable[[base.Advance], fetch.Fetcher]
#: Opens the runs of a disk, in order; see ``base.OpenStream``. A run is valid until the next.
OpenRuns: TypeAlias = Callable[[base.Advance], AbstractContextManager[Iterator[base.Run]]]


class BlankDisk(base.Disk):
    """A disk of zeros."""

    repeats = True

    def __init__(self, size: int) -> None:
        self.size: int = size

    def deliver(self, sink: base.Sink, missing: base.Missing, meter: base.DeliveryMeter) -> int:
        for part in fetch.split(0, self.size, ZERO_STEP):
            for start, end in missing([(part.offset, part.offset + part.length)]):
                sink.zero(start, end - start)
            meter.advance(part.length)
        return self.size


class ExtentsDisk(base.Disk):
    """A disk whose source lists data and holes; only data is read, by ranges.

    ``listed`` returns the extents in ascending order. Those of a delta are what has changed; they do not
    cover the disk.
    """

    repeats = True

    def __init__(
        self,
        ranges: OpenRanges,
        size: int,
        listed: Callable[[], Iterable[extents.Extent]],
        *,
        covers_all: bool = True,
    ) -> None:
        self._ranges = ranges
        self.size: int = size
        self._listed = listed
        self.covers_all = covers_all

    def deliver(self, sink: base.Sink, missing: base.Missing, meter: base.DeliveryMeter) -> int:
        self.declared = 0
        fetcher = self._ranges(meter.advance)

        def place(offset: int, data: memoryview) -> None:
            sink.write(offset, data)
            meter.moved(len(data))

        def pieces() -> Iterator[fetch.ByteRange]:
            """Yield the missing pieces of data; deliver the zeros as they are met."""
            begun = 0
            for extent in _soon(self._declare(), meter):
                if extent.zero:
                    zero(sink, missing, [(extent.offset, extent.length)])
                    continue
                found = missing([(extent.offset, extent.offset + extent.length)])
                meter.keep(extent.length - sum(end - start for start, end in found))
                for start, end in found:
                    for piece in _split(start, end, fetcher.step, max(0, EARLY - begun)):
                        begun += piece.length
                        yield piece

        fetcher.each(pieces(), place)
        return self.size

    def _declare(self) -> Iterator[extents.Extent]:
        """Yield the listed extents, cut at the end of the disk; add their bytes to ``declared``."""
        for extent in self._listed():
            if extent.offset < self.size:
                length = min(extent.length, self.size - extent.offset)
                self.declared += length
                yield extent._replace(length=length)


def whole(ranges: OpenRanges, size: int) -> ExtentsDisk:
    """Return the disk that is the first ``size`` bytes of an image, all of them data."""
    return ExtentsDisk(ranges, size, lambda: [extents.Extent(0, size, zero=False)])


class StreamDisk(base.Disk):
    """A raw disk that is read as one ordered stream.

    ``footer``: the last sector may be the footer of a fixed VHD, which is known only at the end: then
    ``size``, None if it is not known before, is that much smaller.
    """

    def __init__(
        self, opened: base.OpenStream, scope: cancelling.Cancel, *, footer: bool, size: int | None = None
    ) -> None:
        self._opened = opened
        self._scope = scope
        self._footer = footer
        self.size = size

    def deliver(self, sink: base.Sink, missing: base.Missing, meter: base.DeliveryMeter) -> int:
        with self._opened(meter.advance) as reader:
            if not self._footer:
                return copy(ahead.pieces(reader, self._scope), sink, meter, self._scope, missing)
            disk = vhd.WithoutFooter(reader)
            size = copy(ahead.pieces(disk, self._scope), sink, meter, self._scope, missing)
            if disk.footer:
                vhd.check_fixed(disk.footer, size)
                self.size = size
        facts.check_size("raw", size)
        return size


class RunsDisk(base.Disk):
    """A disk that comes as runs of data and holes, in order, such as that of a clone."""

    def __init__(
        self,
        opened: OpenRuns,
        scope: cancelling.Cancel,
        *,
        size: int | None = None,
        keep: Callable[[int, int], None] | None = None,
    ) -> None:
        self._opened = opened
        self._scope = scope
        self.size = size
        if keep is not None:
            self.keep = lambda stored: keep(stored.start, stored.end)

    def deliver(self, sink: base.Sink, missing: base.Missing, meter: base.DeliveryMeter) -> int:
        with self._opened(meter.advance) as runs:
            return copy(runs, sink, meter, self._scope)


def copy(
    runs: Iterator[base.Run],
    sink: base.Sink,
    meter: base.DeliveryMeter,
    scope: cancelling.Cancel,
    missing: base.Missing = base.EVERYTHING,
) -> int:
    """Deliver runs (the length of a hole, or data) one after the other; return the number of bytes.

    Of data, only what is ``missing``.

    One thread reads ahead, the caller's writes. What the target already holds (``clone.Kept``) is
    skipped. A failure sets ``scope``, which must end the read in progress.
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
                parts = missing([(total, total + len(run))])
                for start, end in parts:
                    sink.write(start, run[start - total : end - total])
                total += len(run)
                meter.moved(sum(end - start for start, end in parts))
            else:
                total += run.length
    return total


def _split(start: int, end: int, step: int, early: int) -> Iterator[fetch.ByteRange]:
    """Split a range into pieces of ``step`` bytes, the first ``early`` bytes into shorter ones."""
    if step <= fetch.PIECE:
        # One request for several pieces; otherwise each piece would be a request.
        middle = min(end, start + early)
        yield from fetch.split(start, middle, min(step, _EARLY_PIECE))
        start = middle
    yield from fetch.split(start, end, step)


def zero(sink: base.Sink, missing: base.Missing, holes: Iterable[tuple[int, int]]) -> None:
    """Deliver the missing parts of ``holes`` (offset, length)."""
    coming = ((offset, offset + length) for offset, length in holes)
    while some := list(itertools.islice(coming, _TOGETHER)):
        for start, end in missing(some):
            sink.zero(start, end - start)


def _soon(listed: Iterable[extents.Extent], meter: base.DeliveryMeter) -> Iterator[extents.Extent]:
    """Yield extents and skip the zeros in the meter: before the first data, if the list is known soon."""
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
