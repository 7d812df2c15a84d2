"""Responses of bounded length, as http.client reads them."""

from __future__ import annotations

import gc
import http.client
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
