"""An NBD client: ranges, extents and dirty areas of one export over a few connections.

Every NBD disk is read through this client: those of the nbd source, and those that VDDK serves in nbdkit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator

from cdi_worker import errors
from cdi_worker.images.engine import retry
from cdi_worker.sources import base, extents, wire
from cdi_worker.sources.nbd import connection, handshake

log = logging.getLogger(__name__)

#: Bytes of the longest query for extents (32-bit lengths).
LONGEST_STATUS = 1 << 30
#: A listing that makes so many requests without a mean extent worth one ends: the rest counts as data. A
#: server may return 512 bytes for each request of a disk of exabytes.
MOST_REQUESTS = 4096
#: A listing counts as so many reads, because VDDK does not read meanwhile.
LISTING = 4

# NBD_STATE_ZERO of base:allocation, and NBD_STATE_DIRTY of qemu:dirty-bitmap.
_ZERO, _DIRTY = 2, 1


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a client, in seconds. ``connections``: at most, if the server allows several.

    ``always``: open them in any case, because the disk does not change. ``connect``: for one attempt,
    ``another``: beside a connection that works, because qemu-nbd leaves excess clients waiting. ``stall``:
    without a byte of a reply. ``patience``: without progress in a list of extents. ``slowest``: bytes per
    second that are progress. ``longest``: bytes of a read.
    """

    connections: int = 6
    always: bool = False
    connect: float = wire.TIMEOUT[0]
    another: float = 3.0
    stall: float = wire.TIMEOUT[1]
    patience: float = 180.0
    slowest: float = retry.SLOWEST
    longest: int = connection.LONGEST


def _unchanged(error: errors.Error, _offset: int) -> errors.Error:
    return error


class Client:
    """A client of ``server``. Thread-safe; ``cancel`` aborts all waits.

    Connects when needed, and again after a connection is lost. A server that allows several connections also
    gets a new one after a failed read: it opens the disk again, which may help. ``explained`` translates the
    failures of connections and requests, which are ``errors.Transient``, at a byte of the disk.
    """

    #: A short range costs as much as a longer one, and changed areas may be many.
    batching = True

    def __init__(
        self,
        server: handshake.Server,
        cancel: base.Cancel,
        limits: Limits = Limits(),
        explained: Callable[[errors.Error, int], errors.Error] = _unchanged,
    ) -> None:
        self._server = server
        self._cancel = cancel
        self._limits = limits
        self._explained = explained
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._connections: list[connection.Connection] = []
        self._allowed = 1
        self._size: int | None = None
        self._closed = False
        #: Names of QEMU's dirty bitmaps, as the server lists them.
        self.bitmaps: list[str] = []
        #: The requested metadata contexts that the server has.
        self.contexts: frozenset[str] = frozenset()

    @property
    def allowed(self) -> int:
        """The number of connections that may be open."""
        return self._allowed

    def open(self) -> int:
        """Connect; return the size of the disk in bytes."""
        with self._lent(0, 0):
            return self._size or 0

    def read_range(self, offset: int, into: memoryview, /) -> int:
        """Read up to ``len(into)`` bytes from ``offset``; see ``sources.base.RandomReader``."""
        into = into[: self._limits.longest]
        with self._lent(offset, 1) as used:
            # Aborts all requests of the connection: libnbd cannot cancel a single one.
            with self._cancel.ending(functools.partial(self._drop, used)):
                error = self._read(used, offset, into)
            self._check(used, error, f"reading at byte {offset}")
        return len(into)

    def extents(self, parts: Iterable[tuple[int, int]] | None = None) -> Iterator[base.Extent]:
        """Yield the extents of the disk, or of ``parts`` (start, end), in order.

        All is data if the server does not report its allocation.
        """
        found = self._listed(handshake.ALLOCATION, parts, _ZERO)
        return (base.Extent(start, length, bool(flags)) for start, length, flags in found)

    def dirty(self, bitmap: str) -> Iterator[base.Extent]:
        """Yield the dirty areas of a bitmap, which may read as zeros."""
        found = self._listed(handshake.BITMAP + bitmap, None, _DIRTY, unknown=_DIRTY)
        return (base.Extent(start, length, zero=False) for start, length, flags in found if flags)

    def close(self) -> None:
        """Abort the requests of other threads, and refuse new connections."""
        with self._lock:
            self._closed = True
            left = list(self._connections)
        for each in left:
            self._drop(each)

    # -- connections

    @contextlib.contextmanager
    def _lent(self, offset: int, load: int) -> Iterator[connection.Connection]:
        """Lend the connection with the least load; explain the failures of the block."""
        try:
            used = self._chosen()
            with self._lock:
                used.load += load
            try:
                yield used
            finally:
                with self._lock:
                    used.load -= load
        except errors.Transient as err:
            explained = self._explained(err, offset)
            if explained is err:
                raise
            raise explained from err

    def _chosen(self) -> connection.Connection:
        while True:
            idle, enough = self._idle()
            if idle is not None and enough:
                return idle
            # While one thread connects, the others use the connections that there are.
            if not self._connecting.acquire(blocking=idle is None):
                assert idle is not None  # noqa: S101  (otherwise it waits)
                return idle
            try:
                idle, enough = self._idle()
                if idle is None or not enough:
                    self._connect(idle)
            finally:
                self._connecting.release()

    def _idle(self) -> tuple[connection.Connection | None, bool]:
        """Return the connection with the least load, and whether no other is to be opened."""
        with self._lock:
            if self._closed:
                raise errors.Transient(url=self._server.name, reason="closed")
            self._connections = [each for each in self._connections if not each.dead]
            idle = min(self._connections, key=lambda each: each.load, default=None)
            return idle, idle is None or not idle.load or len(self._connections) >= self._allowed

    def _connect(self, beside: connection.Connection | None) -> None:
        limit = self._limits.connect if beside is None else min(self._limits.another, self._limits.connect)
        try:
            handle, bitmaps = handshake.connect(self._server, self._cancel, limit)
        except errors.Transient as err:
            if beside is None:
                raise
            with self._lock:
                self._allowed = max(1, len(self._connections))
            log.info("no more connections number=%d reason=%s", self._allowed, err)
            return
        made = connection.Connection(handle, self._limits.stall, self._limits.slowest)
        try:
            self._accept(made)
        except errors.Error:
            made.close()
            raise
        if beside is None:
            self.bitmaps = bitmaps
        with self._lock:
            if not self._closed:
                self._connections.append(made)
                return
        made.close()

    def _accept(self, made: connection.Connection) -> None:
        """Check that a new connection is to the same disk as the first."""
        if self._size is None:
            self._size = made.size
            self.contexts = frozenset(name for name in self._server.contexts if made.has(name))
            if made.is_shared or self._limits.always:
                self._allowed = self._limits.connections
        elif made.size != self._size:
            raise errors.SourceChanged(url=self._server.name, what="size", before=self._size, now=made.size)

    def _drop(self, used: connection.Connection) -> None:
        """Close a connection, once."""
        with self._lock:
            if used not in self._connections:
                return
            self._connections.remove(used)
        used.close()

    def _check(self, used: connection.Connection, error: int, doing: str) -> None:
        if not error:
            return
        if error == errno.EMSGSIZE:
            self._drop(used)
            reason = (
                f"{self._server.name}: {doing}: the server sends more than was requested, or a part twice"
            )
            raise errors.SourceError(reason=reason)
        is_lost = error == errno.ENOTCONN
        reason = used.failure if is_lost else os.strerror(error).lower()
        if error == errno.EPROTO:
            reason = "the reply is malformed, or a part of it is missing"
        # qemu-nbd without --persistent ends with its last client.
        if is_lost or self._allowed > 1:
            self._drop(used)
        raise errors.Transient(url=self._server.name, reason=f"{doing}: {reason}")

    @staticmethod
    def _read(used: connection.Connection, offset: int, into: memoryview) -> int:
        before, after = offset % used.unit, -(offset + len(into)) % used.unit
        end = min(offset + len(into) + after, max(used.size, offset + len(into)))
        if not before and end == offset + len(into):
            return used.read(offset, into)
        whole = memoryview(bytearray(end - offset + before))
        error = used.read(offset - before, whole)
        into[:] = whole[before : before + len(into)]
        return error

    # -- lists of extents

    def _listed(
        self, context: str, parts: Iterable[tuple[int, int]] | None, mask: int, unknown: int = 0
    ) -> Generator[tuple[int, int, int]]:
        """Yield (offset, length, flags) of ``context``, merged; continue after a lost connection.

        ``mask``: the flags that matter. ``unknown``: flags of bytes that the server does not report.
        """
        size = self.open()
        left = [(0, size)] if parts is None else list(parts)
        patience = retry.Patience(self._limits.patience, self._cancel, slowest=self._limits.slowest)
        asked = _Asked()
        at = 0
        while True:
            try:
                runs = self._asked(context, left, asked, unknown)
                for start, length, flags in _merged((run[0], run[1], run[2] & mask) for run in runs):
                    at = start + length
                    patience.progress(length, self._server.name, at)
                    yield start, length, flags
                    patience.resume()
                return
            except errors.Transient as err:
                patience.wait(err, at)
                left = [(max(start, at), end) for start, end in left if end > at]

    def _asked(
        self, context: str, parts: list[tuple[int, int]], asked: _Asked, unknown: int
    ) -> Iterator[tuple[int, int, int]]:
        for start, end in parts:
            offset = start
            while offset < end:
                if context not in self.contexts or asked.is_vain:
                    yield offset, end - offset, unknown
                    break
                length = min(LONGEST_STATUS, end - offset)
                asked.requests += 1
                for count, flags in self._status(context, offset, length):
                    # The last extent may reach beyond the requested range, even beyond the end of the disk.
                    covered = min(count, end - offset)
                    yield offset, covered, flags
                    offset += covered
                    asked.covered += covered
                    if offset == end:
                        break

    def _status(self, context: str, offset: int, length: int) -> connection.Entries:
        with self._lent(offset, LISTING) as used:
            with self._cancel.ending(functools.partial(self._drop, used)):
                # The last bytes of a disk may be less than a unit.
                begin = offset - offset % used.unit
                end = min(-(-(offset + length) // used.unit) * used.unit, max(used.size, offset + length))
                error, found = used.status(begin, end - begin)
            self._check(used, error, f"listing the extents at byte {offset}")
        entries = found.get(context, [])
        if not entries or not all(count for count, _ in entries):
            what = f"returned {len(entries)} extents at byte {offset}, of which some may be empty"
            raise errors.SourceError(reason=f"{self._server.name}: the server {what}")
        first, flags = entries[0]
        if first <= offset - begin:
            what = f"returned an extent that ends at byte {begin + first} for one at byte {offset}"
            raise errors.SourceError(reason=f"{self._server.name}: the server {what}")
        return [(first - (offset - begin), flags), *entries[1:]]


@dataclasses.dataclass
class _Asked:
    """Requests of a listing, and the bytes that their replies covered."""

    requests: int = 0
    covered: int = 0

    @property
    def is_vain(self) -> bool:
        return self.requests > MOST_REQUESTS and self.covered < self.requests * extents.SHORTEST_ZERO


def _merged(runs: Iterator[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Merge adjacent runs with equal flags. A long run is yielded early: it can be read meanwhile."""
    last = (0, 0, 0)
    for run in runs:
        start, length, flags = last
        if run[2] == flags and run[0] == start + length and (flags or length < LONGEST_STATUS):
            last = (start, length + run[1], flags)
            continue
        if length:
            yield last
        last = run
    if last[1]:
        yield last
