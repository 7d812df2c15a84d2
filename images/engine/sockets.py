"""Ending the reads of a socket from another thread."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any


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
