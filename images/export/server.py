"""A read-only NBD server, so that qemu-img can read any source with random access.

Simple replies, out of order, on a unix socket in a directory that only this user can access.
https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from cdi_worker import errors
from cdi_worker.images.engine import cancelling, crew
from cdi_worker.images.export import handshake, readahead
from cdi_worker.images.tools import workspace

_REQUEST_MAGIC = 0x25609513
_REPLY_MAGIC = 0x67446698
_REQUEST = struct.Struct(">IHHQQI")
_REPLY = struct.Struct(">IIQ")

_READ, _WRITE, _DISCONNECT, _TRIM, _WRITE_ZEROES = 0, 1, 2, 4, 6

#: Maximum bytes of a request: the protocol recommends that every server supports this.
LONGEST = 32 << 20
# qemu's client rounds the size up to this, and would wait forever for the rest of a shorter reply.
_SECTOR = 512
# Maximum bytes of replies being fetched or sent, for all connections together.
_IN_FLIGHT = 32 << 20
_MOST_CONNECTIONS = 16


class Export:
    """Serve ``size`` bytes, padded with zeros to whole sectors, on the unix socket ``socket``.

    ``parallel`` threads call ``read``; the end of the ``with`` block sets ``scope``, which must end its
    calls. The client gets an error of ``read`` as EIO. The block then raises that error instead of the
    client's.
    """

    def __init__(
        self,
        read: readahead.Read,
        size: int,
        scope: cancelling.Cancel,
        *,
        parallel: int = 8,
    ) -> None:
        self._size = -(-size // _SECTOR) * _SECTOR
        self._cache = readahead.Cache(_padded(read, size), self._size, scope, parallel=parallel)
        self._budget = _Budget(_IN_FLIGHT)
        self._failure: BaseException | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._connections: dict[_Connection, threading.Thread] = {}
        self._directory = workspace.Workspace()
        self.socket = f"{self._directory.name}/nbd"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.socket)
        self._listener.listen()
        self._acceptor = threading.Thread(target=self._accept, name="nbd-accept", daemon=True)

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        is_consequence = error is None or isinstance(error, (errors.ToolFailed, errors.ImageError))
        if self._failure is not None and is_consequence:
            raise self._failure from error

    def _close(self) -> None:
        self._closing = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            connection.shutdown()
        self._cache.close()
        crew.join(list(connections.values()))
        self._directory.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if len(self._connections) >= _MOST_CONNECTIONS:
                    accepted.close()
                    continue
                connection = _Connection(accepted)
                thread = threading.Thread(target=self._serve, args=(connection,), name="nbd", daemon=True)
                self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: _Connection) -> None:
        # A failure of one connection does not affect the others.
        with contextlib.suppress(handshake.Gone, OSError):
            handshake.negotiate(connection, self._size, LONGEST)
            while True:
                self._request(connection)
        connection.close()
        with self._lock:
            del self._connections[connection]

    def _request(self, connection: _Connection) -> None:
        magic, flags, kind, cookie, offset, length = _REQUEST.unpack(connection.receive(_REQUEST.size))
        if magic != _REQUEST_MAGIC or kind == _DISCONNECT or (kind == _WRITE and length > LONGEST):
            raise handshake.Gone
        if kind == _WRITE:
            connection.receive(length)
        if kind in {_WRITE, _TRIM, _WRITE_ZEROES}:
            connection.reply(cookie, errno.EPERM)
        elif kind != _READ or flags or not 0 < length <= LONGEST or offset + length > self._size:
            connection.reply(cookie, errno.EINVAL)
        else:
            self._read(connection, cookie, offset, length)

    def _read(self, connection: _Connection, cookie: int, offset: int, length: int) -> None:
        """Reply now if all bytes are cached, else from the thread that fetches the last of them."""
        self._budget.take(length)
        fetches = self._cache.take(offset, length)

        def answer() -> None:
            connection.reply(cookie, *self._gather(fetches, offset, offset + length))
            self._cache.give(fetches, offset, length)
            self._budget.give(length)

        _when_all_done(fetches, answer)

    def _gather(
        self, fetches: Sequence[readahead.Fetch], start: int, end: int
    ) -> tuple[int, Sequence[memoryview]]:
        try:
            return 0, [fetch.part(start, end) for fetch in fetches]
        except BaseException as err:  # noqa: BLE001  (raised again when the block ends)
            if not self._closing:
                self._failure = self._failure or err
            return errno.EIO, ()


class _Connection(handshake.Connection):
    """A connection to a client in the transmission phase."""

    def reply(self, cookie: int, error: int, data: Sequence[memoryview] = ()) -> None:
        """Answer a request. A closed connection is ignored here, because ``receive`` reports it."""
        with contextlib.suppress(OSError):
            self.send(_REPLY.pack(_REPLY_MAGIC, error, cookie), *data)


def _padded(read: readahead.Read, size: int) -> readahead.Read:
    """Return a read function that returns zeros after ``size`` bytes."""

    def fill(offset: int, into: memoryview) -> None:
        inside = max(0, min(len(into), size - offset))
        if inside:
            read(offset, into[:inside])
        into[inside:] = bytes(len(into) - inside)

    return fill


class _Budget:
    """A limit on the bytes in use; ``take`` waits until enough are free."""

    def __init__(self, total: int) -> None:
        self._left = total
        self._changed = threading.Condition()

    def take(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left >= count)
            self._left -= count

    def give(self, count: int) -> None:
        with self._changed:
            self._left += count
            self._changed.notify_all()


def _when_all_done(fetches: Sequence[readahead.Fetch], act: Callable[[], None]) -> None:
    """Call ``act`` once all fetches are done: now, or from the thread of the last one."""
    missing = [fetch for fetch in fetches if not fetch.future.done()]
    lock = threading.Lock()
    left = len(missing) + 1

    def count(_: object = None) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            act()

    for fetch in missing:
        fetch.future.add_done_callback(count)
    count()
