"""The map of what passes, whatever the order, against the bytes."""

from __future__ import annotations

import hashlib
import itertools
import random
from concurrent import futures

import hypothesis
import pytest
from hypothesis import strategies

from cdi_worker.formats import bmap
from cdi_worker.images.sinks import mapping
from tests.support import bmaps
from tests.support.bmaps import Disk

BLOCK, MiB = 4096, 1 << 20


def disk(dice: random.Random, size: int) -> bytearray:
    """Return a disk with data, blocks of zeros, and bytes here and there."""
    data = bytearray(size)
    for _ in range(dice.randrange(6)):
        start = dice.randrange(size)
        length = min(dice.choice([1, 512, 4096, 70_000, MiB]), size - start)
        data[start : start + length] = dice.randbytes(length)
    return data


def finished(sink: mapping.Mapping, stored: Disk, end: int, size: int) -> bmap.Map:
    """Return the map, when what is missing was read."""
    for start, stop in sink.missing(end, size):
        sink.read(stored, start, stop, lambda _count: None)
    return sink.map(size)


def _parts(dice: random.Random, data: bytes, unit: int) -> list[tuple[int, int]]:
    borders = sorted({0, len(data), *(dice.randrange(0, len(data), unit) for _ in range(12))})
    return list(itertools.pairwise(borders))


@pytest.mark.slow
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(strategies.integers(0, 1 << 32), strategies.sampled_from([1, 512, 4096, 65536]))
def test_map_of_a_disk_delivered_in_any_order(seed: int, unit: int) -> None:
    dice = random.Random(seed)
    data = disk(dice, dice.randrange(1, 3 * MiB // 512) * 512)
    stored, parts = Disk(len(data)), _parts(dice, data, unit)
    dice.shuffle(parts)
    with mapping.Mapping(stored) as sink, futures.ThreadPoolExecutor(3) as pool:
        for work in [pool.submit(bmaps.deliver, sink, bytes(data), *part) for part in parts]:
            work.result()
        assert sink.missing(len(data), len(data)) == []
        assert sink.map(len(data)) == bmaps.expected(data)
    assert stored.data == data


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(strategies.integers(0, 1 << 32))
def test_what_did_not_pass_is_read(seed: int) -> None:
    dice = random.Random(seed)
    data = disk(dice, dice.randrange(1, 3 * MiB // 512) * 512)
    stored = Disk(len(data))
    with mapping.Mapping(stored) as sink:
        for part in _parts(dice, data, 512):
            if dice.random() < 0.6:
                bmaps.deliver(sink, data, *part)
        stored.data[:] = data
        assert finished(sink, stored, len(data), len(data)) == bmaps.expected(data)


def test_what_is_delivered_again_is_read() -> None:
    """The first bytes were wrong, as those of a range whose checksum does not match."""
    dice = random.Random(5)
    data = dice.randbytes(3 * MiB)
    orders = [
        [(0, 3 * MiB)],  # complete pieces
        [(0, MiB // 2), (MiB // 2, 3 * MiB)],
        [(MiB // 2, MiB)],  # waits
        [(4096, 8192), (0, 4096)],
    ]
    for first in orders:
        stored = Disk(len(data))
        with mapping.Mapping(stored) as sink:
            for start, end in first:
                sink.write(start, memoryview(b"\xff" * (end - start)))
            for start in range(0, len(data), 65536):
                bmaps.deliver(sink, data, start, start + 65536)
            assert finished(sink, stored, len(data), len(data)) == bmaps.expected(data)


def test_zeros_over_data_are_zeros() -> None:
    stored = Disk(2 * MiB)
    with mapping.Mapping(stored) as sink:
        sink.write(0, memoryview(b"\xff" * MiB))
        sink.write(MiB, memoryview(b"\xff" * 4096))
        sink.zero(0, 2 * MiB)
        assert finished(sink, stored, 2 * MiB, 2 * MiB) == bmap.Map(2 * MiB, BLOCK, ())


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_MOST", MiB)
    data = random.Random(1).randbytes(8 * MiB)
    stored = Disk(len(data))
    with mapping.Mapping(stored) as sink:
        for half in (1, 0):
            for start in range(half * MiB // 2, len(data), MiB):
                bmaps.deliver(sink, data, start, start + MiB // 2)
        assert finished(sink, stored, len(data), len(data)) == bmaps.expected(data)
    assert 0 < stored.read_bytes < len(data)


def test_end_of_the_last_sector_is_zeros() -> None:
    data = b"\xff" * 1000
    stored = Disk(1024)
    with mapping.Mapping(stored) as sink:
        sink.write(0, memoryview(data))
        assert finished(sink, stored, 1000, 1024) == bmaps.expected(data + bytes(24))
        assert stored.read_bytes == 0


def test_zeros_of_many_terabytes_cost_nothing() -> None:
    size = 64 << 40
    with mapping.Mapping(Disk(0)) as sink:
        sink._take_zeros(0, size - 4096)
        sink._take(size - 4096, memoryview(b"\xff" * 4096))
        found = sink.map(size)
    assert found.ranges == ((size - 4096, size, hashlib.sha256(b"\xff" * 4096).digest()),)


def test_ranges_far_behind_are_longer() -> None:
    at = 256 << 30
    with mapping.Mapping(Disk(0)) as sink:
        sink._take_zeros(0, at - 4096)
        for start in range(at - 4096, at + 32 * MiB, 4096):
            sink._take(start, memoryview(b"\xff" * 4096))
        lengths = [end - start for start, end, _ in sink.map(at + 32 * MiB).ranges]
    assert lengths == [4096, 16 * MiB, 16 * MiB]
