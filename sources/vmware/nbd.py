"""An NBD client for a server on a unix socket: ranges and extents (libnbd).

Many reads share one connection: with VDDK another connection opens the disk again, which is slow and
limited in number.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import socket
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple

from cdi_worker import errors
from cdi_worker.images.engine import cancelling

# Largest read that all servers support, and largest block status request (32-bit lengths), in bytes.
_LONGEST = 32 << 20
_LONGEST_STATUS = 1 << 30
_ALLOCATION = "base:allocation"
_STATE_ZERO = 2


class Extent(NamedTuple):
    """A range of the disk, in bytes. ``zero``: it reads as zeros."""

    offset: int
    length: int
    zero: bool


class Client:
    """A client of the server at ``path``. Thread-safe. ``name`` is for messages; ``cancel`` aborts all waits.

    Connects when needed, and again after a failed read: then the server opens the disk again, which may help.
    All failures are ``errors.Transient``; the caller decides whether a retry can help.
    """

    def __init__(self, path: str, name: str, cancel: cancelling.Cancel = cancelling.NEVER) -> None:
        self._path = path
        self._name = name
        self._cancel = cancel
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._connection: Connection | None = None
        self._closed = False

    @property
    def size(self) -> int:
        """The size of the disk in bytes."""
        return self._connected().size

    def read_range(self, offset: int, into: memoryview, /) -> int:
        """Read up to ``len(into)`` bytes from ``offset``. Called from several threads at once."""
        into = into[:_LONGEST]
        connection = self._connected()
        # Aborts all reads of the connection: libnbd cannot cancel a single one.
        with self._cancel.ending(functools.partial(self._drop, connection)):
            error = connection.read(offset, into)
        if error:
            self._drop(connection)
            raise errors.Transient(
                url=self._name, reason=f"reading at byte {offset}: {os.strerror(error).lower()}"
            )
        return len(into)

    def extents(self, parts: Iterable[tuple[int, int]] | None = None) -> Generator[Extent] | None:
        """Return the extents of the disk, or of ``parts`` (start, end), in order. None: not supported.

        Uses a connection of its own, which is closed with the iterator.
        """
        handle = self._connect(extents=True)
        if not handle.can_meta_context(_ALLOCATION):
            hang_up(handle)
            return None
        return self._merged(handle, [(0, handle.get_size())] if parts is None else parts)

    def close(self) -> None:
        """Abort the reads of other threads, and refuse new connections."""
        with self._lock:
            self._closed = True
        self._drop(self._connection)

    def _drop(self, connection: Connection | None) -> None:
        """Close ``connection``, unless another thread has already replaced it."""
        with self._lock:
            if connection is None or connection is not self._connection:
                return
            self._connection = None
        connection.close()

    def _connect(self, *, extents: bool = False) -> Any:
        try:
            import nbd
        except ImportError as err:
            raise errors.MissingTool(tool="libnbd for Python", package="python3-libnbd") from err
        handle = nbd.NBD()
        if extents:
            handle.add_meta_context(_ALLOCATION)
        else:
            # A simple reply contains the whole read; libnbd does not notice missing chunks of others.
            handle.set_request_structured_replies(False)
        # The buffer of a failed read is not used: clearing buffers first took 0.2 s of CPU for 2 GiB.
        handle.set_pread_initialize(False)
        with socket.socket(socket.AF_UNIX) as made:
            try:
                made.connect(self._path)
                with self._awaiting(made.fileno()):
                    handle.connect_socket(made.detach())
            except OSError as err:
                reason = f"connect: {errors.words(err)}"
                raise errors.Transient(url=self._name, reason=reason) from err
            except nbd.Error as err:
                raise errors.Transient(url=self._name, reason=err.string) from err
        return handle

    def _connected(self) -> Connection:
        with self._connecting:
            connection = self._connection
            if connection is not None and not connection.dead:
                return connection
            made = Connection(self._connect())
            with self._lock:
                if not self._closed:
                    self._connection = made
                    return made
        made.close()
        raise errors.Transient(url=self._name, reason="closed")

    @contextlib.contextmanager
    def _awaiting(self, fd: int) -> Iterator[None]:
        """Let ``cancel`` abort a blocking call on the socket ``fd`` in the block."""
        with (
            socket.socket(fileno=os.dup(fd)) as sock,
            self._cancel.ending(lambda: sock.shutdown(socket.SHUT_RDWR)),
        ):
            yield

    def _merged(self, handle: Any, parts: Iterable[tuple[int, int]]) -> Generator[Extent]:
        try:
            last = Extent(0, 0, zero=False)
            for extent in (each for part in parts for each in self._asked(handle, *part)):
                adjoins = extent.zero == last.zero and extent.offset == last.offset + last.length
                # Data is yielded early: it can be read during the next request.
                if adjoins and (last.zero or last.length < _LONGEST_STATUS):
                    last = last._replace(length=last.length + extent.length)
                    continue
                if last.length:
                    yield last
                last = extent
            if last.length:
                yield last
        finally:
            hang_up(handle)

    def _asked(self, handle: Any, offset: int, end: int) -> Iterator[Extent]:
        while offset < end:
            entries = self._status(handle, offset, min(_LONGEST_STATUS, end - offset))
            start = offset
            for length, flags in zip(entries[::2], entries[1::2], strict=True):
                # The last extent may reach beyond the requested range, even beyond the end of the disk.
                length = min(length, end - offset)  # noqa: PLW2901  (clipped)
                yield Extent(offset, length, bool(flags & _STATE_ZERO))
                offset += length
            if offset == start:
                raise errors.SourceError(
                    reason=f"{self._name}: the server returned no extents at byte {offset}"
                )

    def _status(self, handle: Any, offset: int, length: int) -> list[int]:
        import nbd

        found: list[int] = []

        def take(_context: str, _offset: int, entries: list[int], _error: object) -> int:
            found.extend(entries)
            return 0

        try:
            with self._awaiting(handle.aio_get_fd()):
                handle.block_status(length, offset, take)
        except nbd.Error as err:
            raise errors.Transient(url=self._name, reason=err.string) from err
        return found


#: Size of reads that discard the rest of a connection, in bytes.
_REST = 256 << 10
# LIBNBD_AIO_DIRECTION_READ and _WRITE.
_READ, _WRITE = 1, 2


def hang_up(handle: Any) -> None:
    """Close the connection without waiting for the server. libnbd's shutdown waits."""
    import nbd

    with contextlib.suppress(nbd.Error), socket.socket(fileno=os.dup(handle.aio_get_fd())) as sock:
        sock.shutdown(socket.SHUT_RDWR)


class Connection:
    """A connection, with a thread for its I/O. Thread-safe."""

    def __init__(self, handle: Any) -> None:
        self.size: int = handle.get_size()
        self.dead = False
        self._leaving = False
        self._handle = handle
        self._pending: set[_Pending] = set()
        self._lock = threading.Lock()
        self._wake = os.eventfd(0)
        # A duplicate of the socket, usable after libnbd has closed its own.
        self._socket = socket.socket(fileno=os.dup(handle.aio_get_fd()))
        self._left = threading.Event()
        threading.Thread(target=self._run, name="nbd-client", daemon=True).start()

    def read(self, offset: int, into: memoryview) -> int:
        """Fill ``into``; return 0 or an errno. ``into`` is not written to after the return."""
        import nbd

        pending = _Pending()
        with self._lock:
            if self.dead:
                return errno.ENOTCONN
            self._pending.add(pending)
            try:
                self._handle.aio_pread(nbd.Buffer.from_buffer(into), offset, completion=pending.complete)
            except nbd.Error as err:
                pending.end(err.errnum or errno.EIO)
            os.eventfd_write(self._wake, 1)
        pending.done.wait()
        with self._lock:
            # Under the lock: ``_run`` iterates over the set at the end.
            self._pending.discard(pending)
        return pending.error

    def close(self) -> None:
        """Abort the reads in progress. Later replies of the server are discarded."""
        with self._lock:
            if not self.dead:
                self._leaving = True
                os.eventfd_write(self._wake, 1)
        self._left.wait()

    def _run(self) -> None:
        import nbd

        try:
            while not (self._leaving or self._handle.aio_is_dead() or self._handle.aio_is_closed()):
                self._turn()
        except nbd.Error:
            # The server violated the protocol, or closed the connection within a reply.
            pass
        with self._lock:
            self.dead = True
            for pending in self._pending:
                pending.end(errno.ENOTCONN)
            os.close(self._wake)
        self._left.set()
        self._part()

    def _part(self) -> None:
        """Discard remaining replies until the server closes.

        nbdkit aborts with a failed assertion, and the disk open, if two replies fail to be sent.
        """
        rest = bytearray(_REST)
        with self._socket, contextlib.suppress(OSError):
            self._socket.setblocking(True)
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv_into(rest):
                pass

    def _turn(self) -> None:
        direction = self._handle.aio_get_direction()
        wanted = (select.POLLIN if direction & _READ else 0) | (select.POLLOUT if direction & _WRITE else 0)
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._socket, wanted)
        events = dict(poll.poll())
        if self._wake in events:
            os.eventfd_read(self._wake)
        happened = events.get(self._socket.fileno(), 0)
        if happened & ~select.POLLOUT and direction & _READ:
            self._handle.aio_notify_read()
        elif happened and direction & _WRITE:
            self._handle.aio_notify_write()


class _Pending:
    """A read in progress. ``complete`` is libnbd's callback."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error = 0

    def complete(self, error: Any) -> int:
        self.end(error.value)
        # 1: libnbd retires the command itself.
        return 1

    def end(self, error: int) -> None:
        if not self.done.is_set():
            self.error = error
            self.done.set()
