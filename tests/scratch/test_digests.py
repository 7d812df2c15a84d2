"""Digests show every change of the bytes on storage, in whatever pieces they were written."""

from __future__ import annotations

import functools
import itertools
import json
import operator
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdi_worker.scratch import digests, ranges

UNIT = digests.UNIT
KEY = bytes(range(32))
PAGE = 4096
#: Pages of data in units that have zeros, too: at the start, in the middle, at the end, at both ends.
PAGES = {4: {0}, 5: {3, 4, 7}, 6: {15}, 7: {0, 15}}


def _unit(index: int) -> bytes:
    if index in {2, 3, 9}:
        return bytes(UNIT)
    data = bytearray(random.Random(index).randbytes(UNIT))
    for page in set(range(UNIT // PAGE)) - PAGES[index] if index in PAGES else ():
        data[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)
    return bytes(data)


#: Units of data and of zeros; the last one is short.
DISK = b"".join(map(_unit, range(12)))[: 11 * UNIT + 1536]


@pytest.fixture(params=[16 << 10, 4])
def granules(request: pytest.FixtureRequest) -> Any:
    """At most so many digests: granules of one unit, and of several."""
    return request.param


def recorded(cuts: list[int], seed: int, granules: int) -> digests.Digests:
    """Return the digests of the disk, written in pieces in random order."""
    finished = digests.Digests(KEY, 0, len(DISK), granules=granules)
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(DISK)), len(DISK)]
    pieces = list(itertools.pairwise(edges))
    random.Random(seed).shuffle(pieces)
    for first, after in pieces:
        add(finished, first, after)
    return finished


def add(finished: digests.Digests, start: int, end: int) -> None:
    data = memoryview(DISK)[start:end]
    if not any(data):
        finished.add(start, end)
        return
    first, last = finished.whole_units(start, end)
    finished.add(start, end, data, finished.tags(first, data[first - start : last - start]))


def covered(records: list[digests.Record]) -> list[ranges.Range]:
    return list(ranges.Ranges(span for record in records for span in record.spans))


def read(finished: digests.Digests, record: digests.Record, stored: bytes) -> int:
    """Return the digest of what storage holds of a record."""
    tags = (tag for start, end in record.spans for tag in finished.tags(start, memoryview(stored)[start:end]))
    return functools.reduce(operator.xor, tags, 0)


CUTS = st.lists(
    st.integers(0, len(DISK))
    | st.integers(0, 12).map(lambda index: index * UNIT)
    | st.integers(4 * UNIT // PAGE, 8 * UNIT // PAGE).map(lambda index: index * PAGE),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(CUTS, st.integers(0, 99), st.integers(0, len(DISK) - 1), st.sampled_from([16 << 10, 4]))
def test_every_changed_byte_is_found(cuts: list[int], seed: int, at: int, most: int) -> None:
    finished = recorded(cuts, seed, most)
    records = finished.records()
    assert covered(records) == [(0, len(DISK))]
    changed = bytearray(DISK)
    changed[at] ^= 1
    for record in records:
        assert read(finished, record, DISK) == record.digest
        holds = any(start <= at < end for start, end in record.spans)
        assert (read(finished, record, bytes(changed)) != record.digest) is holds


@pytest.mark.parametrize("zeros_first", [True, False])
@pytest.mark.parametrize(
    ("start", "end"),
    [(0, PAGE), (0, 512), (PAGE, PAGE + 512), (2 * PAGE, 5 * PAGE), (512, PAGE), (UNIT - PAGE, UNIT)],
)
def test_data_between_zeros_has_the_digest_of_its_unit(start: int, end: int, zeros_first: bool) -> None:
    """Whatever comes first, and although the data may have pages of zeros at its ends, too."""
    data = bytes(PAGE) + b"x" * PAGE if end - start > PAGE else b"x"
    disk = (bytes(start) + data.ljust(end - start, b"\0")).ljust(UNIT, b"\0")
    finished = digests.Digests(KEY, 0, 2 * UNIT)
    places = [UNIT + at for at in (0, start, end, UNIT)]
    zeros = [places[:2], places[2:]]
    for first, after in zeros if zeros_first else ():
        finished.add(first, after)
    finished.add(*places[1:3], memoryview(disk)[start:end])
    for first, after in zeros:
        finished.add(first, after)
    (record,) = finished.records()
    assert record.digest == read(finished, record, bytes(UNIT) + disk) != 0


def test_part_that_the_whole_unit_replaces_is_not_counted_again() -> None:
    """Two tags of a unit would cancel each other out."""
    disk = memoryview(b"x" * PAGE + bytes(UNIT - PAGE))
    finished = digests.Digests(KEY, 0, 2 * UNIT)
    finished.add(0, PAGE, disk[:PAGE])
    finished.add(0, UNIT, disk, finished.tags(0, disk))
    finished.add(2 * PAGE, 3 * PAGE)
    (record,) = finished.records()
    assert record.digest == read(finished, record, bytes(disk)) != 0


@settings(max_examples=60, deadline=None)
@given(CUTS, st.integers(0, 99), st.sampled_from([16 << 10, 4]))
def test_bytes_that_are_written_twice_are_noted_once(cuts: list[int], seed: int, most: int) -> None:
    finished = recorded(cuts, seed, most)
    records = finished.records()
    for first, after in itertools.pairwise([0, *sorted(cuts), len(DISK)]):
        add(finished, first, after)
    assert finished.records() == records


def test_exchanged_units_are_found(granules: int) -> None:
    """A write to the wrong place has the right bytes. A sum of GMACs would be the same."""
    finished = recorded([], 0, granules)
    swapped = DISK[UNIT : 2 * UNIT] + DISK[:UNIT] + DISK[2 * UNIT :]
    (first, *_) = finished.records()
    assert read(finished, first, swapped) != first.digest


@pytest.mark.parametrize("moment", ["at once", "while the rest is written"])
def test_refuted_units_are_claimed_again_when_written(granules: int, moment: str) -> None:
    finished = recorded([5 * UNIT], 0, granules)
    records = finished.records()
    finished = digests.Digests(KEY, 0, len(DISK), granules=granules)
    add(finished, 0, 5 * UNIT)
    record = finished.records()[-1]
    if moment != "at once":
        add(finished, 5 * UNIT, len(DISK))
    finished.refute(record)
    assert ranges.Ranges(covered(finished.records())).missing(0, 5 * UNIT) == list(record.spans)
    add(finished, *record.spans[0])
    add(finished, 5 * UNIT, len(DISK))
    assert finished.records() == records


def test_refuted_record_of_which_a_part_was_discarded_is_removed(granules: int) -> None:
    finished = recorded([], 0, granules)
    record = finished.records()[1]
    finished.discard(record.spans[0][0], record.spans[0][0] + 1)
    finished.refute(record)
    add(finished, 0, len(DISK))
    assert finished.records() == recorded([], 0, granules).records()


def test_nothing_is_removed_with_a_range_that_is_not_finished() -> None:
    """A clone that resumes a prefix discards what follows it, also in the granule where it ends."""
    finished = digests.Digests(KEY, 0, len(DISK), granules=4)
    add(finished, 0, 5 * UNIT)
    finished.discard(5 * UNIT, len(DISK))
    assert covered(finished.records()) == [(0, 5 * UNIT)]


def test_loaded_records_are_those_saved(granules: int) -> None:
    finished = digests.Digests(KEY, 0, len(DISK), granules=granules)
    for first in (0, UNIT, 2 * UNIT, 3 * UNIT, 5 * UNIT):
        add(finished, first, first + UNIT)
    add(finished, 7 * UNIT, 7 * UNIT + 512)
    again = digests.Digests(KEY, 0, len(DISK), granules=granules)
    again.load(*finished.dump())
    assert again.records() == finished.records()
    assert again.sample == finished.sample
    assert covered(again.records()) == [(0, 4 * UNIT), (5 * UNIT, 6 * UNIT)]


def test_disk_that_ends_early_has_a_short_unit() -> None:
    finished = digests.Digests(KEY, 0, 1 << 40)
    for first, after in ((10 * UNIT + 9, 11 * UNIT), (11 * UNIT, 11 * UNIT + 512), (0, 10 * UNIT + 9)):
        add(finished, first, after)
    add(finished, 11 * UNIT + 512, len(DISK))
    assert covered(finished.records()) == [(0, 11 * UNIT)]
    finished.cut(len(DISK))
    (record,) = finished.records()
    assert covered([record]) == [(0, len(DISK))]
    assert read(finished, record, DISK) == record.digest


def test_other_key_has_other_tags() -> None:
    mine, theirs = (digests.Digests(key, 0, len(DISK)) for key in (KEY, bytes(32)))
    assert mine.tags(0, memoryview(DISK)[:UNIT]) != theirs.tags(0, memoryview(DISK)[:UNIT])


def test_memory_of_partial_units_is_bounded() -> None:
    """The oldest is forgotten: when its other part is written, it does not count as zeros with data."""
    finished = digests.Digests(KEY, 0, 1 << 40)
    for index in range(1000):
        finished.add(index * UNIT, index * UNIT + 512, memoryview(b"x" * 512))
    assert len(finished._parts) <= digests.PARTS
    for index in range(1000):
        finished.add(index * UNIT + 512, (index + 1) * UNIT)
    assert sum(end - start for start, end in covered(finished.records())) == digests.PARTS * UNIT


def test_granules_with_the_most_ranges_are_forgotten() -> None:
    """For a disk that is written in random order. What remains is still right."""
    total = 16 << 30
    finished = digests.Digests(KEY, 0, total)
    finished.add(total // 2, total)
    for index in range(digests.RANGES + 1):
        start = index * 2 * UNIT
        finished.add(start, start + 512 * (1 + index % 100))
    assert len(finished.done) <= digests.RANGES
    assert finished.done.missing(total // 2 + finished.granule, total) == []


@pytest.mark.parametrize("total", [1 << 30, 1 << 62])
def test_what_is_dumped_fits_into_a_slot(total: int) -> None:
    """With the most granules, ranges and units of the sample."""
    finished = digests.Digests(KEY, 0, total)
    for index in range(digests.GRANULES):
        start = index * finished.granule
        finished.add(start, start + UNIT, memoryview(b"x" * UNIT), [(1 << 64) - 1 - index])
    assert len(finished.digests) == digests.GRANULES
    done, packed = finished.dump()
    assert len(json.dumps(done)) + len(packed) * 4 // 3 < 344 << 10


def test_equal_units_have_different_tags() -> None:
    """The position is the nonce of GMAC: two tags with one nonce would reveal its key."""
    unit = memoryview(DISK[:UNIT])
    finished = digests.Digests(KEY, 0, len(DISK))
    assert finished.tags(0, unit) == finished.tags(0, unit) != finished.tags(UNIT, unit)
