"""Sockets: receiving much with few wake-ups, ending reads from another thread, failures of TLS."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from typing import Any, Final

#: Bytes for which a thread is woken, at most. With 512 KiB the CPU time is about the same.
_LEAST: Final = 1 << 20
#: The same for TLS, whose thread has decryption to do while more arrives: with 512 KiB, one connection took
#: 1.1 times as long.
_LEAST_OF_TLS: Final = 256 << 10
#: Seconds to wait for so many bytes: then, what is there is received.
_SOON: Final = 0.02
#: Bytes that TLS may have taken from the socket already: less than two records (RFC 8446, 5.1).
_RECORDS: Final = 32 << 10


class Receiver:
    """Receive a body from a socket with a time-out, and wait for many bytes at once (SO_RCVLOWAT, socket(7)).

    Otherwise a thread is woken for the first packets: six connections received 2 GiB in 15,000 calls and
    1.1 s of CPU time, and in 2,500 calls and 0.6 s this way. The kernel also wakes it when the receive
    buffer is full and when the connection ends. If so many bytes do not arrive soon, it receives what is
    there: the connection is slow, or its sender waits, too. Over TLS on loopback, whose segments have 64 KiB,
    both waited for 0.2 s once or twice in 400 MiB.

    TLS decrypts a record of 16 KiB at a time. When a thread waited for each, those of six connections took
    turns with the interpreter's lock: 18,400 context switches and 1.4 s of CPU time for an import of 400 MiB.
    With all records that have arrived at once, it is 5,900 switches and 1.1 s.
    """

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._least = 1
        # urllib3's TLS in TLS (through an https proxy) is not a socket.
        self._can_wait = isinstance(sock, socket.socket)
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        # The end of TLS, and a failure for the next read: the bytes before it were returned first.
        self._is_over = False
        self._failures: list[OSError] = []

    def readinto(self, into: memoryview, /, *, waits: bool = True) -> int:
        """Receive 1 to ``len(into)`` bytes; 0 at the end.

        The caller must know that so many bytes will still arrive if this ``waits`` for many.
        """
        least = min(len(into), _LEAST)
        if self._is_tls:
            least = max(1, min(len(into), _LEAST_OF_TLS) - _RECORDS)
        self._wait_for(least if waits and self._can_wait else 1)
        if self._least > 1 and not self._has_data(_SOON):
            self.reset()
        return self._receive_records(into) if self._is_tls else int(self._sock.recv_into(into))

    def reset(self) -> None:
        """Restore SO_RCVLOWAT to 1."""
        self._wait_for(1)

    def _receive_records(self, into: memoryview) -> int:
        """Wait for a part of a record, and receive all records that are there."""
        if self._failures:
            # Kept no longer: its traceback leads to this object.
            raise self._failures.pop()
        if self._is_over:
            return 0
        limit = self._sock.gettimeout()
        end = None if limit is None else time.monotonic() + limit
        while True:
            if not self._sock.pending():
                left = None if end is None else max(0.0, end - time.monotonic())
                if not self._has_data(left):
                    raise TimeoutError("timed out")
            # Python's own flag: a socket with a time-out does not block in the kernel.
            self._sock.settimeout(0)
            try:
                return self._receive_ready(into)
            except ssl.SSLWantReadError:
                # A part of a record, or records without data, perhaps without end: wait for the next byte.
                self.reset()
                if end is not None and time.monotonic() >= end:
                    raise TimeoutError("timed out") from None
            finally:
                self._sock.settimeout(limit)

    def _receive_ready(self, into: memoryview) -> int:
        """Receive records without waiting. Raises ``ssl.SSLWantReadError`` if there is none."""
        count = 0
        try:
            while count < len(into) and not self._is_over:
                received = self._sock.read(len(into) - count, into[count:])
                count += received
                self._is_over = not received
        except ssl.SSLWantReadError:
            if not count:
                raise
        except OSError as err:
            if not count:
                raise
            self._failures.append(err.with_traceback(None))
        return count

    def _has_data(self, seconds: float | None = 0) -> bool:
        """Return whether bytes have arrived, as many as the kernel waits for, after ``seconds`` at most."""
        waiting = select.poll()
        waiting.register(self._sock, select.POLLIN)
        return bool(waiting.poll(None if seconds is None else seconds * 1000))

    def _wait_for(self, count: int) -> None:
        if count != self._least:
            try:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            except OSError:
                self._can_wait = False
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
        except ssl.SSLWantReadError:
            raise  # no failure
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
