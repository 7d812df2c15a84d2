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
import time
from collections.abc import Callable, Iterable, Iterator

from cdi_worker import errors
from cdi_worker.images.engine import pace, retry
from cdi_worker.sources import base, extents, wire
from cdi_worker.sources.nbd import connection, handshake

log = logging.getLogger(__name__)

#: Bytes of the longest query for extents (32-bit lengths).
LONGEST_STATUS = 1 << 30
#: A listing that makes so many requests without a mean extent worth one ends: the rest counts as data. A
#: server may return 512 bytes for each request of a disk of exabytes.
MOST_REQUESTS = 4096
#: Tries for the extents of a part that a server cannot list; and so many parts after which it is not asked
#: again, because each try may take seconds.
TRIES, MOST_FAILURES = 3, 4
#: Errors of requests that the server can never serve (doc/proto.md, Error values).
_PERMANENT = frozenset({errno.EPERM, errno.EINVAL})
#: A listing counts as so many reads, because VDDK does not read meanwhile.
LISTING = 4

# NBD_STATE_ZERO of base:allocation, and NBD_STATE_DIRTY of qemu:dirty-bitmap.
_ZERO, _DIRTY = 2, 1


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a client, in seconds. ``connections``: at most, if the server allows several.

    ``always``: open them in any case, because the disk does not change. ``connect``: for one attempt,
    ``another``: beside a connection that works, because qemu-nbd leaves excess clients waiting. ``stall``:
    without a byte of a reply. ``patience``: without progress in a list of extents. ``min_speed``: bytes per
    second that are progress. ``longest``: bytes of a read.
    """

    connections: int = 6
    always: bool = False
    connect: float = wire.TIMEOUT[0]
    another: float = 3.0
    stall: float = wire.TIMEOUT[1]
    patience: float = 180.0
    min_speed: float = retry.MIN_SPEED
    longest: int = connection.LONGEST


class Refused(errors.SourceError):
    """The server can never serve a request."""


class Failed(errors.Transient):
    """The server answers a request with an error."""


class Client:
    """A client of ``server``. Thread-safe; ``cancel`` aborts all waits.

    Connects when needed, and again after a connection is lost. A server that allows several connections also
    gets a new one after a failed read: it opens the disk again, which may help. ``explain`` translates the
    failures of connections and requests, which are ``errors.Transient``, at a byte of the disk.
    """

    #: A short range costs as much as a longer one, and changed areas may be many.
    batching = True

    def __init__(
        self,
        server: handshake.Server,
        cancel: base.Cancel,
        limits: Limits = Limits(),
        explain: Callable[[errors.Error, int], errors.Error] = lambda error, _: error,
    ) -> None:
        self._server = server
        self._cancel = cancel
        self._limits = limits
        self._explain = explain
        #: The times of the reads that succeeded.
        self.pace = pace.Pace()
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._connections: list[connection.Connection] = []
        #: The number of connections that may be open.
        self.allowed = 1
        self._size: int | None = None
        self._closed = False
        #: Whether the end of a disk that ends within a block was read.
        self._has_end = False
        #: Names of QEMU's dirty bitmaps, as the server lists them.
        self.bitmaps: list[str] = []
        #: The requested metadata contexts that the server has.
        self.contexts: frozenset[str] = frozenset()

    def open(self) -> int:
        """Connect; return the size of the disk in bytes.

        Raises ``errors.SourceError`` if the disk ends within a block, and the server does not read its end.
        """
        with self._lend(0, 0) as used:
            size, unit = self._size or 0, used.unit
        if size % unit and not self._has_end:
            try:
                self.read_range(size // unit * unit, memoryview(bytearray(size % unit)))
            except (Refused, OSError) as err:
                raise errors.SourceError(
                    reason=f"{self._server.name}: has {size} bytes, no multiple of the server's smallest "
                    f"block of {unit} bytes, and its last bytes cannot be read; resize the disk, or serve it "
                    "with smaller blocks"
                ) from err
            self._has_end = True
        return size

    def read_range(self, offset: int, into: memoryview, /) -> int:
        """Read up to ``len(into)`` bytes from ``offset``; see ``sources.base.RandomReader``."""
        with self._lend(offset, 1) as used:
            begin, end = _whole_blocks(used, offset, offset + len(into))
            end = min(end, begin + min(used.longest, self._limits.longest))
            into = into[: end - offset]
            is_aligned = end - begin == len(into)
            blocks = into if is_aligned else memoryview(bytearray(end - begin))
            # Aborts all requests of the connection: libnbd cannot cancel a single one.
            with self._cancel.ending(functools.partial(self._drop, used)):
                began = time.monotonic()
                error = used.read(begin, blocks)
                seconds = time.monotonic() - began
            if not is_aligned:
                into[:] = blocks[offset - begin :][: len(into)]
            self._check(used, error, f"reading at byte {offset}")
            self.pace.read(len(blocks), seconds)
        return len(into)

    def extents(self, parts: Iterable[tuple[int, int]] | None = None) -> Iterator[base.Extent]:
        """Yield the extents of the disk, or of ``parts`` (start, end), in order.

        What the server does not list is data: to read too much is always right.
        """
        for start, length, flags in self._list(handshake.ALLOCATION, parts, is_optional=True):
            yield base.Extent(start, length, bool(flags & _ZERO))

    def dirty(self, bitmap: str) -> Iterator[base.Extent]:
        """Yield the dirty areas of a bitmap, which may read as zeros. Raises if one cannot be listed."""
        for start, length, flags in self._list(handshake.BITMAP + bitmap, None, unknown=_DIRTY):
            if flags & _DIRTY:
                yield base.Extent(start, length, zero=False)

    def close(self) -> None:
        """Abort the requests of other threads, and refuse new connections."""
        with self._lock:
            self._closed = True
            left = list(self._connections)
        for each in left:
            self._drop(each)

    # -- connections

    @contextlib.contextmanager
    def _lend(self, offset: int, load: int) -> Iterator[connection.Connection]:
        """Lend the connection with the least load; explain the failures of the block."""
        try:
            used = self._choose()
            with self._lock:
                used.load += load
            try:
                yield used
            finally:
                with self._lock:
                    used.load -= load
        except errors.Transient as err:
            translated = self._explain(err, offset)
            if translated is err:
                raise
            raise translated from err

    def _choose(self) -> connection.Connection:
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
            return idle, idle is None or not idle.load or len(self._connections) >= self.allowed

    def _connect(self, beside: connection.Connection | None) -> None:
        limit = self._limits.connect if beside is None else min(self._limits.another, self._limits.connect)
        try:
            handle, bitmaps = handshake.connect(self._server, self._cancel, limit)
        except errors.Transient as err:
            if beside is None:
                raise
            with self._lock:
                self.allowed = max(1, len(self._connections))
            log.info("no more connections number=%d reason=%s", self.allowed, err)
            return
        made = connection.Connection(handle, self._limits.stall, self._limits.min_speed)
        with contextlib.ExitStack() as undo:
            undo.callback(made.close)
            self._accept(made)
            if beside is None:
                self.bitmaps = bitmaps
            with self._lock:
                if not self._closed:
                    self._connections.append(made)
                    undo.pop_all()

    def _accept(self, made: connection.Connection) -> None:
        """Check that a new connection is to the same disk as the first."""
        if self._size is None:
            self._size = made.size
            self.contexts = frozenset(name for name in self._server.contexts if made.has(name))
            if made.is_shared or self._limits.always:
                self.allowed = self._limits.connections
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
        if is_lost or self.allowed > 1:
            self._drop(used)
        is_violated = used.is_violated if is_lost else error == errno.EPROTO
        if error in _PERMANENT:
            raise Refused(reason=f"{self._server.name}: {doing}: the server refuses it: {reason}")
        kind = errors.Malformed if is_violated else errors.Transient if is_lost else Failed
        raise kind(url=self._server.name, reason=f"{doing}: {reason}")

    # -- lists of extents

    def _list(
        self,
        context: str,
        parts: Iterable[tuple[int, int]] | None,
        *,
        unknown: int = 0,
        is_optional: bool = False,
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (offset, length, flags) of ``context``.

        ``unknown``: flags of bytes that the server does not report; if the list ``is_optional``, also of
        those that it cannot list.
        """
        size = self.open()
        patience = retry.Patience(self._limits.patience, self._cancel, min_speed=self._limits.min_speed)
        requests = covered = failures = 0
        for start, end in [(0, size)] if parts is None else parts:
            offset = start
            while offset < end:
                is_endless = requests > MOST_REQUESTS and covered < requests * extents.SHORTEST_ZERO
                if context not in self.contexts or is_endless or failures >= MOST_FAILURES:
                    yield offset, end - offset, unknown
                    break
                length = min(LONGEST_STATUS, end - offset)
                requests += 1
                try:
                    entries = self._ask(context, offset, length, patience, TRIES if is_optional else 0)
                except (errors.TransferFailed, Failed, Refused, OSError) as err:
                    if not is_optional or isinstance(err.__cause__, errors.Malformed):
                        raise
                    log.warning("no extents at byte %d: %d bytes are read reason=%s", offset, length, err)
                    # A silent server is not asked again.
                    failures += MOST_FAILURES if isinstance(err, errors.TransferFailed) else 1
                    entries = [(length, unknown)]
                for listed, flags in entries:
                    # The last extent may reach beyond the requested range, even beyond the end of the disk.
                    count = min(listed, end - offset)
                    patience.progress(count, self._server.name, offset + count)
                    yield offset, count, flags
                    patience.resume()
                    offset += count
                    covered += count
                    if offset == end:
                        break

    def _ask(
        self, context: str, offset: int, length: int, patience: retry.Patience, tries: int
    ) -> connection.Entries:
        """Return the extents of a range. Retries lost connections, and errors up to ``tries`` requests."""
        answered = 0
        while True:
            try:
                return self._status(context, offset, length)
            except errors.Transient as err:
                answered += isinstance(err, Failed)
                if answered and answered == tries:
                    raise
                patience.wait(err, offset)

    def _status(self, context: str, offset: int, length: int) -> connection.Entries:
        with self._lend(offset, LISTING) as used:
            with self._cancel.ending(functools.partial(self._drop, used)):
                begin, end = _whole_blocks(used, offset, offset + length)
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


def _whole_blocks(used: connection.Connection, start: int, end: int) -> tuple[int, int]:
    """Extend a range to whole blocks of the server; the last bytes of a disk may be less than one."""
    return start - start % used.unit, min(-(-end // used.unit) * used.unit, max(used.size, end))
