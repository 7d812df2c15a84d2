"""Digests show every change of the bytes on storage, in whatever pieces they were written."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdi_worker.scratch import digests, ranges

UNIT = digests.UNIT
KEY = bytes(range(32))
#: Units of data and of zeros; the last one is short.
DISK = b"".join(
    bytes(UNIT) if index in {2, 3, 9} else random.Random(index).randbytes(UNIT) for index in range(12)
)[: 11 * UNIT + 1536]


@pytest.fixture(params=[16 << 10, 4])
def granules(request: pytest.FixtureRequest) -> Any:
    """At most so many digests: granules of one unit, and of several."""
    return request.param


def recorded(cuts: list[int], seed: int, granules: int, start: int = 0) -> digests.Digests:
    """Return the digests of the disk, written in pieces in random order."""
    made = digests.Digests(KEY, start, len(DISK), granules=granules)
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(DISK)), len(DISK)]
    pieces = list(itertools.pairwise(edges))
    random.Random(seed).shuffle(pieces)
    for first, after in pieces:
        add(made, first, after)
    return made


def add(made: digests.Digests, first: int, after: int) -> None:
    data = memoryview(DISK)[first:after]
    is_zero = not any(data)
    whole = made.whole_units(first, after)
    if whole[0] < whole[1]:
        if is_zero:
            made.add_zeros(*whole)
        else:
            made.add(whole[0], made.tags(whole[0], memoryview(DISK)[whole[0] : whole[1]]))
    else:
        whole = (after, after)
    for start, end in ((first, min(whole[0], after)), (max(whole[1], first), after)):
        bounds = [start, *(edge for edge in range(0, end, UNIT) if edge > start), end]
        for part in itertools.pairwise(bounds):
            made.add_part(*part, None if is_zero else memoryview(DISK)[slice(*part)])


def covered(records: list[digests.Record]) -> list[ranges.Range]:
    return list(ranges.Ranges((record.start, record.end) for record in records))


def stored_tags(made: digests.Digests, record: digests.Record, stored: bytes) -> bytes:
    return made.tags(record.start, memoryview(stored)[record.start : record.end])


CUTS = st.lists(st.integers(0, len(DISK)) | st.integers(0, 12).map(lambda index: index * UNIT), max_size=30)


@settings(max_examples=60, deadline=None)
@given(CUTS, st.integers(0, 99), st.integers(0, len(DISK) - 1), st.sampled_from([16 << 10, 4]))
def test_every_changed_byte_is_found(cuts: list[int], seed: int, at: int, most: int) -> None:
    made = recorded(cuts, seed, most)
    records = made.records()
    assert covered(records) == [(0, len(DISK))]
    changed = bytearray(DISK)
    changed[at] ^= 1
    for record in records:
        assert made.differing(record, stored_tags(made, record, DISK)) == []
        differing = made.differing(record, stored_tags(made, record, bytes(changed)))
        assert bool(differing) is (record.start <= at < record.end)


def test_exchanged_units_are_found(granules: int) -> None:
    """A write to the wrong place has the right bytes."""
    made = recorded([], 0, granules)
    swapped = DISK[UNIT : 2 * UNIT] + DISK[:UNIT] + DISK[2 * UNIT :]
    (first, *_) = made.records()
    assert made.differing(first, stored_tags(made, first, swapped))


def test_bytes_beyond_the_end_of_storage_differ(granules: int) -> None:
    made = recorded([], 0, granules)
    for record in made.records():
        assert made.differing(record, b"") == [(record.start, record.end)]


def test_discarded_ranges_are_claimed_again_when_written(granules: int) -> None:
    made = recorded([], 0, granules)
    record = made.records()[1]
    made.discard(record.start, record.end)
    assert covered(made.records()) == [(0, record.start), (record.end, len(DISK))]
    add(made, record.start, record.end)
    assert covered(made.records()) == [(0, len(DISK))]


def test_start_is_not_recorded(granules: int) -> None:
    assert covered(recorded([1000, UNIT + 5], 0, granules, start=UNIT).records()) == [(UNIT, len(DISK))]


def test_loaded_claims_are_those_saved() -> None:
    made = digests.Digests(KEY, 0, len(DISK), granules=4)
    for first in (0, UNIT, 2 * UNIT, 3 * UNIT, 5 * UNIT):
        add(made, first, first + UNIT)
    again = digests.Digests(KEY, 0, len(DISK), granules=4)
    again.load(made.records())
    assert again.records() == made.records()
    assert [record.whole for record in made.records()] == [True, False]


def test_other_key_has_other_tags() -> None:
    mine, theirs = (digests.Digests(key, 0, len(DISK)) for key in (KEY, bytes(32)))
    assert mine.tags(0, memoryview(DISK)[:UNIT]) != theirs.tags(0, memoryview(DISK)[:UNIT])


def test_memory_of_partial_units_is_bounded() -> None:
    made = digests.Digests(KEY, 0, 1 << 40)
    for index in range(1000):
        made.add_part(index * UNIT, index * UNIT + 512, memoryview(b"x" * 512))
    assert sum(edge.data is not None for edge in made._edges.values()) <= 256


def test_equal_units_have_different_tags() -> None:
    """The position is the nonce of GMAC: two tags with one nonce would reveal its key."""
    unit = memoryview(DISK[:UNIT])
    made = digests.Digests(KEY, 0, len(DISK))
    assert made.tags(0, unit) == made.tags(0, unit) != made.tags(UNIT, unit)


@pytest.mark.parametrize("granules", [16 << 10, 2])
def test_units_that_were_moved_with_their_tags_are_found(granules: int) -> None:
    """Somebody who may write to the volume, but does not know the key, swaps parts of disk and journal."""
    size = 8 * UNIT
    disk = b"".join(random.Random(index).randbytes(UNIT) for index in range(8))
    made = digests.Digests(KEY, 0, size, granules=granules)
    made.add(0, made.tags(0, memoryview(disk)))
    records = made.records()
    half = size // 2
    moved = disk[half:] + disk[:half]
    tags = b"".join(record.tags for record in records)
    middle = len(tags) // 2
    tags = tags[middle:] + tags[:middle]
    for record in records:
        length = len(record.tags)
        forged, tags = record._replace(tags=tags[:length]), tags[length:]
        found = made.tags(record.start, memoryview(moved)[record.start : record.end])
        assert made.differing(forged, found) == [(record.start, record.end)]
