"""One ordered stream from several connections, with and without a server that supports offsets."""

from __future__ import annotations

import random
import time

import pytest

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images.engine import cancelling, resume, retry

DATA = random.Random(2).randbytes(10_000)


class Connection:
    """A stream of ``data`` that is reset after ``cut`` bytes."""

    def __init__(self, data: bytes, cut: int | None) -> None:
        self.data = memoryview(data)
        self.cut = cut
        self.at = 0
        self.closed = False
        #: Seconds before each read.
        self.pause = 0.0

    def readinto(self, into: memoryview, /) -> int:
        time.sleep(self.pause)
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
    """Cut the connections after ``cuts`` bytes, in turn. ``second``: the content served after the first."""

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


def opened(server: Server, size: int | None = len(DATA), no_progress: float = 2) -> resume.Resuming:
    return resume.Resuming(
        server.open_at, size, name="memory", no_progress=no_progress, cancel=cancelling.Cancel()
    )


def read(server: Server, size: int | None = len(DATA)) -> bytes:
    stream = opened(server, size)
    parts = []
    buffer = memoryview(bytearray(999))
    while count := stream.readinto(buffer):
        parts.append(bytes(buffer[:count]))
    stream.close()
    assert all(connection.closed for connection in server.connections)
    return b"".join(parts)


@pytest.mark.parametrize(
    ("cut", "ranges"),
    [(0, True), (0, False), (1, True), (700, False), (700, True), (9_999, True), (10_000, False)],
)
def test_stream_resumes_where_the_connection_was_cut(ranges: bool, cut: int) -> None:
    server = Server(cut, ranges=ranges)
    assert read(server) == DATA
    if cut:
        assert server.opened == ([0, max(0, cut - 512)] if ranges else [0, 0])


def test_stream_survives_many_cuts() -> None:
    server = Server(*[1500] * 6, ranges=True)
    assert read(server) == DATA
    assert server.opened == [0, 988, 1976, 2964, 3952, 4940, 5928]


class Shifted(Server):
    """Offsets are counted from another byte."""

    def __init__(self, *cuts: int, shift: int) -> None:
        super().__init__(*cuts, ranges=True)
        self.shift = shift

    def open_at(self, offset: int) -> Connection:
        return super().open_at(max(0, offset + self.shift) if offset else 0)


@pytest.mark.parametrize("shift", [-512, 1])
def test_stream_continued_at_another_byte_is_read_from_the_beginning(shift: int) -> None:
    server = Shifted(3000, 5000, 7000, shift=shift)
    assert read(server) == DATA
    assert server.opened[1:3] == [3000 - 512 + shift, 0]


def test_changed_content_is_refused_on_resume() -> None:
    changed = bytes([DATA[0] ^ 1]) + DATA[1:]
    with pytest.raises(errors.SourceChanged):
        read(Server(5000, ranges=False, second=changed))


def test_repeated_cut_at_the_same_byte_fails() -> None:
    stream = opened(Server(5000, *[100] * 50, ranges=False), no_progress=0.3)
    with pytest.raises(errors.TransferFailed):
        readers.fill(stream, memoryview(bytearray(len(DATA))))


def test_outage_is_waited_for_where_only_the_beginning_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_DELAY", 0.01)
    server = Server(5000, *[4000] * 7, ranges=False)
    stream = opened(server, no_progress=60)
    whole = bytearray(len(DATA))
    assert readers.fill(stream, memoryview(whole)) == len(DATA)
    assert whole == DATA
    assert server.opened == [0] * 9


@pytest.mark.parametrize("more", [1, 5000])
def test_stream_longer_than_stated_is_refused(more: int) -> None:
    with pytest.raises(errors.SourceChanged, match="size"):
        read(Server(ranges=True), size=len(DATA) - more)


def test_early_end_is_resumed() -> None:
    server = Server(ranges=True)
    short = Server(ranges=True)
    opened = iter([Connection(DATA[:4000], None), Connection(DATA[4000 - 512 :], None)])
    short.open_at = lambda _offset: next(opened)
    assert read(short) == read(server)


def test_stream_of_unknown_size_ends_with_the_response() -> None:
    assert read(Server(ranges=False), size=None) == DATA


def test_closed_stream_is_not_reopened() -> None:
    """A decompressor closes its input; draining that afterwards must not fetch everything again."""
    server = Server(ranges=False)
    stream = opened(server)
    buffer = memoryview(bytearray(len(DATA)))
    while stream.readinto(buffer):
        pass
    stream.close()
    assert stream.readinto(buffer) == 0
    assert server.opened == [0]


def test_time_of_the_reader_is_not_silence_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two connections are cut after it, without a new byte: one failure alone is never the last."""
    monkeypatch.setattr(retry, "FIRST_DELAY", 0.01)
    server = Server(700, 512, ranges=True)
    stream = opened(server, no_progress=1.0)
    into = memoryview(bytearray(len(DATA)))
    done = stream.readinto(into)
    time.sleep(1.3)
    assert readers.fill(stream, into[done:]) == len(DATA) - done
    assert into == DATA
    assert server.opened == [0, 188, 188]


def test_beginning_that_is_read_again_slowly_is_no_silence() -> None:
    """The second connection needs longer than the limit for it, and brings nothing else."""

    class Slow(Server):
        def open_at(self, offset: int) -> Connection:
            connection = super().open_at(offset)
            connection.pause = 0.1 if len(self.opened) == 2 else 0.0
            return connection

    server = Slow(5000, 5000, ranges=False)
    into = memoryview(bytearray(len(DATA)))
    assert readers.fill(opened(server, no_progress=0.6), into) == len(DATA)
    assert into == DATA
    assert server.opened == [0, 0, 0]


def test_source_that_trickles_is_given_up() -> None:
    class Trickle(Connection):
        def readinto(self, into: memoryview, /) -> int:
            time.sleep(0.01)
            return super().readinto(into[:1])

    stream = resume.Resuming(
        lambda _: Trickle(DATA, None), len(DATA), name="memory", no_progress=0.3, cancel=cancelling.Cancel()
    )
    with pytest.raises(errors.TransferFailed, match=r"only \d+ bytes in 0 s, less than 1.0 KiB per second"):
        readers.fill(stream, memoryview(bytearray(len(DATA))))
