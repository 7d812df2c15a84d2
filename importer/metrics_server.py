"""The metrics page: HTTPS with a certificate that nobody has to be told of."""

from __future__ import annotations

import datetime as dt
import http.server
import logging
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from prometheus_client import core, exposition, registry

from cdi_worker import metrics

log = logging.getLogger(__name__)

PATH = "/metrics"
#: Scrapes under way at the same time; more are turned away.
CONNECTIONS = 8
#: Seconds that a client may be silent.
PATIENCE = 10.0
#: How late the end of the work is noticed, in seconds.
TURN = 0.1
#: Longer than any import; clients cannot verify it anyway.
VALIDITY = dt.timedelta(days=365)


def serve(told: metrics.Metrics, port: int, over: threading.Event) -> None:
    """Serve until ``over`` is set. Raises ``OSError``, such as when the port is taken."""
    with _Server(told, port) as server:
        server.timeout = TURN
        log.info("metrics port=%d path=%r", port, PATH)
        while not over.is_set():
            server.handle_request()


class _Collector(registry.Collector):
    """The numbers as they are when asked for."""

    def __init__(self, told: metrics.Metrics) -> None:
        self._told = told

    def collect(self) -> Iterator[core.Metric]:
        told = self._told
        # Controllers look for the name, this one label and digits (CDI's progress reporters).
        yield self._counter(told.counter, "Percent of the work that is done.", round(told.percent, 2))
        yield self._counter("cdi_worker_read_bytes", "Bytes that came from the source.", told.bytes_read)
        if (written := told.bytes_written) is not None:
            yield self._counter("cdi_worker_written_bytes", "Bytes given to storage.", written)
        failures = told.failures
        yield self._counter("cdi_worker_retries", "Further attempts after a failure.", sum(failures.values()))
        kinds = core.CounterMetricFamily(
            "cdi_worker_errors",
            "Failures that were followed by another attempt.",
            labels=("ownerUID", "kind"),
        )
        for kind, count in sorted(failures.items()):
            kinds.add_metric((told.owner_uid, kind), count)
        yield kinds
        phase = core.GaugeMetricFamily(
            "cdi_worker_phase", "What is being done.", labels=("ownerUID", "phase")
        )
        phase.add_metric((told.owner_uid, "done" if told.finished else told.name or "start"), 1)
        yield phase

    def _counter(self, name: str, text: str, value: float) -> core.CounterMetricFamily:
        family = core.CounterMetricFamily(name, text, labels=("ownerUID",))
        family.add_metric((self._told.owner_uid,), value)
        return family


class _Server(http.server.ThreadingHTTPServer):
    def __init__(self, told: metrics.Metrics, port: int) -> None:
        super().__init__(("", port), _Handler, bind_and_activate=False)
        self.socket.close()
        self.registry = registry.CollectorRegistry()
        self.registry.register(_Collector(told))
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        # The handshake is the business of each connection's thread: a silent client keeps nobody waiting.
        self.socket = _context().wrap_socket(_listen(port), server_side=True, do_handshake_on_connect=False)

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


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = PATIENCE
    server_version = "cdi-worker"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self.send_error(404)
            return
        encode, content_type = exposition.choose_encoder(self.headers.get("Accept", ""))
        page = encode(self.server.registry)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (http.server's name)
        log.debug("scrape %s", format % args)


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _context() -> ssl.SSLContext:
    """Return a context with a key and a certificate of its own."""
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
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # OpenSSL reads files only, and a pod may have no place to write one.
    with open(os.memfd_create("metrics.pem"), "wb", buffering=0) as file:
        file.write(pem)
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context
