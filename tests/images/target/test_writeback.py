"""Adjacent ranges are merged, and no range is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cdi_worker.images.target import writeback


def test_adjacent_ranges_are_merged() -> None:
    merging = writeback.Merger(100)
    assert merging.add(0, 10) == []
    assert merging.add(50, 60) == []
    assert merging.add(10, 20) == []
    assert sorted(merging.drain()) == [(0, 20), (50, 60)]
    assert merging.drain() == []


def test_long_range_is_returned() -> None:
    merging = writeback.Merger(100)
    merging.add(0, 60)
    assert merging.add(60, 130) == [(0, 130)]
    assert merging.drain() == []


def test_oldest_range_is_returned_when_there_are_too_many() -> None:
    merging = writeback.Merger(100, side_by_side=2)
    merging.add(0, 1)
    merging.add(10, 11)
    assert merging.add(20, 21) == [(0, 1)]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=30))
def test_no_range_is_lost(ranges: list[tuple[int, int]]) -> None:
    merging = writeback.Merger(40, side_by_side=3)
    found: set[int] = set()
    expected: set[int] = set()
    for start, length in ranges:
        expected.update(range(start, start + length))
        for merged in merging.add(start, start + length):
            found.update(range(*merged))
    for merged in merging.drain():
        found.update(range(*merged))
    assert found == expected
