"""One TLS connection to the upload server, received directly into the caller's memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

#: Seconds without data after which a read returns the bytes received so far.
QUIET = 0.005
#: Seconds after which a read returns what it has, also if bytes keep on arriving.
BRIEF = 1.0
#: Bytes received by one system call. OpenSSL by itself makes two calls for each TLS record, which took a
#: tenth of the time of a clone.
WINDOW = 256 << 10
#: Bytes that must have arrived to wake a reader that asks for at least as many (SO_RCVLOWAT, socket(7)).
LOW_WATER = 128 << 10
#: Bytes of the largest TLS record (RFC 8446, 5.1): read at once where the length is not known before.
RECORD = 16 << 10
#: Seconds for the client to receive an answer.
SEND = 10.0
#: Seconds for the client to close its side.
CLOSE = 1.0

T = TypeVar("T")


class Interrupted(ConnectionError):
    """The server has ended reading from this connection; see ``Connection.interrupt``."""

    def __init__(self) -> None:
        super().__init__("interrupted by the server")


class Connection:
    """The server's end of a TLS connection. Every wait has a limit, in seconds. Raises ``OSError``.

    For one thread at a time; ``interrupt`` may be called from any. TLS works on memory buffers and the socket
    never blocks: a wait polls an event too, so that a read can be ended without breaking TLS, and an answer
    can still be sent.
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
        #: Set by ``interrupt``.
        self.interrupted = False
        self._closed = False
        self._ahead = b""

    def handshake(self, limit: float) -> None:
        """Do the TLS handshake."""
        self._until(self._tls.do_handshake, limit)

    @property
    def client_name(self) -> str:
        """The common name of the client's verified certificate; empty without one."""
        subject: Any = (self._tls.getpeercert() or {}).get("subject", ())
        pairs = itertools.chain.from_iterable(subject)
        return next((value for name, value in pairs if name == "commonName"), "")

    # -- receiving

    def readinto(self, into: memoryview, limit: float) -> int:
        """Receive until ``into`` is full, no data arrives for ``QUIET``, or ``BRIEF`` seconds have passed.

        ``limit``: seconds for the first byte. Return the number of bytes, 0 at the end.
        """
        if self.interrupted:
            raise Interrupted
        filled = min(len(self._ahead), len(into))
        if filled:
            into[:filled] = self._ahead[:filled]
            self._ahead = self._ahead[filled:]
        now = time.monotonic()
        latest, since = now + BRIEF, now
        try:
            while filled < len(into) and not (filled and time.monotonic() > latest):
                try:
                    # With a buffer it returns a number of bytes; typeshed says bytes.
                    count = cast(int, self._tls.read(len(into) - filled, into[filled:]))
                except ssl.SSLWantReadError:
                    self._more(len(into) - filled, _left(since, QUIET if filled else limit))
                    continue
                if not count:
                    break
                filled += count
                since = time.monotonic()
        except ssl.SSLEOFError:
            pass
        except OSError:
            if not filled:  # otherwise the next call raises it again
                raise
        return filled

    def some(self, limit: float) -> bytes:
        """Return the next bytes, of any number; empty if the client closed the connection."""
        if not self._ahead:
            return self._record(limit)
        found, self._ahead = self._ahead, b""
        return found

    def line(self, longest: int, limit: float) -> bytes:
        """Return the next line without its CRLF; a part of a line is kept for the next call."""
        deadline = time.monotonic() + limit
        while (end := self._ahead.find(b"\r\n", 0, longest + 2)) < 0:
            if len(self._ahead) > longest + 1:
                raise ConnectionError(f"a line is longer than {longest} bytes")
            more = self._record(deadline - time.monotonic())
            if not more:
                raise ConnectionError("the client closed the connection within a line")
            self._ahead += more
        found, self._ahead = self._ahead[:end], self._ahead[end + 2 :]
        return found

    def put_back(self, data: bytes) -> None:
        """Make ``data`` the bytes that are received next."""
        self._ahead = data + self._ahead

    def drain(self, limit: float) -> None:
        """Receive and discard for up to ``limit`` seconds, also after ``interrupt``. Ends all reading."""
        deadline = time.monotonic() + limit
        with contextlib.suppress(OSError):
            while (left := deadline - time.monotonic()) > 0 and self._take(left, interruptible=False):
                pass

    # -- sending and ending

    def send(self, data: bytes) -> None:
        """Send all of ``data``, also after ``interrupt``."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._tls.write(rest) :]
            self._flush(SEND)

    def interrupt(self) -> None:
        """End the read that waits in another thread, and all later ones, with ``Interrupted``."""
        with self._lock:
            self.interrupted = True
            if not self._closed:
                os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Close TLS, then the connection; errors are ignored."""
        with contextlib.suppress(OSError, ValueError):
            with contextlib.suppress(ssl.SSLWantReadError):
                self._tls.unwrap()
            self._flush(CLOSE)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            if not self.interrupted:
                # Closing with unread data sends a reset: the client may lose our last answer (RFC 9112, 9.6).
                self.drain(CLOSE)
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

    def _until(self, step: Callable[[], T], limit: float) -> T:
        """Repeat ``step`` of TLS, receiving and sending what it needs, until it succeeds."""
        since = time.monotonic()
        while True:
            # Checked also without a wait: a client that never pauses must not delay an interruption.
            if self.interrupted:
                raise Interrupted
            try:
                done = step()
            except ssl.SSLWantReadError:
                self._flush(SEND)
                self._more(0, _left(since, limit))
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush(SEND)  # the TLS alert with the reason
                raise
            else:
                self._flush(SEND)
                return done

    def _more(self, room: int, limit: float) -> None:
        """Feed TLS with the next bytes; with enough ``room``, wait a moment for ``LOW_WATER`` of them."""
        if count := self._take(limit, room):
            self._received.write(self._window[:count])
        else:
            self._received.write_eof()

    def _take(self, limit: float, room: int = 0, *, interruptible: bool = True) -> int:
        """Receive into the window; return the bytes received, 0 if the client closed the connection."""
        while True:
            if interruptible and self.interrupted:
                raise Interrupted
            with contextlib.suppress(BlockingIOError):
                return self._socket.recv_into(self._window)
            if room >= LOW_WATER:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, LOW_WATER)
                try:
                    self._ready(select.POLLIN, QUIET, interruptible=interruptible)
                finally:
                    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            if not self._ready(select.POLLIN, limit, interruptible=interruptible):
                raise TimeoutError(f"no data for {limit:.3g} s")

    def _flush(self, limit: float) -> None:
        rest = memoryview(self._to_send.read()) if self._to_send.pending else b""
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                if not self._ready(select.POLLOUT, limit, interruptible=False):
                    raise TimeoutError(f"the client accepted no data for {limit:.3g} s") from None

    def _ready(self, events: int, limit: float, *, interruptible: bool) -> bool:
        """Wait for ``events`` on the socket; return whether one came. Raises ``Interrupted``."""
        waiting = self._poll if interruptible else select.poll()
        waiting.register(self._socket, events)
        found = waiting.poll(max(0.0, limit) * 1000)
        if any(fd == self._event for fd, _ in found):
            raise Interrupted
        return bool(found)


def _left(since: float, limit: float) -> float:
    """Return the seconds that are left of ``limit``, which began at ``since``. Raises ``TimeoutError``.

    What arrives may be no data, such as updates of keys, and so much of it that no wait is ever long.
    """
    left = since + limit - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"no data for {limit:.3g} s")
    return left
