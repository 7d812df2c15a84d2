"""An upload client that controls every byte and every TLS record it sends."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import ssl
from collections.abc import Iterator
from email.message import Message
from typing import NamedTuple

from tests.support import tls, uploads

#: A checksum that no content has: the upload is read to its end and refused, and the server keeps running.
WRONG_CHECKSUM = f"x-cdi-checksum: sha256:{'0' * 64}\r\n"


class Response(NamedTuple):
    """A response of the server."""

    status: int
    headers: Message
    text: str


class Wire:
    """One TLS connection to the server."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.sock = sock
        self._file = sock.makefile("rb")

    def send(self, *records: bytes | str) -> None:
        """Send each argument in a TLS record of its own, if it fits into one."""
        for record in records:
            self.sock.sendall(record.encode() if isinstance(record, str) else record)

    def answer(self, method: str = "GET") -> Response:
        """Read exactly one response."""
        line = self._file.readline().decode()
        found = re.fullmatch(r"HTTP/1\.1 (\d{3}) [A-Za-z -]*\r\n", line)
        assert found, line or "closed instead of an answer"
        status, headers = int(found[1]), http.client.parse_headers(self._file)
        if method == "HEAD" or status in {100, 204}:
            return Response(status, headers, "")
        return Response(status, headers, self._file.read(int(headers["Content-Length"])).decode())

    def ask(self, request: bytes | str, method: str = "GET") -> Response:
        """Send a request and return its response."""
        self.send(request)
        return self.answer(method)

    def is_in_sync(self) -> bool:
        """Report whether the next request gets its own response."""
        return self.ask("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")[::2] == (200, "OK")

    def is_closed_by_server(self) -> bool:
        """Stop sending; report whether the server closes without sending anything."""
        try:
            socket.socket.shutdown(self.sock, socket.SHUT_WR)  # without a TLS close_notify
            return self._file.read(1) == b""
        except (ConnectionError, ssl.SSLError):
            return True

    def digest(self, *records: bytes | str) -> str:
        """Send an upload with ``WRONG_CHECKSUM`` and return the digest that the server computed."""
        self.send(*records)
        response = self.answer()
        found = re.search(r"calculated sha256:([0-9a-f]{64})", response.text)
        assert found, response
        return found[1]


@contextlib.contextmanager
def connected(server: uploads.Server, client: tls.KeyPair | str | None = "right") -> Iterator[Wire]:
    """Connect, by default with the client's valid certificate."""
    with secure(server, client) as sock:
        wire = Wire(sock)
        with contextlib.closing(wire._file):
            yield wire


def secure(server: uploads.Server, client: tls.KeyPair | str | None = "right") -> ssl.SSLSocket:
    """Return a connection after the TLS handshake."""
    pair = server.certificates.client if isinstance(client, str) else client
    return server.certificates.shared(pair).wrap_socket(plain(server), server_hostname="localhost")


def plain(server: uploads.Server) -> socket.socket:
    """Return a connection without TLS. What is sent in two parts is not held back: each is a segment."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
