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
from typing import TypeVar, cast

from cdi_worker.upload import tls

#: Seconds after which what has come is handed on, though there is room for more.
QUIET = 0.005
#: Bytes that are taken from the network at once: a call of the kernel for each record of TLS, as OpenSSL
#: makes two of by itself, took a tenth of the time of a clone.
WINDOW = 256 << 10
#: Bytes that have to come for a reader of many to be woken.
WORTH = 128 << 10
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

    TLS is between two places in memory, the socket beside them never blocks: a wait looks at an event too,
    so that a read can be ended without breaking TLS, and an answer still be given. All limits are in
    seconds. Raises ``OSError``.
    """

    def __init__(self, plain: socket.socket, context: ssl.SSLContext) -> None:
        plain.setblocking(False)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = plain
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=True)
        self._window = memoryview(bytearray(WINDOW))
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)
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
        return tls.common_name(self._tls.getpeercert())

    # -- receiving

    def readinto(self, into: memoryview, limit: float) -> int:
        """Receive until ``into`` is full or nothing comes for a moment; 0: the client has closed.

        ``limit`` is for the first byte.
        """
        if self._interrupted:
            raise Interrupted
        filled = min(len(self._ahead), len(into))
        if filled:
            into[:filled] = self._ahead[:filled]
            self._ahead = self._ahead[filled:]
        while filled < len(into):
            try:
                count = self._receive(into[filled:], QUIET if filled else limit)
            except OSError:
                if filled:  # what breaks it now does so again
                    break
                raise
            if not count:
                break
            filled += count
        return filled

    def _receive(self, into: memoryview, limit: float) -> int:
        while True:
            try:
                # With a buffer it returns a number, other than its types say.
                return cast(int, self._tls.read(len(into), into))
            except ssl.SSLWantReadError:
                self._more(len(into), limit)
            except ssl.SSLEOFError:
                return 0

    def some(self, limit: float) -> bytes:
        """Return what comes first; empty: the client has closed."""
        if not self._ahead:
            return self._record(limit)
        found, self._ahead = self._ahead, b""
        return found

    def line(self, longest: int, limit: float) -> bytes:
        """Return a line without its end; what has come of it stays for the next call if there is none yet."""
        while (end := self._ahead.find(b"\r\n", 0, longest + 2)) < 0:
            if len(self._ahead) > longest + 1:
                raise ConnectionError(f"a line is longer than {longest} bytes")
            more = self._record(limit)
            if not more:
                raise ConnectionError("the client has gone within a line")
            self._ahead += more
        found, self._ahead = self._ahead[:end], self._ahead[end + 2 :]
        return found

    def put_back(self, data: bytes) -> None:
        """Let ``data`` be what is received next."""
        self._ahead = data + self._ahead

    def drain(self, limit: float) -> None:
        """Throw away all that comes in that time, also after an interruption. Nothing can be read then."""
        deadline = time.monotonic() + limit
        with contextlib.suppress(OSError):
            while (left := deadline - time.monotonic()) > 0 and self._take(left, heed=False):
                pass

    # -- sending and ending

    def send(self, data: bytes) -> None:
        """Send all of it, also after an interruption."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._until(functools.partial(self._tls.write, rest), SEND, heed=False) :]

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
            with contextlib.suppress(ssl.SSLWantReadError):
                self._tls.unwrap()
            self._flush(FAREWELL)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            if not self._interrupted:
                # Closed with something unread, the kernel would have the client forget our last answer.
                self.drain(FAREWELL)
        with self._lock:
            self._closed = True
            os.close(self._event)
        self._socket.close()

    # -- between TLS and the network

    def _record(self, limit: float) -> bytes:
        try:
            return self._until(functools.partial(self._tls.read, RECORD), limit)
        except ssl.SSLEOFError:
            return b""

    def _until(self, step: Callable[[], T], limit: float, *, heed: bool = True) -> T:
        """Take a step of TLS, with what it needs from the other end and has to tell it."""
        deadline = time.monotonic() + limit
        while True:
            # Also where there is no need to wait: a client may never be silent.
            if heed and self._interrupted:
                raise Interrupted
            try:
                done = step()
            except ssl.SSLWantReadError:
                self._flush(SEND)
                self._more(0, deadline - time.monotonic(), heed=heed)
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush(SEND)  # it says why
                raise
            else:
                self._flush(SEND)
                return done

    def _more(self, room: int, limit: float, *, heed: bool = True) -> None:
        """Give TLS what comes next; where there is ``room`` for much, wait a moment for as much."""
        if count := self._take(limit, room, heed=heed):
            self._received.write(self._window[:count])
        else:
            self._received.write_eof()

    def _take(self, limit: float, room: int = 0, *, heed: bool) -> int:
        """Receive into the window; 0: the client has closed."""
        while True:
            if heed and self._interrupted:
                raise Interrupted
            with contextlib.suppress(BlockingIOError):
                return self._socket.recv_into(self._window)
            if room >= WORTH:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, WORTH)
                try:
                    self._ready(select.POLLIN, QUIET, heed=heed)
                finally:
                    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            if not self._ready(select.POLLIN, limit, heed=heed):
                raise TimeoutError(f"nothing came for {limit:g} s")

    def _flush(self, limit: float) -> None:
        rest = memoryview(self._to_send.read()) if self._to_send.pending else b""
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                if not self._ready(select.POLLOUT, limit, heed=False):
                    raise TimeoutError(f"the client takes nothing for {limit:g} s") from None

    def _ready(self, wanted: int, limit: float, *, heed: bool) -> bool:
        """Wait for the socket; False: not in that time. ``heed``: raise ``Interrupted`` if it is."""
        waiting = self._poll if heed else select.poll()
        waiting.register(self._socket, wanted)
        found = waiting.poll(max(0.0, limit) * 1000)
        if any(fd == self._event for fd, _ in found):
            raise Interrupted
        return bool(found)
