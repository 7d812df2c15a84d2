"""CRC-32C of pieces against that of the whole."""

from __future__ import annotations

import itertools
import random

import google_crc32c
import hypothesis
import hypothesis.strategies as st

from cdi_worker.sources.objects import crc32c

DATA = random.Random(12).randbytes(700_000)


def whole(data: bytes) -> int:
    return int(google_crc32c.value(data))


def test_runs_longer_than_32_bits_are_joined() -> None:
    combine = crc32c._crc().combine
    crc, zeros = whole(b"a"), 10 << 30
    half = combine(crc, 0, zeros // 2)
    assert half != crc
    assert combine(half, 0, zeros // 2) == combine(crc, 0, zeros)


@hypothesis.given(st.integers(0, 2**32), st.integers(1, 20))
def test_pieces_come_in_any_order_and_overlap(seed: int, count: int) -> None:
    dice = random.Random(seed)
    data = DATA[: dice.randrange(1, 5000)]
    cuts = sorted({0, len(data), *(dice.randrange(len(data)) for _ in range(count))})
    pieces = [(a, min(len(data), b + dice.choice((0, 0, 7, 2000)))) for a, b in itertools.pairwise(cuts)]
    dice.shuffle(pieces)
    seen = crc32c.Coverage()
    for number, (start, end) in enumerate(pieces):
        assert number == 0 or seen.value(len(data)) in (None, whole(data))
        seen.add(start, memoryview(data)[start:end])
    assert seen.value(len(data)) == whole(data)


def test_a_missing_or_added_byte_is_no_whole() -> None:
    seen = crc32c.Coverage()
    assert seen.value(len(DATA)) is None
    seen.add(0, memoryview(DATA)[:-2])
    assert seen.value(len(DATA)) is None
    seen.add(len(DATA) - 1, memoryview(DATA)[-1:])
    assert seen.value(len(DATA)) is None
    seen.add(len(DATA) - 2, memoryview(DATA)[-2:])
    assert seen.value(len(DATA)) == whole(DATA)
    assert seen.value(len(DATA) - 1) is None


def test_nothing_is_the_whole_of_an_empty_object() -> None:
    assert crc32c.Coverage().value(0) == whole(b"") == 0


def test_random_reading_costs_no_memory_without_end() -> None:
    seen = crc32c.Coverage()
    for offset in range(0, 4 * crc32c.MOST_RUNS, 2):
        seen.add(offset, memoryview(DATA)[offset : offset + 1])
    assert len(seen._runs) <= crc32c.MOST_RUNS + 1
