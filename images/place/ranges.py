"""Place the pieces of a mapped image (qcow2, vmdk) that is read at random.

``formats.mapped`` has the image's layout and the decompression.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

from cdi_worker import errors
from cdi_worker.formats.mapped.pieces import Batch, Inflate, Piece
from cdi_worker.images import directio
from cdi_worker.images.engine import fetch
from cdi_worker.images.targets import copy, journaled
from cdi_worker.scratch import journal

# Short pieces that are adjacent on the disk are written together, up to this many bytes: the largest cluster
# fits, and writes of more than 1 MiB are not faster.
_GATHER = 2 << 20
# Copying up to this many bytes is cheaper than a separate write.
_SHORT = 256 << 10
# A batch of so many pieces is written by one thread at a time. Each write lets another thread run, and then
# waits for it: for extents of 8 KiB, six threads took a third more CPU time than one.
_MANY = 32

_guest = attrgetter("guest")


class Counted(Protocol):
    """Counts bytes of the file that are not read. Thread-safe."""

    def skip(self, count: int) -> None:
        """Take ``count`` bytes, which are not read, off the size of the file.

        Called when the last table is known. Negative: tables and data are so close that both are read twice.
        """

    def keep(self, count: int) -> None:
        """Count bytes of data that are finished in the journal."""


class Window(Protocol):
    """A part of the disk; see ``formats.mapped.image.Window``."""

    @property
    def is_last(self) -> bool: ...
    def tables(self) -> Iterator[Batch]: ...
    def load(self, table: Piece, data: bytes | memoryview, /) -> None: ...
    def check(self) -> object: ...
    def holes(self) -> Iterator[tuple[int, int]]: ...
    def data(self) -> Iterator[Batch]: ...


class Image(Protocol):
    """A disk image, or a chain of them; see ``formats.mapped.image.Image``."""

    @property
    def inflate(self) -> Inflate: ...
    def windows(self) -> Iterator[Window]: ...


def from_ranges(
    image: Image,
    fetcher: fetch.Fetcher,
    target: journaled.Flushable,
    noted: journal.Journal,
    counted: Counted,
    *,
    direct: bool = False,
) -> None:
    """Place a whole image that can be read at random.

    Ranges that are finished in the journal ``noted`` are neither fetched nor written. The bytes that
    ``fetcher`` reads and those of ``counted`` are the whole file, except that it may read some twice.
    ``direct``: writes bypass the page cache, so that short ones must not wait for each other.
    """
    disk = journaled.Journaled(target, noted)
    placer = Placer(image.inflate, disk, direct=direct)

    def place(batch: Batch, data: memoryview) -> None:
        placer.put(batch, data)
        disk.checkpoint(batch.length)

    unused = fetcher.size
    for window in image.windows():
        _load(window, fetcher)
        unused -= sum(batch.length for batch in chain(window.tables(), window.data()))
        if window.is_last:
            counted.skip(unused)
            unused = 0
        # Nothing is zeroed, and noted, before the tables are confirmed.
        zero = functools.partial(disk.zero_missing, window.holes())
        _each(fetcher, _missing(window.data(), noted, counted), place, confirmed=zero)


def load(window: Window, fetcher: fetch.Fetcher) -> None:
    """Fetch, check and confirm the tables of a window."""
    _load(window, fetcher)
    fetcher.confirm()


def _missing(batches: Iterable[Batch], noted: journal.Journal, counted: Counted) -> Iterator[Batch]:
    for batch in batches:
        if any(noted.missing(piece.guest, piece.guest + piece.size) for piece in batch.pieces):
            yield batch
        else:
            counted.keep(batch.length)


def _each(
    fetcher: fetch.Fetcher,
    batches: Iterable[Batch],
    deliver: Callable[[Any, memoryview], None],
    **options: Any,
) -> None:
    pending: dict[int, Batch] = {}

    def ranges() -> Iterator[fetch.Range]:
        for batch in batches:
            pending[batch.offset] = batch
            yield fetch.Range(batch.offset, batch.length)

    fetcher.each(ranges(), lambda offset, data: deliver(pending.pop(offset), data), **options)


def _load(window: Window, fetcher: fetch.Fetcher) -> None:
    """Load and check the tables of a window. They are confirmed with its data."""
    loaded: list[tuple[Piece, bytes]] = []

    def keep(batch: Batch, data: memoryview) -> None:
        for table in batch.pieces:
            start = table.host - batch.offset
            loaded.append((table, bytes(data[start : start + table.length])))

    _each(fetcher, window.tables(), keep, tables=True)
    try:
        for table, data in loaded:
            window.load(table, data)
        window.check()
    except errors.ImageError:
        # Tables of a server whose ranges are not right: then the image is read in order.
        fetcher.confirm()
        raise


class Placer:
    """Write pieces to a target, detecting zeros. Thread-safe."""

    def __init__(self, inflate: Inflate, target: copy.Writable, *, direct: bool = False) -> None:
        self._inflate = inflate
        self._target = target
        self._turn: contextlib.AbstractContextManager[object] = threading.Lock()
        if direct:
            self._turn = contextlib.nullcontext()
        self._local = threading.local()

    def put(self, batch: Batch, data: memoryview) -> None:
        """Place the pieces of a batch; ``data``: its bytes in the file."""
        if len(batch.pieces) < _MANY or any(piece.compressed for piece in batch.pieces):
            self._put(batch, data)
            return
        with self._turn:
            self._put(batch, data)

    def _put(self, batch: Batch, data: memoryview) -> None:
        gathered = self._gathered()
        # Programs that compress in parallel store clusters in another order than the disk's.
        for piece in sorted(batch.pieces, key=_guest):
            start = piece.host - batch.offset
            body = data[start : start + piece.length]
            if piece.compressed:
                plain = self._inflate(body, piece)
                for first, end in piece.shown or ((0, piece.size),):
                    gathered.add(piece.guest + first, plain[first:end])
            elif piece.size < _SHORT:
                gathered.add(piece.guest, body)
            else:
                copy.write(self._target, piece.guest, body)
        gathered.flush()

    def _gathered(self) -> _Gathered:
        if not hasattr(self._local, "gathered"):
            self._local.gathered = _Gathered(self._target)
        found: _Gathered = self._local.gathered
        return found


class _Gathered:
    """Collect adjacent bytes of the disk in an aligned buffer, to write them at once."""

    def __init__(self, target: copy.Writable) -> None:
        self._target = target
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
        copy.write(self._target, self._start, self._view[:used])
