"""Small reads are merged into few large ones, with bounded memory."""

from __future__ import annotations

import contextlib
import os
import random
import threading

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.images.export import readahead
from tests.support import processes

KiB, MiB = 1 << 10, 1 << 20


class Source:
    """Random bytes that record the reads of them, and fail at the offsets in ``broken``."""

    def __init__(self, size: int) -> None:
        self.content = os.urandom(size)
        self.reads: list[tuple[int, int]] = []
        self.broken: set[int] = set()
        self.started = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def read(self, offset: int, into: memoryview) -> None:
        self.reads.append((offset, len(into)))
        self.started.set()
        assert self.gate.wait(20)
        if any(offset <= each < offset + len(into) for each in self.broken):
            raise errors.TransferFailed(url="mem:", offset=offset, reason="gone")
        into[:] = self.content[offset : offset + len(into)]

    @property
    def fetched(self) -> int:
        return sum(length for _, length in self.reads)


def use(cache: readahead.Cache, offset: int, length: int) -> bytes:
    """Take, copy and release, as the server does."""
    fetches = cache.take(offset, length)
    try:
        for fetch in fetches:
            fetch.future.exception(20)
        return b"".join(fetch.part(offset, offset + length) for fetch in fetches)
    finally:
        cache.give(fetches, offset, length)


@pytest.mark.parametrize("size", [1, 256 * KiB, 256 * KiB + 1, 9 * MiB + 333])
def test_any_range_is_read(size: int) -> None:
    source = Source(size)
    cache = readahead.Cache(source.read, size, cancelling.Cancel(), parallel=3, capacity=8 * MiB)
    dice = random.Random(1)
    with contextlib.closing(cache):
        assert use(cache, 0, size) == source.content
        for _ in range(300):
            offset = dice.randrange(size)
            length = dice.choice((1, 512, 64 * KiB, 300 * KiB, 2 * MiB))
            length = min(length, size - offset)
            assert use(cache, offset, length) == source.content[offset : offset + length]


def test_sequential_reads_fetch_large_pieces_once() -> None:
    size = 64 * MiB
    source = Source(size)
    cache = readahead.Cache(source.read, size, cancelling.Cancel(), capacity=32 * MiB)
    for offset in range(0, size, 64 * KiB):
        assert use(cache, offset, 64 * KiB) == source.content[offset : offset + 64 * KiB]
    cache.close()
    assert source.fetched == size
    assert len(source.reads) < 25


def test_scattered_reads_fetch_few_extra_bytes() -> None:
    size = 64 * MiB
    source = Source(size)
    cache = readahead.Cache(source.read, size, cancelling.Cancel())
    for offset in range(0, size, 4 * MiB):
        use(cache, offset + MiB, 64 * KiB)
    cache.close()
    assert source.fetched == 16 * 256 * KiB


def test_concurrent_reads_share_one_fetch() -> None:
    source = Source(MiB)
    source.gate.clear()
    cache = readahead.Cache(source.read, MiB, cancelling.Cancel())
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(use(cache, 10, 100))) for _ in range(8)]
    for thread in threads:
        thread.start()
    source.gate.set()
    for thread in threads:
        thread.join()
    cache.close()
    assert got == [source.content[10:110]] * 8
    assert len(source.reads) == 1


def test_failed_read_raises_and_is_retried() -> None:
    source = Source(MiB)
    source.broken = {5000}
    cache = readahead.Cache(source.read, MiB, cancelling.Cancel())
    for _ in range(2):
        with pytest.raises(errors.TransferFailed):
            use(cache, 0, 100)
    source.broken = set()
    assert use(cache, 0, 100) == source.content[:100]
    cache.close()


def test_failed_read_ahead_is_ignored_unless_read() -> None:
    source = Source(8 * MiB)
    source.broken = {7 * MiB}
    cache = readahead.Cache(source.read, 8 * MiB, cancelling.Cancel())
    for offset in range(0, 2 * MiB, 64 * KiB):
        use(cache, offset, 64 * KiB)
    processes.wait_for(
        lambda: any(offset <= 7 * MiB < offset + length for offset, length in [*source.reads]), "the failure"
    )
    cache.close()


def test_buffers_in_use_are_not_overwritten() -> None:
    size = 16 * MiB
    source = Source(size)
    cache = readahead.Cache(source.read, size, cancelling.Cancel(), capacity=MiB)
    taken = [(offset, cache.take(offset, 100)) for offset in range(0, size, MiB)]
    for offset, fetches in taken:
        fetches[0].future.exception(20)
        assert fetches[0].part(offset, offset + 100) == source.content[offset : offset + 100]
        cache.give(fetches, offset, 100)
    assert use(cache, 3, 3 * MiB) == source.content[3 : 3 * MiB + 3]
    cache.close()


def test_closed_cache_fails_at_once() -> None:
    source = Source(MiB)
    cache = readahead.Cache(source.read, MiB, cancelling.Cancel())
    cache.close()
    with pytest.raises(errors.Cancelled):
        use(cache, 0, 1)


def test_closing_fails_waiting_reads() -> None:
    source = Source(8 * MiB)
    source.gate.clear()
    cache = readahead.Cache(source.read, 8 * MiB, cancelling.Cancel(), parallel=1)
    running, waiting = cache.take(0, 1), cache.take(4 * MiB, 1)
    assert source.started.wait(20)
    closing = threading.Thread(target=cache.close)
    closing.start()
    source.gate.set()
    closing.join()
    assert running[0].part(0, 1) == source.content[:1]
    assert isinstance(waiting[0].future.exception(20), errors.Cancelled)
