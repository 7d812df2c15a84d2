"""Answers that are not HTTP: they are no outage, and fail soon with a message of their own."""

from __future__ import annotations

import contextlib
import itertools
import re
import socketserver
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import retry
from tests.support import misbehave, pairs, threaded, ways

DATA = bytes(range(256)) * 4096 * 2
OK = b'HTTP/1.1 200 OK\r\nETag: "one"\r\n'
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
#: Seconds: a small part of the patience.
SOON = 20.0


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_DELAY", 0.01)


@contextlib.contextmanager
def answering(
    answer: Callable[[bytes, Callable[[bytes], object]], None],
) -> Iterator[tuple[str, list[bytes]]]:
    """Answer each request by a call with its head and the function that sends; yield URL and requests."""
    requests: list[bytes] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                requests.append(b"".join(iter(self.rfile.readline, b"\r\n")))
                answer(requests[-1], self.request.sendall)

    listening = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    with threaded.Threaded(listening) as server:
        yield f"http://127.0.0.1:{server.port}/disk", requests


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def failed(url: str, target: Path) -> errors.Error:
    began = time.monotonic()
    with pytest.raises(errors.SourceError) as caught:
        ways.import_disk(url, target)
    assert time.monotonic() - began < SOON
    assert not target.exists()
    return caught.value


#: What follows a whole chunk, and the message.
BODIES = {
    "negative": (b"-1\r\n", "malformed chunk header '-1'"),
    "no number": (b"pear\r\n", "malformed chunk header 'pear'"),
    "prefix": (b"0x10\r\n", "malformed chunk header '0x10'"),
    "empty": (b"\r\n", "malformed chunk header ''"),
    "2^64": (b"10000000000000000\r\n", "malformed chunk header '10000000000000000'"),
    "a longer chunk": (b"2\r\nabcd\r\n", "a chunk is longer than its header says"),
    "extensions": (b"2;a=" + b"x" * (1 << 20), "a chunk header without end"),
    "trailers": (
        b"0\r\n" + b"X-More: of this\r\n" * 100_000,
        "interim responses, headers or trailers without end",
    ),
}
IN_THE_HEAD, LATER = 1 << 12, len(DATA)


@pytest.mark.parametrize(("fault", "before"), pairs.dealt(BODIES, (IN_THE_HEAD, LATER)))
def test_malformed_chunk_fails_after_two_tries(tmp_path: Path, fault: str, before: int) -> None:
    body, message = BODIES[fault]

    def answer(_: bytes, send: Callable[[bytes], object]) -> None:
        send(CHUNKED + chunk(DATA[:before]) + body)

    with answering(answer) as (url, requests):
        found = failed(url, tmp_path / "disk.img")
    assert f"the server {'sends' if fault == 'trailers' else 'violates HTTP:'} {message}" in str(found)
    assert "no data for" not in str(found)
    # A stream that has begun is continued by a request for the rest and, without ranges, one for all.
    assert len(requests) <= 4


HEADS = {
    "Content-Length of 2^64": (OK + b"Content-Length: 18446744073709551616\r\n\r\n", "Content-Length"),
    "Content-Length of 10^30": (OK + b"Content-Length: 1%b\r\n\r\n" % (b"0" * 30), "Content-Length"),
    "Content-Length of pears": (OK + b"Content-Length: pears\r\n\r\n", "malformed Content-Length 'pears'"),
    "negative Content-Length": (OK + b"Content-Length: -5\r\n\r\n", "malformed Content-Length '-5'"),
    "two lengths": (
        OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        "malformed Content-Length '5, 6'",
    ),
    "encoded": (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "Transfer-Encoding 'gzip, chunked'"),
    "another protocol": (b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", "malformed status line 'SSH-2.0-OpenSSH"),
    "another version": (b"HTTP/2.0 200 OK\r\n\r\n", "HTTP/2.0"),
    "a long header": (
        OK + b"X-Long: " + b"x" * 70_000 + b"\r\n\r\n",
        "got more than 65536 bytes when reading header line",
    ),
}


@pytest.mark.parametrize("fault", HEADS)
def test_malformed_head_fails_after_two_tries(tmp_path: Path, fault: str) -> None:
    head, message = HEADS[fault]
    with answering(lambda _, send: send(head + DATA)) as (url, requests):
        assert message in str(failed(url, tmp_path / "disk.img"))
    assert len(requests) == 2


@pytest.mark.parametrize("fault", ["Content-Length of 2^64", "encoded", "another protocol"])
def test_malformed_head_of_a_later_answer_fails_after_two_tries(tmp_path: Path, fault: str) -> None:
    """The ranges are refused, too: they are not read as a stream instead."""
    head, message = HEADS[fault]

    def answer(request: bytes, send: Callable[[bytes], object]) -> None:
        found = re.search(rb"bytes=(\d+)-(\d+)", request)
        assert found
        start, end = int(found[1]), int(found[2]) + 1
        if start:
            stated = b"206 Partial Content\r\nContent-Range: bytes %d-%d/%d"
            send(head.replace(b"200 OK", stated % (start, end - 1, len(DATA))) + DATA)
            return
        stated = b"Content-Range: bytes 0-%d/%d\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        send(
            b'HTTP/1.1 206 Partial Content\r\nETag: "one"\r\n'
            + stated % (end - 1, len(DATA), end)
            + DATA[:end]
        )

    with answering(answer) as (url, _):
        assert message in str(failed(url, tmp_path / "disk.img"))


@pytest.mark.parametrize(
    "first",
    [CHUNKED + chunk(DATA[:5000]) + b"pear\r\n", CHUNKED + chunk(DATA[:-1]) + b"-1\r\n", HEADS["encoded"][0]],
)
def test_malformed_answer_is_retried_once(tmp_path: Path, first: bytes) -> None:
    # The second one is for the rest of a stream, which this server does not resume.
    whole = CHUNKED + chunk(DATA) + b"0\r\n\r\n"
    answers = itertools.chain([first], itertools.repeat(whole))
    with answering(lambda _, send: send(next(answers))) as (url, requests):
        ways.import_disk(url, tmp_path / "disk.img")
    assert (tmp_path / "disk.img").read_bytes() == DATA
    assert 2 <= len(requests) <= 3


@pytest.mark.parametrize(
    "length", ["2097152, 2097152", "2097152\r\nContent-Length: 2097152", "2097152 ", "0" * 5000 + "2097152"]
)
def test_length_that_is_repeated_or_padded_is_a_length(tmp_path: Path, length: str) -> None:
    """RFC 9110, 8.6."""
    head = OK + f"Content-Length: {length}\r\n\r\n".encode()
    with answering(lambda _, send: send(head + DATA)) as (url, _):
        assert ways.import_disk(url, tmp_path / "disk.img").size == len(DATA)
    assert (tmp_path / "disk.img").read_bytes() == DATA


@pytest.mark.parametrize("name", ["chunked", "Chunked ", " chunked\t"])
def test_chunks_are_no_part_of_the_disk(tmp_path: Path, name: str) -> None:
    head = OK + f"Transfer-Encoding: {name}\r\n\r\n".encode()
    with answering(lambda _, send: send(head + chunk(DATA) + b"0;end=1\r\n\r\n")) as (url, _):
        ways.import_disk(url, tmp_path / "disk.img")
    assert (tmp_path / "disk.img").read_bytes() == DATA


def test_cut_within_a_chunk_header_is_an_outage(tmp_path: Path) -> None:
    number = itertools.count()

    def answer(_: bytes, send: Callable[[bytes], object]) -> None:
        is_cut = next(number) < 4
        send(CHUNKED + chunk(DATA[:1000]) + (b"ff" if is_cut else chunk(DATA[1000:]) + b"0\r\n\r\n"))

    with answering(answer) as (url, _):
        ways.import_disk(url, tmp_path / "disk.img")
    assert (tmp_path / "disk.img").read_bytes() == DATA


def test_message_of_a_stream_that_cannot_be_resumed(server: misbehave.Server, tmp_path: Path) -> None:
    page = misbehave.Page(DATA, ranges=False, cut=1 << 20)
    options = cdi_worker.FetchOptions(no_progress=0.5)
    with pytest.raises(errors.TransferFailed) as caught:
        ways.import_disk(server.serve("/disk", page), tmp_path / "disk.img", fetch=options)
    assert re.search(
        r"the connection broke \d+ times before this byte, and the server cannot resume there: "
        r"the server does not support ranges; no new data for \d+ s$",
        str(caught.value),
    )
