"""Reading ahead: in order, bounded, and over when whoever reads wants no more."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import ahead, cancelling
from tests.support import processes

NEVER = cancelling.NEVER


class Source:
    """Bytes in reads of odd lengths; waits where ``gate`` says, until it is given up."""

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


def test_order_and_errors_at_their_place() -> None:
    def items() -> Iterator[int]:
        yield from range(10)
        raise KeyError("its place")

    given_up: list[int] = []
    found: list[int] = []
    over = threading.Event()
    with ahead.Ahead(items(), over, lambda: given_up.append(1)) as made:
        with pytest.raises(KeyError, match="its place"):
            found.extend(made)
        with pytest.raises(KeyError, match="its place"):
            next(made)
    assert not found or found == [*range(10)]
    assert not given_up
    assert threads() == 0


def test_items_before_an_error() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError

    with ahead.Ahead(items(), threading.Event()) as made:
        assert next(made) == 1
        with pytest.raises(KeyError):
            next(made)


def test_nothing_made_it_is_the_end() -> None:
    with ahead.Ahead(iter(()), threading.Event()) as made:
        assert [*made] == []
        assert next(made, None) is None


def test_a_slow_consumer_bounds_what_is_made() -> None:
    counted = threading.Semaphore(0)
    made_so_far = 0

    def items() -> Iterator[int]:
        nonlocal made_so_far
        while made_so_far < 100:
            made_so_far += 1
            counted.release()
            yield made_so_far

    with ahead.Ahead(items(), threading.Event()) as made:
        for used in range(1, 20):
            assert next(made) == used
            # What was given, what waits, and one that waits to wait.
            for _ in range(1 if used > 1 else ahead.DEPTH + 2):
                assert counted.acquire(timeout=processes.PATIENCE)
            assert not counted.acquire(timeout=0.005)
            assert made_so_far == used + ahead.DEPTH + 1


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("raises", [False, True])
def test_leaving_early(taken: int, raises: bool) -> None:
    """Whether the other side waits for room or for bytes: it ends, and is told once."""
    source = Source(bytes(3 * ahead.CHUNK), stops_at=2 * ahead.CHUNK + 5)
    over = threading.Event()
    pieces = ahead.pieces(source, NEVER, over)
    try:
        with ahead.Ahead(pieces, over, source.give_up) as made:
            for _ in range(min(taken, 2)):
                next(made)
            if taken == 3:
                processes.wait_for(lambda: source.at > 2 * ahead.CHUNK, "the read that waits")
            if raises:
                raise KeyError("the user's")
    except KeyError:
        assert raises
    assert over.is_set()
    assert source.given_up == 1
    assert threads() == 0


def test_leaving_while_there_is_no_room() -> None:
    source = Source(bytes(20 * ahead.CHUNK))
    over = threading.Event()
    with ahead.Ahead(ahead.pieces(source, NEVER, over), over, source.give_up):
        processes.wait_for(lambda: source.at == (ahead.DEPTH + 1) * ahead.CHUNK, "no more room")
    assert (source.given_up, threads()) == (1, 0)
    assert source.at == (ahead.DEPTH + 1) * ahead.CHUNK


# -- pieces


@pytest.mark.parametrize("size", [0, 1, ahead.CHUNK - 1, ahead.CHUNK, ahead.CHUNK + 1, 7 * ahead.CHUNK + 333])
def test_pieces_are_full_but_the_last(size: int) -> None:
    data = random.Random(size).randbytes(size)
    over = threading.Event()
    found = b""
    with ahead.Ahead(ahead.pieces(Source(data), NEVER, over), over) as made:
        for piece in made:
            assert len(piece) == min(ahead.CHUNK, size - len(found))
            found += bytes(piece)
    assert found == data


def test_a_piece_stays_until_the_next_is_asked_for() -> None:
    data = random.Random(2).randbytes(12 * ahead.CHUNK)
    source = Source(data)
    over = threading.Event()
    at = 0
    with ahead.Ahead(ahead.pieces(source, NEVER, over), over) as made:
        for piece in made:
            last = min(at + (ahead.DEPTH + 2) * ahead.CHUNK, len(data))
            processes.wait_for(lambda last=last: source.at >= last, "all that there is room for")  # type: ignore[misc]
            assert piece == data[at : at + ahead.CHUNK]
            at += ahead.CHUNK


def test_an_error_comes_after_what_was_whole_before() -> None:
    over = threading.Event()
    source = Source(bytes(3 * ahead.CHUNK), fails_at=2 * ahead.CHUNK + 1)
    found = []
    with ahead.Ahead(ahead.pieces(source, NEVER, over), over) as made:
        found += [len(next(made)), len(next(made))]
        with pytest.raises(errors.Unreachable):
            next(made)
    assert found == [ahead.CHUNK, ahead.CHUNK]


def test_cancelled() -> None:
    cancel = cancelling.Stop(threading.Event())
    over = threading.Event()
    with ahead.Ahead(ahead.pieces(Source(bytes(50 * ahead.CHUNK)), cancel, over), over) as made:
        next(made)
        cancel.set()
        with pytest.raises(errors.Cancelled):
            for _ in made:
                pass


# -- a reader


def read(reader: ahead.Reader, size: int) -> bytes:
    into = memoryview(bytearray(size))
    return bytes(into[: reader.readinto(into)])


def opened(source: Source) -> ahead.Reader:
    return ahead.Reader(source, NEVER, source.give_up)


def test_a_reader_gives_all_of_it() -> None:
    data = random.Random(3).randbytes(3 * ahead.CHUNK + 77)
    source = Source(data)
    reader = opened(source)
    dice = random.Random(4)
    found = b""
    while part := read(reader, dice.randint(1, 900_000)):
        found += part
    assert read(reader, 10) == b""
    reader.close()
    assert found == data
    assert (source.closed, source.given_up, threads()) == (1, 0, 0)


STATES: dict[str, Callable[[ahead.Reader], object]] = {
    "unread": lambda _: None,
    "within a piece": lambda reader: read(reader, 5),
    "waiting": lambda reader: [read(reader, ahead.CHUNK), read(reader, ahead.CHUNK)],
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("stops_at", [2 * ahead.CHUNK, None])
def test_closed_early(state: str, stops_at: int | None) -> None:
    source = Source(bytes(9 * ahead.CHUNK), stops_at=stops_at)
    reader = opened(source)
    STATES[state](reader)
    reader.close()
    assert (source.closed, source.given_up, threads()) == (1, 1, 0)


def test_closed_after_an_error() -> None:
    source = Source(b"", fails_at=0)
    reader = opened(source)
    for _ in range(2):
        with pytest.raises(errors.Unreachable):
            read(reader, 10)
    reader.close()
    assert (source.closed, source.given_up, threads()) == (1, 0, 0)
