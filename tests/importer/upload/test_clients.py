"""Upload clients that disconnect, fall silent, or send garbage."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest

from cdi_worker.importer import contract
from tests.support import oracle, processes, uploads

MIB = uploads.MIB
SYNC = uploads.SYNC
DATA = uploads.DATA
server = uploads.server


@pytest.mark.parametrize("sent", [0, MIB, len(DATA) - 1, "within a chunk"])
def test_server_survives_a_client_that_disconnects(
    server: uploads.Server, disk: Path, sent: int | str
) -> None:
    with server.connect() as connection:
        if isinstance(sent, int):
            server.begin(connection, SYNC, len(DATA))
            connection.send(DATA[:sent])
        else:
            connection.putrequest("POST", SYNC)
            connection.putheader("Transfer-Encoding", "chunked")
            connection.endheaders()
            connection.send(b"100000\r\n" + DATA[:MIB] + b"\r\n200000\r\n" + DATA[:1000])
    uploads.wait_until(lambda: server.ask("POST", SYNC, DATA).status == 200)
    assert disk.read_bytes() == DATA


def test_stalled_body_times_out(
    certificates: uploads.Certificates, paths: contract.Paths, disk: Path
) -> None:
    with (
        uploads.Server(certificates, {}, paths).with_short_timeouts() as server,
        server.connect() as connection,
    ):
        connection.putrequest("POST", SYNC)
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        connection.send(b"100000\r\n" + DATA[:MIB] + b"\r\n")
        assert connection.sock.recv(12) == b"HTTP/1.1 500"
        oracle.unusable(disk)
        uploads.wait_until(lambda: server.ask("POST", SYNC, DATA).status == 200)


@pytest.mark.parametrize("framing", ["sized", "chunked"])
def test_body_that_trickles_times_out(
    certificates: uploads.Certificates, paths: contract.Paths, disk: Path, framing: str
) -> None:
    with (
        uploads.Server(certificates, {}, paths).with_short_timeouts() as server,
        server.connect() as connection,
    ):
        connection.putrequest("POST", SYNC)
        if framing == "chunked":
            connection.putheader("Transfer-Encoding", "chunked")
        else:
            connection.putheader("Content-Length", str(len(DATA)))
        connection.endheaders()
        ended = threading.Event()

        def trickle() -> None:
            with contextlib.suppress(OSError):
                while not ended.wait(0.003):
                    connection.send(b"1\r\nx\r\n" if framing == "chunked" else b"x")

        sender = threading.Thread(target=trickle, daemon=True)
        sender.start()
        try:
            uploads.wait_until(lambda: server.ask("POST", SYNC, DATA).status == 200)
        finally:
            ended.set()
            sender.join()
    assert disk.read_bytes() == DATA


def test_bytes_behind_the_body_are_ignored(server: uploads.Server, disk: Path) -> None:
    with server.connect() as connection:
        server.begin(connection, SYNC, len(DATA))
        connection.send(DATA + b"and more\r\n\r\n")
        assert connection.getresponse().status == 200
    assert disk.read_bytes() == DATA
    assert server.result().status == 0


def test_one_of_ten_concurrent_clients_succeeds(server: uploads.Server, disk: Path) -> None:
    found: list[int] = []
    gate = threading.Barrier(10)

    def send() -> None:
        with server.connect() as connection:
            connection.connect()
            gate.wait(20)
            try:
                connection.request("POST", SYNC, DATA)
                found.append(connection.getresponse().status)
            except ConnectionError:
                found.append(503)  # refused while it was still sending

    threads = [threading.Thread(target=send) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found.count(200) == 1
    assert set(found) <= {200, 503, 409}
    assert disk.read_bytes() == DATA
    assert server.result().status == 0


def test_garbage_instead_of_tls_is_dropped(server: uploads.Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=processes.PATIENCE) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        plain.recv(1000)
    assert server.ask("GET", "/healthz", client=None).status == 200
