"""Reading ahead: in order, bounded, and stopped when the consumer leaves."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import ahead, cancelling
from tests.support import processes


class Source:
    """Bytes in reads of different lengths; block at ``stops_at`` until given up, raise at ``fails_at``."""

    def __init__(self, data: bytes, *, stops_at: int | None = None, fails_at: int | None = None) -> None:
        self.data = data
        self.at = 0
        self.closed = 0
        self.given_up = 0
        self._stops_at = stops_at
        self._fails_at = fails_at
        self._dice = random.Random(1)
        self._gone = threading.Event()

    def readinto(self, into: memoryview, /) -> int:
        if self._fails_at is not None and self.at >= self._fails_at:
            raise errors.Unreachable(url="here", reason="gone")
        if self._stops_at is not None and self.at >= self._stops_at:
            assert self._gone.wait(processes.PATIENCE)
            raise errors.Cancelled
        ends = [end for end in (self._stops_at, self._fails_at) if end is not None]
        part = self.data[self.at : min([self.at + self._dice.randint(1, len(into)), *ends])]
        into[: len(part)] = part
        self.at += len(part)
        return len(part)

    def give_up(self) -> None:
        self.given_up += 1
        self._gone.set()

    def close(self) -> None:
        self.closed += 1


def threads() -> int:
    return sum(thread.name == "read-ahead" for thread in threading.enumerate())


# -- items


def test_items_keep_order_and_error_comes_last() -> None:
    def items() -> Iterator[int]:
        yield from range(10)
        raise KeyError("its place")

    found: list[int] = []
    scope = cancelling.Cancel()
    with ahead.Ahead(items(), scope) as reader:
        with pytest.raises(KeyError, match="its place"):
            found.extend(reader)
        with pytest.raises(KeyError, match="its place"):
            next(reader)
    assert found == [*range(10)]
    assert not scope.is_set()
    assert threads() == 0


def test_empty_iterator_ends_at_once() -> None:
    with ahead.Ahead(iter(()), cancelling.Cancel()) as reader:
        assert [*reader] == []
        assert next(reader, None) is None


def test_slow_consumer_limits_reading_ahead() -> None:
    counted = threading.Semaphore(0)
    made_so_far = 0

    def items() -> Iterator[int]:
        nonlocal made_so_far
        while made_so_far < 100:
            made_so_far += 1
            counted.release()
            yield made_so_far

    with ahead.Ahead(items(), cancelling.Cancel()) as reader:
        for used in range(1, 20):
            assert next(reader) == used
            # The items taken, those in the queue, and one that waits for room in it.
            for _ in range(1 if used > 1 else ahead.DEPTH + 2):
                assert counted.acquire(timeout=processes.PATIENCE)
            assert not counted.acquire(timeout=0.005)
            assert made_so_far == used + ahead.DEPTH + 1


@pytest.mark.parametrize(("taken", "raises"), [(0, False), (1, True), (3, False)])
def test_leaving_early_stops_the_thread(taken: int, raises: bool) -> None:
    """The reading thread ends whether it waits for room or for bytes, and is given up once."""
    source = Source(bytes(3 * ahead.CHUNK), stops_at=2 * ahead.CHUNK + 5)
    scope = cancelling.Cancel()
    scope.on_set(source.give_up)
    pieces = ahead.pieces(source, scope)
    try:
        with ahead.Ahead(pieces, scope) as reader:
            for _ in range(min(taken, 2)):
                next(reader)
            if taken == 3:
                processes.wait_for(lambda: source.at > 2 * ahead.CHUNK, "the read that waits")
            if raises:
                raise KeyError("the user's")
    except KeyError:
        assert raises
    assert scope.is_set()
    assert source.given_up == 1
    assert threads() == 0


def test_leaving_with_a_full_queue_stops_the_thread() -> None:
    source = Source(bytes(20 * ahead.CHUNK))
    scope = cancelling.Cancel()
    scope.on_set(source.give_up)
    with ahead.Ahead(ahead.pieces(source, scope), scope):
        processes.wait_for(lambda: source.at == (ahead.DEPTH + 1) * ahead.CHUNK, "no more room")
    assert (source.given_up, threads()) == (1, 0)
    assert source.at == (ahead.DEPTH + 1) * ahead.CHUNK


# -- pieces


@pytest.mark.parametrize("size", [0, 1, ahead.CHUNK, 3 * ahead.CHUNK + 333])
def test_all_pieces_but_the_last_are_full(size: int) -> None:
    data = random.Random(size).randbytes(size)
    scope = cancelling.Cancel()
    found = b""
    with ahead.Ahead(ahead.pieces(Source(data), scope), scope) as reader:
        for piece in reader:
            assert len(piece) == min(ahead.CHUNK, size - len(found))
            found += bytes(piece)
    assert found == data


def test_piece_is_valid_until_the_next_is_taken() -> None:
    data = os.urandom(6 * ahead.CHUNK)
    source = Source(data)
    scope = cancelling.Cancel()
    at = 0
    with ahead.Ahead(ahead.pieces(source, scope), scope) as reader:
        for piece in reader:
            last = min(at + (ahead.DEPTH + 2) * ahead.CHUNK, len(data))
            processes.wait_for(lambda last=last: source.at >= last, "all that there is room for")
            assert piece == data[at : at + ahead.CHUNK]
            at += ahead.CHUNK


def test_error_comes_after_the_complete_pieces() -> None:
    scope = cancelling.Cancel()
    source = Source(bytes(3 * ahead.CHUNK), fails_at=2 * ahead.CHUNK + 1)
    found = []
    with ahead.Ahead(ahead.pieces(source, scope), scope) as reader:
        found += [len(next(reader)), len(next(reader))]
        with pytest.raises(errors.Unreachable):
            next(reader)
    assert found == [ahead.CHUNK, ahead.CHUNK]


def test_cancel_ends_reading() -> None:
    scope = cancelling.Cancel()
    with ahead.Ahead(ahead.pieces(Source(bytes(50 * ahead.CHUNK)), scope), scope) as reader:
        next(reader)
        scope.set()
        with pytest.raises(errors.Cancelled):
            for _ in reader:
                pass


# -- a reader


def read(reader: ahead.AheadReader, size: int) -> bytes:
    into = memoryview(bytearray(size))
    return bytes(into[: reader.readinto(into)])


def open_reader(source: Source) -> ahead.AheadReader:
    scope = cancelling.Cancel()
    scope.on_set(source.give_up)
    return ahead.AheadReader(source, scope)


def test_reader_returns_all_bytes() -> None:
    data = random.Random(3).randbytes(3 * ahead.CHUNK + 77)
    source = Source(data)
    reader = open_reader(source)
    dice = random.Random(4)
    found = b""
    while part := read(reader, dice.randint(1, 900_000)):
        found += part
    assert read(reader, 10) == b""
    reader.close()
    assert found == data
    assert (source.closed, source.given_up, threads()) == (1, 0, 0)


STATES: dict[str, Callable[[ahead.AheadReader], object]] = {
    "unread": lambda _: None,
    "within a piece": lambda reader: read(reader, 5),
    "waiting": lambda reader: [read(reader, ahead.CHUNK), read(reader, ahead.CHUNK)],
}


@pytest.mark.parametrize(
    ("state", "stops_at"),
    [("unread", None), ("within a piece", 2 * ahead.CHUNK), ("waiting", 2 * ahead.CHUNK)],
)
def test_reader_can_be_closed_early(state: str, stops_at: int | None) -> None:
    source = Source(bytes(9 * ahead.CHUNK), stops_at=stops_at)
    reader = open_reader(source)
    STATES[state](reader)
    reader.close()
    assert (source.closed, source.given_up, threads()) == (1, 1, 0)


def test_reader_can_be_closed_after_an_error() -> None:
    source = Source(b"", fails_at=0)
    reader = open_reader(source)
    for _ in range(2):
        with pytest.raises(errors.Unreachable):
            read(reader, 10)
    reader.close()
    assert (source.closed, source.given_up, threads()) == (1, 0, 0)
