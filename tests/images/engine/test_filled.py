"""No reader returns memory that it has not filled."""

from __future__ import annotations

import random

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling, fetch, filled

DATA = random.Random(5).randbytes(100_003)


class Careless:
    """Reads ``DATA`` but leaves out the bytes from ``start`` to ``end``, and adds ``more`` to the count."""

    def __init__(self, start: int = 0, end: int = 0, more: int = 0) -> None:
        self.start, self.end, self.more = start, end, more

    def read_range(self, offset: int, into: memoryview, /) -> int:
        data = DATA[offset : offset + len(into)]
        before, after = max(0, self.start - offset), max(0, self.end - offset)
        into[:before] = data[:before]
        into[after : len(data)] = data[after:]
        return len(data) + self.more


def fetched(reader: Careless) -> bytes:
    options = fetch.FetchOptions(connections=1, chunk=1 << 20, no_progress=0.1)
    return fetch.Fetcher(reader, len(DATA), options, scope=cancelling.Cancel()).read(0, len(DATA))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 4095, 4096, 4097, len(DATA)])
def test_bytes_that_were_written_are_returned(length: int) -> None:
    into = memoryview(bytearray(length))
    assert filled.read(Careless().read_range, 3, into, "disk") == min(length, len(DATA) - 3)
    assert bytes(into[: len(DATA) - 3]) == DATA[3 : 3 + length]


def test_fetched_bytes_are_those_of_the_source() -> None:
    assert fetched(Careless()) == DATA


@pytest.mark.parametrize(("start", "end"), [(0, 4096), (50_000, 60_000), (98_304, len(DATA)), (0, len(DATA))])
def test_memory_that_no_byte_was_written_to_is_refused(start: int, end: int) -> None:
    with pytest.raises(errors.SourceError, match="bytes that it has not written"):
        fetched(Careless(start, end))


@pytest.mark.parametrize("more", [1, 1 << 40, -len(DATA) - 1])
def test_more_bytes_than_the_buffer_has_are_refused(more: int) -> None:
    with pytest.raises(errors.SourceError, match="a read of 100003 bytes returned"):
        fetched(Careless(more=more))


def test_reads_without_a_byte_end_with_the_patience() -> None:
    with pytest.raises(errors.TransferFailed, match="no data"):
        fetched(Careless(more=-len(DATA)))


def test_read_without_a_byte_is_an_outage() -> None:
    """It is retried after a pause, not at once."""
    with pytest.raises(errors.Transient, match="no data at byte 7"):
        filled.read(lambda _offset, _into: 0, 7, memoryview(bytearray(10)), "disk")
