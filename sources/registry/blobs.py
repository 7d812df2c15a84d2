"""Blobs as they pass: in order, whatever the registry can do, and verified against their digest."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images.engine import cancelling, crew, fetch, resume
from cdi_worker.sources import base
from cdi_worker.sources.registry import documents
from cdi_worker.sources.web import http

PIECE = 1 << 20
#: Pieces that are hashed ahead of the reader.
AHEAD = 4


class Ordered:
    """The bytes of a blob from ``position`` on: in parallel ranges, plainly where those fail.

    ``reopen`` gives the same blob again, on new connections, as long as its argument lets it try.
    ``close`` may come from another thread and ends a read.
    """

    def __init__(
        self,
        blob: http.HttpSource,
        position: int,
        *,
        reopen: Callable[[base.Cancel], http.HttpSource],
        options: fetch.Options,
        cancel: base.Cancel,
    ) -> None:
        self._blob = blob
        self._position = position
        self._reopen = reopen
        self._options = options
        self._stop = cancelling.Stop(cancel)
        self._by_range = blob.ranges() is not None
        self._rest: base.Reader | None = None

    def readinto(self, into: memoryview, /) -> int:
        if self._rest is None:
            self._rest = self._in_parallel() if self._by_range else self._plainly()
        try:
            count = self._rest.readinto(into)
        except errors.NoRanges:
            if not self._by_range or self._stop.is_set():
                raise
            self._by_range = False
            self._rest.close()
            self._blob = self._reopen(self._stop)
            if self._stop.is_set():
                # Whoever has closed this meanwhile knew of the other one.
                self._blob.close()
                raise errors.Cancelled from None
            self._rest = self._plainly()
            count = self._rest.readinto(into)
        self._position += count
        return count

    def close(self) -> None:
        self._stop.set()
        self._blob.close()
        if self._rest is not None:
            self._rest.close()

    def _in_parallel(self) -> base.Reader:
        size = self._blob.size or 0
        return fetch.Fetcher(self._blob, size, self._options, cancel=self._stop).stream(self._position)

    def _plainly(self) -> base.Reader:
        """Read the blob from its beginning, over what was already given."""
        patience = self._options.no_progress
        name, size = self._blob.name, self._blob.size
        plain = resume.Resuming(self._blob.stream, size, name=name, no_progress=patience, cancel=self._stop)
        left, piece = self._position, memoryview(bytearray(PIECE))
        while left and (count := plain.readinto(piece[:left])):
            left -= count
        return plain


class Verified:
    """The bytes of a blob, in order; their end is only reached when size and digest are right.

    ``head``: its first bytes, at hand already. ``rest`` gives a reader from a position on: it is
    opened when the head does not do, and read and hashed ahead in a thread, because hashing is about
    as fast as unpacking.
    """

    def __init__(
        self,
        descriptor: documents.Descriptor,
        name: str,
        head: bytes,
        rest: Callable[[int], base.Reader],
    ) -> None:
        self.head = head
        self._descriptor = descriptor
        self._name = f"{name}: blob {descriptor.digest}"
        self._hash = hashlib.new(descriptor.digest.partition(":")[0], head, usedforsecurity=False)
        self._rest = rest
        self._given = 0
        self._ahead: _Ahead | None = None
        self._ended = False

    def readinto(self, into: memoryview, /) -> int:
        count = min(len(into), len(self.head) - self._given)
        if count > 0:
            into[:count] = self.head[self._given : self._given + count]
        elif not self._ended and len(into):
            count = self._read_on(into)
        else:
            return 0
        self._given += count
        if self._given > self._descriptor.size:
            raise self._mismatch(f"{self._descriptor.size} bytes", f"{self._given} bytes or more")
        return count

    def close(self) -> None:
        """Let go of the blob. Safe to call twice."""
        if self._ahead is not None:
            self._ahead.close()

    def _read_on(self, into: memoryview) -> int:
        if len(self.head) < self._descriptor.size:
            if self._ahead is None:
                self._ahead = _Ahead(self._rest(len(self.head)), self._hash.update)
            if count := self._ahead.readinto(into):
                return count
        self._ended = True
        if self._given != self._descriptor.size:
            raise self._mismatch(f"{self._descriptor.size} bytes", f"{self._given} bytes")
        expected = self._descriptor.digest
        calculated = f"{expected.partition(':')[0]}:{self._hash.hexdigest()}"
        if calculated != expected:
            raise self._mismatch(expected, calculated)
        return 0

    def _mismatch(self, expected: str, calculated: str) -> errors.DigestMismatch:
        return errors.DigestMismatch(url=self._name, expected=expected, calculated=calculated)


class _Ahead:
    """Reads ahead of its consumer in a thread, and shows what it read to ``see`` there."""

    def __init__(self, reader: base.Reader, see: Callable[[memoryview], None]) -> None:
        self._reader = reader
        self._see = see
        self._free: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[memoryview, int] | BaseException] = queue.SimpleQueue()
        for _ in range(AHEAD):
            self._free.put(memoryview(bytearray(PIECE)))
        self._piece, self._at, self._end = memoryview(b""), 0, 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="verify", daemon=True)
        self._thread.start()

    def readinto(self, into: memoryview, /) -> int:
        if self._at == self._end:
            self._next()
        count = min(len(into), self._end - self._at)
        into[:count] = self._piece[self._at : self._at + count]
        self._at += count
        return count

    def close(self) -> None:
        self._free.put(None)
        self._reader.close()
        # One that still waits for an answer can do no harm any more and ends with its time-out.
        self._thread.join(crew.LAST_WAIT)

    def _next(self) -> None:
        if self._failure is None:
            if len(self._piece):
                self._free.put(self._piece)
            got = self._full.get()
            if isinstance(got, BaseException):
                self._failure = got
            else:
                self._at = 0
                self._piece, self._end = got
                return
        raise self._failure

    def _run(self) -> None:
        try:
            count = 1
            while count and (piece := self._free.get()) is not None:
                count = self._reader.readinto(piece)
                self._see(piece[:count])
                self._full.put((piece, count))
        except BaseException as err:  # noqa: BLE001 - carried to the thread that reads
            self._full.put(err)


def read_all(reader: base.Reader, limit: int, name: str) -> bytes:
    """Return everything up to the end, of at most ``limit`` bytes."""
    into = memoryview(bytearray(limit + 1))
    done = readers.fill(reader, into)
    if done > limit:
        raise errors.Unsupported(reason=f"{name}: more than {limit} bytes where a small document belongs")
    return bytes(into[:done])
