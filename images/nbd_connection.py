"""One connection to an NBD server: many reads under way, and an end that the server survives (libnbd)."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
from typing import Any

#: Bytes read at once of what nobody wants any more.
_REST = 256 << 10
# LIBNBD_AIO_DIRECTION_READ and _WRITE.
_READ, _WRITE = 1, 2


def hang_up(handle: Any) -> None:
    """Leave without waiting for the server to agree, as libnbd's own shutdown does."""
    import nbd

    with contextlib.suppress(nbd.Error), socket.socket(fileno=os.dup(handle.aio_get_fd())) as sock:
        sock.shutdown(socket.SHUT_RDWR)


class Connection:
    """One connection, with a thread that moves its bytes."""

    def __init__(self, handle: Any) -> None:
        self.size: int = handle.get_size()
        self.dead = False
        self._leaving = False
        self._handle = handle
        self._pending: set[_Pending] = set()
        self._lock = threading.Lock()
        self._wake = os.eventfd(0)
        # The socket as our own, to be used past libnbd.
        self._socket = socket.socket(fileno=os.dup(handle.aio_get_fd()))
        self._left = threading.Event()
        threading.Thread(target=self._run, name="nbd-client", daemon=True).start()

    def read(self, offset: int, into: memoryview) -> int:
        """Fill ``into``; return 0 or the number of an error. Nobody writes there afterwards."""
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
            # Not while the others are told of the end.
            self._pending.discard(pending)
        return pending.error

    def close(self) -> None:
        """End the reads under way, now. What the server still sends comes to nobody."""
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
            # The server broke the protocol, or left in the middle of an answer.
            pass
        with self._lock:
            self.dead = True
            for pending in self._pending:
                pending.end(errno.ENOTCONN)
            os.close(self._wake)
        self._left.set()
        self._part()

    def _part(self) -> None:
        """Hear the server out: two replies to nobody end nbdkit by an assertion, with the disk open."""
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
    """One read under way. ``complete`` is libnbd's callback."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error = 0

    def complete(self, error: Any) -> int:
        self.end(error.value)
        # 1: libnbd forgets the command by itself.
        return 1

    def end(self, error: int) -> None:
        if not self.done.is_set():
            self.error = error
            self.done.set()
