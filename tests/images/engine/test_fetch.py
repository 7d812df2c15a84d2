"""The fetch engine with a source in memory that fails as networks do."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import threading
import time

import pytest

from cdi_worker import errors
from cdi_worker.formats import readers, remembered
from cdi_worker.images import kernel
from cdi_worker.images.engine import cancelling, crew, fetch, pace, retry, seams
from tests.support import processes, reading

DATA = random.Random(1).randbytes(300_000)
OPTIONS = fetch.FetchOptions(connections=3, chunk=4096, window=4, no_progress=2.0)


class Memory:
    """A random reader over bytes; ``fault`` is called before each read and may raise or shorten it."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data = data
        self.reads: list[tuple[int, int]] = []
        self.lock = threading.Lock()
        self.interrupted = threading.Event()

    def fault(self, number: int, offset: int, length: int) -> int:
        return length

    def read_range(self, offset: int, into: memoryview, /) -> int:
        with self.lock:
            number = len(self.reads)
            self.reads.append((offset, len(into)))
        length = self.fault(number, offset, len(into))
        into[:length] = self.data[offset : offset + length]
        return length


class Short(Memory):
    """Every response but the last bytes ends after a third."""

    def fault(self, number: int, offset: int, length: int) -> int:
        return max(1, length // 3)


class Flaky(Memory):
    """Every tenth chunk succeeds only at the second attempt."""

    def fault(self, number: int, offset: int, length: int) -> int:
        if offset % 40960 == 0 and self.reads.count((offset, length)) == 1:
            raise errors.Transient(url="memory", reason="reset", retry_after=0.001)
        return length


class Failing(Memory):
    """No byte arrives from 100 000 on."""

    def __init__(self, failure: type[errors.Transient | errors.Unreachable]) -> None:
        super().__init__()
        self._failure = failure

    def fault(self, number: int, offset: int, length: int) -> int:
        if offset + length > 100_000:
            raise self._failure(url="memory", reason="reset")
        return length


class Stuck(Memory):
    """One request never ends by itself."""

    def fault(self, number: int, offset: int, length: int) -> int:
        if number == 5:
            assert self.interrupted.wait(60)
            raise errors.Transient(url="memory", reason="interrupted")
        return length


def fetcher(
    reader: Memory, options: fetch.FetchOptions = OPTIONS, cancel: cancelling.Cancel | None = None
) -> fetch.Fetcher:
    cancel = cancel or cancelling.Cancel()
    cancel.on_set(reader.interrupted.set)
    return fetch.Fetcher(reader, len(reader.data), options, scope=cancel)


def fetched(opened: fetch.Fetcher, ordered: bool) -> bytearray:
    """Fetch all of DATA, in order or as it arrives."""
    got = bytearray(len(DATA))
    if ordered:
        with contextlib.closing(opened.stream()) as stream:
            assert readers.fill(stream, memoryview(got)) == len(DATA)
    else:
        opened.each(
            fetch.split(0, len(DATA), 4096), lambda at, data: got.__setitem__(slice(at, at + len(data)), data)
        )
    return got


@pytest.mark.parametrize(
    ("kind", "size", "start"),
    [
        (Short, len(DATA), 0),
        (Flaky, len(DATA), 1),
        (Memory, len(DATA), 4095),
        (Short, len(DATA), 4096),
        (Memory, len(DATA), len(DATA) - 1),
        (Memory, len(DATA), len(DATA)),
        (Memory, 0, 0),
        (Memory, 4096, 0),
        (Memory, 16385, 0),
    ],
)
def test_stream_returns_all_bytes_in_order(kind: type[Memory], size: int, start: int) -> None:
    with contextlib.closing(fetcher(kind(DATA[:size])).stream(start)) as stream:
        assert reading.read_all(stream) == DATA[start:size]


@pytest.mark.parametrize("kind", [Memory, Short, Flaky])
def test_ranges_are_delivered_in_any_order(kind: type[Memory]) -> None:
    assert fetched(fetcher(kind()), ordered=False) == DATA


class Seamed(Memory, seams.Seams):
    """A reader whose ranges are compared, which compares none itself; records those announced."""

    pace = pace.Pace()

    def __init__(self, data: bytes = bytes(range(256)) * 8192) -> None:
        super().__init__(data)
        self.expected: list[tuple[int, int]] = []

    def expect(self, offset: int, length: int, *, tables: bool = False) -> None:
        self.expected.append((offset, length))


def test_neighbouring_ranges_are_announced_together() -> None:
    reader = Seamed()
    delivered: dict[int, int] = {}
    options = fetch.FetchOptions(connections=12, chunk=100_000)
    ranges = [
        (0, 40_000),
        (40_000, 40_000),
        (81_000, 19_000),
        (100_000, 50_000),
        (700_000, 200_000),
        (800_000, 10),
    ]
    fetcher(reader, options).each(
        [fetch.ByteRange(*item) for item in ranges], lambda o, d: delivered.update({o: len(d)})
    )
    assert sorted(delivered.items()) == ranges
    # Merged up to the size of a request, but not over a long gap; overlapping and longer ranges stay alone.
    requests = [(0, 100_000), (100_000, 50_000), (700_000, 200_000), (800_000, 10)]
    assert sorted(reader.expected) == requests


@pytest.mark.parametrize(
    ("size", "start", "length"),
    [(40, 0, 4), (100, 0, 9), (1000, 0, 16), (1000, 800, 16), (1000, 900, 9), (1000, 960, 4), (1000, 999, 4)],
)
def test_requests_for_large_objects_are_long_first_and_short_at_the_end(
    size: int, start: int, length: int
) -> None:
    """In MiB, with six connections: each of them has at least two more to come."""
    opened = fetch.Fetcher(Seamed(), size * fetch.MIB, fetch.FetchOptions(), scope=cancelling.Cancel())
    assert opened.request_length(start * fetch.MIB) // fetch.MIB == length


@pytest.mark.parametrize(
    ("speed", "left", "ahead", "length"),
    [
        pytest.param(3, 200, None, 16, id="far-from-the-end"),
        pytest.param(3, 23, None, 2, id="near-the-end"),
        pytest.param(3, 1, None, 1, id="last"),
        pytest.param(3, 200, 48, 2, id="stream"),
        pytest.param(300, 1, None, 4, id="last-of-a-fast-server"),
        pytest.param(300, 200, 48, 8, id="stream-of-a-fast-server"),
    ],
)
def test_last_requests_and_those_of_a_stream_are_brief(
    speed: int, left: int, ahead: int | None, length: int
) -> None:
    """In MiB, with six connections of so many MiB a second to a server 50 ms away."""
    reader = Seamed()
    opened = fetch.Fetcher(reader, 1000 * fetch.MIB, fetch.FetchOptions(), scope=cancelling.Cancel())
    opened.pace.received(speed * fetch.MIB, 1.0)
    limit = None if ahead is None else ahead * fetch.MIB
    opened.pace.answered(0.05 if speed < 100 else 0.001)
    assert opened.request_length((1000 - left) * fetch.MIB, limit) == length * fetch.MIB


class Batched(Memory):
    """Reads nearby ranges at once, in pieces."""

    batching = True

    def fault(self, number: int, offset: int, length: int) -> int:
        return min(length, 1000)


def test_nearby_ranges_are_read_in_batches() -> None:
    source = Batched()
    ranges = [fetch.ByteRange(start, 10) for start in range(7, 50_000, 110)]
    ranges += [fetch.ByteRange(60_000, 10_000), fetch.ByteRange(70_050, 10), fetch.ByteRange(70_200, 10)]
    delivered: dict[int, bytes] = {}
    arrived: list[int] = []
    fetcher = fetch.Fetcher(source, len(DATA), OPTIONS, scope=cancelling.Cancel(), advance=arrived.append)
    fetcher.each(ranges, lambda offset, data: delivered.update({offset: bytes(data)}))
    assert delivered == {start: DATA[start : start + length] for start, length in ranges}
    assert sum(arrived) == sum(length for _, length in ranges)
    # Batches of at most 4096 bytes, which arrive in pieces of 1000.
    assert len(source.reads) < 100
    assert max(length for _, length in source.reads) == 10_000
    assert not any(offset <= 55_000 < offset + length for offset, length in source.reads)


def test_only_the_requested_ranges_are_fetched() -> None:
    reader = Memory()
    delivered: list[tuple[int, bytes]] = []
    fetcher(reader).each(
        [fetch.ByteRange(10, 20), fetch.ByteRange(5000, 9000)], lambda o, d: delivered.append((o, bytes(d)))
    )
    assert sorted(delivered) == [(10, DATA[10:30]), (5000, DATA[5000:14000])]
    assert sorted(reader.reads) == [(10, 20), (5000, 9000)]


def test_no_ranges_deliver_nothing() -> None:
    fetcher(Memory()).each([], lambda _o, _d: pytest.fail("nothing to deliver"))


def test_split_has_the_same_borders_in_every_run() -> None:
    assert list(fetch.split(10, 25, 10)) == [(10, 10), (20, 5)]
    assert list(fetch.split(5, 25, 10)) == [(5, 5), (10, 10), (20, 5)]
    assert list(fetch.split(5, 5, 10)) == []


def test_window_limits_fetching_ahead() -> None:
    reader = Memory()
    stream = fetcher(reader).stream()
    stream.readinto(memoryview(bytearray(1)))
    processes.wait_for(lambda: len(reader.reads) >= OPTIONS.window, "a full window")
    # Time for one read too many.
    time.sleep(0.05)
    assert len(reader.reads) == OPTIONS.window
    stream.close()


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(
    ("failure", "expected", "message"),
    [
        (errors.Transient, errors.TransferFailed, "memory: transfer failed at byte"),
        (errors.Unreachable, errors.Unreachable, "reset"),
    ],
)
def test_permanent_error_and_no_progress_end_the_transfer(
    ordered: bool,
    failure: type[errors.Transient | errors.Unreachable],
    expected: type[errors.Error],
    message: str,
) -> None:
    options = dataclasses.replace(OPTIONS, no_progress=0.3)
    with pytest.raises(expected, match=message):
        fetched(fetcher(Failing(failure), options), ordered)


class Breaking(Memory):
    """The next ``failures`` reads fail."""

    failures = 0

    def fault(self, number: int, offset: int, length: int) -> int:
        if self.failures:
            self.failures -= 1
            raise errors.Transient(url="memory", reason="reset")
        return length


@pytest.mark.parametrize("ordered", [True, False])
def test_time_of_the_target_is_not_silence_of_the_source(
    monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    """A write lasts longer than the source may be silent, and its connections break meanwhile."""
    monkeypatch.setattr(retry, "FIRST_DELAY", 0.01)
    reader = Breaking()
    options = dataclasses.replace(OPTIONS, connections=1, window=1, no_progress=1.0)
    opened, got = fetcher(reader, options), bytearray()

    def deliver(_offset: int, data: memoryview) -> None:
        got.extend(data)
        if len(got) == 4 * 4096:
            time.sleep(1.2)
            # One failure alone is never the last.
            reader.failures = 2

    if ordered:
        into = memoryview(bytearray(4096))
        with contextlib.closing(opened.stream()) as stream:
            while count := stream.readinto(into):
                deliver(0, into[:count])
    else:
        opened.each(fetch.split(0, len(DATA), 4096), deliver)
    assert (got == DATA, reader.failures) == (True, 0)


@pytest.mark.parametrize("ordered", [True, False])
def test_cancel_interrupts_a_blocked_read(ordered: bool) -> None:
    cancel = cancelling.Cancel()
    reader = Stuck()
    threading.Timer(0.2, cancel.set).start()
    started = time.monotonic()
    with pytest.raises(errors.Cancelled):
        fetched(fetcher(reader, cancel=cancel), ordered)
    assert reader.interrupted.is_set()
    assert time.monotonic() - started < processes.PATIENCE


def test_failing_delivery_is_the_last_one() -> None:
    calls = itertools.count()
    ended = threading.Event()

    def deliver(_offset: int, _data: memoryview) -> None:
        assert not ended.is_set()
        if next(calls) == 7:
            raise errors.TargetError(path="disk", reason="no space left on device")

    with pytest.raises(errors.TargetError):
        fetcher(Memory()).each(fetch.split(0, len(DATA), 4096), deliver)
    ended.set()
    # Time for a thread that has not ended.
    time.sleep(0.1)


def test_no_call_runs_on_after_the_failure_of_another() -> None:
    entered = threading.Event()
    ended: list[str] = []

    def slow() -> None:
        entered.set()
        # Longer than threads that deliver nothing are waited for.
        time.sleep(1.2)
        ended.append("slow")

    def fail() -> None:
        entered.wait()
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        fetcher(Memory()).each([], lambda _o, _d: None, first=[slow, fail])
    assert ended == ["slow"]


def test_read_outside_the_file_is_truncated() -> None:
    engine = fetcher(Memory())
    assert engine.read(10, 5) == DATA[10:15]
    for offset, length in ((len(DATA), 1), (-1, 2), (0, len(DATA) + 1)):
        with pytest.raises(errors.Truncated):
            engine.read(offset, length)


@pytest.mark.parametrize("offset", [0, 4000, 6000, 10_000, 30_000])
def test_known_bytes_are_not_fetched(offset: int) -> None:
    """The bytes of the first read are delivered, even if the source returns others now."""
    head, middle = b"h" * 5000, b"m" * 100
    known = remembered.Remembered(head)
    known.remembering(lambda _offset, length: middle[:length])(12_000, 100)
    reader, counted = Memory(), list[int]()
    engine = fetch.Fetcher(
        reader, len(DATA), OPTIONS, scope=cancelling.Cancel(), known=known, advance=counted.append
    )
    expected = bytearray(DATA)
    expected[:5000], expected[12_000:12_100] = head, middle
    assert engine.read(offset, 8000) == expected[offset : offset + 8000]
    assert sum(counted) == 8000
    fetched = max(offset, 5000)
    assert reader.reads == [(fetched, offset + 8000 - fetched)]
    assert engine.read(100, 4900) == head[:4900]
    assert len(reader.reads) == 1


def test_short_reads_that_are_too_slow_together_end_the_transfer() -> None:
    """None of them lasts as long as the limit."""

    class Slow(Memory):
        def fault(self, number: int, offset: int, length: int) -> int:
            time.sleep(0.06)
            return length

    options = dataclasses.replace(OPTIONS, connections=1, no_progress=0.15, min_speed=1 << 20)
    with pytest.raises(errors.TransferFailed, match="less than"):
        fetcher(Slow(), options).each(fetch.split(0, len(DATA), 4096), lambda _o, _d: None)


class Near(Seamed):
    """A server on the same network. It is slow from ``slow`` on, as one is that limits each connection."""

    def __init__(self, slow: int) -> None:
        super().__init__(DATA)
        self.pace = pace.Pace()
        # A request costs nothing, so that there is one for each range.
        self.pace.answered(0.0)
        self.pace.received(fetch.MIB, 0.001)
        self.threads: set[int] = set()
        self._slow = slow

    def read_range(self, offset: int, into: memoryview, /) -> int:
        self.threads.add(threading.get_ident())
        # So that each thread has its turn.
        time.sleep(0.002)
        if offset >= self._slow:
            self.pace.received(len(into), 1.0)
        return super().read_range(offset, into)


@pytest.mark.parametrize(
    ("slow", "ordered"),
    [(len(DATA), True), (len(DATA), False), (len(DATA) // 2, False), (len(DATA) // 2, True)],
)
def test_threads_are_as_many_as_are_worth_it(ordered: bool, slow: int) -> None:
    reader = Near(slow)
    few = reader.pace.enough(1 << 20)
    options = dataclasses.replace(OPTIONS, connections=few + 48, window=few + 48)
    opened = fetch.Fetcher(reader, len(DATA), options, scope=cancelling.Cancel())
    assert fetched(opened, ordered) == DATA
    if slow == len(DATA):
        assert len(reader.threads) <= few
    else:
        assert len(reader.threads) > few


@pytest.mark.parametrize(
    ("latency", "length", "seconds", "is_few"),
    [
        (0.002, 4 * fetch.MIB, 0.02, True),
        (0.002, 4 * fetch.MIB, 0.2, False),
        (0.05, 4 * fetch.MIB, 0.07, False),
        (0.003, 64 << 10, 0.003, False),  # a sparse disk: all reads are as short as the first
    ],
)
def test_threads_for_a_reader_that_times_whole_reads(
    latency: float, length: int, seconds: float, is_few: bool
) -> None:
    class Timed(Batched):
        def __init__(self) -> None:
            super().__init__()
            self.pace = pace.Pace()
            self.pace.read(min(length, 256 << 10), latency)
            self.threads: set[int] = set()

        def read_range(self, offset: int, into: memoryview, /) -> int:
            self.threads.add(threading.get_ident())
            # So that each thread has its turn.
            time.sleep(0.002)
            self.pace.read(length, seconds)
            return Memory.read_range(self, offset, into)

    reader = Timed()
    few = max(2, round(kernel.processors()))
    assert fetched(fetcher(reader, dataclasses.replace(OPTIONS, connections=few + 48)), ordered=False) == DATA
    assert (len(reader.threads) <= few) is is_few


@pytest.mark.parametrize("ordered", [False, True])
def test_few_requests_that_stall_do_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    """Nobody else would start the threads that are missing: no piece arrives, and nothing is measured."""
    monkeypatch.setattr(crew, "INTERVAL", 0.2)
    over = threading.Event()

    class Stalling(Near):
        def read_range(self, offset: int, into: memoryview, /) -> int:
            with self.lock:
                is_new = threading.get_ident() not in self.threads
                self.threads.add(threading.get_ident())
                is_stalled = is_new and len(self.threads) <= few
            if is_stalled:
                over.wait(20)
            elif offset + len(into) == len(DATA):
                over.set()
            return Memory.read_range(self, offset, into)

    reader = Stalling(len(DATA))
    few = reader.pace.enough(1 << 20)
    options = dataclasses.replace(OPTIONS, connections=few + 2, window=100)
    opened = fetch.Fetcher(reader, len(DATA), options, scope=cancelling.Cancel())
    began = time.monotonic()
    assert fetched(opened, ordered) == DATA
    assert time.monotonic() - began < 15


def test_read_that_was_ended_is_not_retried() -> None:
    """Ending the attempt breaks its connections: that is neither a retry nor an outage."""
    cancel, retried = cancelling.Cancel(), list[errors.Transient]()

    class Broken(Memory):
        def fault(self, number: int, offset: int, length: int) -> int:
            cancel.set()
            raise errors.Transient(url="memory", reason="reset")

    options = dataclasses.replace(OPTIONS, no_progress=0.0)
    engine = fetch.Fetcher(Broken(), len(DATA), options, scope=cancel, retried=retried.append)
    with pytest.raises(errors.Cancelled):
        engine.fill(0, memoryview(bytearray(4096)))
    assert not retried
