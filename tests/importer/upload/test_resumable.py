"""Uploads in several requests."""

from __future__ import annotations

import random
from pathlib import Path

from cdi_worker import contract
from tests.support import oracle, processes, uploads

MIB = uploads.MIB
PLACE = uploads.RESUMABLE
DATA = random.Random(9).randbytes(3 * MIB) + bytes(2 * MIB) + random.Random(8).randbytes(MIB)
TUS = uploads.TUS
MORE = uploads.MORE
server = uploads.server


def create(server: uploads.Server, length: int = len(DATA), **headers: str) -> str:
    answer = server.ask("POST", PLACE, b"", {**TUS, "Upload-Length": str(length), **headers})
    assert (answer.status, answer.headers["Upload-Offset"]) == (201, "0")
    location = answer.headers["Location"]
    assert location.startswith(PLACE + "/")
    return location


def patch(server: uploads.Server, where: str, offset: int, data: bytes, **headers: str) -> uploads.Answer:
    return server.ask("PATCH", where, data, {**MORE, "Upload-Offset": str(offset), **headers})


def test_options(server: uploads.Server) -> None:
    answer = server.ask("OPTIONS", PLACE)
    assert answer.status == 204
    assert answer.headers["Tus-Version"] == "1.0.0"
    assert "creation" in answer.headers["Tus-Extension"]
    assert server.ask("OPTIONS", PLACE, client=None).status == 401
    assert server.ask("GET", PLACE).status == 404
    assert server.ask("HEAD", PLACE).status == 404


def test_every_answer_tells_the_protocol(server: uploads.Server) -> None:
    """As tus wants it, refusals too."""
    where = create(server)
    wrong = {**MORE, "Upload-Offset": "7"}
    asked = [
        (204, ("OPTIONS", PLACE)),
        (400, ("POST", PLACE, b"", TUS)),
        (503, ("POST", PLACE, b"", {**TUS, "Upload-Length": "1"})),
        (412, ("HEAD", PLACE, None, {"Tus-Resumable": "0.2.2"})),
        (404, ("HEAD", PLACE + "/another", None, TUS)),
        (404, ("PUT", where, b"", TUS)),
        (401, ("HEAD", where, None, TUS, None)),
        (409, ("PATCH", where, b"", wrong)),
        (415, ("PATCH", where, b"", {**TUS, "Upload-Offset": "0"})),
        (204, ("DELETE", where, None, TUS)),
    ]
    with server.connect() as connection:
        connection.putrequest("PATCH", where)
        for name, value in {**MORE, "Upload-Offset": "0", "Content-Length": "9"}.items():
            connection.putheader(name, value)
        connection.endheaders(b"x")
        processes.wait_for(lambda: server.received, "the first byte")
        for status, request in asked:
            answer = server.ask(*request)
            assert (answer.status, answer.headers["Tus-Resumable"]) == (status, "1.0.0"), request


def test_methods_that_a_client_does_not_have(server: uploads.Server, disk: Path) -> None:
    def ask(method: str, where: str, body: bytes = b"", **headers: str) -> uploads.Answer:
        return server.ask("POST", where, body, {**MORE, **headers, "X-HTTP-Method-Override": method})

    where = create(server)
    assert ask("DELETE", where).status == 204
    where = create(server)
    assert ask("PATCH", where, DATA[:MIB], **{"Upload-Offset": "0"}).status == 204
    assert ask("HEAD", where).headers["Upload-Offset"] == str(MIB)
    assert ask("PATCH", where, DATA[MIB:], **{"Upload-Offset": str(MIB)}).status == 204
    assert disk.read_bytes() == DATA


def test_nothing_is_complete_at_once(server: uploads.Server, disk: Path) -> None:
    """A client that has nothing more to send hears nothing more."""
    for _ in range(2):
        answer = server.ask("POST", PLACE, b"", {**TUS, "Upload-Length": "0"})
        assert (answer.status, answer.text) == (
            500,
            "Saving stream failed: unsupported image: the source is empty",
        )
        assert server.ask("HEAD", PLACE, None, TUS).status == 404
    oracle.unusable(disk)
    assert server.ask("POST", uploads.SYNC, DATA).status == 200


def test_in_parts(server: uploads.Server, disk: Path) -> None:
    where = create(server, **{"Upload-Metadata": "filename ZGlzaw=="})
    assert patch(server, where, 0, DATA[:MIB]).headers["Upload-Offset"] == str(MIB)
    assert server.offset() == server.offset(where) == MIB
    assert server.ask("HEAD", where).headers["Upload-Metadata"] == "filename ZGlzaw=="
    assert patch(server, where, MIB, b"").status == 204
    for wrong in (0, MIB - 1, MIB + 1):
        assert patch(server, where, wrong, DATA[wrong : wrong + 1000]).status == 409
    last = patch(server, where, MIB, DATA[MIB:])
    assert (last.status, last.headers["Upload-Offset"]) == (204, str(len(DATA)))
    assert server.result().status == 0
    assert disk.read_bytes() == DATA


def test_what_is_refused(server: uploads.Server) -> None:
    assert server.ask("POST", PLACE, b"", TUS).status == 400
    assert server.ask("POST", PLACE, b"", {**TUS, "Upload-Length": "-1"}).status == 400
    assert server.ask("POST", PLACE, b"", {"Tus-Resumable": "0.2.2", "Upload-Length": "1"}).status == 412
    wrong = {**TUS, "Upload-Length": "1", "x-cdi-checksum": "sha256:zz"}
    assert server.ask("POST", PLACE, b"", wrong).status == 400
    where = create(server)
    assert server.ask("PATCH", where, DATA, {**TUS, "Upload-Offset": "0"}).status == 415
    assert patch(server, where, 0, DATA + b"x").status == 413
    assert patch(server, PLACE + "/another", 0, DATA).status == 404
    assert server.ask("PATCH", where, DATA, {**MORE, "Upload-Offset": "0"}, client=None).status == 401


def test_a_length_of_none(server: uploads.Server, disk: Path) -> None:
    assert server.ask("POST", PLACE, b"", {**TUS, "Upload-Defer-Length": "1"}).status == 201
    with server.connect() as connection:
        headers = {**MORE, "Upload-Offset": "0"}
        connection.request("PATCH", PLACE, iter([DATA[:MIB], DATA[MIB:]]), headers, encode_chunked=True)
        assert connection.getresponse().status == 204
    assert disk.read_bytes() == DATA


def test_a_length_that_is_told_at_the_end(server: uploads.Server, disk: Path) -> None:
    """As clients do that read from a pipe: pieces of a known length, of an unknown whole."""
    created = server.ask("POST", f"{PLACE}/", b"", {**TUS, "Upload-Defer-Length": "1"})
    where = created.headers["Location"]
    assert patch(server, where, 0, b"").status == 204
    answer = patch(server, where, 0, DATA[:MIB])
    assert (answer.status, answer.headers["Upload-Defer-Length"]) == (204, "1")
    assert patch(server, where, MIB, b"x", **{"Upload-Length": "many"}).status == 400
    assert patch(server, where, MIB, b"x", **{"Upload-Length": str(MIB)}).status == 413
    length = {"Upload-Length": str(len(DATA))}
    answer = patch(server, where, MIB, DATA[MIB : 2 * MIB], **length)
    assert (answer.status, answer.headers["Upload-Length"]) == (204, str(len(DATA)))
    assert patch(server, where, 2 * MIB, DATA[2 * MIB :]).status == 204
    assert server.result().status == 0
    assert disk.read_bytes() == DATA


def test_termination(server: uploads.Server, disk: Path) -> None:
    where = create(server)
    patch(server, where, 0, DATA[:1000])
    assert server.ask("DELETE", where, None, TUS).status == 204
    processes.wait_for(lambda: server.ask("HEAD", where, None, TUS).status == 404, "the end of the upload")
    oracle.unusable(disk)
    assert patch(server, create(server), 0, DATA).status == 204


def test_a_connection_that_breaks(server: uploads.Server, disk: Path) -> None:
    where = create(server)
    sent = 0
    while sent < len(DATA):
        with server.connect() as connection:
            connection.putrequest("PATCH", where)
            for name, value in {**MORE, "Upload-Offset": str(sent)}.items():
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(DATA) - sent))
            connection.endheaders()
            connection.send(DATA[sent : sent + 1_300_000])
            if sent + 1_300_000 >= len(DATA):
                assert connection.getresponse().status == 204
                break
        now = server.offset(where)
        assert sent <= now <= sent + 1_300_000
        sent = now
    assert disk.read_bytes() == DATA


def test_the_same_client_again_while_the_old_connection_hangs(server: uploads.Server, disk: Path) -> None:
    where = create(server)
    with server.connect() as dead:
        dead.putrequest("PATCH", where)
        for name, value in {**MORE, "Upload-Offset": "0", "Content-Length": str(len(DATA))}.items():
            dead.putheader(name, value)
        dead.endheaders()
        dead.send(DATA[:MIB])
        processes.wait_for(lambda: server.offset(where) > 0, "the first bytes")
        now = server.offset(where)
        assert patch(server, where, now, DATA[now:]).status == 204
    assert disk.read_bytes() == DATA


def test_an_abandoned_upload_makes_way(server: uploads.Server, disk: Path) -> None:
    for _ in range(2):
        patch(server, create(server, 5 * MIB), 0, bytes(1000))
    assert server.ask("POST", "/v1beta1/upload", DATA).status == 200
    assert disk.read_bytes() == DATA


def test_an_upload_that_nobody_goes_on_with(
    certificates: uploads.Certificates, paths: contract.Paths, disk: Path
) -> None:
    with uploads.Server(certificates, {}, paths).impatient() as server:
        where = create(server)
        patch(server, where, 0, DATA[:MIB])
        processes.wait_for(lambda: server.ask("HEAD", where, None, TUS).status == 404, "impatience")
        oracle.unusable(disk)


def test_a_wrong_checksum(server: uploads.Server, disk: Path) -> None:
    where = create(server, **{"x-cdi-checksum": "sha256:" + "0" * 64})
    answer = patch(server, where, 0, DATA)
    assert (answer.status, "checksum mismatch" in answer.text) == (500, True)
    oracle.unusable(disk)
