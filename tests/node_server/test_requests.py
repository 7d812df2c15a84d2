"""The server of node pull against hostile and slow clients, under checks of memory."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import node_servers, processes


@pytest.fixture(scope="session")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the program with checks of every access to memory."""
    flags = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
    return node_servers.compiled(tmp_path_factory.mktemp("checked"), CFLAGS=flags, LDFLAGS="")


@pytest.fixture(scope="module")
def sturdy(tmp_path_factory: pytest.TempPathFactory, checked: Path) -> Iterator[int]:
    """Serve with checks of memory; the port. A fault would be said on standard error."""
    directory = tmp_path_factory.mktemp("sturdy")
    (directory / "disk").mkdir()
    (directory / "disk/disk.img").write_bytes(node_servers.DATA)
    port = processes.free_port()
    arguments = ["-p", str(port), "-image-dir", str(directory / "disk")]
    arguments += ["-ready-file", str(directory / "ready"), "-done-file", str(directory / "done")]
    log = directory / "log"
    with processes.running(
        [checked, *arguments],
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
def test_odd_requests(sturdy: int, text: bytes, status: int) -> None:
    answer = node_servers.say(sturdy, text + b"\r\n")
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
    sturdy: int, line: bytes, headers: list[bytes], sane: bool
) -> None:
    first = b"GET /disk.img HTTP/1.1" if sane else line
    answer = node_servers.say(sturdy, b"\r\n".join([first, b"Host: x", *headers]) + b"\r\n\r\n")
    assert not answer or node_servers.status_of(answer) in {200, 206, 400, 404, 405, 413, 416, 505}
    assert node_servers.status_of(node_servers.say(sturdy, b"GET /info HTTP/1.1\r\nHost: x\r\n\r\n")) == 200


def test_half_a_request(sturdy: int) -> None:
    assert node_servers.say(sturdy, b"GET /disk.img HT") == b""


def test_slow_clients_keep_nobody_waiting(sturdy: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", sturdy)))
            client.sendall(b"GET /disk.img HTTP/1.1\r\n")
        started = time.monotonic()
        assert node_servers.ask(sturdy, "/disk.img").body == node_servers.DATA
        assert time.monotonic() - started < 12  # their time-out is 20 s


def test_a_client_that_drips_is_cut_off(sturdy: int) -> None:
    with socket.create_connection(("127.0.0.1", sturdy), timeout=1) as client:
        client.sendall(b"GET /disk.img HTTP/1.1\r\n")
        answer, started = b"", time.monotonic()
        while not answer and time.monotonic() - started < 40:
            with contextlib.suppress(TimeoutError):
                client.sendall(b"X")
                answer = client.recv(1000)
        assert node_servers.status_of(answer) == 408
        assert 15 < time.monotonic() - started < 40
