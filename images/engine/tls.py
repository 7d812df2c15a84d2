"""TLS sockets whose failures end only their own connection."""

from __future__ import annotations

import contextlib
import ssl
from typing import Any


class Socket(ssl.SSLSocket):
    """A client's socket that empties OpenSSL's error queue of the thread when it fails.

    OpenSSL 3.4 and later leave the errno of a failed system call there, and Python raises it without removing
    it (PySSL_SetError in _ssl.c). The next read that has to wait, of any connection of the thread, would
    raise it again, until the thread does a handshake. Ours are done in other threads, so for ever.
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
    """Let the sockets of ``context`` be of the class ``Socket``."""
    context.sslsocket_class = Socket
    return context
