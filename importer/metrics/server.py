"""The metrics page: prometheus_client's, over HTTPS with a self-signed certificate made at start-up."""

from __future__ import annotations

import datetime as dt
import http.server
import logging
import select
import socket
import ssl
import threading
import time
from typing import Any

import prometheus_client
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from prometheus_client import registry

from cdi_worker.sources import certificates

log = logging.getLogger(__name__)

PATH = "/metrics"
#: For probes, as on the upload server.
HEALTH = "/healthz"
#: Scrapes served at the same time; more are refused.
CONNECTIONS = 8
#: Seconds of silence after which a client is disconnected.
PATIENCE = 10.0
#: Seconds at the end for clients that are connected. Controllers scrape at once after connecting.
GRACE = 1.0
#: Longer than any import. Clients cannot verify a self-signed certificate anyway.
VALIDITY = dt.timedelta(days=365)


def serve(collector: registry.Collector, listener: socket.socket, over: int) -> None:
    """Serve what ``collector`` yields until ``over``, a descriptor, is readable; then end.

    Clients that are connected then are still answered. Takes over ``listener``.
    """
    port = listener.getsockname()[1]
    with _Server(collector, listener) as server:
        log.info("metrics port=%d path=%r", port, PATH)
        # socketserver's own ``serve_forever`` polls, and its end waits for a turn.
        waiting = select.poll()
        for fd in (server.fileno(), over):
            waiting.register(fd, select.POLLIN)
        while over not in dict(waiting.poll()):
            server.handle_request()
        server.finish()


class _Server(http.server.ThreadingHTTPServer):
    def __init__(self, collector: registry.Collector, listener: socket.socket) -> None:
        page = registry.CollectorRegistry()
        page.register(collector)
        super().__init__(("", 0), _Handler.factory(page), bind_and_activate=False)
        self.socket.close()
        self._is_idle = False
        #: ``handle_request`` is called when a client waits, and returns if it has gone meanwhile.
        self.timeout = 0
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        # The TLS handshake runs in each connection's thread, so that a silent client blocks no other.
        # prometheus_client's own server runs it in the thread that accepts.
        self.socket = _context().wrap_socket(listener, server_side=True, do_handshake_on_connect=False)

    def finish(self) -> None:
        """Answer the clients that are connected, for ``GRACE`` seconds; refuse others.

        The process ends next: the kernel would close their connections without an answer.
        """
        self._is_idle = False
        while not self._is_idle:
            self.handle_request()
        self.socket.close()
        deadline = time.monotonic() + GRACE
        for _ in range(CONNECTIONS):
            self._free.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def handle_timeout(self) -> None:
        self._is_idle = True

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("scrape client=%r", client_address, exc_info=True)  # noqa: LOG014  (is called from one)


class _Handler(prometheus_client.MetricsHandler):
    timeout = PATIENCE
    server_version = "cdi-worker"
    sys_version = ""

    def do_GET(self) -> None:  # noqa: N802  (the name that http.server calls)
        # The library's handler answers on any path.
        path = self.path.partition("?")[0]
        if path == PATH:
            super().do_GET()
        elif path == HEALTH:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.end_headers()
            self.wfile.write(b"OK")
        else:
            self.send_error(404)


def _context() -> ssl.SSLContext:
    """Return a context with a new key and a self-signed certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cdi-worker")])
    now = dt.datetime.now(dt.UTC)
    certificate = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        # A scraper's clock may be behind ours.
        not_valid_before=now - dt.timedelta(hours=1),
        not_valid_after=now + VALIDITY,
    ).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    context = certificates.context(ssl.PROTOCOL_TLS_SERVER)
    certificates.load_pair(context, certificate.public_bytes(pem), private, "metrics")
    return context
