"""One TLS connection to the upload server: bytes, straight into the caller's memory."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from importer import upload_tls

#: Seconds after which what has come is handed on, though there is room for more.
QUIET = 0.005
#: Bytes that are received at once where it is not known how many belong together: one record of TLS.
RECORD = 16 << 10
#: Seconds for the other end to take an answer.
SEND = 10.0
#: Seconds for the other end to close its side.
FAREWELL = 1.0

T = TypeVar("T")


class Interrupted(ConnectionError):
    """Somebody here wants nothing more from this connection."""

    def __init__(self) -> None:
        super().__init__("the server goes on without this connection")


class Connection:
    """Blocks, with a limit on every wait. For one thread at a time; ``interrupt`` may come from any.

    The socket itself never blocks: a wait looks at an event beside it, so that a read can be ended without
    breaking TLS, and an answer still be given. All limits are in seconds. Raises ``OSError``.
    """

    def __init__(self, plain: socket.socket, context: ssl.SSLContext) -> None:
        plain.setblocking(False)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._tls = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._interrupted = False
        self._closed = False
        self._ahead = b""

    def shake_hands(self, limit: float) -> None:
        """Begin TLS."""
        self._until(self._tls.do_handshake, limit)

    @property
    def client_name(self) -> str:
        """The common name in the client's certificate, which was verified; empty without one."""
        return upload_tls.common_name(self._tls.getpeercert())

    # -- receiving

    def readinto(self, into: memoryview, limit: float) -> int:
        """Receive until ``into`` is full or nothing comes for a moment; 0: the client has closed.

        ``limit`` is for the first byte.
        """
        filled = min(len(self._ahead), len(into))
        if filled:
            into[:filled] = self._ahead[:filled]
            self._ahead = self._ahead[filled:]
        while filled < len(into):
            try:
                receive = functools.partial(self._tls.recv_into, into[filled:])
                count = self._until(receive, QUIET if filled else limit)
            except OSError:
                if filled:  # what breaks it now does so again
                    break
                raise
            if not count:
                break
            filled += count
        return filled

    def some(self, limit: float) -> bytes:
        """Return what comes first; empty: the client has closed."""
        if not self._ahead:
            return self._until(lambda: self._tls.recv(RECORD), limit)
        found, self._ahead = self._ahead, b""
        return found

    def line(self, longest: int, limit: float) -> bytes:
        """Return a line without its end; what has come of it stays for the next call if there is none yet."""
        while (end := self._ahead.find(b"\r\n", 0, longest + 2)) < 0:
            if len(self._ahead) > longest + 1:
                raise ConnectionError(f"a line is longer than {longest} bytes")
            more = self._until(lambda: self._tls.recv(RECORD), limit)
            if not more:
                raise ConnectionError("the client has gone within a line")
            self._ahead += more
        found, self._ahead = self._ahead[:end], self._ahead[end + 2 :]
        return found

    def put_back(self, data: bytes) -> None:
        """Let ``data`` be what is received next."""
        self._ahead = data + self._ahead

    def drain(self, limit: float) -> None:
        """Throw away what comes in that time, also after an interruption."""
        waste = memoryview(bytearray(1 << 20))
        deadline = time.monotonic() + limit
        with contextlib.suppress(OSError):
            while (left := deadline - time.monotonic()) > 0:
                if not self._until(lambda: self._tls.recv_into(waste), left, heed=False):
                    return

    # -- sending and ending

    def send(self, data: bytes) -> None:
        """Send all of it, also after an interruption."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._until(functools.partial(self._tls.send, rest), SEND, heed=False) :]

    def interrupt(self) -> None:
        """End the read that waits in another thread, and all that follow."""
        with self._lock:
            self._interrupted = True
            if not self._closed:
                os.eventfd_write(self._event, 1)

    @property
    def interrupted(self) -> bool:
        return self._interrupted

    def close(self) -> None:
        """Take leave, and close."""
        with contextlib.suppress(OSError, ValueError):
            self._tls.unwrap()
        with contextlib.suppress(OSError):
            self._tls.shutdown(socket.SHUT_WR)
            if not self._interrupted:
                # Closed with something unread, the kernel would have the client forget our last answer.
                self.drain(FAREWELL)
        with self._lock:
            self._closed = True
            os.close(self._event)
        self._tls.close()

    # -- waiting

    def _until(self, step: Callable[[], T], limit: float, *, heed: bool = True) -> T:
        deadline = time.monotonic() + limit
        while True:
            # Also where there is no need to wait: a client may never be silent.
            if heed and self._interrupted:
                raise Interrupted
            try:
                return step()
            except (ssl.SSLWantReadError, BlockingIOError):
                wanted = select.POLLIN
            except ssl.SSLWantWriteError:
                wanted = select.POLLOUT
            if not self._ready(wanted, max(0.0, deadline - time.monotonic()), heed=heed):
                raise TimeoutError(f"no answer within {limit:g} s")

    def _ready(self, wanted: int, limit: float, *, heed: bool = True) -> bool:
        """Wait for the socket; False: not in that time. ``heed``: raise ``Interrupted`` if it is."""
        both = select.poll()
        both.register(self._tls, wanted)
        if heed:
            both.register(self._event, select.POLLIN)
        found = both.poll(limit * 1000)
        if any(fd == self._event for fd, _ in found):
            raise Interrupted
        return bool(found)
