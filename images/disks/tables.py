"""Disks of images with tables (qcow2, vmdk, vdi, vhd, vhdx), read by ranges, of one file or of a chain.

``formats.mapped`` has the layout of the images and the decompression.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from cdi_worker.formats import views
from cdi_worker.formats.mapped.pieces import Batch, Inflate, Piece
from cdi_worker.images import directio
from cdi_worker.images.disks import base, raw
from cdi_worker.images.engine import fetch

if TYPE_CHECKING:
    from cdi_worker.formats.mapped import image
    from cdi_worker.formats.qcow2 import layers

# Short pieces that are adjacent on the disk are written together, up to this many bytes: the largest cluster
# fits, and writes of more than 1 MiB are not faster.
_GATHER: Final = 2 << 20
# Copying up to this many bytes is cheaper than a separate write.
_SHORT: Final = 256 << 10
# A batch of so many pieces is written by one thread at a time. Each write lets another thread run, and then
# waits for it: for extents of 8 KiB, six threads took a third more CPU time than one.
_MANY: Final = 32
# Bytes of data that are kept because they were read with tables, of all files. As much as the longest window
# of an image whose tables are not far from each other.
_NEAR: Final = 64 << 20


#: The tables of a disk, a part of the disk, and what one file holds of it: of one file, or of a chain.
DiskTables: TypeAlias = "image.MappedImage | layers.ChainTables"
Window: TypeAlias = "image.Window | layers.ChainWindow"
Part: TypeAlias = "image.Window | layers.FilePart"

#: Reads the first tables, by a function for each file that returns bytes of it.
OpenTables = Callable[[Sequence[views.Read]], DiskTables]


class MappedDisk(base.Disk):
    """The disk of one image, or of a chain: each cluster comes from the newest file that contains it.

    ``files``: open each file by ranges, the oldest first. ``size``: of the disk. ``covers_all``: see
    ``base.Disk``; a chain without its oldest file holds changes only. ``direct``: the target bypasses the
    page cache, so that short writes must not wait for each other.
    """

    repeats = True

    def __init__(
        self,
        files: Sequence[raw.OpenRanges],
        tables: OpenTables,
        size: int,
        *,
        covers_all: bool = True,
        direct: bool = False,
    ) -> None:
        self._files = files
        self._tables = tables
        self.size: int = size
        self.covers_all = covers_all
        self._direct = direct

    def deliver(self, sink: base.Sink, missing: base.Missing, meter: base.DeliveryMeter) -> int:
        """See ``base.Disk``. ``meter`` gets the whole files, except that some bytes may be read twice."""
        fetchers = [ranges(meter.advance) for ranges in self._files]
        placer = Placer(sink, direct=self._direct)
        unread = sum(fetcher.size for fetcher in fetchers)
        self.declared = 0
        neighbours = [Near(_NEAR // len(fetchers)) for _ in fetchers]
        for window in self._tables([fetcher.read for fetcher in fetchers]).windows():
            parts: Sequence[Part] = window.parts
            load(window, fetchers, neighbours)
            unread -= sum(batch.length for part in parts for batch in part.tables())
            arrived: list[list[tuple[Batch, memoryview]]] = []
            for part, near in zip(parts, neighbours, strict=True):
                arrived.append([])
                for batch, data in near.split(part.data()):
                    if data is None:
                        unread -= batch.length
                    else:
                        arrived[-1].append((batch, data))
            if window.is_last:
                meter.skip(unread)
                unread = 0
            if not self.covers_all:
                pieces = (piece for part in parts for batch in part.data() for piece in batch.pieces)
                shown = (span for piece in pieces for span in piece.shown or ((0, piece.size),))
                self.declared += sum(end - start for start, end in shown)
                self.declared += sum(length for _, length in window.holes())
            # An iterator: with a chain, the first file's turn zeroes the holes.
            zero = functools.partial(raw.zero, sink, missing, iter(window.holes()))
            for part, fetcher, near, here in zip(parts, fetchers, neighbours, arrived, strict=True):

                def place(
                    batch: Batch, data: memoryview, inflate: Inflate = part.inflate, *, is_near: bool = False
                ) -> None:
                    placer.put(batch, data, inflate)
                    # What is near tables is read again with them after a kill.
                    meter.moved(0 if is_near else batch.length)

                lacking = (each for each in here if _lacks(missing, each[0]))
                first = (functools.partial(place, *each, is_near=True) for each in lacking)
                others = (batch for batch, data in near.split(part.data()) if data is None)
                _each(fetcher, _missing(others, missing, meter), place, first=first, meanwhile=zero)
        return self.size


class Near:
    """The bytes between the tables of a window that were read with them, at most ``room``.

    An image with few extents in each table has its data there.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._used = 0
        self._kept: list[tuple[int, memoryview]] = []
        self._lock = threading.Lock()

    def forget(self) -> None:
        self._used = 0
        self._kept.clear()

    def keep(self, batch: Batch, data: memoryview) -> None:
        """Keep what was read with these tables, if they are not all of it. Thread-safe."""
        if len(data) == sum(table.length for table in batch.pieces):
            return
        with self._lock:
            if len(data) <= self._room - self._used:
                # The same memory for all windows: the allocator would keep that of other sizes, too.
                kept = self._buffer.view[self._used :][: len(data)]
                kept[:] = data
                self._used += len(data)
                bisect.insort(self._kept, (batch.offset, kept))

    def split(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, memoryview | None]]:
        """Split batches of data into those that are kept, with their bytes, and others."""
        for batch in batches:
            if not self._kept:
                yield batch, None
                continue
            for kept, group in groupby(batch.pieces, self._holder):
                pieces = list(group)
                start, end = pieces[0].host, max(piece.host + piece.length for piece in pieces)
                part = Batch(start, min(end, batch.offset + batch.length) - start, pieces)
                yield part, None if kept is None else kept[1][start - kept[0] :][: part.length]

    @functools.cached_property
    def _buffer(self) -> directio.Buffer:
        return directio.Buffer(self._room)

    def _holder(self, piece: Piece) -> tuple[int, memoryview] | None:
        """Return the offset and the bytes of the kept part that holds a piece."""
        index = bisect.bisect(self._kept, (piece.host + 1,)) - 1
        if index >= 0:
            offset, data = self._kept[index]
            if piece.host + piece.length <= offset + len(data):
                return self._kept[index]
        return None


def load(window: Window, fetchers: Sequence[fetch.Fetcher], neighbours: Sequence[Near] = ()) -> None:
    """Load and check the tables of a window. ``neighbours`` keep what was read with those of each file."""
    parts: Sequence[Part] = window.parts
    for part, fetcher, near in zip(parts, fetchers, neighbours or [Near(0) for _ in parts], strict=True):
        near.forget()

        def keep(batch: Batch, data: memoryview, part: Part = part, near: Near = near) -> None:
            for table in batch.pieces:
                start = table.host - batch.offset
                part.load(table, data[start : start + table.length])
            near.keep(batch, data)

        _each(fetcher, part.tables(), keep, tables=True)
    window.check()


def _missing(batches: Iterable[Batch], missing: base.Missing, meter: base.DeliveryMeter) -> Iterator[Batch]:
    for batch in batches:
        if _lacks(missing, batch):
            yield batch
        else:
            meter.keep(batch.length)


def _lacks(missing: base.Missing, batch: Batch) -> bool:
    return bool(missing((piece.guest, piece.guest + piece.size) for piece in batch.pieces))


def _each(
    fetcher: fetch.Fetcher,
    batches: Iterable[Batch],
    deliver: Callable[[Batch, memoryview], None],
    **options: Any,
) -> None:
    pending: dict[int, Batch] = {}

    def ranges() -> Iterator[fetch.ByteRange]:
        for batch in batches:
            pending[batch.offset] = batch
            yield fetch.ByteRange(batch.offset, batch.length)

    fetcher.each(ranges(), lambda offset, data: deliver(pending.pop(offset), data), **options)


class Placer:
    """Deliver pieces of an image at their offsets of the disk. Thread-safe."""

    def __init__(self, sink: base.Sink, *, direct: bool = False) -> None:
        self._sink = sink
        self._turn: contextlib.AbstractContextManager[object] = threading.Lock()
        if direct:
            self._turn = contextlib.nullcontext()
        self._local = threading.local()

    def put(self, batch: Batch, data: memoryview, inflate: Inflate) -> None:
        """Deliver the pieces of a batch; ``data``: its bytes in the file."""
        if not hasattr(self._local, "gathered"):
            self._local.gathered = _Gathered(self._sink)
        gathered: _Gathered = self._local.gathered
        is_alone = len(batch.pieces) >= _MANY and not any(piece.compressed for piece in batch.pieces)
        with self._turn if is_alone else contextlib.nullcontext():
            # Programs that compress in parallel store clusters in another order than the disk's.
            for piece in sorted(batch.pieces, key=attrgetter("guest")):
                start = piece.host - batch.offset
                body = data[start : start + piece.length]
                if piece.compressed:
                    plain = inflate(body, piece)
                    for first, end in piece.shown or ((0, piece.size),):
                        gathered.add(piece.guest + first, plain[first:end])
                elif piece.size < _SHORT:
                    gathered.add(piece.guest, body)
                else:
                    self._sink.write(piece.guest, body)
            gathered.flush()


class _Gathered:
    """Collect adjacent bytes of the disk in an aligned buffer, to deliver them at once."""

    def __init__(self, sink: base.Sink) -> None:
        self._sink = sink
        self._view = directio.Buffer(_GATHER).view
        self._start = 0
        self._used = 0

    def add(self, offset: int, data: bytes | memoryview) -> None:
        if offset != self._start + self._used or self._used + len(data) > _GATHER:
            self.flush()
            self._start = offset
        self._view[self._used : self._used + len(data)] = data
        self._used += len(data)

    def flush(self) -> None:
        used, self._used = self._used, 0
        if used:
            self._sink.write(self._start, self._view[:used])
