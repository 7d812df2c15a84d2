"""Sockets: receiving much with few wake-ups, ending reads from another thread, failures of TLS."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
from typing import Any, Final

#: Bytes for which a thread is woken, at most. With 512 KiB the CPU time is about the same.
_LEAST: Final = 1 << 20
#: Bytes that TLS may have taken from the socket already: less than two records (RFC 8446, 5.1).
_RECORDS: Final = 32 << 10


class Receiver:
    """Receive a body from a socket with a time-out, and wait for many bytes at once (SO_RCVLOWAT, socket(7)).

    Otherwise a thread is woken for the first packets: six connections received 2 GiB in 15,000 calls and
    1.1 s of CPU time, and in 2,500 calls and 0.6 s this way. The kernel also wakes it when the receive
    buffer is full and when the connection ends. From a connection that is too slow for so many bytes, it
    receives what is there.
    """

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._least = 1
        self._margin = _RECORDS if hasattr(sock, "pending") else 0
        # urllib3's TLS in TLS (through an https proxy) is not a socket.
        self._is_slow = not isinstance(sock, socket.socket)

    def readinto(self, into: memoryview, /) -> int:
        """Receive 1 to ``len(into)`` bytes, all of which must be on their way; 0 at the end."""
        self._wait_for(1 if self._is_slow else self._least_of(len(into)))
        try:
            return self._receive(into)
        except TimeoutError:
            self._is_slow = True
            self.reset()
            if not self._has_data():
                raise
            return self._receive(into)

    def _least_of(self, length: int) -> int:
        least = max(1, min(length, _LEAST) - self._margin)
        # TLS returns a record at a time: else each would be a system call with another number.
        return 1 << least.bit_length() - 1 if self._margin else least

    def reset(self) -> None:
        """Let the next wait, also one of others, end with the first byte."""
        self._wait_for(1)

    def _receive(self, into: memoryview) -> int:
        return int(self._sock.recv_into(into))

    def _has_data(self) -> bool:
        waiting = select.poll()
        waiting.register(self._sock, select.POLLIN)
        return bool(waiting.poll(0))

    def _wait_for(self, count: int) -> None:
        if count != self._least:
            try:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            except OSError:
                self._is_slow = True
            else:
                self._least = count


def shut(sock: Any) -> None:
    """Abort the reads of a socket in other threads. Raises ``TypeError`` for an object without a socket.

    Bypasses ``SSLSocket.shutdown``: that removes the TLS layer first, and a read in progress would return
    ciphertext as data. urllib3's TLS in TLS (through an https proxy) is not a socket, but wraps one.

    ``SO_LINGER`` makes ``close`` reset the connection. A server with a full send window would not notice the
    end otherwise, and would keep its resources, such as a locked disk, until a time-out.
    """
    sock = getattr(sock, "socket", sock)
    with contextlib.suppress(OSError):
        socket.socket.setsockopt(sock, socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class Secure(ssl.SSLSocket):
    """A client's socket that empties OpenSSL's error queue of the thread when it fails.

    OpenSSL 3.4 and later leave the errno of a failed system call there, and Python raises it without removing
    it (PySSL_SetError in _ssl.c). Every later read in the thread that has to wait, on any connection, would
    raise it again until the thread does a handshake. Our handshakes run in other threads.
    """

    # All other methods that receive or send call one of these.
    def read(self, len: int = 1024, buffer: Any = None) -> Any:  # noqa: A002  (the name in ssl)
        try:
            return super().read(len, buffer)
        except OSError:
            self._clear()
            raise

    def send(self, data: Any, flags: int = 0) -> int:
        try:
            return super().send(data, flags)
        except OSError:
            self._clear()
            raise

    def _clear(self) -> None:
        # A handshake is the one call of Python's ssl that always begins with ERR_clear_error.
        with contextlib.suppress(ssl.SSLError):
            unused = self.context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="localhost")
            unused.do_handshake()


def separated(context: ssl.SSLContext) -> ssl.SSLContext:
    """Make ``context`` create sockets of the class ``Secure``; return it."""
    context.sslsocket_class = Secure
    return context
