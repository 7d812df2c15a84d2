"""A read-only NBD server, so that qemu-img can read any source with random access.

One export without a name, fixed newstyle handshake, simple replies, out of order, on a unix socket in a
directory that only this user can access. It has what qemu uses: of the options only NBD_OPT_GO.
https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Self

from cdi_worker import errors
from cdi_worker.images.engine import cancelling, crew
from cdi_worker.images.export import readahead
from cdi_worker.images.tools import workspace

_INIT_MAGIC = b"NBDMAGIC"
_OPTION_MAGIC = b"IHAVEOPT"
_OPTION_REPLY_MAGIC = 0x0003E889045565A9
_OPTION = struct.Struct(">8sII")
_OPTION_REPLY = struct.Struct(">QIII")

_FIXED_NEWSTYLE, _NO_ZEROES = 1, 2
_HAS_FLAGS, _READ_ONLY, _CAN_MULTI_CONN = 1, 2, 1 << 8
_ABORT, _GO = 2, 7
_ACK, _INFO, _UNSUPPORTED, _INVALID = 1, 3, (1 << 31) + 1, (1 << 31) + 3
_INFO_EXPORT, _INFO_BLOCK_SIZE = 0, 3

_REQUEST_MAGIC = 0x25609513
_REPLY_MAGIC = 0x67446698
_REQUEST = struct.Struct(">IHHQQI")
_REPLY = struct.Struct(">IIQ")

_READ = 0

#: Maximum bytes of a request: the protocol recommends that every server supports this.
LONGEST = 32 << 20
# qemu's client rounds the size up to this, and would wait forever for the rest of a shorter reply.
_SECTOR = 512
# Maximum bytes of replies being fetched or sent, for all connections together.
_IN_FLIGHT = 32 << 20
_MOST_CONNECTIONS = 16
# A client that asks for more is not qemu.
_LONGEST_OPTION, _MOST_OPTIONS = 8 << 10, 64


class NbdServer:
    """Serve ``size`` bytes, padded with zeros to whole sectors, on the unix socket ``socket``.

    ``parallel`` threads call ``read``; the end of the ``with`` block sets ``scope``, which must end its
    calls. The client gets an error of ``read`` as EIO. The block then raises that error instead of the
    client's.
    """

    def __init__(
        self, read: readahead.ReadInto, size: int, scope: cancelling.Cancel, *, parallel: int = 8
    ) -> None:
        self._size = -(-size // _SECTOR) * _SECTOR

        def fill(offset: int, into: memoryview) -> None:
            """Read, with zeros after ``size`` bytes."""
            inside = max(0, min(len(into), size - offset))
            if inside:
                read(offset, into[:inside])
            into[inside:] = bytes(len(into) - inside)

        self._cache = readahead.Cache(fill, self._size, scope, parallel=parallel)
        #: Bytes of replies that may be fetched or sent besides those that are.
        self._free = _IN_FLIGHT
        self._freed = threading.Condition()
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

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
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
        is_consequence = error is None or isinstance(error, (errors.ToolFailed, errors.ImageError))
        if self._failure is not None and is_consequence:
            raise self._failure from error

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
        with contextlib.suppress(_Gone, OSError):
            _negotiate(connection, self._size)
            while True:
                magic, flags, kind, cookie, offset, length = _REQUEST.unpack(
                    connection.receive(_REQUEST.size)
                )
                # qemu sends no other request to a read-only export, and ends with one.
                if magic != _REQUEST_MAGIC or kind != _READ or flags:
                    raise _Gone
                if not 0 < length <= LONGEST or offset + length > self._size:
                    raise _Gone
                self._read(connection, cookie, offset, length)
        connection.close()
        with self._lock:
            del self._connections[connection]

    def _read(self, connection: _Connection, cookie: int, offset: int, length: int) -> None:
        """Reply now if all bytes are cached, else from the thread that fetches the last of them."""
        with self._freed:
            self._freed.wait_for(lambda: self._free >= length)
            self._free -= length
        fetches = self._cache.take(offset, length)

        def answer() -> None:
            try:
                error, parts = 0, [fetch.part(offset, offset + length) for fetch in fetches]
            except BaseException as err:  # noqa: BLE001  (raised again when the block ends)
                if not self._closing:
                    self._failure = self._failure or err
                error, parts = errno.EIO, []
            # That the connection is closed is noticed where requests are received.
            with contextlib.suppress(OSError):
                connection.send(_REPLY.pack(_REPLY_MAGIC, error, cookie), *parts)
            self._cache.give(fetches, offset, length)
            with self._freed:
                self._free += length
                self._freed.notify_all()

        _when_all_done(fetches, answer)


class _Gone(Exception):
    """The client closed the connection or violated the protocol."""


class _Connection:
    """A connection to a client: one thread receives, any thread sends whole messages."""

    def __init__(self, accepted: socket.socket) -> None:
        self._socket = accepted
        self._requests = accepted.makefile("rb", 64 << 10)
        self._lock = threading.Lock()

    def receive(self, length: int) -> bytes:
        """Return exactly ``length`` bytes. Raises ``_Gone`` at the end of the connection."""
        data: bytes = self._requests.read(length)
        if len(data) < length:
            raise _Gone
        return data

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all parts as one message. Thread-safe."""
        with self._lock:
            for part in parts:
                self._socket.sendall(part)

    def shutdown(self) -> None:
        """End ``receive`` and ``send`` in all threads."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shutdown()
        # The descriptor must not be closed, and its number reused, while another thread sends to it.
        with self._lock:
            self._requests.close()
            self._socket.close()


def _negotiate(connection: _Connection, size: int) -> None:
    """Answer options until the client selects the export of ``size`` bytes. Raises ``_Gone``."""
    connection.send(_INIT_MAGIC, _OPTION_MAGIC, struct.pack(">H", _FIXED_NEWSTYLE | _NO_ZEROES))
    (flags,) = struct.unpack(">I", connection.receive(4))
    if flags & ~(_FIXED_NEWSTYLE | _NO_ZEROES):
        raise _Gone
    for _ in range(_MOST_OPTIONS):
        magic, option, length = _OPTION.unpack(connection.receive(_OPTION.size))
        if magic != _OPTION_MAGIC or length > _LONGEST_OPTION or option == _ABORT:
            raise _Gone
        data = connection.receive(length)

        def reply(kind: int, data: bytes = b"", option: int = option) -> None:
            connection.send(_OPTION_REPLY.pack(_OPTION_REPLY_MAGIC, option, kind, len(data)), data)

        # The length of the name, the name, the number of requested infos (16 bits each).
        is_ours = data[:4] == bytes(4) and len(data) == 6 + 2 * int.from_bytes(data[4:6], "big")
        if option == _GO and is_ours:
            about = _HAS_FLAGS | _READ_ONLY | _CAN_MULTI_CONN
            reply(_INFO, struct.pack(">HQH", _INFO_EXPORT, size, about))
            # Minimum block size 1: formats have tables at any offset.
            reply(_INFO, struct.pack(">HIII", _INFO_BLOCK_SIZE, 1, 4096, LONGEST))
            reply(_ACK)
            return
        reply(_INVALID if option == _GO else _UNSUPPORTED)
    raise _Gone


def _when_all_done(fetches: Sequence[readahead.CachedRange], act: Callable[[], None]) -> None:
    """Call ``act`` once all fetches are done: now, or from the thread of the last one."""
    missing = next((fetch for fetch in fetches if not fetch.future.done()), None)
    if missing is None:
        act()
    else:
        missing.future.add_done_callback(lambda _: _when_all_done(fetches, act))
