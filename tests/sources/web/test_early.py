"""The connections for a large image are opened while its head arrives."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3.connection

import cdi_worker
from cdi_worker import errors
from cdi_worker.images import kernel
from cdi_worker.images.engine import cancelling
from tests.support import misbehave, processes, tls

MIB = 1 << 20
DATA = bytes(range(256)) * 4096 * 32
#: Its server is slow to answer: a near one gets few connections.
PAGE = misbehave.Page(DATA, delay=0.02, drip=(64 << 10, 0.001))
STALLED = dataclasses.replace(PAGE, stall=100_000)


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[misbehave.Server]:
    """Run the server, with TLS if a test names the scheme https."""
    pair = tls.Authority(tmp_path).issue() if getattr(request, "param", "http") == "https" else None
    with misbehave.Server(pair) as running:
        yield running


def made(url: str, path: Path, connections: int = 6) -> cdi_worker.Request:
    location = cdi_worker.Location(url, cdi_worker.Access(insecure=True))
    options = cdi_worker.FetchOptions(connections=connections)
    return cdi_worker.Request(source="http", location=location, target=str(path / "disk"), fetch=options)


def check(server: misbehave.Server, path: Path, data: bytes = DATA) -> None:
    """Import and compare."""
    cdi_worker.run(made(f"{server.scheme}://127.0.0.1:{server.port}/disk", path))
    assert (path / "disk").read_bytes() == data
    processes.wait_for(lambda: server.open == 0, "closed connections")


@pytest.mark.parametrize(
    ("server", "closes"), [("http", False), ("https", False), ("https", True)], indirect=["server"]
)
def test_connections_are_opened_while_the_head_arrives(
    server: misbehave.Server, tmp_path: Path, closes: bool
) -> None:
    """Not to a server that closes them: if it handles them in turn, it waits for a request on the first."""
    page = dataclasses.replace(STALLED, headers={"Connection": "close"} if closes else {})
    cancel, ended = cancelling.Cancel(), []

    def run() -> None:
        with pytest.raises(errors.Cancelled) as raised:
            cdi_worker.run(made(server.serve("/disk", page), tmp_path, 4), cancel=cancel)
        ended.append(raised)

    thread = threading.Thread(target=run)
    thread.start()
    if closes:
        processes.wait_for(lambda: server.sent("/disk") == page.stall, "the first bytes")
        time.sleep(0.5)
    else:
        processes.wait_for(lambda: server.connections == 4, "all connections")
    began = time.monotonic()
    cancel.set()
    thread.join()
    assert (len(ended), time.monotonic() - began < processes.PATIENCE) == (1, True)
    processes.wait_for(lambda: server.open == 0, "closed connections")
    assert (server.connections, len(server.requests)) == (1 if closes else 4, 1)


@pytest.mark.parametrize(
    ("server", "size", "connections"),
    [
        ("http", 1024, 1),
        ("https", MIB, 1),
        ("http", 6 * MIB, 2),
        ("http", len(DATA), 6),
        ("https", len(DATA), 6),
    ],
    indirect=["server"],
)
def test_only_those_are_opened_that_are_needed(
    server: misbehave.Server, tmp_path: Path, size: int, connections: int
) -> None:
    server.serve("/disk", dataclasses.replace(PAGE, body=DATA[:size]))
    check(server, tmp_path, DATA[:size])
    # Of TLS also: tickets that arrive on an idle connection are not its end.
    assert server.connections == connections


@pytest.mark.parametrize("server", ["http", "https"], indirect=True)
def test_requests_wait_for_connections_that_are_being_opened(
    server: misbehave.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = urllib3.connection.HTTPConnection._new_conn

    def slowly(connection: urllib3.connection.HTTPConnection) -> socket.socket:
        time.sleep(0.2)
        return plain(connection)

    monkeypatch.setattr(urllib3.connection.HTTPConnection, "_new_conn", slowly)
    server.serve("/disk", PAGE)
    check(server, tmp_path)
    assert server.connections == 6


def test_few_to_a_server_that_is_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To connect may take longer than its answers, and to load the CAs before."""
    plain = urllib3.connection.HTTPConnection._new_conn

    def slowly(connection: urllib3.connection.HTTPConnection) -> socket.socket:
        time.sleep(0.02)
        return plain(connection)

    monkeypatch.setattr(urllib3.connection.HTTPConnection, "_new_conn", slowly)
    few = min(6, max(2, round(kernel.processors())))
    for attempt in range(40):
        with misbehave.Server() as server:
            server.serve("/disk", misbehave.Page(DATA))
            check(server, tmp_path)
            (tmp_path / "disk").unlink()
            if server.connections == few:
                return
            print(f"attempt {attempt}: this machine is busy, {server.connections} connections")
    pytest.fail("always more connections than are worth it")


def test_inspection_and_a_server_without_ranges_need_one(server: misbehave.Server, tmp_path: Path) -> None:
    cdi_worker.inspect(made(server.serve("/disk", PAGE), tmp_path))
    assert server.connections == 1
    server.serve("/disk", dataclasses.replace(PAGE, ranges=False))
    check(server, tmp_path)
    assert server.connections == 2


def test_server_may_refuse_them(server: misbehave.Server, tmp_path: Path) -> None:
    server.most = 1
    data = DATA[: 6 * MIB]
    cdi_worker.run(made(server.serve("/disk", dataclasses.replace(PAGE, body=data)), tmp_path))
    assert (tmp_path / "disk").read_bytes() == data
