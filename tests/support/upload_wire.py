"""A client of the upload server that says, byte for byte and record for record, what a test wants."""

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

#: A checksum that no bytes have: such an upload is read to its end, and the server goes on.
WRONG = f"x-cdi-checksum: sha256:{'0' * 64}\r\n"


class Said(NamedTuple):
    """An answer of the server."""

    status: int
    headers: Message
    text: str


class Wire:
    """One TLS connection."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.sock = sock
        self._file = sock.makefile("rb")

    def send(self, *records: bytes | str) -> None:
        """Send each in a record of its own, if it is no longer than one."""
        for record in records:
            self.sock.sendall(record.encode() if isinstance(record, str) else record)

    def answer(self, method: str = "GET") -> Said:
        """Read one answer, and not a byte more."""
        line = self._file.readline().decode()
        found = re.fullmatch(r"HTTP/1\.1 (\d{3}) [A-Za-z -]*\r\n", line)
        assert found, line or "closed instead of an answer"
        status, headers = int(found[1]), http.client.parse_headers(self._file)
        if method == "HEAD" or status in {100, 204}:
            return Said(status, headers, "")
        return Said(status, headers, self._file.read(int(headers["Content-Length"])).decode())

    def ask(self, request: bytes | str, method: str = "GET") -> Said:
        self.send(request)
        return self.answer(method)

    def is_in_step(self) -> bool:
        """Tell whether the next request gets its own answer."""
        return self.ask("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")[::2] == (200, "OK")

    def has_ended(self) -> bool:
        """Send nothing more, and tell whether the server closes and says nothing before."""
        try:
            socket.socket.shutdown(self.sock, socket.SHUT_WR)  # without an end of TLS
            return self._file.read(1) == b""
        except (ConnectionError, ssl.SSLError):
            return True

    def digest(self, *records: bytes | str) -> str:
        """Send an upload with ``WRONG`` and return the digest of what the server has received."""
        self.send(*records)
        said = self.answer()
        found = re.search(r"calculated sha256:([0-9a-f]{64})", said.text)
        assert found, said
        return found[1]


@contextlib.contextmanager
def connected(server: uploads.Server, client: tls.KeyPair | str | None = "right") -> Iterator[Wire]:
    """Connect, by default with the right certificate."""
    with secure(server, client) as sock:
        wire = Wire(sock)
        with contextlib.closing(wire._file):
            yield wire


def secure(server: uploads.Server, client: tls.KeyPair | str | None = "right") -> ssl.SSLSocket:
    """Return a connection after its handshake."""
    pair = server.certificates.client if isinstance(client, str) else client
    return server.certificates.context(pair).wrap_socket(plain(server), server_hostname="localhost")


def plain(server: uploads.Server) -> socket.socket:
    """Return a connection without TLS."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)
