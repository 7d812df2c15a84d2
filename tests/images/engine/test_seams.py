"""Ranges that are compared with each other, of a file in memory."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi_worker import errors
from cdi_worker.formats import readers, remembered
from cdi_worker.images.engine import cancelling, fetch, pace, retry, seams
from tests.support import pairs, processes, reading

KiB = 1 << 10
DATA = random.Random(2).randbytes(200_000)
LARGE = random.Random(3).randbytes(9 << 20)
HEAD = 20_000
OPTIONS = fetch.FetchOptions(connections=3, chunk=16 * KiB, window=4, no_progress=30.0)
Lie = Callable[[int, int], int]


class Server:
    """``lie`` returns where the bytes of a request begin; after ``cut`` bytes a response ends."""

    def __init__(self, data: bytes = DATA, lie: Lie = lambda first, _: first, cut: int | None = None) -> None:
        self.data = data
        self.requests: list[tuple[int, int]] = []
        self.sent = 0
        self._lie = lie
        self._cut = cut
        self.lock = threading.Lock()

    def at(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]

    def open_range(self, start: int, end: int, /) -> readers.Reader:
        with self.lock:
            number = len(self.requests)
            self.requests.append((start, end))
        shift = self._lie(start, number) - start
        return Response(self, start, end if self._cut is None else min(end, start + self._cut), shift)

    def read_range(self, offset: int, into: memoryview, /) -> int:
        return self.open_range(offset, offset + len(into)).readinto(into)


class Response:
    """The bytes from ``at`` to ``end``, from ``shift`` bytes later."""

    def __init__(self, server: Server, at: int, end: int, shift: int) -> None:
        self._server, self._at, self._end, self._shift = server, at, end, shift

    def readinto(self, into: memoryview, /) -> int:
        count = min(len(into), self._end - self._at)
        if not count:
            raise errors.CutShort(url="memory", reason="empty")
        with self._server.lock:
            self._server.sent += count
        into[:count] = self._server.at(self._at + self._shift, count).ljust(count, b"\0")
        self._at += count
        return count

    def close(self) -> None: ...


class Measured(pace.Pace):
    """A request costs so many bytes, however long this machine takes."""

    def __init__(self, cost: int) -> None:
        super().__init__()
        self._cost = cost

    @property
    def cost(self) -> int:
        return self._cost


CHEAP = Measured(0)


def fetcher(
    server: Server,
    head: int = HEAD,
    times: pace.Pace = CHEAP,
) -> fetch.Fetcher:
    first = server.data[:head]
    reader = seams.Seams(
        server, len(server.data), name="memory", head=first, known=remembered.Remembered(first), pace=times
    )
    return fetch.Fetcher(reader, len(server.data), OPTIONS, scope=cancelling.Cancel())


def fetched(server: Server, start: int = 0) -> bytes:
    into = bytearray(server.data[:start].ljust(len(server.data), b"?"))

    def deliver(offset: int, data: memoryview) -> None:
        into[offset : offset + len(data)] = data

    engine = fetcher(server)
    engine.each(fetch.split(start, engine.size, 4 * KiB), deliver)
    return bytes(into)


def everything(engine: fetch.Fetcher, kind: str) -> bytes:
    """Read all but the head."""
    if kind == "stream":
        with contextlib.closing(engine.stream(HEAD)) as stream:
            return reading.read_all(stream)
    into = bytearray(engine.size)
    engine.each(
        fetch.split(HEAD, engine.size, 4 * KiB),
        lambda offset, data: into.__setitem__(slice(offset, offset + len(data)), data),
    )
    return bytes(into[HEAD:])


def once(number: int, shift: int) -> Lie:
    return lambda first, n: max(0, first + shift) if n == number else first


def test_honest_server_costs_one_request_and_a_sector_at_each_end() -> None:
    honest = Server()
    assert fetched(honest, HEAD) == DATA
    probe, *rest = honest.requests
    assert probe[1] - probe[0] == 512
    assert probe[0] % 2 == 1
    assert min(rest)[0] == HEAD - 512
    assert len(rest) <= -(-len(DATA) // OPTIONS.chunk) + 1
    assert sum(end - first for first, end in rest) <= len(DATA) - HEAD + 1024 * len(rest)


def test_consecutive_reads_share_one_request() -> None:
    server = Server()
    read = reader_of(server)
    assert read(HEAD, 10_000) == DATA[HEAD : HEAD + 10_000]
    assert read(HEAD + 10_000, 10_000) == DATA[HEAD + 10_000 : HEAD + 20_000]
    # A small gap is read and discarded; the last read ends the response.
    assert read(HEAD + 50_000, 30_000) == DATA[HEAD + 50_000 : HEAD + 80_000]
    assert server.requests[1:] == [(HEAD - 512, HEAD + 80_000 + 512)]
    # A read backwards, or far ahead, needs a new request.
    assert read(HEAD, 10) == DATA[HEAD : HEAD + 10]
    assert read(150_000, 10) == DATA[150_000:150_010]
    assert len(server.requests) == 4


def test_response_that_ends_in_a_gap_is_replaced() -> None:
    server = Server(cut=25_000)
    read = reader_of(server)
    assert read(HEAD, 10_000) == DATA[HEAD : HEAD + 10_000]
    assert read(HEAD + 50_000, 10_000) == DATA[HEAD + 50_000 : HEAD + 60_000]
    assert [first for first, _ in server.requests[1:]] == [HEAD - 512, HEAD + 50_000 - 512]


def reader_of(server: Server) -> Callable[[int, int], bytes]:
    """Return what reads at an offset, where 80,000 bytes after the head were announced."""
    reader = fetcher(server)._reader
    reader.expect(HEAD, 80_000)

    def read(offset: int, length: int) -> bytes:
        into = bytearray(length)
        assert reader.read_range(offset, memoryview(into)) == length
        return bytes(into)

    return read


def test_long_request_after_the_head_begins_with_a_part_of_it() -> None:
    honest = Server(LARGE)
    assert everything(fetcher(honest, times=Measured(pace.MOST)), "stream") == LARGE[HEAD:]
    ((first, end),) = honest.requests
    assert HEAD - 1024 < first < HEAD - 512
    assert first % 2 == 1
    assert end == len(LARGE)
    lies: list[Lie] = [lambda first, _: first + 512, lambda first, _: first // 8 * 8]
    for lie in lies:
        lying = Server(LARGE, lie=lie)
        with pytest.raises(errors.NoRanges, match="two requests returned different data"):
            everything(fetcher(lying, times=Measured(pace.MOST)), "stream")
        assert len(lying.requests) == 1


@pytest.mark.parametrize("shift", [-4096, -512, -1, 1, 8, 512, 65_536])
def test_constant_shift_is_found_by_the_head(shift: int) -> None:
    """Such ranges agree with each other, but not with the bytes read from byte 0."""
    server = Server(lie=lambda first, _: max(0, first + shift) if first else 0)
    with pytest.raises(errors.NoRanges, match="two requests returned different data at byte"):
        fetcher(server).each([fetch.ByteRange(HEAD, 4 * KiB)] * 8, not_delivered)


SHIFTS = [-8192, -512, -1, 1, 512, 65_536]


@pytest.mark.parametrize(
    ("number", "shift"), [*pairs.dealt(range(10), SHIFTS), *pairs.dealt(range(10), SHIFTS[::-1])]
)
def test_one_answer_of_another_range_is_found(number: int, shift: int) -> None:
    with pytest.raises(errors.NoRanges, match="two requests returned different data"):
        fetched(Server(lie=once(number, shift)), HEAD)


SEAM = HEAD + 4 * KiB


def test_bytes_behind_a_seam_are_compared() -> None:
    """The second request agrees with the first up to their seam, and has other bytes from there on."""

    class Spoiled(Server):
        def at(self, offset: int, length: int) -> bytes:
            data = super().at(offset, length)
            return data[::-1] if offset == SEAM and length > seams.SECTOR else data

    reader, into = fetcher(Spoiled())._reader, memoryview(bytearray(4 * KiB))
    reader.read_range(HEAD, into)
    assert into == DATA[HEAD:SEAM]
    with pytest.raises(errors.NoRanges, match=f"different data at byte {SEAM};"):
        reader.read_range(SEAM, into)


def test_bytes_before_a_seam_are_compared() -> None:
    """The first request is made last, and its end has other bytes than the second request read before."""

    class Spoiled(Server):
        def at(self, offset: int, length: int) -> bytes:
            data = super().at(offset, length)
            return data[: -seams.SECTOR] + bytes(seams.SECTOR) if offset == HEAD else data

    reader, into = fetcher(Spoiled())._reader, memoryview(bytearray(4 * KiB))
    reader.read_range(SEAM, into)
    assert into == DATA[SEAM : SEAM + 4 * KiB]
    with pytest.raises(errors.NoRanges, match=f"different data at byte {SEAM - seams.SECTOR};"):
        reader.read_range(HEAD, into)


@given(st.integers(1, 13), st.integers(-70_000, 70_000).filter(bool), st.sampled_from([4096, 1, 512, 8]))
def test_no_lie_about_random_data_is_delivered(number: int, shift: int, block: int) -> None:
    lies: list[Lie] = [once(number, shift), lambda first, _: first // block * block]
    for lie in lies:
        with contextlib.suppress(errors.NoRanges):
            assert fetched(Server(lie=lie), HEAD) == DATA


@pytest.mark.parametrize("number", [1, 2])
def test_shifted_table_is_found(number: int) -> None:
    """A table is read by two requests, because its neighbours may never be read."""
    with pytest.raises(errors.NoRanges):
        fetcher(Server(lie=once(number, 8))).read(100_000, 4096)


@pytest.mark.parametrize("head", [HEAD, 0])
def test_table_is_read(head: int) -> None:
    """Also of a third party's source, which states no first bytes of the file."""
    assert fetcher(Server(), head).read(100_000, 4096) == DATA[100_000:104_096]


def test_each_table_is_a_request_of_its_own() -> None:
    """One answer of another range that has zeros would be several tables without data."""
    server = Server()
    reader = fetcher(server)._reader
    reader.expect(50_000, 4096, tables=True)
    for offset in (50_000, 50_512):
        reader.read_range(offset, memoryview(bytearray(512)))
    # The probe, and each table with a part of it.
    assert len(server.requests) == 5


def test_table_of_zeros_is_read_again() -> None:
    """Another request may find bytes where the first one was answered with zeros."""
    data = DATA[:50_000] + bytes(8192) + DATA[58_192:]
    server = Server(data, lie=lambda first, n: 51_000 if n == 1 else first)
    with pytest.raises(errors.NoRanges):
        fetcher(server).read(100_000, 4096)
    assert fetcher(Server(data)).read(51_000, 4096) == bytes(4096)


@pytest.mark.parametrize("data", [DATA, bytes(300_000)], ids=["noise", "zeros"])
def test_bytes_read_again_to_confirm_others_are_no_progress(data: bytes) -> None:
    """Else the percentage of an image with zeros would reach its end too early."""
    server, counted = Server(data), list[int]()
    reader = fetcher(server)._reader
    engine = fetch.Fetcher(reader, len(data), OPTIONS, scope=cancelling.Cancel(), advance=counted.append)
    engine.fill_confirmed(100_000, memoryview(bytearray(20_000)))
    # The probe, the table, and a part of it.
    assert len(server.requests) == 3
    assert sum(counted) == 20_000


TABLES = [fetch.ByteRange(50_000, 512), fetch.ByteRange(150_000, 512)]


def not_delivered(_offset: int, _data: memoryview) -> None:
    pytest.fail("delivered")


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_shifted_table_is_not_delivered(number: int) -> None:
    """One of the tables, or of the requests that confirm them, is wrong."""
    engine = fetcher(Server(lie=once(number, 8)))
    delivered: list[int] = []
    with pytest.raises(errors.NoRanges, match="two requests returned different data"):
        engine.each(TABLES, lambda offset, _data: delivered.append(offset), tables=True)
    assert len(delivered) < len(TABLES)


def test_callers_work_is_done_while_ranges_are_fetched() -> None:
    engine, arrived = fetcher(Server()), threading.Event()
    engine.each(
        [fetch.ByteRange(100_000, 512)],
        lambda _offset, _data: arrived.set(),
        meanwhile=lambda: pytest.fail("sequential") if not arrived.wait(processes.PATIENCE) else None,
    )
    with pytest.raises(OSError, match="full"):
        engine.each([], not_delivered, meanwhile=lambda: (_ for _ in ()).throw(OSError("full")))


def test_bytes_are_not_returned_before_the_probe() -> None:
    """Every range is shifted, and the answer to the probe arrives last."""

    class Late(Server):
        def open_range(self, start: int, end: int, /) -> readers.Reader:
            if start < HEAD:
                time.sleep(0.1)
            return super().open_range(start, end)

    engine = fetcher(Late(lie=lambda first, _: first + 512))
    with pytest.raises(errors.NoRanges):
        engine.each(TABLES, not_delivered)


class Huge(Server):
    """5 GiB, whose data is a function of the offset; offsets have 32 bits."""

    class Size(bytes):
        def __len__(self) -> int:
            return 5 << 30

    def __init__(self, mask: int) -> None:
        super().__init__(self.Size(self.at(0, HEAD)), lie=lambda first, _: first & mask)

    def at(self, offset: int, length: int) -> bytes:
        words = range(offset // 8, -(-(offset + length) // 8))
        data = b"".join((word * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "big") for word in words)
        return data[offset % 8 :][:length]


def test_offsets_of_32_bits_are_found() -> None:
    engine = fetcher(Huge((1 << 32) - 1))
    with pytest.raises(errors.NoRanges, match="at byte 4295"):
        engine.read(1 << 20, 512)
    assert len(fetcher(Huge((1 << 64) - 1)).read(1 << 20, 512)) == 512


@pytest.mark.parametrize("cut", [0, 600])
def test_fruitless_answers_end_the_ranges(monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    """Less than a 64th of 16 KiB, and the sector before it."""
    monkeypatch.setattr(retry, "LONGEST_DELAY", 0.05)
    server = Server(cut=cut)
    with pytest.raises(errors.NoRanges, match="6 answers in a row ended at once"):
        fetched(server, HEAD)
    assert len(server.requests) < 50


@pytest.mark.parametrize("kind", ["each", "stream"])
def test_progress_of_long_requests_is_not_fruitless(kind: str) -> None:
    """A proxy may end each answer after 100 KB: a longer request must not make it a server without ranges."""
    server = Server(LARGE, cut=100_000)
    engine = fetcher(server, times=Measured(pace.MOST))
    assert everything(engine, kind) == server.data[HEAD:]
    assert server.requests[0][1] == len(server.data)


@pytest.mark.parametrize(
    ("kind", "cost", "most"),
    [("each", pace.MOST, 1), ("stream", pace.MOST, 1), ("each", 70_000, 3), ("stream", 0, 13)],
)
def test_expensive_requests_are_long_and_few(kind: str, cost: int, most: int) -> None:
    server = Server()
    engine = fetcher(server, times=Measured(cost))
    assert everything(engine, kind) == DATA[HEAD:]
    # And a part of the head.
    assert len(server.requests) <= most + 1


def test_requests_longer_than_the_window_wait_for_the_reader() -> None:
    server = Server()
    stream = fetcher(server, times=Measured(pace.MOST)).stream(HEAD)
    stream.readinto(memoryview(bytearray(1)))
    room = OPTIONS.window * OPTIONS.chunk
    processes.wait_for(lambda: server.sent > room - OPTIONS.chunk, "a full window")
    time.sleep(0.05)
    assert server.sent <= room + 1024
    stream.close()


@pytest.mark.parametrize("cut", [1024, 5000, 16 * KiB])
def test_short_answers_with_progress_are_continued(cut: int) -> None:
    assert fetched(Server(DATA[:60_000], cut=cut), HEAD) == DATA[:60_000]


@pytest.mark.parametrize("size", [0, 1, 2, 511, 513, 5000])
def test_telling_part_is_within_the_data(size: int) -> None:
    data = DATA[:size]
    start, length = seams.distinctive_window(data)
    assert start + length <= size
    assert bool(length) == (size > 2)
    assert seams.distinctive_window(bytes(size)) == (0, 0)


def test_telling_part_is_found_between_zeros() -> None:
    data = bytes(100_000) + b"\1\2" + bytes(100_000)
    start, length = seams.distinctive_window(data)
    assert b"\1" in data[start : start + length]
    assert start % 2 == 1
