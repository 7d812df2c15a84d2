"""One NBD connection with many requests in flight (libnbd)."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from cdi_worker.scratch import ranges
from cdi_worker.sources.nbd import handshake

#: Bytes of the largest read that all servers support (doc/proto.md, Size constraints).
LONGEST = 32 << 20
#: Bytes of the largest unit that a server may require; the protocol allows no more.
LARGEST_UNIT = 64 << 10
#: The most chunks of a reply: each sector one, and errors.
MOST_CHUNKS = LONGEST // 512 + 100
#: The most extents of one reply; QEMU returns at most 1/8 of them.
MOST_EXTENTS = 1 << 20
#: Bytes per second: a reply that brings less, for longer than the stall timeout, is given up. It may consist
#: of chunks without data, or of errors, without end.
SLOWEST = 64 << 10
#: Seconds for which libnbd may keep on reading, before its socket is shut down. It reads what there is.
_NOTICE = 5.0
#: Size of reads that discard the rest of a connection, in bytes, and seconds for which they last.
_REST, _PARTING = 256 << 10, 60.0

#: libnbd's messages for the end of a connection. Like those for a malformed reply they have no errno.
_CUT = re.compile("disconnected|gnutls", re.IGNORECASE)

#: The extents of a context: lengths in bytes and flags.
Entries = list[tuple[int, int]]


class Connection:
    """A connection, with a thread for its I/O. Thread-safe.

    ``stall``: seconds without a byte of a reply after which it is given up. ``min_speed``: bytes per second,
    on average over ``stall`` and the time for what is requested at ``SLOWEST``. ``load``: for its users.
    """

    def __init__(self, handle: Any, stall: float, min_speed: float) -> None:
        self.load = 0
        self.dead = False
        #: Why it is dead, and whether a reply was not NBD.
        self.failure = "the server closed the connection"
        self.is_violated = False
        self.size: int = handle.get_size()
        self.is_shared: bool = handle.can_multi_conn()
        self.is_read_only: bool = handle.is_read_only()
        self.can_zero: bool = handle.can_zero()
        self.can_flush: bool = handle.can_flush()
        nbd = handshake.library()
        unit = handle.get_block_size(nbd.SIZE_MINIMUM)
        #: Reads begin and end at multiples of it, except at the end of the disk.
        self.unit = unit if 0 < unit <= LARGEST_UNIT else 1
        most = handle.get_block_size(nbd.SIZE_MAXIMUM)
        #: Bytes of the longest read or write, a multiple of ``unit``.
        self.longest = max(self.unit, min(most or LONGEST, LONGEST) // self.unit * self.unit)
        self._handle = handle
        self._stall = stall
        self._heard = time.monotonic()
        #: When a reply last brought data, extents, or its end.
        self._useful = _Clock(min_speed)
        self._leaving = False
        self._pending: set[_Pending] = set()
        self._lock = threading.Lock()
        self._wake = os.eventfd(0)
        # A duplicate of the socket, usable after libnbd has closed its own.
        self._socket = socket.socket(fileno=os.dup(handle.aio_get_fd()))
        self._left = threading.Event()
        threading.Thread(target=self._run, name="nbd-client", daemon=True).start()

    def has(self, context: str) -> bool:
        """Return whether the server has a metadata context that was requested."""
        return bool(self._handle.can_meta_context(context))

    def read(self, offset: int, into: memoryview) -> int:
        """Fill ``into``; return 0 or an errno. ``into`` is not written to after the return.

        libnbd gets a view, no ``nbd.Buffer``: each request would leave a reference to what that shares
        (libnbd 1.14).
        """
        pending = _Pending(self._socket, self._useful, offset, len(into))
        return self._request(pending, self._handle.aio_pread_structured, into, offset, pending.chunk)

    def write(self, offset: int, data: memoryview) -> int:
        """Write ``data``; return 0 or an errno."""
        pending = _Pending(self._socket, self._useful)
        return self._request(pending, self._handle.aio_pwrite, data, offset)

    def zero(self, offset: int, length: int, *, allocate: bool) -> int:
        """Zero a range; return 0 or an errno. ``allocate``: the server must not make a hole of it."""
        flags = handshake.library().CMD_FLAG_NO_HOLE if allocate else 0
        pending = _Pending(self._socket, self._useful)
        return self._request(pending, functools.partial(self._handle.aio_zero, flags=flags), length, offset)

    def flush(self) -> int:
        """Write what was written to stable storage; return 0 or an errno."""
        return self._request(_Pending(self._socket, self._useful), self._handle.aio_flush)

    def status(self, offset: int, length: int) -> tuple[int, dict[str, Entries]]:
        """Return 0 or an errno, and the extents of each context from ``offset``."""
        found: dict[str, Entries] = {}
        pending = _Pending(self._socket, self._useful)

        def take(context: str, _offset: int, entries: list[int], _error: object) -> int:
            pending.useful.tick()
            if context in found or len(entries) > 2 * MOST_EXTENTS:
                pending.refuse()
            else:
                found[context] = list(zip(entries[::2], entries[1::2], strict=True))
            return 0

        return self._request(pending, self._handle.aio_block_status, length, offset, take), found

    def _request(self, pending: _Pending, send: Callable[..., object], *arguments: object) -> int:
        """Send a request and wait for its reply; return 0 or an errno."""
        nbd = handshake.library()
        with self._lock:
            if self.dead:
                return errno.ENOTCONN
            if not self._pending:
                self._heard = time.monotonic()
                self._useful.tick()
            self._pending.add(pending)
            try:
                send(*arguments, pending.complete)
            except nbd.Error as err:
                # libnbd reads replies here, too. A handle without a connection is EINVAL.
                is_lost = self._handle.aio_is_dead() or self._handle.aio_is_closed()
                if is_lost and not err.errnum:
                    self._broke(err)
                pending.end(errno.ENOTCONN if is_lost else err.errnum or errno.EIO)
            os.eventfd_write(self._wake, 1)
        while not pending.done.wait(self._stall):
            # libnbd does not return to ``_turn`` within a reply that never ends, and may bring nothing.
            now, longest = time.monotonic(), self._stall + _NOTICE
            with self._lock:
                owed = sum(each.length for each in self._pending if not each.done.is_set())
            if now - self._heard > longest or now - self._useful.at > longest + owed / SLOWEST:
                _shut(self._socket)
        if pending.error == errno.ENOTCONN:
            # libnbd ends the requests before ``_run`` knows why.
            self._left.wait(_NOTICE)
        with self._lock:
            # Under the lock: ``_run`` iterates over the set at the end.
            self._pending.discard(pending)
        return errno.EMSGSIZE if pending.is_refused else pending.error

    def close(self) -> None:
        """Abort the requests in progress. Later replies of the server are discarded."""
        with self._lock:
            if not self.dead:
                self._leaving = True
                os.eventfd_write(self._wake, 1)
        if not self._left.wait(_NOTICE):
            # libnbd does not return while bytes arrive.
            _shut(self._socket)
            self._left.wait()

    def _run(self) -> None:
        nbd = handshake.library()
        try:
            while not (self._leaving or self._handle.aio_is_dead() or self._handle.aio_is_closed()):
                self._turn()
        except TimeoutError:
            self.failure = f"no answer within {self._stall:.0f} s"
        except nbd.Error as err:
            self._broke(err)
        with self._lock:
            self.dead = True
            for pending in self._pending:
                pending.end(errno.ENOTCONN)
            os.close(self._wake)
        self._left.set()
        # Discard remaining replies until the server closes: nbdkit aborts with a failed assertion, and the
        # disk open, if two replies fail to be sent.
        rest = bytearray(_REST)
        deadline = time.monotonic() + _PARTING
        with self._socket, contextlib.suppress(OSError):
            self._socket.settimeout(_PARTING)
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv_into(rest) and time.monotonic() < deadline:
                pass

    def _broke(self, err: Any) -> None:
        """Note why libnbd has given the connection up: it was cut, or a reply is not NBD."""
        words = handshake.words(err)
        self.is_violated = not err.errnum and not _CUT.search(words)
        what = "the reply is malformed" if self.is_violated else "the connection broke"
        self.failure = f"{what} ({words})"

    def _turn(self) -> None:
        """Wait for libnbd's next event, or until a reply is overdue; without requests, without limit."""
        milliseconds = None
        with self._lock:
            is_waiting = any(not pending.done.is_set() for pending in self._pending)
        if is_waiting:
            milliseconds = (self._heard + self._stall - time.monotonic()) * 1000
            if milliseconds <= 0:
                raise TimeoutError
        ready = handshake.step(self._handle, self._socket.fileno(), self._wake, milliseconds)
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if self._socket.fileno() in ready:
            self._heard = time.monotonic()


class _Clock:
    """A time that callbacks of libnbd set. It keeps no connection open."""

    def __init__(self, min_speed: float) -> None:
        self._min_speed = min_speed
        self.tick()

    def tick(self) -> None:
        self.at = time.monotonic()
        self._bytes = 0

    def count(self, count: int) -> None:
        """Add bytes of data; set the time if they are not too slow."""
        self._bytes += count
        if self._bytes >= self._min_speed * (time.monotonic() - self.at):
            self.tick()


class _Pending:
    """A request in progress. ``chunk`` and ``complete`` are libnbd's callbacks.

    libnbd keeps them: a reference to the connection would keep that open. ``offset``, ``length``: the bytes
    of a read, each of which must be in exactly one chunk. libnbd counts at most their number. ``useful`` is
    set when the reply brings data or ends.
    """

    def __init__(self, connected: socket.socket, useful: _Clock, offset: int = 0, length: int = 0) -> None:
        self.done = threading.Event()
        self.error = 0
        self._offset = offset
        self.length = length
        self.useful = useful
        self._arrived = ranges.Ranges()
        self._chunks = MOST_CHUNKS
        self._socket = connected
        #: The server has sent more than was requested, or a part of it twice.
        self.is_refused = False

    def refuse(self) -> None:
        """End the connection within a callback: an endless reply keeps libnbd from returning."""
        self.is_refused = True
        _shut(self._socket)

    def chunk(self, data: memoryview, offset: int, _status: int, _error: object) -> int:
        start = offset - self._offset
        end = start + len(data)
        is_new = start >= end or self._arrived.missing(start, end) == [(start, end)]
        self._arrived.add(start, end)
        self._chunks -= 1
        if data:
            self.useful.count(len(data))
        if not is_new or end > self.length or self._chunks < 0:
            self.refuse()
        return 0

    def complete(self, error: Any) -> int:
        # libnbd does not notice chunks that a reply omits.
        self.useful.tick()
        self.end(error.value or (0 if self._arrived.is_all(self.length) else errno.EPROTO))
        # 1: libnbd retires the command itself.
        return 1

    def end(self, error: int) -> None:
        if not self.done.is_set():
            self.error = error
            self.done.set()


def _shut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
