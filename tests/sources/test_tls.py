"""A failed TLS connection does not disturb the others of its thread.

Without ``sockets.Secure``, OpenSSL 3.4 and later fail (Debian 13); earlier versions keep no such error.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import pytest

from cdi_worker.importer.send import client as upload_client
from cdi_worker.sources import base, sockets, wire
from cdi_worker.sources.ovirt import backend as backends
from cdi_worker.sources.vmware import session
from tests.support import processes, tls

#: Seconds until a server answers, so that a read has to wait.
LATE = 0.2
ANSWER = b"an answer"

Context = Callable[[tls.Authority, tls.KeyPair], ssl.SSLContext]


def _of_sources(authority: tls.Authority, _pair: tls.KeyPair) -> ssl.SSLContext:
    return wire.tls_context(base.Access(ca_files=(str(authority.certificate),)))


def _of_uploads(authority: tls.Authority, pair: tls.KeyPair) -> ssl.SSLContext:
    texts = (path.read_text() for path in (authority.certificate, pair.certificate, pair.key))
    return upload_client.context(*texts)


def _of_imageio(authority: tls.Authority, _pair: tls.KeyPair) -> ssl.SSLContext:
    access = base.Access(ca_files=(str(authority.certificate),))
    backend = type("Backend", (backends.Backend,), {"access": access})
    made = backend(urllib.parse.urlparse("https://host/x"), connect=False)
    context: ssl.SSLContext = made._create_ssl_context()
    return context


def _of_vsphere(_authority: tls.Authority, pair: tls.KeyPair) -> ssl.SSLContext:
    certificate = ssl.PEM_cert_to_DER_cert(pair.certificate.read_text())
    return session.pinned(hashlib.sha1(certificate, usedforsecurity=False).hexdigest())


@pytest.fixture
def authority(tmp_path: Path) -> tls.Authority:
    return tls.Authority(tmp_path)


@pytest.fixture
def pair(authority: tls.Authority) -> tls.KeyPair:
    return authority.issue()


@contextlib.contextmanager
def connected(
    context: ssl.SSLContext, pair: tls.KeyPair, serve: Callable[[ssl.SSLSocket], object]
) -> Iterator[ssl.SSLSocket]:
    """Yield a connection to ``serve``. Its handshake is done in another thread, as ours are."""

    def accept() -> None:
        # In this thread: it empties the error queue.
        there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        there.load_cert_chain(pair.certificate, pair.key)
        plain, _ = listener.accept()
        with contextlib.suppress(OSError), there.wrap_socket(plain, server_side=True) as taken:
            serve(taken)

    def dial() -> ssl.SSLSocket:
        plain = socket.create_connection(listener.getsockname(), processes.PATIENCE)
        return context.wrap_socket(plain, server_hostname="localhost")

    with socket.create_server(("127.0.0.1", 0)) as listener, futures.ThreadPoolExecutor(2) as others:
        serving = others.submit(accept)
        with others.submit(dial).result() as made:
            yield made
        serving.result()


def flood(taken: ssl.SSLSocket) -> None:
    while True:
        taken.sendall(bytes(1 << 20))


def close(taken: ssl.SSLSocket) -> None:
    """Close without TLS's own end."""
    socket.socket.close(taken)


def answer(taken: ssl.SSLSocket) -> None:
    time.sleep(LATE)
    taken.sendall(ANSWER)


def read_until_shut(client: ssl.SSLSocket) -> None:
    """Read as a cancelled import does: the end comes within a record."""
    threading.Timer(LATE, sockets.shut, [client]).start()
    into = bytearray(1 << 16)
    while client.recv_into(into):
        # So that the socket always has something to read.
        time.sleep(0.001)


def send_to_the_end(client: ssl.SSLSocket) -> None:
    time.sleep(LATE)
    while True:
        client.sendall(bytes(1 << 16))


def send_after_shut(client: ssl.SSLSocket) -> None:
    sockets.shut(client)
    client.sendall(b"x")


@pytest.mark.parametrize(
    ("of", "serve", "use"),
    [
        (_of_sources, flood, read_until_shut),
        (_of_uploads, close, send_to_the_end),
        (_of_imageio, flood, send_after_shut),
        (_of_vsphere, flood, read_until_shut),
    ],
)
def test_failed_connection_does_not_end_the_next_one(
    authority: tls.Authority,
    pair: tls.KeyPair,
    of: Context,
    serve: Callable[[ssl.SSLSocket], object],
    use: Callable[[ssl.SSLSocket], object],
) -> None:
    context = of(authority, pair)

    def both() -> bytes:
        with connected(context, pair, serve) as broken, contextlib.suppress(OSError):
            use(broken)
        with connected(context, pair, answer) as sound:
            return sound.recv(100)

    # A thread of their own, which has done nothing before.
    with futures.ThreadPoolExecutor(1) as thread:
        assert thread.submit(both).result() == ANSWER
