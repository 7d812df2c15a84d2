"""One ordered stream out of several connections, with and without a server that can go to an offset."""

from __future__ import annotations

import random
import threading

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import resume

DATA = random.Random(2).randbytes(10_000)


class Connection:
    def __init__(self, data: bytes, cut: int | None) -> None:
        self.data = memoryview(data)
        self.cut = cut
        self.at = 0
        self.closed = False

    def readinto(self, into: memoryview, /) -> int:
        end = len(self.data) if self.cut is None else min(self.cut, len(self.data))
        if self.cut is not None and self.at >= self.cut:
            raise errors.Transient(url="memory", reason="reset", retry_after=0.001)
        count = min(len(into), end - self.at, 700)
        into[:count] = self.data[self.at : self.at + count]
        self.at += count
        return count

    def close(self) -> None:
        self.closed = True


class Server:
    """Breaks each connection after ``cuts`` bytes in turn, then no more. ``second``: what it has later."""

    def __init__(self, *cuts: int, ranges: bool, second: bytes = DATA) -> None:
        self.cuts = list(cuts)
        self.ranges = ranges
        self.second = second
        self.opened: list[int] = []
        self.connections: list[Connection] = []

    def open_at(self, offset: int) -> Connection:
        if offset and not self.ranges:
            raise errors.NoRanges(url="memory", reason="none")
        data = self.second if self.opened else DATA
        self.opened.append(offset)
        cut = self.cuts.pop(0) if self.cuts else None
        self.connections.append(Connection(data[offset:], cut))
        return self.connections[-1]


def read(server: Server, size: int | None = len(DATA)) -> bytes:
    stream = resume.Resuming(server.open_at, size, name="memory", no_progress=2, cancel=threading.Event())
    parts = []
    buffer = memoryview(bytearray(999))
    while count := stream.readinto(buffer):
        parts.append(bytes(buffer[:count]))
    stream.close()
    assert all(connection.closed for connection in server.connections)
    return b"".join(parts)


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("cut", [0, 1, 699, 700, 701, 9_999, 10_000])
def test_goes_on_where_it_broke(ranges: bool, cut: int) -> None:
    server = Server(cut, ranges=ranges)
    assert read(server) == DATA
    if cut:
        assert server.opened == ([0, cut] if ranges else [0, 0])


def test_breaks_often() -> None:
    server = Server(*[1500] * 6, ranges=True)
    assert read(server) == DATA
    assert server.opened == [0, 1500, 3000, 4500, 6000, 7500, 9000]


def test_other_bytes_at_the_second_reading_are_not_taken() -> None:
    changed = bytes([DATA[0] ^ 1]) + DATA[1:]
    with pytest.raises(errors.SourceChanged):
        read(Server(5000, ranges=False, second=changed))


def test_breaking_before_the_same_byte_each_time_ends() -> None:
    with pytest.raises(errors.TransferFailed):
        read(Server(5000, *[100] * 50, ranges=False))


def test_an_early_end_is_no_end() -> None:
    server = Server(ranges=True)
    short = Server(ranges=True)
    opened = iter([Connection(DATA[:4000], None), Connection(DATA[4000:], None)])
    short.open_at = lambda _offset: next(opened)  # type: ignore[method-assign]
    assert read(short) == read(server)


def test_unknown_size_ends_where_the_server_does() -> None:
    assert read(Server(ranges=False), size=None) == DATA


def test_what_is_closed_is_not_opened_again() -> None:
    """A decompressor closes what it reads; whoever drains that afterwards must not fetch it all anew."""
    server = Server(ranges=False)
    stream = resume.Resuming(
        server.open_at, len(DATA), name="memory", no_progress=2, cancel=threading.Event()
    )
    buffer = memoryview(bytearray(len(DATA)))
    while stream.readinto(buffer):
        pass
    stream.close()
    assert stream.readinto(buffer) == 0
    assert server.opened == [0]
