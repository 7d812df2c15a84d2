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
    coverage = coverage_module.Coverage(len(data))
    for number, (start, end) in enumerate(pieces):
        assert number == 0 or coverage.value() in (None, checksum(data))
        coverage.add(start, memoryview(data)[start:end])
    assert coverage.value() == checksum(data)


def test_missing_or_extra_byte_gives_no_value() -> None:
    size = len(DATA) - 1
    coverage = coverage_module.Coverage(size)
    assert coverage.value() is None
    coverage.add(0, memoryview(DATA)[: size - 2])
    assert coverage.value() is None
    coverage.add(size - 1, memoryview(DATA)[size - 1 : size])
    assert coverage.value() is None
    coverage.add(size - 2, memoryview(DATA)[size - 2 : size])
    assert coverage.value() == checksum(DATA[:size])
    coverage.add(size, memoryview(DATA)[size:])
    assert coverage.value() is None


def test_empty_object_has_a_value() -> None:
    assert coverage_module.Coverage(0).value() == checksum(b"") == 0


def test_memory_of_random_reads_is_bounded() -> None:
    coverage = coverage_module.Coverage(len(DATA))
    for offset in range(0, 4 * coverage_module.MOST_PARTS, 2):
        coverage.add(offset, memoryview(DATA)[offset : offset + 1])
    assert len(coverage._read) <= coverage_module.MOST_PARTS + 1
