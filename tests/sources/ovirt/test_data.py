"""Connections for a ticket, with servers that differ from the real daemon."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.ovirt import data as imageio_data
from tests.support import processes, threaded

DATA = random.Random(1).randbytes(300_000)
EXTENTS = [
    {"start": 0, "length": 100_000, "zero": False},
    {"start": 100_000, "length": 200_000, "zero": True},
]


@dataclasses.dataclass
class Server:
    """The responses of a server. ``options`` None: OPTIONS is not supported, as in oVirt 4.2."""

    options: dict[str, Any] | None
    extents: str = json.dumps(EXTENTS)
    status: int = 206
    #: Statuses of the next lists of extents; then 200.
    listing: list[int] = dataclasses.field(default_factory=list)
    #: Serve ranges that begin so many bytes later than requested, and say so.
    shift: int = 0
    #: Content-Range of a range; None: the right one, empty: none.
    content_range: str | None = None
    encoding: str = ""
    #: Cut an answer off after so many bytes.
    cut: int = 1 << 20
    #: Cut it off by a reset, once it has been read.
    reset: bool = False
    #: State that a range is sent in chunks, besides its length.
    chunked: bool = False
    #: State another length besides that of a range.
    repeated: bool = False
    #: Never answer a range.
    stall: bool = False
    #: Never end a response: of the options, of the extents, or to an error.
    endless: str = ""
    sent: int = 0
    busiest: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/images/ticket"


NEW = {"features": ["extents"], "max_readers": 2}


@pytest.fixture
def server() -> Iterator[Server]:
    served = Server(dict(NEW))
    busy = 0
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_OPTIONS(self) -> None:
            if served.endless == "options":
                self.send_endlessly(200)
                return
            known = served.options is not None
            self.answer(200 if known else 405, json.dumps(served.options).encode())

        def do_GET(self) -> None:
            nonlocal busy
            if served.endless == ("extents" if "extents" in self.path else "error"):
                self.send_endlessly(200 if served.endless == "extents" else 500)
                return
            if "extents" in self.path:
                self.answer(served.listing.pop(0) if served.listing else 200, served.extents.encode())
                return
            with lock:
                busy += 1
                served.busiest = max(served.busiest, busy)
            time.sleep(0.01)
            while served.stall:
                time.sleep(0.01)
            with lock:
                busy -= 1
            found = self.headers.get("Range", "")
            first, last = map(int, found.removeprefix("bytes=").split("-")) if found else (0, len(DATA) - 1)
            if not found:
                self.answer(200, DATA)
                return
            first, last = first + served.shift, last + served.shift
            stated = f"bytes {first}-{last}/{len(DATA)}"
            if served.content_range is not None:
                stated = served.content_range
            headers = {"Content-Range": stated, "Content-Encoding": served.encoding}
            headers["Transfer-Encoding"] = "chunked" if served.chunked else ""
            headers["Content-length"] = "7" if served.repeated else ""
            self.answer(served.status, DATA[first : last + 1], headers)

        def answer(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if value:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.close_connection = len(body) > served.cut
            self.wfile.write(body[: served.cut])
            if self.close_connection and served.reset:
                time.sleep(0.1)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                # socketserver would end it in order first.
                socket.close(self.connection.detach())

        def send_endlessly(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            part = b" " * (1 << 20)
            while served.sent < 200 << 20:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
                served.sent += len(part)
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: object) -> None:
            pass

    class Threads(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Ignore clients that disconnect."""

    with threaded.Threaded(Threads(("127.0.0.1", 0), Handler)) as running:
        served.port = running.port
        yield served


@pytest.fixture
def reads() -> cancelling.Reads:
    return cancelling.Reads(cancelling.Cancel())


@pytest.fixture
def pool(server: Server, reads: cancelling.Reads) -> Iterator[imageio_data.Pool]:
    made = imageio_data.Pool("disk", base.Access(connections=6), reads)
    yield made
    made.close()


def read(pool: imageio_data.Pool, offset: int = 0, length: int = len(DATA)) -> bytes:
    data = bytearray(length)
    return bytes(data[: pool.read(offset, memoryview(data))])


def test_extents_and_ranges_are_read(server: Server, pool: imageio_data.Pool) -> None:
    pool.connect([server.url])
    found = [base.Extent(0, 100_000, zero=False), base.Extent(100_000, 200_000, zero=True)]
    assert list(pool.extents()) == found
    assert read(pool, 1234, 5678) == DATA[1234 : 1234 + 5678]


def test_old_server_is_read_without_extents(server: Server, pool: imageio_data.Pool) -> None:
    server.options = None
    pool.connect([server.url])
    assert list(pool.extents()) == [base.Extent(0, len(DATA), zero=False)]
    assert read(pool) == DATA


@pytest.mark.parametrize(("status", "tries"), [(500, 3), (503, 3), (400, 1), (404, 1), (501, 1)])
def test_disk_whose_extents_are_not_listed_is_data(
    server: Server, pool: imageio_data.Pool, caplog: pytest.LogCaptureFixture, status: int, tries: int
) -> None:
    pool.connect([server.url])
    server.listing = [status] * tries
    for _ in range(tries - 1):
        with pytest.raises(errors.Transient, match=f"answers {status}"):
            pool.extents()
    assert list(pool.extents()) == [base.Extent(0, len(DATA), zero=False)]
    assert "no extents" in caplog.text
    assert ("does not support zero extents" if status == 404 else f"answers {status}") in caplog.text
    assert read(pool) == DATA


@pytest.mark.parametrize("status", [401, 403, 410])
def test_refused_ticket_is_no_disk_without_extents(
    server: Server, pool: imageio_data.Pool, status: int
) -> None:
    pool.connect([server.url])
    server.listing = [status] * 9
    for _ in range(4):
        with pytest.raises(imageio_data.TicketRefused):
            pool.extents()


def test_list_of_extents_that_fails_once_is_asked_for_again(server: Server, pool: imageio_data.Pool) -> None:
    pool.connect([server.url])
    server.listing = [500]
    with pytest.raises(errors.Transient):
        pool.extents()
    assert len(list(pool.extents())) == 2


@pytest.mark.parametrize("options", [None, NEW, {**NEW, "max_readers": 20}])
def test_number_of_connections_is_limited(
    server: Server, pool: imageio_data.Pool, options: dict[str, Any] | None
) -> None:
    server.options = options
    pool.connect([server.url])
    threads = [threading.Thread(target=read, args=(pool,)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    allowed = 1 if options is None else min(6, int(options["max_readers"]))
    assert server.busiest <= allowed


@pytest.mark.parametrize("readers", ["8", None, [], {}, 1.5])
def test_limit_of_readers_that_is_no_number_is_an_error(
    server: Server, pool: imageio_data.Pool, readers: object
) -> None:
    server.options = {**NEW, "max_readers": readers}
    with pytest.raises(errors.Transient, match="invalid response"):
        pool.connect([server.url])


@pytest.mark.parametrize("reset", [False, True])
def test_bytes_before_a_cut_are_kept(server: Server, pool: imageio_data.Pool, *, reset: bool) -> None:
    pool.connect([server.url])
    server.cut, server.reset = 70_000, reset
    whole, done = bytearray(len(DATA)), 0
    while done < len(DATA):
        received = pool.read(done, memoryview(whole)[done:])
        assert received in {70_000, len(DATA) - done}
        done += received
    assert bytes(whole) == DATA


def test_range_in_chunks_is_never_data(server: Server, pool: imageio_data.Pool) -> None:
    pool.connect([server.url])
    server.chunked = True
    with pytest.raises(errors.Malformed, match="in chunks"):
        read(pool, 1000, 1000)


def test_response_that_is_not_http_is_no_outage(server: Server, pool: imageio_data.Pool) -> None:
    pool.connect([server.url])
    server.repeated = True
    with pytest.raises(errors.Malformed, match="violates HTTP: malformed Content-Length"):
        read(pool, 1000, 1000)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (403, imageio_data.TicketRefused),
        (503, imageio_data.Failed),
        (200, errors.NoRanges),
        (400, imageio_data.Refused),
    ],
)
def test_response_that_is_not_the_range_is_refused(
    server: Server, pool: imageio_data.Pool, status: int, kind: type[errors.Error]
) -> None:
    pool.connect([server.url])
    server.status = status
    with pytest.raises(errors.Error) as caught:
        read(pool, 0, 1000)
    assert type(caught.value) is kind
    server.status = 206
    assert read(pool, 0, 1000) == DATA[:1000]


@pytest.mark.parametrize(
    "content_range", [None, "bytes */300000", "bytes 999-1998/300000", "bytes=1000-1999"]
)
def test_another_range_is_never_data(
    server: Server, pool: imageio_data.Pool, content_range: str | None
) -> None:
    """Its length is right, which is all that the library compares."""
    pool.connect([server.url])
    server.content_range = content_range
    server.shift = 4096 if content_range is None else 0
    with pytest.raises(errors.WrongRanges, match="requested byte 1000, received bytes"):
        read(pool, 1000, 1000)
    server.content_range, server.shift = None, 0
    assert read(pool, 1000, 1000) == DATA[1000:2000]


@pytest.mark.parametrize("content_range", ["", "bytes 1000-1499/1500", "bytes 1000-1999/*"])
def test_content_range_of_old_daemons_is_accepted(
    server: Server, pool: imageio_data.Pool, content_range: str
) -> None:
    pool.connect([server.url])
    server.content_range = content_range
    assert read(pool, 1000, 1000) == DATA[1000:2000]


def test_content_encoding_is_never_data(server: Server, pool: imageio_data.Pool) -> None:
    pool.connect([server.url])
    server.encoding = "gzip"
    with pytest.raises(errors.Unsupported, match="content encoding"):
        read(pool, 1000, 1000)


@pytest.mark.parametrize(
    ("extents", "words"),
    [
        ("<html>", "invalid response"),
        ("[{}]", "invalid response"),
        ('[{"start": 0, "length": 10, "zero": true}, {"start": 11, "length": 1, "zero": true}]', "gap"),
        ('[{"start": 0, "length": -1, "zero": true}]', "gap"),
        ('[{"start": 0, "length": 100000000000000000000, "zero": true}]', "gap"),
        ('[{"start": 0, "length": "1", "zero": true}]', "invalid response"),
        ('[{"start": 0, "length": 10, "zero": "false"}]', "invalid response"),
        ('[{"start": 0, "length": 10, "zero": null}]', "invalid response"),
        ('[{"start": 0.0, "length": 10, "zero": true}]', "invalid response"),
        ('[{"start": 0, "length": 10.5, "zero": true}]', "invalid response"),
    ],
)
def test_malformed_extents_are_refused(
    server: Server, pool: imageio_data.Pool, extents: str, words: str
) -> None:
    server.extents = extents
    pool.connect([server.url])
    with pytest.raises(errors.SourceError, match=words):
        pool.extents()


@pytest.mark.parametrize("path", ["extents", "options", "error"])
def test_endless_responses_are_refused(server: Server, pool: imageio_data.Pool, path: str) -> None:
    """The library keeps them whole."""
    server.endless = path

    def use() -> None:
        pool.connect([server.url])
        if path == "error":
            read(pool, 0, 1000)
        pool.extents()

    with pytest.raises(
        errors.SourceError, match=r"more than 40 MiB; if the disk is very fragmented"
    ) as caught:
        use()
    assert not isinstance(caught.value, errors.Transient)
    assert server.sent < 64 << 20


def test_lists_of_extents_are_not_kept_by_each_connection(server: Server, pool: imageio_data.Pool) -> None:
    pool.connect([server.url])
    pool.extents()
    with pool._lend() as first, pool._lend() as second:
        assert not first._extents
        assert not second._extents


def test_second_url_is_used_if_the_first_does_not_respond(server: Server, pool: imageio_data.Pool) -> None:
    dead = "http://127.0.0.1:1/images/ticket"
    with pytest.raises(errors.Unreachable, match="connection refused"):
        pool.connect([dead, dead])
    pool.connect([dead, server.url])
    assert read(pool) == DATA
    # A host that has responded before is being restarted.
    with pytest.raises(errors.Transient, match="connection refused"):
        pool.connect([dead])


def test_interrupt_ends_running_reads(
    server: Server, pool: imageio_data.Pool, reads: cancelling.Reads
) -> None:
    pool.connect([server.url])
    server.stall = True
    started = time.monotonic()
    with reads.scope() as scope:
        threading.Timer(0.3, scope.set).start()
        with pytest.raises(errors.Cancelled):
            read(pool, 0, 1000)
    assert time.monotonic() - started < processes.PATIENCE
    server.stall = False
    assert read(pool, 0, 1000) == DATA[:1000]


def test_interrupt_ends_the_wait_for_a_connection(
    server: Server, pool: imageio_data.Pool, reads: cancelling.Reads
) -> None:
    """The one that has the only connection may be opening it, which nothing ends."""
    server.options = None
    pool.connect([server.url])
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            read(pool)
        except errors.Cancelled as err:
            failures.append(err)

    with reads.scope() as scope, contextlib.suppress(errors.Cancelled), pool._lend():
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        time.sleep(0.2)
        assert waiting.is_alive()
        scope.set()
        waiting.join(processes.PATIENCE)
        assert not waiting.is_alive()
    assert len(failures) == 1


def test_interrupt_may_coincide_with_the_end_of_reads(
    server: Server, pool: imageio_data.Pool, reads: cancelling.Reads
) -> None:
    """Whatever a connection is doing at that moment, even closing."""
    pool.connect([server.url])
    server.cut = 500
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        while not stop.is_set():
            try:
                read(pool, 0, 1000)
            except (errors.Transient, errors.Cancelled):
                continue
            except BaseException as err:  # noqa: BLE001  (kept for the assertion)
                failures.append(err)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        with reads.scope() as scope:
            scope.set()
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_closed_pool_opens_no_connection(server: Server, pool: imageio_data.Pool) -> None:
    """A new connection would keep the ticket in use, and the renewal may be late by one response."""
    pool.connect([server.url])
    assert read(pool) == DATA
    pool.close()
    with pytest.raises(errors.Transient, match="closed"):
        read(pool, 0, 1000)
    pool.connect([server.url])
    assert read(pool) == DATA
