"""Raw disks by a block map: what it maps is verified by its checksums, everything else is zeros.

The last piece of a range is delivered when the checksum of the whole range is right. So a range that is whole
in a journal was verified, and what is there of others proves nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from cdi_worker import errors
from cdi_worker.formats import bmap, readers, spans, vhd
from cdi_worker.images import directio
from cdi_worker.images.disks import base, raw
from cdi_worker.images.engine import ahead, cancelling, fetch
from cdi_worker.scratch import ranges

#: How often a range is fetched again that does not have its checksum.
AGAIN: Final = 3
#: Bytes of a piece.
_PIECE: Final = ahead.CHUNK

#: An offset, and data or the length of a hole; or start and end of a range that was wrong, and comes again.
_Piece: TypeAlias = "tuple[int, memoryview | int | base.Range]"
#: Reads all of a buffer from an offset.
_Fill: TypeAlias = Callable[[int, memoryview], object]


class Selection:
    """The parts of a mapped disk that are delivered: all, or what is not the same in another map.

    ``had``: the map of the disk that is there. A range is the same if its place and its checksum are.
    """

    def __init__(self, blocks: bmap.Map, had: bmap.Map | None = None) -> None:
        self.blocks = blocks
        self.is_whole = had is None
        kept = set(had.ranges) if had is not None and had.algorithm == blocks.algorithm else frozenset()
        #: The ranges that are delivered.
        self.ranges = [each for each in blocks.ranges if each not in kept]
        #: What is delivered as zeros.
        self.zeros = ranges.Ranges()
        others = [(0, blocks.size)] if had is None else [*_data(had), (had.size, max(had.size, blocks.size))]
        for _, parts in spans.common(blocks.holes(), [each for each in others if each[0] < each[1]]):
            for part in parts:
                self.zeros.add(*part)

    @property
    def data(self) -> int:
        """Bytes of the ranges that are delivered."""
        return sum(end - start for start, end, _ in self.ranges)

    @property
    def declared(self) -> int:
        """Bytes that are delivered, as data and as zeros."""
        return self.data + self.zeros.covered()


class _Mapped(base.Disk):
    """A disk of which ``selection`` is delivered. ``names``: of the image and of the map, for messages."""

    def __init__(self, selection: Selection, scope: cancelling.Cancel, names: tuple[str, str]) -> None:
        self._selection = selection
        self._blocks = selection.blocks
        self._scope = scope
        self._names = names
        self.size: int = self._blocks.size
        self.covers_all = selection.is_whole
        self.declared = 0
        self._buffers: Iterator[memoryview] = iter(())
        self._buffer = memoryview(b"")
        self._is_spare = False

    def _pour(self, pieces: Iterator[_Piece], sink: base.Sink, meter: base.Meter) -> int:
        # One more than an ``Ahead`` needs is held back until its range is verified.
        self._buffers = itertools.cycle([directio.Buffer(_PIECE).view for _ in range(ahead.DEPTH + 3)])
        with ahead.Ahead(pieces, self._scope) as coming:
            for offset, piece in coming:
                self._scope.check()
                if isinstance(piece, int):
                    sink.zero(offset, piece)
                elif isinstance(piece, tuple):
                    if self.again is not None:
                        self.again(*piece)
                else:
                    sink.write(offset, piece)
                    meter.moved(len(piece))
        self.declared = self._selection.declared
        return self.size

    def _take(self, length: int) -> memoryview:
        """Return a buffer. They are used in turn: one that is not delivered must not lose its turn."""
        if not self._is_spare:
            self._buffer = next(self._buffers)
        self._is_spare = False
        return self._buffer[:length]

    def _drop(self) -> None:
        """Take the last buffer back, which is not delivered."""
        self._is_spare = True

    def _wrong(self, start: int, end: int, what: str) -> errors.MapMismatch:
        image, blocks = self._names
        return errors.MapMismatch(url=image, map=blocks, reason=f"bytes {start} to {end - 1} {what}")


class ByRanges(_Mapped):
    """A mapped disk that is read by ranges: nothing else is requested, and a wrong range is fetched again.

    ``known``: returns whether some of a range is not fetched, because it was read before to examine the
    image. If that is wrong, it is an error at once: the image must be examined again. None: that has been
    done.
    """

    repeats = True

    def __init__(
        self,
        ranges: raw.Ranges,
        selection: Selection,
        scope: cancelling.Cancel,
        names: tuple[str, str],
        *,
        known: Callable[[int, int], bool] | None = None,
    ) -> None:
        super().__init__(selection, scope, names)
        self._ranges = ranges
        self._known = known

    def deliver(self, sink: base.Sink, missing: base.Missing, meter: base.Meter) -> int:
        """See ``base.Disk``."""
        wanted = []
        for each in self._selection.ranges:
            start, end, _ = each
            if gaps := missing([(start, end)]):
                # What is there of a range can only be verified if it can be read.
                wanted.append((each, gaps if self.stored else [(start, end)]))
            meter.keep(end - start - _length(wanted[-1][1] if gaps else ()))
        raw.zero(sink, missing, ((start, end - start) for start, end in self._selection.zeros))
        return self._pour(self._pieces(wanted, self._ranges(meter.advance), meter), sink, meter)

    def _pieces(
        self,
        wanted: Sequence[tuple[bmap.Range, list[base.Range]]],
        fetcher: fetch.Fetcher,
        meter: base.Meter,
    ) -> Iterator[_Piece]:
        parts = spans.joined(gap for _, gaps in wanted for gap in gaps)
        with contextlib.closing(
            fetcher.parts([fetch.Range(start, end - start) for start, end in parts])
        ) as reader:

            def read(_offset: int, into: memoryview) -> None:
                readers.fill(reader, into)

            try:
                for each, gaps in wanted:
                    yield from self._right(each, gaps, (read, fetcher), meter)
            except errors.Error as err:
                # Closing the reader sets the scope, too, and without this failure.
                self._scope.fail(err)
                raise

    def _right(
        self,
        each: bmap.Range,
        gaps: Iterable[base.Range],
        reads: tuple[_Fill, fetch.Fetcher],
        meter: base.Meter,
    ) -> Iterator[_Piece]:
        """Yield a range; fetch it again if it does not have its checksum. ``reads``: first, and then."""
        start, end, _ = each
        read, fetcher = reads
        is_right = yield from self._verified(each, gaps, read)
        for _ in range(AGAIN):
            if is_right:
                return
            if self._known is not None and self._known(start, end):
                failure = self._wrong(start, end, "have another checksum")
                failure.is_head = True
                raise failure
            fetcher.pause(start, f"bytes {start} to {end - 1} do not have the checksum of the map")
            meter.skip(start - end)
            yield start, (start, end)
            fetcher.expect([fetch.Range(start, end - start)])
            is_right = yield from self._verified(each, [(start, end)], fetcher.fill)
        if not is_right:
            raise self._wrong(start, end, f"have another checksum, {AGAIN + 1} times")

    def _verified(
        self, each: bmap.Range, gaps: Iterable[base.Range], read: _Fill
    ) -> Generator[_Piece, None, bool]:
        """Yield what is read of a range, its last piece if the checksum is right. Return whether it is.

        ``gaps``: what is read. The rest is on the target already, and hashed from there.
        """
        start, end, digest = each
        hashed = hashlib.new(self._blocks.algorithm)
        held: _Piece | None = None
        at = start
        for first, after in [*gaps, (end, end)]:
            for low in range(at, first, _PIECE):
                assert self.stored is not None  # noqa: S101  (see ``deliver``)
                hashed.update(self.stored(low, min(_PIECE, first - low)))
            for low in range(first, after, _PIECE):
                buffer = self._take(after - low)
                read(low, buffer)
                hashed.update(buffer)
                if held is not None:
                    yield held
                held = low, buffer
            at = after
        if hashed.digest() != digest:
            self._drop()
            return False
        if held is not None:
            yield held
        return True


class Passing(_Mapped):
    """A mapped disk that passes as one ordered stream. What its map does not map must be zeros.

    ``footer``: its last sector may be the footer of a fixed VHD, which is refused.
    """

    def __init__(
        self,
        opened: base.Opened,
        selection: Selection,
        scope: cancelling.Cancel,
        names: tuple[str, str],
        *,
        footer: bool,
    ) -> None:
        super().__init__(selection, scope, names)
        self._opened = opened
        self._footer = footer

    def deliver(self, sink: base.Sink, missing: base.Missing, meter: base.Meter) -> int:
        """See ``base.Disk``."""
        with self._opened(meter.advance) as reader:
            return self._pour(self._pieces(reader), sink, meter)

    def _pieces(self, reader: readers.Reader) -> Iterator[_Piece]:
        wanted = {start for start, _, _ in self._selection.ranges}
        at, last = 0, b""
        for start, end, digest in [*self._blocks.ranges, (self.size, self.size, b"")]:
            for low, buffer in self._read(reader, at, start):
                if not directio.is_zero(buffer):
                    raise self._wrong(low, low + len(buffer), "are not mapped, and not zeros")
                last = _last(last, buffer)
                self._drop()
                yield from self._zeros(low, low + len(buffer))
            hashed = hashlib.new(self._blocks.algorithm)
            held: _Piece | None = None
            for low, buffer in self._read(reader, start, end):
                hashed.update(buffer)
                last = _last(last, buffer)
                if held is not None:
                    yield held
                held = low, buffer
                if start not in wanted:
                    held = None
                    self._drop()
            if digest and hashed.digest() != digest:
                raise self._wrong(start, end, "have another checksum")
            if held is not None:
                yield held
            at = end
        self._check_end(reader, last)

    def _read(self, reader: readers.Reader, start: int, end: int) -> Iterator[tuple[int, memoryview]]:
        for low in range(start, end, _PIECE):
            buffer = self._take(end - low)
            if (count := readers.fill(reader, buffer)) < len(buffer):
                raise self._wrong(low + count, self.size, "are missing: the image ends before them")
            yield low, buffer

    def _zeros(self, start: int, end: int) -> Iterator[_Piece]:
        for first, after in spans.gaps(self._selection.zeros.missing(start, end), start, end):
            yield first, after - first

    def _check_end(self, reader: readers.Reader, last: bytes) -> None:
        if reader.readinto(memoryview(bytearray(1))):
            raise self._wrong(self.size, self.size + 1, "follow the end of the disk in the map")
        if self._footer and vhd.is_fixed(last):
            raise not_raw("vhd")


def not_raw(form: str) -> errors.Unsupported:
    """Return the error for an image in another format."""
    return errors.Unsupported(reason=f"--map is for a raw disk, plain or compressed, and this is {form}")


def _data(blocks: bmap.Map) -> Iterator[base.Range]:
    return ((start, end) for start, end, _ in blocks.ranges)


def _length(parts: Iterable[base.Range]) -> int:
    return sum(end - start for start, end in parts)


def _last(before: bytes, buffer: memoryview) -> bytes:
    return (before + bytes(buffer[-vhd.FOOTER :]))[-vhd.FOOTER :]
