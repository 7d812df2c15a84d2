"""Resumable uploads whose requests are cut or concurrent: no byte is lost or duplicated."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cdi_worker.importer import contract
from tests.support import devices, oracle, processes, upload_wire, uploads

MIB = uploads.MIB
PLACE = uploads.RESUMABLE
DATA = random.Random(9).randbytes(2 * MIB) + bytes(MIB) + random.Random(8).randbytes(MIB)
server = uploads.server


def create(server: uploads.Server, length: int = len(DATA), **headers: str) -> uploads.Response:
    return server.ask("POST", PLACE, b"", {**uploads.TUS, "Upload-Length": str(length), **headers})


def head(offset: int, more: str) -> str:
    metadata = "".join(f"{name}: {value}\r\n" for name, value in uploads.PATCH_HEADERS.items())
    return f"PATCH {PLACE} HTTP/1.1\r\nHost: x\r\nUpload-Offset: {offset}\r\n{metadata}{more}\r\n\r\n"


def sized(offset: int) -> str:
    return head(offset, f"Content-Length: {len(DATA) - offset}")


def patch(server: uploads.Server, offset: int, data: bytes = DATA) -> uploads.Response:
    return server.ask("PATCH", PLACE, data[offset:], {**uploads.PATCH_HEADERS, "Upload-Offset": str(offset)})


def reset(wire: upload_wire.Wire) -> None:
    wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.sock.close()


def close_cleanly(wire: upload_wire.Wire) -> None:
    wire.sock.setblocking(False)
    with contextlib.suppress(OSError):
        wire.sock.unwrap()
    wire.sock.settimeout(20)


BREAKS: dict[str, Callable[[upload_wire.Wire], object]] = {
    "no chunk": lambda wire: wire.send(b"\r\n5 5\r\nhello\r\n0\r\n\r\n"),
    "end of TLS": close_cleanly,
    "end of TCP": lambda wire: socket.socket.shutdown(wire.sock, socket.SHUT_WR),
    "no TLS": lambda wire: socket.socket.send(wire.sock, b"x" * 100),
    "silence": lambda _: None,
}


@pytest.mark.parametrize(
    ("fault", "chunked"),
    [
        ("no chunk", True),
        ("end of TLS", False),
        ("end of TLS", True),
        ("end of TCP", False),
        ("no TLS", True),
        ("silence", False),
        ("silence", True),
        ("reset", False),
        ("reset", True),
    ],
)
def test_offset_is_exact_after_a_cut(
    certificates: uploads.Certificates, paths: contract.Paths, disk: Path, fault: str, chunked: bool
) -> None:
    made = uploads.Server(certificates, {}, paths)
    silence = fault == "silence"
    with made.with_short_timeouts(1) if silence else made as server:
        assert create(server).status == 201
        offset = 0
        for count in (300_000,) if silence else (1, 1_500_000):
            with upload_wire.connected(server) as wire:
                if chunked:
                    wire.send(head(offset, "Transfer-Encoding: chunked"), f"{count:x}\r\n")
                else:
                    wire.send(sized(offset))
                wire.send(DATA[offset : offset + count])
                if fault == "reset":
                    reset(wire)
                else:
                    BREAKS[fault](wire)
                    status = 0
                    with contextlib.suppress(AssertionError, OSError):
                        status = wire.answer().status
                    # Bytes that are not TLS end the session on which an answer would come.
                    assert status == (0 if fault == "no TLS" else 400)
            now, before = server.offset(), -1
            while fault == "reset" and now != before:
                # On a busy machine the server may still read what came before the reset.
                time.sleep(0.3)
                now, before = server.offset(), now
            assert now == offset + count or (fault == "reset" and offset <= now <= offset + count)
            offset = now
        assert patch(server, offset).status == 204
        assert disk.read_bytes() == DATA


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_concurrent_clients_complete_one_upload(server: uploads.Server, disk: Path, pause: float) -> None:
    """Each client resumes the upload wherever it is, and all send the same bytes."""
    assert create(server).status == 201
    found: list[int] = []

    def send(dice: random.Random) -> None:
        with contextlib.suppress(OSError, AssertionError):
            while server.running:
                offset = server.offset()
                if offset == len(DATA):
                    return
                part = DATA[: offset + dice.randint(1, 900_000)]
                with server.connect() as connection:
                    connection.putrequest("PATCH", PLACE)
                    for name, value in {**uploads.PATCH_HEADERS, "Upload-Offset": str(offset)}.items():
                        connection.putheader(name, value)
                    connection.putheader("Content-Length", str(len(part) - offset))
                    connection.endheaders()
                    half = dice.randint(offset, len(part))
                    connection.send(part[offset:half])
                    time.sleep(dice.random() * pause)
                    connection.send(part[half:])
                    found.append(connection.getresponse().status)

    threads = [threading.Thread(target=send, args=(random.Random(number),)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(processes.PATIENCE)
    assert server.result().status == 0
    assert set(found) <= {204, 400, 409}
    assert disk.read_bytes() == DATA


def test_head_is_answered_while_a_client_sends(server: uploads.Server, disk: Path) -> None:
    size = 1 << 30
    assert create(server, size).status == 201
    with upload_wire.connected(server) as wire:

        def send() -> None:
            with contextlib.suppress(OSError):
                wire.send(head(0, f"Content-Length: {size}"), DATA)
                while True:
                    wire.send(bytes(MIB))

        sending = threading.Thread(target=send)
        sending.start()
        processes.wait_for(lambda: server.received > len(DATA), "the first bytes")
        offset = server.offset()
        assert len(DATA) < offset < size
        assert server.offset() == offset
        sending.join(processes.PATIENCE)
    assert server.ask("DELETE", PLACE).status == 204
    oracle.unusable(disk)


def test_deleting_an_upload_ends_its_request_at_once(server: uploads.Server, disk: Path) -> None:
    """The other request, still sending, gets an error; no client waits for its timeout."""
    for _ in range(2):
        assert create(server).status == 201
        with upload_wire.connected(server) as wire:
            wire.send(sized(0), DATA[:MIB])
            processes.wait_for(lambda: server.received > 0, "the first bytes")
            assert server.ask("DELETE", PLACE).status == 204
            assert wire.answer().status in {400, 500}
        assert server.ask("HEAD", PLACE).status == 404
        oracle.unusable(disk)
    assert create(server).status == 201
    assert patch(server, 0).status == 204
    assert disk.read_bytes() == DATA


def test_complete_upload_cannot_be_deleted(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    """It is being processed, or done: the client must not be told that it does not exist."""
    size = 8 * MIB
    with (
        devices.slow(tmp_path, size, bytes_per_second=6 * MIB) as target,
        uploads.Server(certificates, {"DESTINATION": str(target)}, paths) as server,
    ):
        assert create(server, size).status == 201
        with server.connect() as connection:
            data = random.Random(1).randbytes(size)
            connection.request("PATCH", PLACE, data, {**uploads.PATCH_HEADERS, "Upload-Offset": "0"})
            processes.wait_for(lambda: server.received == size, "all bytes")
            assert server.ask("DELETE", PLACE).status == 503
            assert connection.getresponse().status == 204
        assert server.result().status == 0


@pytest.mark.parametrize(("chunked", "length_given"), [(False, True), (True, False)])
def test_second_request_at_the_last_byte_is_answered(
    certificates: uploads.Certificates,
    paths: contract.Paths,
    tmp_path: Path,
    chunked: bool,
    length_given: bool,
) -> None:
    """All bytes have arrived, and the client that sent them reconnects before its response."""
    made = {"Upload-Length": str(len(DATA))} if length_given else {"Upload-Defer-Length": "1"}
    last = {**uploads.PATCH_HEADERS, "Upload-Offset": str(len(DATA)), "Upload-Length": str(len(DATA))}
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(DATA)}"
    with (
        devices.slow(tmp_path, len(DATA), bytes_per_second=4 * MIB) as target,
        uploads.Server(certificates, {"DESTINATION": str(target)}, paths) as server,
    ):
        assert server.ask("POST", PLACE, b"", {**uploads.TUS, **made}).status == 201
        with upload_wire.connected(server) as first:
            first.send(head(0, framing))
            # The chunk has arrived, its trailing line has not.
            first.send(*([f"{len(DATA):x}\r\n"] if chunked else []), DATA)
            processes.wait_for(lambda: server.received == len(DATA), "all bytes")
            assert server.offset() == len(DATA)
            assert server.ask("PATCH", PLACE, b"", last).status == 204
            assert first.answer().status in {204, 400}
        assert server.result().status == 0
        expected = tmp_path / "expected"
        expected.write_bytes(DATA)
        oracle.same(target, expected)


@pytest.mark.parametrize("kind", ["upload", "upload-resumable"])
def test_new_upload_is_possible_while_a_connection_hangs(
    certificates: uploads.Certificates, paths: contract.Paths, disk: Path, kind: str
) -> None:
    with uploads.Server(certificates, {}, paths).with_short_timeouts(1) as server:
        assert create(server).status == 201
        with upload_wire.connected(server) as dead:
            dead.send(sized(0), DATA[:1000])
            processes.wait_for(lambda: server.received > 0, "the first bytes")
            again = {**uploads.TUS, "Upload-Length": str(len(DATA))} if "resumable" in kind else {}
            assert server.ask("POST", f"/v1beta1/{kind}", b"", again).status == 503
            assert dead.answer().status == 400
        if again:
            assert create(server).status == 201
            assert patch(server, 0).status == 204
        else:
            assert server.ask("POST", uploads.SYNC, DATA).status == 200
        assert disk.read_bytes() == DATA


def test_metadata_is_returned_unchanged(server: uploads.Server) -> None:
    metadata = "filename d\u00efsk"
    answer = create(server, **{"Upload-Metadata": metadata.encode("latin-1").decode("latin-1")})
    assert (answer.status, answer.headers["Upload-Metadata"]) == (201, metadata)
    assert server.ask("HEAD", PLACE).headers["Upload-Metadata"] == metadata


@pytest.mark.parametrize("length", ["9" * 19, "9" * 5000, "\u0665", "1.0", "+1", " "])
def test_malformed_length_is_refused(server: uploads.Server, length: str) -> None:
    with upload_wire.connected(server) as wire:
        request = f"POST {PLACE} HTTP/1.1\r\nHost: x\r\nUpload-Length: {length}\r\n\r\n"
        assert wire.ask(request).status == 400
        assert wire.is_in_sync()
