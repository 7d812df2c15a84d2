"""Responses that come late, in parts, or never end."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer.send import client
from cdi_worker.sources import base, responses
from cdi_worker.sources.web import session
from tests.support import http_disk, misbehave, reading, tls

HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\n\r\n"
GOING = b"HTTP/1.1 100 Continue\r\n\r\n"
#: Seconds.
SOON = 10.0


@pytest.mark.parametrize(
    ("interim", "times"),
    [(HINTS, 1), (HINTS, 20), (GOING, 20), (b"HTTP/1.1 102 Processing\r\n\r\n" + HINTS, 1)],
)
def test_interim_responses_are_skipped(server: misbehave.Server, interim: bytes, times: int) -> None:
    url = server.serve("/disk", http_disk.changed(before=(interim, times)))
    with http_disk.opened(url) as image:
        assert http_disk.whole(image) == http_disk.DATA
        assert reading.read_through_engine(image) == http_disk.DATA


@pytest.mark.parametrize("interim", [HINTS, GOING])
def test_endless_interim_responses_are_refused(server: misbehave.Server, interim: bytes) -> None:
    url = server.serve("/disk", http_disk.changed(before=(interim, None)))
    began = time.monotonic()
    with pytest.raises(errors.Unreachable, match="interim responses, headers or trailers without end"):
        http_disk.refused(url)
    assert time.monotonic() - began < SOON


def test_endless_interim_responses_of_a_proxy_are_refused() -> None:
    with endless(HINTS) as port:
        access = base.Access(https_proxy=f"127.0.0.1:{port}")
        with pytest.raises(errors.Unreachable, match="without end"):
            http_disk.refused(f"https://{tls.FAR}/disk", access)


def test_endless_headers_of_a_proxy_are_refused() -> None:
    with endless(b"X-More: of this\r\n", first=b"HTTP/1.1 200 OK\r\n") as port:
        access = base.Access(https_proxy=f"127.0.0.1:{port}")
        with pytest.raises(errors.SourceError, match=r"without end|more than 100 headers"):
            http_disk.refused(f"https://{tls.FAR}/disk", access)


@pytest.mark.parametrize("times", [0, 1, 300])
def test_trailers_are_skipped(server: misbehave.Server, times: int) -> None:
    page = http_disk.changed(framing="chunked", ranges=False, trailers=(b"X-Checksum: abc\r\n", times))
    with http_disk.opened(server.serve("/disk", page)) as image:
        assert http_disk.whole(image) == http_disk.DATA


def test_endless_trailers_are_refused(server: misbehave.Server) -> None:
    page = http_disk.changed(framing="chunked", ranges=False, trailers=(b"X-Checksum: abc\r\n", None))
    with http_disk.opened(server.serve("/disk", page)) as image:
        began = time.monotonic()
        with pytest.raises(errors.Transient, match="trailers without end"):
            http_disk.whole(image)
        assert time.monotonic() - began < SOON


@pytest.mark.parametrize("first", [b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 1"])
def test_head_that_arrives_byte_by_byte_is_limited(first: bytes) -> None:
    with endless(b"x" if b"200" in first else b"0", first=first, pause=0.05) as port:
        began = time.monotonic()
        with pytest.raises(errors.Transient, match="timed out"):
            http_disk.refused(f"http://127.0.0.1:{port}/disk", base.Access(patience=0.5))
        assert time.monotonic() - began < 5


def test_large_head_is_read(server: misbehave.Server) -> None:
    headers = {f"X-Long-{number}": "v" * 4000 for number in range(40)}
    assert sum(map(len, headers.values())) < responses.LARGEST
    with http_disk.opened(server.serve("/disk", http_disk.changed(headers=headers))) as image:
        assert http_disk.whole(image) == http_disk.DATA


def test_small_document_that_arrives_byte_by_byte_is_limited(server: misbehave.Server) -> None:
    url = server.serve("/document", http_disk.changed(drip=(1, 0.05)))
    with session.new_session(base.Access(), cancelling.NEVER) as fresh, fresh.get(url, stream=True) as answer:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            session.body(answer, 1 << 20, 0.5)
        assert time.monotonic() - began < SOON


def test_upload_client_skips_interim_responses() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone"
    with endless(b"", first=HINTS + answer, pause=0.05) as port:
        asking = client.Client(f"http://127.0.0.1:{port}/", ssl.create_default_context(), cancelling.Cancel())
        assert asking.ask("HEAD", "/").status == 200


@contextlib.contextmanager
def endless(data: bytes, *, first: bytes = b"", pause: float = 0.0) -> Iterator[int]:
    """Serve one connection with ``first`` and then ``data`` until the client disconnects; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(first)
                while not select.select([connection], [], [], 0)[0]:
                    connection.sendall(data)
                    time.sleep(pause)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()
