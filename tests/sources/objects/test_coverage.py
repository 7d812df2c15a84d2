"""The CRC-32C of a whole, combined from those of its pieces."""

from __future__ import annotations

import itertools
import random

import google_crc32c
import hypothesis
import hypothesis.strategies as st

from cdi_worker.formats import crc32c
from cdi_worker.sources.objects import coverage as coverage_module

DATA = random.Random(12).randbytes(700_000)


def checksum(data: bytes) -> int:
    return int(google_crc32c.value(data))


def test_crcs_of_runs_longer_than_32_bits_are_combined() -> None:
    combine = crc32c.MODEL.combine
    crc, zeros = checksum(b"a"), 10 << 30
    half = combine(crc, 0, zeros // 2)
    assert half != crc
    assert combine(half, 0, zeros // 2) == combine(crc, 0, zeros)


@hypothesis.given(st.integers(0, 2**32), st.integers(1, 20))
def test_pieces_may_overlap_in_any_order(seed: int, count: int) -> None:
    dice = random.Random(seed)
    data = DATA[: dice.randrange(1, 5000)]
    cuts = sorted({0, len(data), *(dice.randrange(len(data)) for _ in range(count))})
    pieces = [(a, min(len(data), b + dice.choice((0, 0, 7, 2000)))) for a, b in itertools.pairwise(cuts)]
    dice.shuffle(pieces)
    coverage = coverage_module.Coverage()
    for number, (start, end) in enumerate(pieces):
        assert number == 0 or coverage.value(len(data)) in (None, checksum(data))
        coverage.add(start, memoryview(data)[start:end])
    assert coverage.value(len(data)) == checksum(data)


def test_missing_or_extra_byte_gives_no_value() -> None:
    coverage = coverage_module.Coverage()
    assert coverage.value(len(DATA)) is None
    coverage.add(0, memoryview(DATA)[:-2])
    assert coverage.value(len(DATA)) is None
    coverage.add(len(DATA) - 1, memoryview(DATA)[-1:])
    assert coverage.value(len(DATA)) is None
    coverage.add(len(DATA) - 2, memoryview(DATA)[-2:])
    assert coverage.value(len(DATA)) == checksum(DATA)
    assert coverage.value(len(DATA) - 1) is None


def test_empty_object_has_a_value() -> None:
    assert coverage_module.Coverage().value(0) == checksum(b"") == 0


def test_memory_of_random_reads_is_bounded() -> None:
    coverage = coverage_module.Coverage()
    for offset in range(0, 4 * coverage_module.MOST_RUNS, 2):
        coverage.add(offset, memoryview(DATA)[offset : offset + 1])
    assert len(coverage._runs) <= coverage_module.MOST_RUNS + 1
