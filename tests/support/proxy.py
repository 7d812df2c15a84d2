"""A forward HTTP proxy: plain requests, CONNECT tunnels, and tunnels that it decrypts."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import http.server
import select
import socket
import ssl
import urllib.parse
from typing import Any

from tests.support import threaded, tls

HOP_BY_HOP = {"connection", "proxy-connection", "proxy-authorization", "keep-alive", "te", "upgrade"}


@dataclasses.dataclass(frozen=True)
class Request:
    """A request received by the proxy; ``target`` is ``host:port`` for CONNECT, else a URL."""

    method: str
    target: str
    headers: dict[str, str]


class Proxy(threaded.Threaded):
    """Run a proxy for the duration of a ``with`` block.

    ``password`` is the ``user:password`` that clients must send. With an ``authority`` the proxy decrypts
    tunnels: it issues a certificate for the requested host and does not verify the server behind it.
    ``origin``, such as ``http://127.0.0.1:8080``, then receives all tunnelled requests. With a ``pair``
    the proxy itself is reached over TLS. It resolves ``tls.FAR`` to this machine.
    """

    def __init__(
        self,
        *,
        password: str | None = None,
        authority: tls.Authority | None = None,
        origin: str = "",
        pair: tls.KeyPair | None = None,
    ) -> None:
        self.password = password
        self.authority = authority
        self.origin = origin
        self.requests: list[Request] = []
        super().__init__(_HTTP(self), pair)

    @property
    def url(self) -> str:
        """Return the value for ``http_proxy`` and ``https_proxy``."""
        user = f"{urllib.parse.quote(self.password, safe=':')}@" if self.password else ""
        return f"{self.scheme}://{user}127.0.0.1:{self.port}"


class _HTTP(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect early."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _HTTP
    #: The server that receives the requests of a decrypted tunnel.
    origin = ""

    def log_message(self, *_: object) -> None:
        """Log nothing; ``Proxy.requests`` has the requests."""

    def do_HEAD(self) -> None:
        """Forward the request."""
        self.do_GET()

    def do_POST(self) -> None:
        """Forward the request and its body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Forward the request and relay the response."""
        headers = self._record()
        if headers is None:
            return
        target = urllib.parse.urlsplit(self.origin + self.path)
        server = f"{_resolved(target.hostname or '')}:{target.port or ''}".rstrip(":")
        if target.scheme == "https":
            trusting = ssl._create_unverified_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(server, context=trusting)
        else:
            connection = http.client.HTTPConnection(server)
        with contextlib.closing(connection):
            # Not by urlunsplit, which since Python 3.12 adds two slashes to a path that begins with two.
            path = f"{target.path}?{target.query}" if target.query else target.path
            body = self.rfile.read(int(headers.get("content-length", "0")))
            connection.request(self.command, path, body or None, headers=headers)
            self._relay(connection.getresponse())

    def do_CONNECT(self) -> None:
        """Open a tunnel to the host, or terminate its TLS here."""
        if self._record() is None:
            return
        authority = self.server.proxy.authority
        host, _, port = self.path.rpartition(":")
        if authority:
            self._impersonate(authority, host)
            return
        with socket.create_connection((_resolved(host), int(port))) as there:
            self.send_response(200)
            self.end_headers()
            _join(self.connection, there)
        self.close_connection = True

    def _record(self) -> dict[str, str] | None:
        """Record the request; return the headers to forward, or None if it was refused."""
        proxy = self.server.proxy
        headers = {name.lower(): value for name, value in self.headers.items()}
        proxy.requests.append(Request(self.command, self.origin + self.path, headers))
        if proxy.password and not self.origin:
            expected = "Basic " + base64.b64encode(proxy.password.encode()).decode()
            if headers.get("proxy-authorization") != expected:
                self.send_response(407)
                self.send_header("Proxy-Authenticate", 'Basic realm="proxy"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return None
        return {name: value for name, value in headers.items() if name not in HOP_BY_HOP}

    def _relay(self, answer: http.client.HTTPResponse) -> None:
        self.close_connection = True
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in {"connection", "transfer-encoding"}:
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        while piece := answer.read1(65536) if self.command != "HEAD" else b"":
            self.wfile.write(piece)

    def _impersonate(self, authority: tls.Authority, host: str) -> None:
        self.send_response(200)
        self.end_headers()
        pair = authority.issue(host)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.certificate, pair.key)
        with context.wrap_socket(self.connection, server_side=True) as inside:
            tunnelled = type(
                "_Inside", (_Handler,), {"origin": self.server.proxy.origin or f"https://{self.path}"}
            )
            tunnelled(inside, self.client_address, self.server)
        self.close_connection = True


def _resolved(host: str) -> str:
    return "127.0.0.1" if host == tls.FAR else host


def _join(one: socket.socket, other: socket.socket) -> None:
    """Relay bytes in both directions until one side closes."""
    across = {one: other, other: one}
    while True:
        for ready in select.select([one, other], [], [])[0]:
            data = ready.recv(65536)
            if not data:
                return
            across[ready].sendall(data)
