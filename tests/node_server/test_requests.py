"""The node pull server with hostile and slow clients, built with address sanitizer."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import node_servers, processes

#: Seconds for a request of the server that is tested; of the real one 20.
TIMEOUT = 5


@pytest.fixture(scope="session")
def sanitized_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the server with address and undefined behaviour sanitizers, and a short timeout of requests."""
    flags = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
    folder = tmp_path_factory.mktemp("checked")
    source = Path(shutil.copytree(node_servers.SOURCE, folder / "source"))
    header = source / "server.h"
    seconds = "HEAD_SECONDS = 20,"
    assert seconds in header.read_text()
    header.write_text(header.read_text().replace(seconds, f"HEAD_SECONDS = {TIMEOUT},"))
    return node_servers.compiled(folder, source, CFLAGS=flags, LDFLAGS="")


@pytest.fixture(scope="module")
def sanitized_port(tmp_path_factory: pytest.TempPathFactory, sanitized_program: Path) -> Iterator[int]:
    """Run the server with sanitizers and yield its port; no error may be printed."""
    directory = tmp_path_factory.mktemp("sturdy")
    (directory / "disk").mkdir()
    (directory / "disk/disk.img").write_bytes(node_servers.DATA)
    port = processes.free_port()
    arguments = ["-p", str(port), "-image-dir", str(directory / "disk")]
    arguments += ["-ready-file", str(directory / "ready"), "-done-file", str(directory / "done")]
    log = directory / "log"
    with processes.running(
        [sanitized_program, *arguments],
        log=log,
        ready=(directory / "ready").exists,
        env={"ASAN_OPTIONS": "detect_leaks=0"},
    ):
        yield port
    assert "ERROR" not in log.read_text()
    assert "runtime error" not in log.read_text()


HOST = b"Host: x\r\n"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"GET /../disk.img HTTP/1.1\r\n" + HOST, 404),
        (b"GET /../../etc/passwd HTTP/1.1\r\n" + HOST, 404),
        (b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\n" + HOST, 404),
        (b"GET //etc/passwd HTTP/1.1\r\n" + HOST, 404),
        (b"GET //disk.img HTTP/1.1\r\n" + HOST, 404),
        (b"GET /./disk.img HTTP/1.1\r\n" + HOST, 404),
        (b"GET /disk.img/ HTTP/1.1\r\n" + HOST, 404),
        (b"GET /disk.img?x HTTP/1.1\r\n" + HOST, 404),
        (b"GET / HTTP/1.1\r\n" + HOST, 404),
        (b"GET /info/ HTTP/1.1\r\n" + HOST, 404),
        (b"GET http://any.where/disk.img HTTP/1.1\r\n" + HOST, 200),
        (b"GET http://any.where HTTP/1.1\r\n" + HOST, 404),
        (b"GET /disk.img HTTP/1.0\r\n", 200),
        (b"GET /disk%2eimg HTTP/1.1\r\n" + HOST, 200),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b"Content-Length: 0\r\n", 200),
        (b"GET /disk.img%00 HTTP/1.1\r\n" + HOST, 400),
        (b"GET /disk%2 HTTP/1.1\r\n" + HOST, 400),
        (b"GET /disk%zz HTTP/1.1\r\n" + HOST, 400),
        (b"GET disk.img HTTP/1.1\r\n" + HOST, 400),
        (b"GET  /disk.img HTTP/1.1\r\n" + HOST, 400),
        (b"GET /disk.img  HTTP/1.1\r\n" + HOST, 400),
        (b"GET /disk.img\r\n" + HOST, 400),
        (b"GET\r\n", 400),
        (b"\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + HOST, 400),
        (b"GET /disk.img HTTP/1.1\r\nHost : x\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b" folded\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b"nothing\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b"X: a\nY: b\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b"X: a\rb\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b"X: a\0b\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n", 400),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n", 413),
        (b"GET /disk.img HTTP/2.0\r\n" + HOST, 505),
        (b"POST /disk.img HTTP/1.1\r\n" + HOST, 405),
        (b"get /disk.img HTTP/1.1\r\n" + HOST, 405),
        (b"GET /" + b"a" * 17_000 + b" HTTP/1.1\r\n" + HOST, 431),
        (b"GET /disk.img HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 17_000 + b"\r\n", 431),
        (b"GET /" + b"%41" * 5_000 + b" HTTP/1.1\r\n" + HOST, 404),
    ],
)
def test_malformed_request_gets_error_status(sanitized_port: int, text: bytes, status: int) -> None:
    answer = node_servers.send_raw(sanitized_port, text + b"\r\n")
    assert node_servers.status_of(answer) == status
    assert b"root:" not in answer
    if 400 <= status != 404:
        assert b"Connection: close\r\n" in answer
        assert answer.count(b"HTTP/1.1") == 1


HEADERS = st.one_of(
    st.binary(max_size=60),
    st.builds(lambda value: b"Range: bytes=" + value, st.text("0123456789-,", max_size=30).map(str.encode)),
    st.sampled_from([b"Connection: close", b"If-Range: x", b"Content-Length: 0", b"Host: y"]),
)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=40), st.lists(HEADERS, max_size=5), st.booleans())
def test_any_request_is_answered_or_dropped(
    sanitized_port: int, line: bytes, headers: list[bytes], sane: bool
) -> None:
    first = b"GET /disk.img HTTP/1.1" if sane else line
    answer = node_servers.send_raw(sanitized_port, b"\r\n".join([first, b"Host: x", *headers]) + b"\r\n\r\n")
    assert not answer or node_servers.status_of(answer) in {200, 206, 400, 404, 405, 413, 416, 505}
    assert (
        node_servers.status_of(
            node_servers.send_raw(sanitized_port, b"GET /info HTTP/1.1\r\nHost: x\r\n\r\n")
        )
        == 200
    )


def test_incomplete_request_is_dropped(sanitized_port: int) -> None:
    assert node_servers.send_raw(sanitized_port, b"GET /disk.img HT") == b""


def test_slow_clients_do_not_block_others(sanitized_port: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", sanitized_port)))
            client.sendall(b"GET /disk.img HTTP/1.1\r\n")
        started = time.monotonic()
        assert node_servers.request(sanitized_port, "/disk.img").body == node_servers.DATA
        assert time.monotonic() - started < TIMEOUT


def test_client_sending_too_slowly_gets_timeout(sanitized_port: int) -> None:
    with socket.create_connection(("127.0.0.1", sanitized_port), timeout=0.5) as client:
        client.sendall(b"GET /disk.img HTTP/1.1\r\n")
        answer, started = b"", time.monotonic()
        while not answer and time.monotonic() - started < processes.PATIENCE:
            with contextlib.suppress(TimeoutError):
                client.sendall(b"X")
                answer = client.recv(1000)
        assert node_servers.status_of(answer) == 408
        assert TIMEOUT - 1 < time.monotonic() - started < processes.PATIENCE
