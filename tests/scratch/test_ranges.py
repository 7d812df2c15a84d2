"""A set of ranges is the set of its bytes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cdi_worker.scratch import ranges

SOME = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 12)).map(lambda r: (r[0], r[0] + r[1])), max_size=20
)


@given(SOME, st.integers(0, 60), st.integers(0, 60))
def test_ranges_are_the_set_of_their_bytes(added: list[tuple[int, int]], start: int, end: int) -> None:
    kept = ranges.Ranges(added)
    expected = {byte for run in added for byte in range(*run)}
    listed = list(kept)
    assert {byte for run in listed for byte in range(*run)} == expected
    assert kept.covered() == len(expected)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(listed))
    missing = kept.missing(start, end)
    assert [byte for run in missing for byte in range(*run)] == sorted(set(range(start, end)) - expected)
    assert all(first < last for first, last in missing)
    assert start >= end or kept.holds(start, end) is (not missing)


def test_adjacent_ranges_are_merged() -> None:
    kept = ranges.Ranges([(0, 4), (8, 12), (4, 8)])
    assert list(kept) == [(0, 12)]
