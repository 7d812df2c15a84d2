"""Responses of bounded length, as http.client reads them."""

from __future__ import annotations

import gc
import http.client
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cdi_worker.sources import responses
from tests.support import processes

#: More than one part.
MOST = 100_000


class Bounded(responses.Bounded):
    most = MOST


@contextmanager
def answered(body: bytes, header: str) -> Iterator[Bounded]:
    here, there = socket.socketpair()
    with here, there:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MOST)
        there.sendall(f"HTTP/1.1 200 OK\r\n{header}\r\n\r\n".encode() + body)
        there.shutdown(socket.SHUT_WR)
        with Bounded(here) as response:
            response.begin()
            yield response


def framed(length: int, form: str) -> tuple[bytes, str]:
    body = bytes(length)
    if form == "chunked":
        return b"%x\r\n%b\r\n0\r\n\r\n" % (length, body), "Transfer-Encoding: chunked"
    return body, f"Content-Length: {length}" if form == "length" else "Connection: close"


@pytest.mark.parametrize("form", ["length", "chunked", "close"])
@pytest.mark.parametrize("step", [None, 7000])
def test_body_is_read_up_to_the_limit(form: str, step: int | None) -> None:
    with answered(*framed(MOST, form)) as response:
        assert b"".join(iter(lambda: response.read(step), b"")) == bytes(MOST)
    with answered(*framed(MOST + 1, form)) as response, pytest.raises(responses.TooLong):
        for _ in iter(lambda: response.read(step), b""):
            pass


def test_length_beyond_the_limit_is_refused_before_the_body_arrives() -> None:
    with answered(b"", f"Content-Length: {MOST + 1}") as response, pytest.raises(responses.TooLong):
        response.read()


def test_truncated_body_is_reported_as_before() -> None:
    with answered(b"123", "Content-Length: 5") as response, pytest.raises(http.client.IncompleteRead):
        response.read()


def test_bytes_read_into_a_buffer_do_not_count() -> None:
    with answered(*framed(2 * MOST, "length")) as response:
        into = memoryview(bytearray(2 * MOST))
        while into:
            into = into[response.readinto(into) :]
        assert not response.read()


@pytest.mark.parametrize("size", [b"-1", b"-8", b" -1;a=b"])
@pytest.mark.parametrize("step", [None, 7000])
def test_negative_chunk_is_refused(size: bytes, step: int | None) -> None:
    """``http.client`` reads a chunk of -1 bytes to the end of the connection, which may never come."""
    body = size + b"\r\n" + bytes(MOST // 2)
    with answered(body, "Transfer-Encoding: chunked") as response, pytest.raises(responses.Malformed):
        response.read(step)
    with answered(body, "Transfer-Encoding: chunked") as response, pytest.raises(responses.Malformed):
        response.read1(1)
    with answered(body, "Transfer-Encoding: chunked") as response, pytest.raises(responses.Malformed):
        response.readinto(bytearray(100))


def chunked(rng: random.Random, data: bytes, longest: int) -> bytes:
    """Frame bytes in chunks of random lengths, with headers as servers write them."""
    parts, at = [], 0
    while at < len(data):
        part = data[at : at + rng.randrange(1, longest)]
        form = rng.choice([b"%x\r\n%b\r\n"] * 9 + [b"%06X\r\n%b\r\n", b"%x;a=b\r\n%b\r\n", b"%x \n%b\r\n"])
        parts.append(form % (len(part), part))
        at += len(part)
    return b"".join(parts) + b"0\r\nx: y\r\n\r\n"


def received(response: responses.Response, step: int = MOST) -> Iterator[bytes]:
    """Yield what each read of a body returns, as ``connections.read`` reads it."""
    into = memoryview(bytearray(step))
    while True:
        data = bytes(into[: response.receive_chunks(into)])
        if not data:
            response.reset()
            data = response.read1(step)
        if not data:
            return
        yield data


@pytest.mark.parametrize("longest", [2, 20, 9000, MOST])
def test_chunks_are_received_whatever_their_lengths(longest: int) -> None:
    rng = random.Random(longest)
    data = rng.randbytes(min(MOST, 500 * longest))
    for step in (1, 3000, MOST):
        with answered(chunked(rng, data, longest), "Transfer-Encoding: chunked") as response:
            assert b"".join(received(response, step)) == data


def test_chunks_are_received_together() -> None:
    data = bytes(MOST)
    body = b"".join(b"3e8\r\n%b\r\n" % data[:1000] for _ in range(MOST // 1000)) + b"0\r\n\r\n"
    with answered(body, "Transfer-Encoding: chunked") as response:
        # The first read is of the head's buffer.
        assert len([*received(response)]) <= 3


def test_cut_within_chunks_is_reported_at_each_byte() -> None:
    data = bytes(range(40))
    whole = b"5\r\n%b\r\n14\r\n%b\r\nF\r\n%b\r\n0\r\n" % (data[:5], data[5:25], data[25:])
    for end in range(len(whole)):
        got = []
        with (
            answered(whole[:end], "Transfer-Encoding: chunked") as response,
            pytest.raises(http.client.IncompleteRead),
        ):
            got.extend(received(response))
        assert data.startswith(b"".join(got))


@contextmanager
def begun(sent: bytes) -> Iterator[Iterator[bytes]]:
    """Yield the reads of a chunked body whose connection stays open."""
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(processes.PATIENCE)
        there.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + sent)
        with responses.Response(here) as response:
            response.begin()
            yield received(response)


@pytest.mark.parametrize("sent", [b"a\r\nabc", b"3\r\nabc", b"3\r\nabc\r\n", b"3\r\nabc\r\n5"])
def test_content_does_not_wait_for_the_next_chunk(sent: bytes) -> None:
    with begun(sent) as reads:
        assert next(reads) == b"abc"


def test_chunks_do_not_wait_for_many_bytes() -> None:
    """They may be the last ones: with SO_RCVLOWAT, a stream of 50 MB/s took 1.2 times as long."""
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(processes.PATIENCE)
        there.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4e20\r\n" + bytes(20_000))
        with responses.Response(here) as response:
            response.begin()
            reads = received(response)
            assert len(next(reads) + next(reads)) == 20_000
            assert here.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


@pytest.mark.parametrize("end", [b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"0;a\r\n\r\n", b"000\n\n"])
def test_last_chunk_ends_a_body_whose_connection_stays_open(end: bytes) -> None:
    with begun(b"3\r\nabc\r\n" + end) as reads:
        assert [*reads] == [b"abc"]


@pytest.mark.parametrize("after", [b"de", b"\r\n-1\r\n", b"\r\n\r\n"])
def test_malformed_chunk_is_reported_at_once(after: bytes) -> None:
    with begun(b"3\r\nabc" + after) as reads, pytest.raises(responses.Malformed):
        assert not [*reads]


def test_response_that_nobody_holds_closes_its_socket() -> None:
    """Not when the garbage is collected: the server would keep the connection until then."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.settimeout(processes.PATIENCE)
        theirs.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npart")
        gc.disable()
        try:
            response = responses.Response(ours)
            response.begin()
            ours.close()
            del response
            assert theirs.recv(1) == b""
        finally:
            gc.enable()
