"""HTTP/1.1 of the upload server: valid and invalid requests, and their boundaries."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker.importer import contract
from tests.support import pairs, upload_wire, uploads
from tests.support.upload_wire import WRONG_CHECKSUM

SYNC = uploads.SYNC
GET = "GET /healthz HTTP/1.1\r\nHost: x\r\n"
POST = f"POST {SYNC} HTTP/1.1\r\nHost: x\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"


@pytest.fixture(scope="module")
def server(
    certificates: uploads.Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[uploads.Server]:
    """Share one server: no test may succeed with an upload, or make it unusable."""
    data = tmp_path_factory.mktemp("data")
    paths = contract.Paths(data=str(data), block="/no", scratch="/no", termination_log="/no")
    with uploads.Server(certificates, {}, paths).with_short_timeouts(5) as running:
        yield running
        with upload_wire.connected(running) as wire:
            body = random.Random(5).randbytes(300_032)
            assert wire.ask(f"{POST}Content-Length: {len(body)}\r\n\r\n".encode() + body).status == 200
    assert Path(data, "disk.img").read_bytes() == body


# -- request heads

REFUSED = {
    "a length and chunks": (400, f"{POST}{CHUNKED}Content-Length: 5\r\n\r\n"),
    "chunks and a length": (400, f"{POST}Content-Length: 5\r\n{CHUNKED}\r\n"),
    "two lengths": (400, f"{POST}Content-Length: 5\r\nContent-Length: 6\r\n\r\n"),
    "two lengths in one": (400, f"{POST}Content-Length: 5, 6\r\n\r\n"),
    "a negative length": (400, f"{POST}Content-Length: -1\r\n\r\n"),
    "a length with a sign": (400, f"{POST}Content-Length: +1\r\n\r\n"),
    "a length in hex": (400, f"{POST}Content-Length: 0x10\r\n\r\n"),
    "a length of words": (400, f"{POST}Content-Length: many\r\n\r\n"),
    "no length": (400, f"{POST}Content-Length: \r\n\r\n"),
    "a length of 21 digits": (400, f"{POST}Content-Length: {'9' * 21}\r\n\r\n"),
    "a length of 5000 digits": (400, f"{POST}Content-Length: {'9' * 5000}\r\n\r\n"),
    "a length before a colon": (400, f"{POST}Content-Length : 5\r\n\r\n"),
    "another coding": (501, f"{POST}Transfer-Encoding: gzip\r\n\r\n"),
    "two codings": (501, f"{POST}Transfer-Encoding: gzip, chunked\r\n\r\n"),
    "chunks twice": (501, f"{POST}{CHUNKED}{CHUNKED}\r\n"),
    "chunks in 1.0": (400, f"POST {SYNC} HTTP/1.0\r\nHost: x\r\n{CHUNKED}\r\n"),
    "no host": (400, "GET /healthz HTTP/1.1\r\n\r\n"),
    "two hosts": (400, f"{GET}Host: y\r\n\r\n"),
    "an expectation": (417, f"{POST}Content-Length: 5\r\nExpect: 200-ok\r\n\r\n"),
    "a head of 100000 bytes": (431, f"{GET}X: {'x' * 100_000}\r\n\r\n"),
    "a head of many lines": (431, GET + "X: y\r\n" * 20_000 + "\r\n"),
    "another character": (400, "GET /h\u00e9althz HTTP/1.1\r\nHost: x\r\n\r\n"),
    "a zero byte": (400, f"{GET}X: \0\r\n\r\n"),
    "a lone CR": (400, f"{GET}X: a\rY: b\r\n\r\n"),
    "a space in the target": (400, "GET /healthz /x HTTP/1.1\r\nHost: x\r\n\r\n"),
    "no IPv6 address": (400, "GET //[x/healthz HTTP/1.1\r\nHost: x\r\n\r\n"),
    "an empty line before": (400, f"\r\n{GET}\r\n"),
    "HTTP/0.9": (505, "GET /healthz HTTP/0.9\r\nHost: x\r\n\r\n"),
    "no HTTP": (400, "HELO localhost\r\n\r\n"),
    "HTTP/2": (505, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_malformed_request_is_refused(server: uploads.Server, fault: str) -> None:
    """The connection is closed: the start of the next request is unknown."""
    status, request = REFUSED[fault]
    with upload_wire.connected(server) as wire:
        wire.send(request + GET + "\r\n")
        response = wire.answer()
        assert (response.status, response.headers["Connection"]) == (status, "close")
        assert wire.is_closed_by_server()


@pytest.mark.parametrize(
    ("status", "rest"),
    [(400, f"/ HTTP/1.1\r\n{CHUNKED}Content-Length: 5"), (400, "//[ HTTP/1.1"), (505, "/ HTTP/2.0")],
)
def test_request_is_refused_by_its_head(server: uploads.Server, status: int, rest: str) -> None:
    with upload_wire.connected(server, None) as wire:
        assert wire.ask(f"HEAD {rest}\r\nHost: x\r\n\r\n", "HEAD").status == status


TAKEN = {
    "a query": "GET /healthz?a=b#c HTTP/1.1\r\nHost: x\r\n\r\n",
    "an address": "GET https://localhost:8443/healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "lines that are folded": f"{GET}X: a\r\n b\r\n\tc\r\n\r\n",
    "lines without CR": GET.replace("\r", "") + "\n",
    "a length twice": f"{GET}Content-Length: 0\r\nContent-Length: 0\r\n\r\n",
    "60000 bytes": f"{GET}X: {'x' * 60_000}\r\n\r\n",
    "letters of any kind": f"{GET}X: \u00e9\r\n\r\n",
    "nothing to continue": f"{GET}Expect: 100-Continue\r\n\r\n",
}


@pytest.mark.parametrize("name", TAKEN)
def test_unusual_request_is_accepted(server: uploads.Server, name: str) -> None:
    with upload_wire.connected(server, None) as wire:
        assert wire.ask(TAKEN[name])[::2] == (200, "OK")
        assert wire.is_in_sync()
        assert wire.ask(TAKEN[name])[::2] == (200, "OK")


def test_http_1_0_is_supported(server: uploads.Server) -> None:
    """A request without ``Host``, one per connection."""
    with upload_wire.connected(server) as wire:
        response = wire.ask("GET /healthz HTTP/1.0\r\n\r\n")
        assert (response.status, response.text, response.headers["Connection"]) == (200, "OK", "close")
        assert wire.is_closed_by_server()
    with upload_wire.connected(server) as wire:
        head = f"POST {SYNC} HTTP/1.0\r\n{WRONG_CHECKSUM}Content-Length: 3\r\n\r\n"
        assert wire.digest(head + "abc") == hashlib.sha256(b"abc").hexdigest()


# -- responses

REQUEST_LINES = {
    "GET /healthz": 200,
    "HEAD /healthz": 200,
    "HEAD /v1beta1/upload-async": 200,
    "HEAD /v1beta1/upload-form-async": 200,
    "GET /": 404,
    "HEAD /nothing": 404,
    "OPTIONS *": 404,
    "CONNECT localhost:8443": 404,
    "GET v1beta1/upload": 404,
    "POST xv1beta1/upload": 404,
    "POST x/v1beta1/upload": 404,
    "POST /v1beta1/upload/": 404,
    "POST //v1beta1/upload": 404,
    "POST /v1beta1/uplo%61d": 404,
    f"GET {SYNC}": 404,
    f"POST {SYNC}-form": 400,
    f"OPTIONS {uploads.RESUMABLE}": 204,
    f"POST {uploads.RESUMABLE}": 400,
    f"HEAD {uploads.RESUMABLE}": 404,
    f"DELETE {uploads.RESUMABLE}/x": 404,
}


@pytest.mark.parametrize(("request_line", "body"), pairs.dealt(REQUEST_LINES, ("none", "length", "chunks")))
def test_connection_stays_in_sync_after_every_response(
    server: uploads.Server, request_line: str, body: str
) -> None:
    """The unread part of a body is not taken for a request."""
    method = request_line.partition(" ")[0]
    smuggled = GET + "\r\n"
    more = {
        "none": "\r\n",
        "length": f"Content-Length: {len(smuggled)}\r\n\r\n{smuggled}",
        "chunks": f"{CHUNKED}\r\n{len(smuggled):x}\r\n{smuggled}\r\n0\r\n\r\n",
    }
    with upload_wire.connected(server) as wire:
        response = wire.ask(f"{request_line} HTTP/1.1\r\nHost: x\r\n{more[body]}", method)
        assert response.status == REQUEST_LINES[request_line]
        assert response.headers["Date"].endswith(" GMT")
        assert (response.headers["Content-Length"] is None) is (response.status == 204)
        if body == "none":
            assert response.headers["Connection"] is None
            assert wire.is_in_sync()
        else:
            assert response.headers["Connection"] == "close"
            assert wire.is_closed_by_server()


def test_pipelined_requests_are_answered(server: uploads.Server) -> None:
    body = b"what comes with its head"
    upload = f"{POST}{WRONG_CHECKSUM}Content-Length: {len(body)}\r\n\r\n".encode() + body
    chunks = f"{POST}{WRONG_CHECKSUM}{CHUNKED}\r\n{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    with upload_wire.connected(server) as wire:
        wire.send(
            f"{GET}\r\n".encode()
            + upload
            + f"HEAD {SYNC}-async HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            + chunks
            + upload
            + f"{GET}Connection: close\r\n\r\n".encode()
        )
        assert wire.answer().text == "OK"
        assert hashlib.sha256(body).hexdigest() in wire.answer().text
        assert wire.answer("HEAD").status == 200
        assert hashlib.sha256(body).hexdigest() in wire.answer().text
        assert hashlib.sha256(body).hexdigest() in wire.answer().text
        assert wire.answer().text == "OK"
        assert wire.is_closed_by_server()


def test_length_of_20_digits_is_too_large(server: uploads.Server) -> None:
    with upload_wire.connected(server) as wire:
        wire.send(f"{POST}Content-Length: {'9' * 20}\r\n\r\n", bytes(300_000))
        response = wire.answer()
        assert (response.status, "effective image size is larger" in response.text) == (400, True)


# -- bodies

BODY = b"0123456789abcdef01234567"
PARTS = (
    f"{POST}{WRONG_CHECKSUM}{CHUNKED}\r\n".encode(),
    b"1\r\n" + BODY[:1] + b"\r\n",
    b'00F;name=value;x="y"\r\n' + BODY[1:16] + b"\r\n",
    b"8 \t\r\n" + BODY[16:] + b"\r\n",
    b"0000\r\nTrailer: x\r\n\r\n",
)
STREAM = b"".join(PARTS)
HEAD = len(PARTS[0])
DIGEST = hashlib.sha256(BODY).hexdigest()


def test_chunks_may_be_split_anywhere(server: uploads.Server) -> None:
    """Split everywhere, even within the head."""
    with upload_wire.connected(server) as wire:
        for at in (*range(1, HEAD, 40), *range(HEAD - 4, len(STREAM))):
            assert wire.digest(STREAM[:at], STREAM[at:]) == DIGEST
        assert wire.is_in_sync()


def test_every_byte_may_be_a_tls_record(server: uploads.Server) -> None:
    with upload_wire.connected(server) as wire:
        for _ in range(2):
            assert wire.digest(*(STREAM[at : at + 1] for at in range(len(STREAM)))) == DIGEST
        assert wire.is_in_sync()


@pytest.mark.parametrize(("length", "longest"), [(1, 1), (5000, 7), (262_144, 900), (700_000, 30_000)])
def test_chunks_and_records_may_have_any_length(server: uploads.Server, length: int, longest: int) -> None:
    """Bodies that need several reads are included."""
    dice = random.Random(length)
    with upload_wire.connected(server) as wire:
        for _ in range(4):
            body, stream, at = dice.randbytes(length), PARTS[0], 0
            while at < length:
                piece = body[at : at + dice.randint(1, longest)]
                stream += b"%x\r\n%b\r\n" % (len(piece), piece)
                at += len(piece)
            stream += b"0\r\n\r\n"
            cuts = sorted(dice.sample(range(len(stream) + 1), 5))
            parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
            assert wire.digest(*parts) == hashlib.sha256(body).hexdigest()
        assert wire.is_in_sync()


NO_CHUNKS = {
    "a sign": b"+5\r\nhello\r\n0\r\n\r\n",
    "minus": b"-1\r\nhello\r\n0\r\n\r\n",
    "hex as in C": b"0x5\r\nhello\r\n0\r\n\r\n",
    "a space before": b" 5\r\nhello\r\n0\r\n\r\n",
    "two numbers": b"5 5\r\nhello\r\n0\r\n\r\n",
    "an underline": b"1_0\r\n0123456789abcdef\r\n0\r\n\r\n",
    "16 digits": b"0000000000000005\r\nhello\r\n0\r\n\r\n",
    "too many digits": b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "nothing": b"\r\nhello\r\n0\r\n\r\n",
    "an extension only": b";x\r\nhello\r\n0\r\n\r\n",
    "a lone LF": b"5\nhello\r\n0\r\n\r\n",
    "a lone LF in an extension": b"5;\nhello\r\n0\r\n\r\n",
    "a lone CR": b"5\rhello\r\n0\r\n\r\n",
    "another alphabet": "\u0665\r\nhello\r\n0\r\n\r\n".encode(),
    "no line end behind": b"5\r\nhello0\r\n\r\n",
    "a lone LF behind": b"5\r\nhello\n0\r\n\r\n",
    "longer than it says": b"5\r\nhello, you\r\n0\r\n\r\n",
    "shorter than it says": b"9\r\nhello\r\n0\r\n\r\n" + b"y" * 9,
    "a line without end": b"5;" + b"x" * 5000,
    "65 trailers": b"5\r\nhello\r\n0\r\n" + b"X: y\r\n" * 65 + b"\r\n",
    "a trailer without end": b"5\r\nhello\r\n0\r\nX: " + b"y" * 5000,
}


@pytest.mark.parametrize("fault", NO_CHUNKS)
def test_malformed_chunk_is_refused(server: uploads.Server, fault: str) -> None:
    """One response, then the end: nothing behind the body is taken for a request."""
    with upload_wire.connected(server) as wire:
        wire.send(PARTS[0], NO_CHUNKS[fault] + f"{GET}\r\n".encode())
        response = wire.answer()
        assert (response.status, response.headers["Connection"]) == (500, "close"), response.text
        assert response.text.startswith("Saving stream failed: ")
        assert "cancelled" not in response.text
        assert wire.is_closed_by_server()


def test_64_trailers_are_accepted(server: uploads.Server) -> None:
    with upload_wire.connected(server) as wire:
        end = b"5\r\nhello\r\n0\r\n" + b"X: y\r\n" * 63 + b"\r\n"
        assert wire.digest(PARTS[0], end) == hashlib.sha256(b"hello").hexdigest()
        assert wire.is_in_sync()
