"""Resumable uploads (tus)."""

from __future__ import annotations

import random
import threading
from concurrent import futures
from pathlib import Path

from cdi_worker.importer import contract
from cdi_worker.sources import upload
from tests.support import oracle, processes, uploads

MIB = uploads.MIB
PLACE = uploads.RESUMABLE
DATA = random.Random(9).randbytes(3 * MIB) + bytes(2 * MIB) + random.Random(8).randbytes(MIB)
TUS = uploads.TUS
MORE = uploads.PATCH_HEADERS
server = uploads.server


def create(server: uploads.Server, length: int = len(DATA), **headers: str) -> str:
    answer = server.ask("POST", PLACE, b"", {**TUS, "Upload-Length": str(length), **headers})
    assert (answer.status, answer.headers["Upload-Offset"]) == (201, "0")
    location = answer.headers["Location"]
    assert location.startswith(PLACE + "/")
    return location


def patch(
    server: uploads.Server, location: str, offset: int, data: bytes, **headers: str
) -> uploads.Response:
    return server.ask("PATCH", location, data, {**MORE, "Upload-Offset": str(offset), **headers})


def test_options_lists_the_extensions(server: uploads.Server) -> None:
    answer = server.ask("OPTIONS", PLACE)
    assert answer.status == 204
    assert answer.headers["Tus-Version"] == "1.0.0"
    assert "creation" in answer.headers["Tus-Extension"]
    assert server.ask("OPTIONS", PLACE, client=None).status == 401
    assert server.ask("GET", PLACE).status == 404
    assert server.ask("HEAD", PLACE).status == 404


def test_replaced_upload_is_unknown(server: uploads.Server) -> None:
    """A client that resumes by the collection learns which upload it continues."""
    first = create(server)
    for place in (PLACE, first):
        assert server.ask("HEAD", place, None, TUS).headers["Content-Location"] == first
    second = create(server)
    assert server.ask("HEAD", PLACE, None, TUS).headers["Content-Location"] == second
    assert patch(server, first, 0, DATA).status == 404


def test_every_response_has_the_protocol_version(server: uploads.Server) -> None:
    """As tus requires, error responses too."""
    location = create(server)
    wrong = {**MORE, "Upload-Offset": "7"}
    responses_and_requests = [
        (204, ("OPTIONS", PLACE)),
        (400, ("POST", PLACE, b"", TUS)),
        (503, ("POST", PLACE, b"", {**TUS, "Upload-Length": "1"})),
        (412, ("HEAD", PLACE, None, {"Tus-Resumable": "0.2.2"})),
        (404, ("HEAD", PLACE + "/another", None, TUS)),
        (404, ("PUT", location, b"", TUS)),
        (401, ("HEAD", location, None, TUS, None)),
        (409, ("PATCH", location, b"", wrong)),
        (415, ("PATCH", location, b"", {**TUS, "Upload-Offset": "0"})),
        (415, ("PATCH", location, b"", {**MORE, "Upload-Offset": "0", "Content-Encoding": "br"})),
        (204, ("DELETE", location, None, TUS)),
    ]
    with server.connect() as connection:
        connection.putrequest("PATCH", location)
        for name, value in {**MORE, "Upload-Offset": "0", "Content-Length": "9"}.items():
            connection.putheader(name, value)
        connection.endheaders(b"x")
        processes.wait_for(lambda: server.received, "the first byte")
        for status, request in responses_and_requests:
            answer = server.ask(*request)
            assert (answer.status, answer.headers["Tus-Resumable"]) == (status, "1.0.0"), request


def test_method_may_be_overridden(server: uploads.Server, disk: Path) -> None:
    def ask(method: str, location: str, body: bytes = b"", **headers: str) -> uploads.Response:
        return server.ask("POST", location, body, {**MORE, **headers, "X-HTTP-Method-Override": method})

    location = create(server)
    assert ask("DELETE", location).status == 204
    location = create(server)
    assert ask("PATCH", location, DATA[:MIB], **{"Upload-Offset": "0"}).status == 204
    assert ask("HEAD", location).headers["Upload-Offset"] == str(MIB)
    assert ask("PATCH", location, DATA[MIB:], **{"Upload-Offset": str(MIB)}).status == 204
    assert disk.read_bytes() == DATA


def test_empty_upload_is_complete_at_once(server: uploads.Server, disk: Path) -> None:
    """A client with nothing more to send gets no further response."""
    for _ in range(2):
        answer = server.ask("POST", PLACE, b"", {**TUS, "Upload-Length": "0"})
        assert (answer.status, answer.text) == (
            400,
            "Saving stream failed: unsupported image: the source is empty",
        )
        assert server.ask("HEAD", PLACE, None, TUS).status == 404
    oracle.unusable(disk)
    assert server.ask("POST", uploads.SYNC, DATA).status == 200


def test_upload_in_parts_is_complete(server: uploads.Server, disk: Path) -> None:
    location = create(server, **{"Upload-Metadata": "filename ZGlzaw=="})
    assert patch(server, location, 0, DATA[:MIB]).headers["Upload-Offset"] == str(MIB)
    assert server.offset() == server.offset(location) == MIB
    assert server.ask("HEAD", location).headers["Upload-Metadata"] == "filename ZGlzaw=="
    assert patch(server, location, MIB, b"").status == 204
    for wrong in (0, MIB - 1, MIB + 1):
        assert patch(server, location, wrong, DATA[wrong : wrong + 1000]).status == 409
    last = patch(server, location, MIB, DATA[MIB:])
    assert (last.status, last.headers["Upload-Offset"]) == (204, str(len(DATA)))
    assert server.result().status == 0
    assert disk.read_bytes() == DATA


def test_invalid_request_is_refused(server: uploads.Server) -> None:
    assert server.ask("POST", PLACE, b"", TUS).status == 400
    assert server.ask("POST", PLACE, b"", {**TUS, "Upload-Length": "-1"}).status == 400
    assert server.ask("POST", PLACE, b"", {"Tus-Resumable": "0.2.2", "Upload-Length": "1"}).status == 412
    wrong = {**TUS, "Upload-Length": "1", "x-cdi-checksum": "sha256:zz"}
    assert server.ask("POST", PLACE, b"", wrong).status == 400
    location = create(server)
    assert server.ask("PATCH", location, DATA, {**TUS, "Upload-Offset": "0"}).status == 415
    assert patch(server, location, 0, DATA + b"x").status == 413
    assert patch(server, PLACE + "/another", 0, DATA).status == 404
    assert server.ask("PATCH", location, DATA, {**MORE, "Upload-Offset": "0"}, client=None).status == 401


def test_missing_length_is_refused(server: uploads.Server, disk: Path) -> None:
    assert server.ask("POST", PLACE, b"", {**TUS, "Upload-Defer-Length": "1"}).status == 201
    with server.connect() as connection:
        headers = {**MORE, "Upload-Offset": "0"}
        connection.request("PATCH", PLACE, iter([DATA[:MIB], DATA[MIB:]]), headers, encode_chunked=True)
        assert connection.getresponse().status == 204
    assert disk.read_bytes() == DATA


def test_length_may_be_given_at_the_end(server: uploads.Server, disk: Path) -> None:
    """As clients do that read a pipe: parts of known length, a total that is not known."""
    created = server.ask("POST", f"{PLACE}/", b"", {**TUS, "Upload-Defer-Length": "1"})
    location = created.headers["Location"]
    assert patch(server, location, 0, b"").status == 204
    answer = patch(server, location, 0, DATA[:MIB])
    assert (answer.status, answer.headers["Upload-Defer-Length"]) == (204, "1")
    assert patch(server, location, MIB, b"x", **{"Upload-Length": "many"}).status == 400
    assert patch(server, location, MIB, b"x", **{"Upload-Length": str(MIB)}).status == 413
    length = {"Upload-Length": str(len(DATA))}
    answer = patch(server, location, MIB, DATA[MIB : 2 * MIB], **length)
    assert (answer.status, answer.headers["Upload-Length"]) == (204, str(len(DATA)))
    assert patch(server, location, 2 * MIB, DATA[2 * MIB :]).status == 204
    assert server.result().status == 0
    assert disk.read_bytes() == DATA


def test_client_takes_over_its_hanging_connection(server: uploads.Server, disk: Path) -> None:
    location = create(server)
    with server.connect() as dead:
        dead.putrequest("PATCH", location)
        for name, value in {**MORE, "Upload-Offset": "0", "Content-Length": str(len(DATA))}.items():
            dead.putheader(name, value)
        dead.endheaders()
        dead.send(DATA[:MIB])
        processes.wait_for(lambda: server.offset(location) > 0, "the first bytes")
        now = server.offset(location)
        assert patch(server, location, now, DATA[now:]).status == 204
    assert disk.read_bytes() == DATA


def test_abandoned_upload_is_replaced(server: uploads.Server, disk: Path) -> None:
    for _ in range(2):
        patch(server, create(server, 5 * MIB), 0, bytes(1000))
    assert server.ask("POST", "/v1beta1/upload", DATA).status == 200
    assert disk.read_bytes() == DATA


def test_abandoned_upload_ends_the_server(
    certificates: uploads.Certificates, paths: contract.Paths, disk: Path
) -> None:
    with uploads.Server(certificates, {}, paths).with_short_timeouts() as server:
        location = create(server)
        patch(server, location, 0, DATA[:MIB])
        processes.wait_for(lambda: server.ask("HEAD", location, None, TUS).status == 404, "impatience")
        oracle.unusable(disk)


def test_wrong_checksum_is_refused(server: uploads.Server, disk: Path) -> None:
    location = create(server, **{"x-cdi-checksum": "sha256:" + "0" * 64})
    answer = patch(server, location, 0, DATA)
    assert (answer.status, "checksum mismatch" in answer.text) == (400, True)
    oracle.unusable(disk)


class Unread:
    """The body of a request that must not be touched."""

    def readinto(self, into: memoryview, /) -> int:
        raise AssertionError(len(into))

    def interrupt(self) -> None:
        raise AssertionError


def test_request_that_lends_late_gives_way_at_once() -> None:
    """The next request has found nothing to withdraw, and waits only for the session."""
    body = upload.Body()
    has_looked = threading.Event()
    withdraw = body.withdraw

    def looked() -> None:
        withdraw()
        has_looked.set()

    body.withdraw = looked  # type: ignore[method-assign]

    def take_over() -> int:
        with body.take_over():
            return body.received

    with futures.ThreadPoolExecutor(1) as pool:
        with body.take_over():
            has_looked.clear()
            next_one = pool.submit(take_over)
            assert has_looked.wait(processes.PATIENCE)
            failure = body.lend(Unread())
        assert next_one.result(processes.PATIENCE) == 0
    assert str(failure) == "another request continues the upload"
