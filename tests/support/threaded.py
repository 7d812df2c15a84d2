"""Run a server of the standard library in a thread."""

from __future__ import annotations

import socket
import socketserver
import ssl
import threading
from typing import Self

from tests.support import tls


class Threaded:
    """Serve for the duration of a ``with`` block, over TLS if there is a ``pair``."""

    def __init__(self, server: socketserver.TCPServer, pair: tls.KeyPair | None = None) -> None:
        self._server = server
        # Connections inherit it. A handler sends the head and the body apart: without it, each small answer
        # takes 40 ms, by which the client delays its acknowledgement of the head.
        server.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.scheme = "http"
        if pair:
            self.scheme = "https"
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pair.certificate, pair.key)
            server.socket = context.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port: int = server.server_address[1]
        self._is_stopping = False
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which does not poll
        self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        while not self._is_stopping:
            self._server.handle_request()
