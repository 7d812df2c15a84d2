"""A single connection: real TLS over a socket pair, and the bodies read from it."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from cdi_worker.importer.upload import connection as upload_connection
from cdi_worker.importer.upload import http, tls
from cdi_worker.importer.upload.connection import Connection
from tests.support import processes, uploads


class Pair:
    """Both ends of a connection."""

    def __init__(self, server: Connection, client: ssl.SSLSocket) -> None:
        self.server = server
        self.client = client
        self._ended = False

    def leave(self) -> None:
        """Shut down the sending side."""
        self.client.setblocking(False)
        with contextlib.suppress(OSError):
            self.client.unwrap()

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self.client.close()
            self.server.close()


def contexts(certificates: uploads.Certificates) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    made = certificates.server
    files = tls.Server(str(made.certificate), str(made.key), str(certificates.authority.certificate))
    return files.context(), certificates.context(certificates.client)


@pytest.fixture
def pair(certificates: uploads.Certificates) -> Iterator[Pair]:
    with connected(certificates, Connection) as made:
        yield made


@contextlib.contextmanager
def connected(certificates: uploads.Certificates, kind: type[Connection]) -> Iterator[Pair]:
    of_server, of_client = contexts(certificates)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    server = kind(here, of_server)
    client = of_client.wrap_socket(there, server_hostname="localhost", do_handshake_on_connect=False)
    shaking = threading.Thread(target=client.do_handshake)
    shaking.start()
    server.handshake(10)
    shaking.join()
    client.settimeout(10)
    made = Pair(server, client)
    yield made
    made.end()


def read(connection: Connection, size: int = 100, limit: float = 5) -> bytes:
    into = memoryview(bytearray(size))
    return bytes(into[: connection.readinto(into, limit)])


def test_received_bytes_are_returned_at_once(pair: Pair) -> None:
    assert pair.server.client_name == uploads.CLIENT
    pair.client.sendall(b"one")
    assert read(pair.server) == b"one"
    with pytest.raises(TimeoutError):
        read(pair.server, limit=0.01)
    pair.server.put_back(b"zero")
    assert read(pair.server, 2) == b"ze"
    pair.client.sendall(b"three")
    assert read(pair.server, 2) + read(pair.server) == b"rothree"
    pair.leave()
    assert read(pair.server) == b""
    assert read(pair.server) == b""


#: Sends updates of the TLS 1.3 keys (RFC 8446, 4.6.3) without end, after one byte. Python's ssl cannot.
FLOOD = """
import ctypes, socket, sys
port, certificate, key = int(sys.argv[1]), sys.argv[2].encode(), sys.argv[3].encode()
lib = ctypes.CDLL("libssl.so.3")
for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
    getattr(lib, name).restype = ctypes.c_void_p
context = ctypes.c_void_p(lib.SSL_CTX_new(ctypes.c_void_p(lib.TLS_client_method())))
assert lib.SSL_CTX_use_certificate_file(context, certificate, 1) == 1
assert lib.SSL_CTX_use_PrivateKey_file(context, key, 1) == 1
there = socket.create_connection(("127.0.0.1", port))
tls = ctypes.c_void_p(lib.SSL_new(context))
assert lib.SSL_set_fd(tls, there.fileno()) == 1
assert lib.SSL_connect(tls) == 1
assert lib.SSL_write(tls, b"x", 1) == 1
while lib.SSL_key_update(tls, 0) == 1 and lib.SSL_do_handshake(tls) == 1:
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["readinto", "line", "some"])
def test_flood_without_data_is_silence(certificates: uploads.Certificates, how: str) -> None:
    made = certificates.client
    with socket.create_server(("127.0.0.1", 0)) as listener:
        argv = [sys.executable, "-c", FLOOD, f"{listener.getsockname()[1]}", made.certificate, made.key]
        with subprocess.Popen(argv) as flooding:
            here, _ = listener.accept()
            # A server that is slower than the flood: something has always arrived.
            connection = Slow(here, contexts(certificates)[0])
            try:
                connection.handshake(10)
                assert read(connection) == b"x"
                began = time.monotonic()
                with pytest.raises(TimeoutError, match="no data for 1 s"):
                    {"readinto": read, "line": Connection.line, "some": Connection.some}[how](
                        connection, *((100,) if how != "some" else ()), 1
                    )
                assert time.monotonic() - began < processes.PATIENCE
            finally:
                flooding.kill()
                connection.close()


class Slow(Connection):
    """Receives at most a few records at once, so that the next ones have arrived meanwhile."""

    def _more(self, room: int, limit: float) -> None:
        super()._more(room, limit)
        self._window = memoryview(bytearray(512))
        time.sleep(0.002)


@pytest.mark.slow
def test_read_ends_while_bytes_keep_arriving(certificates: uploads.Certificates) -> None:
    with connected(certificates, Slow) as pair:
        # In short records, as a part of one is no data. 800 windows of 2 ms: more than a read may take.
        for _ in range(4000):
            pair.client.sendall(bytes(100))
        assert 10_000 < len(read(pair.server, 400_000)) < 400_000


@pytest.mark.parametrize("stream", [b"123456\r\n", b"1234567", b"12345x\r"])
def test_too_long_line_is_refused(pair: Pair, stream: bytes) -> None:
    pair.client.sendall(stream)
    with pytest.raises(ConnectionError, match="longer than 5 bytes"):
        pair.server.line(5, 5)


def test_interrupt_after_the_end_has_no_effect(pair: Pair) -> None:
    pair.end()
    pair.server.interrupt()
    assert pair.server.interrupted


def test_interrupt_ends_a_wait_for_many_bytes(pair: Pair) -> None:
    """The read after an interrupt must not wait for many bytes, even if it only discards them."""
    # As ``interrupt`` does it, between the check of the flag and the wait.
    os.eventfd_write(pair.server._event, 1)
    with pytest.raises(upload_connection.Interrupted):
        read(pair.server, 1 << 20)
    assert pair.server._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


# -- bodies

HEAD = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def body(pair: Pair, head: bytes, patience: float) -> http.Body:
    pair.client.sendall(head)
    request = http.Exchange(pair.server, http.Limits(5, patience)).receive()
    assert request is not None
    return request.content


def read_body(content: http.Body, size: int = 100) -> bytes:
    into = memoryview(bytearray(size))
    return bytes(into[: content.readinto(into)])


def test_silence_within_the_trailers_times_out(pair: Pair) -> None:
    """What follows is not a chunk."""
    content = body(pair, HEAD + b"3\r\nabc\r\n0\r\nA: b\r\n", 0.1)
    assert read_body(content) == b"abc"
    with pytest.raises(TimeoutError):
        read_body(content)
    pair.client.sendall(b"3\r\ndef\r\n0\r\n\r\n")
    assert read_body(content) == b""
    assert content.at_end


@pytest.mark.parametrize("tail", [b"", b"3\r\nab", b"3\r\nabc", b"3\r\nabc\r\n0\r\n"])
def test_disconnect_within_a_body_is_an_error(pair: Pair, tail: bytes) -> None:
    content = body(pair, HEAD + b"3\r\nabc\r\n" + tail, 5)
    pair.leave()
    whole = b"abc" + tail[3:6]
    assert b"".join(read_body(content, 1) for _ in whole) == whole
    for _ in range(2):
        with pytest.raises(ConnectionError, match="closed"):
            read_body(content)
    assert not content.at_end
