"""Many connections to the upload server, silent and slow ones, and their resources."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.importer import contract
from cdi_worker.importer.upload import listener
from tests.support import processes, upload_wire, uploads

SYNC = uploads.SYNC
DATA = uploads.DATA
MANY = 300
server = uploads.server


def resources() -> set[threading.Thread | str]:
    """Return the threads and descriptors of this process."""
    return {*threading.enumerate(), *processes.descriptors()}


def check_returned(before: set[threading.Thread | str]) -> None:
    """Wait until there are only these threads and descriptors."""
    with contextlib.suppress(AssertionError):
        processes.wait_for(lambda: resources() <= before, "threads and descriptors")
    assert resources() - before == set()


def threads_since(before: set[threading.Thread | str]) -> int:
    return len(set(threading.enumerate()) - before)


def healthy(server: uploads.Server, seconds: float = 5) -> bool:
    begun = time.monotonic()
    answer = server.ask("GET", "/healthz", client=None)
    return (answer.status, time.monotonic() - begun < seconds) == (200, True)


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::", "127.0.0.1"])
def test_server_listens_on_any_address(
    certificates: uploads.Certificates, paths: contract.Paths, address: str
) -> None:
    """An IPv6 socket accepts every address, as with CDI's server: a cluster may have only IPv6."""
    known = Path("/proc/net/if_inet6")
    has_six = known.exists() and "0" * 31 + "1" in known.read_text()
    with uploads.Server(certificates, {"LISTEN_ADDRESS": address}, paths) as server:
        for local in ("127.0.0.1", *(["::1"] if has_six else [])):
            if address == "127.0.0.1" != local:
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((local, server.port), timeout=20)
            else:
                socket.create_connection((local, server.port), timeout=20).close()
        assert healthy(server)


def test_silent_connections_do_not_block_others(server: uploads.Server, disk: Path) -> None:
    """With more connections than the limit the oldest are closed, and others are not affected."""
    before = resources()
    with contextlib.ExitStack() as stack:
        for number in range(MANY):
            connect = upload_wire.plain if number % 10 else upload_wire.secure
            stack.enter_context(connect(server))
        assert healthy(server)
        answer = server.ask("POST", SYNC, DATA, {"x-cdi-checksum": f"sha256:{'0' * 64}"})
        assert "checksum mismatch" in answer.text
        assert threads_since(before) <= listener.MOST + listener.LEAVING + 1
    check_returned(before)
    assert server.ask("POST", SYNC, DATA).status == 200
    assert disk.read_bytes() == DATA


def test_flood_of_connections_is_survived(server: uploads.Server) -> None:
    """Faster than silent connections can be closed."""
    before = resources()
    with contextlib.ExitStack() as stack:
        for _ in range(2 * listener.MOST):
            stack.enter_context(upload_wire.plain(server))
        assert threads_since(before) <= listener.MOST + listener.LEAVING + 1
        assert healthy(server)
    check_returned(before)


def test_running_out_of_descriptors_is_survived(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    """Once clients disconnect, the server accepts connections again."""
    processes.need("prlimit")
    made = uploads.Server(certificates, {}, paths)
    log = tmp_path / "log"
    argv = ["prlimit", "--nofile=48", sys.executable, "-m", "cdi_worker", f"--data-dir={paths.data}"]
    argv += [f"--block-device={paths.block}", f"--termination-log={tmp_path / 'message'}", "-v=3"]
    ready = functools.partial(processes.is_listening, made.port)
    with processes.running(argv, log=log, ready=ready, env={**os.environ, **made.env}) as pod:
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(upload_wire.plain(made))
            processes.wait_for(lambda: "cannot accept a connection" in log.read_text(), "the last descriptor")
        assert healthy(made)
        assert made.ask("POST", SYNC, DATA).status == 200
        assert pod.wait(processes.PATIENCE) == 0
    assert "Traceback" not in log.read_text()


def test_slow_clients_are_disconnected(certificates: uploads.Certificates, paths: contract.Paths) -> None:
    """In the handshake or in the head: each is disconnected, however often it sends a byte."""
    with uploads.Server(certificates, {}, paths).with_short_timeouts(0.25) as server:
        with upload_wire.connected(server) as wire:
            begun = time.monotonic()
            with contextlib.suppress(OSError):
                for letter in b"GET /healthz HTTP/1.1\r\n" + b"X: y\r\n" * 400:
                    wire.send(bytes([letter]))
                    time.sleep(0.02)
            assert 0.9 < time.monotonic() - begun < processes.PATIENCE
            assert healthy(server)
        with upload_wire.plain(server) as plain:
            plain.sendall(b"\x16\x03\x01\x02\x00")
            assert healthy(server)


def test_slow_chunk_line_is_limited(certificates: uploads.Certificates, paths: contract.Paths) -> None:
    """Each byte is progress, but no chunk line may have 4 KiB."""
    with (
        uploads.Server(certificates, {}, paths).with_short_timeouts(3) as server,
        upload_wire.connected(server) as wire,
    ):
        wire.send(f"POST {SYNC} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;")
        for _ in range(5):
            wire.send(b"x")
            time.sleep(0.05)
            assert server.ask("POST", SYNC, b"x").status == 503
        wire.send(b"x" * 5000)
        assert wire.answer().status == 500
        assert server.ask("POST", SYNC, DATA).status == 200


def test_client_that_never_reads_is_disconnected(server: uploads.Server) -> None:
    """Endless pipelined requests."""
    with upload_wire.connected(server, None) as wire:
        wire.sock.settimeout(0.3)
        with contextlib.suppress(TimeoutError, OSError):
            for _ in range(20_000):
                wire.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        assert healthy(server)


# -- end of the server

POST = "POST /v1beta1/upload HTTP/1.1\r\nHost: x\r\n"
LONG = "Content-Length: 5000000\r\n"
FORM = "POST /v1beta1/upload-form HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
CLONE = "x-cdi-content-type: filesystem-clone\r\n"
#: What a client has sent before it falls silent.
PLAIN = {"before its handshake": b"", "within its handshake": b"\x16\x03\x01\x02\x00\x01\x00"}
SECURE = {
    "idle": "",
    "within a head": "POST /v1beta1/upload HTTP/1.1\r\nHo",
    "before its body": f"{POST}{LONG}\r\n",
    "within a body": f"{POST}{LONG}\r\n{'x' * 3_000_000}",
    "within a form": f"{FORM}{LONG}\r\n--b\r\n",
    "within a clone": f"{POST}{LONG}{CLONE}\r\n",
    "within a chunk": f"{POST}Transfer-Encoding: chunked\r\n\r\n5\r\nhel",
    "refused": "PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n",
    "between two requests": "POST /v1beta1/upload-resumable HTTP/1.1\r\nHost: x\r\nUpload-Length: 5\r\n\r\n",
}


def test_servers_stop_despite_waiting_clients(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    """Each has its own server; all wait at the same time."""
    servers: dict[str, uploads.Server] = {}
    with contextlib.ExitStack() as stack:
        for number, (state, request) in enumerate({**PLAIN, **SECURE}.items()):
            (tmp_path / f"data{number}").mkdir()
            own = paths._replace(data=str(tmp_path / f"data{number}"))
            server = servers[state] = stack.enter_context(uploads.Server(certificates, {}, own))
            connect = upload_wire.secure if state in SECURE else upload_wire.plain
            sock = stack.enter_context(connect(server))
            sock.sendall(request.encode() if isinstance(request, str) else request)
            if state in SECURE and request.startswith("POST") and "\r\n\r\n" in request:
                server.wait_until_busy()
            else:
                assert healthy(server)
        begun = time.monotonic()
        for server in servers.values():
            server.cancel.set()
        for server in servers.values():
            with pytest.raises(errors.Cancelled):
                server.result()
        assert time.monotonic() - begun < 6
    for state, server in servers.items():
        assert not processes.is_listening(server.port), state
    assert not [*tmp_path.glob("data*/*")]


def test_server_ends_despite_silent_clients(server: uploads.Server) -> None:
    """Open connections do not keep the server running, not even that of the client it served."""
    with (
        upload_wire.plain(server),
        upload_wire.secure(server),
        upload_wire.connected(server) as wire,
    ):
        assert wire.is_in_sync()
        request = f"POST {SYNC} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(DATA)}\r\n\r\n".encode()
        begun = time.monotonic()
        assert wire.ask(request + DATA).status == 200
        assert server.result().status == 0
        assert time.monotonic() - begun < 6
