"""A read-only NBD server for qemu-img: to it, anything that can be read at random is a file.

Simple replies, out of order, on a unix socket that only this user can reach.
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
from cdi_worker.images.tools import process

_REQUEST_MAGIC = 0x25609513
_REPLY_MAGIC = 0x67446698
_REQUEST = struct.Struct(">IHHQQI")
_REPLY = struct.Struct(">IIQ")

_READ, _WRITE, _DISCONNECT, _TRIM, _WRITE_ZEROES = 0, 1, 2, 4, 6

#: The longest request that is answered, in bytes: what the protocol wants every server to grant.
LONGEST = 32 << 20
# qemu's client rounds the size up to this, and then waits for ever for the rest of a simple reply.
_SECTOR = 512
# Bytes of replies being gathered or sent, over all connections.
_IN_FLIGHT = 32 << 20
_MOST_CONNECTIONS = 16


class Export:
    """Serve ``size`` bytes, and zeros to the end of a sector; ``socket`` is the path to connect to.

    ``read`` is called from ``parallel`` threads; the end of the block sets ``scope``, to end its calls. Its
    error reaches the client as EIO, and leaves the block in place of what the client made of it.
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
        self._directory = process.workspace()
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
        made_of_it = error is None or isinstance(error, (errors.ToolFailed, errors.ImageError))
        if self._failure is not None and made_of_it:
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
        # Whatever goes wrong with a client ends that client only.
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
        """Reply now if all is at hand, else leave that to the thread that brings the last part."""
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
    """One client: requests come in one thread, replies go out whole from any."""

    def reply(self, cookie: int, error: int, data: Sequence[memoryview] = ()) -> None:
        """Answer a request. The client may have left without waiting: its thread finds that out."""
        with contextlib.suppress(OSError):
            self.send(_REPLY.pack(_REPLY_MAGIC, error, cookie), *data)


def _padded(read: readahead.Read, size: int) -> readahead.Read:
    """Return a read that goes on with zeros behind ``size``."""

    def fill(offset: int, into: memoryview) -> None:
        inside = max(0, min(len(into), size - offset))
        if inside:
            read(offset, into[:inside])
        into[inside:] = bytes(len(into) - inside)

    return fill


class _Budget:
    """Bytes that may be held at once; ``take`` waits until they are there."""

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
    """Call ``act`` once: from here, or from the thread that brings the last bytes."""
    missing = [fetch for fetch in fetches if not fetch.done]
    lock = threading.Lock()
    left = len(missing) + 1

    def count() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            act()

    for fetch in missing:
        fetch.when_done(count)
    count()
