"""The web server of the oVirt engine: TLS, the login's JSON and the API's XML."""

from __future__ import annotations

import contextlib
import http.server
import json
import ssl
import urllib.parse
from typing import Any, Protocol

from tests.support import tls


class Answers(Protocol):
    """Handles the requests of an engine; a ``ConnectionError`` is answered with 503."""

    def answer(self, method: str, path: str, body: str, authorization: str) -> tuple[int, str]:
        """Return the status and the XML for an API request."""

    def log_in(self, form: dict[str, str]) -> dict[str, str]:
        """Return the JSON document for a token request."""

    def log_out(self, form: dict[str, str]) -> dict[str, str]:
        """Return the JSON document for a logout."""


class Server(http.server.ThreadingHTTPServer):
    """Serve the API of ``engine`` over TLS on 127.0.0.1."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, engine: Answers, port: int, pair: tls.KeyPair) -> None:
        self.engine = engine
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(pair.certificate, pair.key)
        super().__init__(("127.0.0.1", port), _Handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Do the TLS handshake in the thread of the request."""
        with contextlib.suppress(OSError), self._context.wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    # One request per connection: once the engine is stopped, no connection stays usable.
    protocol_version = "HTTP/1.0"
    server: Server

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        engine = self.server.engine
        sessions = {
            "/ovirt-engine/sso/oauth/token": engine.log_in,
            "/ovirt-engine/services/sso-logout": engine.log_out,
        }
        if self.path in sessions:
            try:
                document = json.dumps(sessions[self.path](dict(urllib.parse.parse_qsl(body))))
                self._answer(200, "application/json", document)
            except ConnectionError:
                self._answer(503, "text/html", "<html>Service Unavailable</html>")
            return
        status, text = engine.answer(self.command, self.path, body, self.headers.get("Authorization", ""))
        if status == 503:
            self._answer(503, "text/html", "<html>Service Unavailable</html>")
        else:
            self._answer(status, "application/xml", text)

    def _answer(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())
