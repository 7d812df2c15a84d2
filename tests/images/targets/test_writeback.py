"""Adjacent ranges are merged, and no range is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cdi_worker.images.targets import writeback

MIB = 1 << 20


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


class Recording(writeback.WritebackWindow):
    """Records the spans whose writeback would be started."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.pushed: list[tuple[int, int]] = []

    def _push(self, span: writeback.DirtySpan) -> None:
        self.pushed.append((span.start, span.end))


def test_scattered_short_ranges_share_calls() -> None:
    """A call for each of 8 KiB took more time than its write."""
    window = Recording()
    starts = [number << 20 for number in range(1000)]
    for start in starts:
        window.wrote(start, start + 8192)
    assert len(window.pushed) == (1000 - 16) * 8192 // MIB
    covered = window.pushed[-1][1]
    assert all(any(a <= start < b for a, b in window.pushed) for start in starts if start < covered)


def test_short_ranges_are_counted_in_pages() -> None:
    """A write of 512 bytes makes a page dirty."""
    window = Recording()
    for number in range(16 + 256):
        window.wrote(number << 20, (number << 20) + 512)
    assert len(window.pushed) == 1


def test_long_range_does_not_wait_for_short_ones() -> None:
    window = Recording()
    for number in range(20):
        window.wrote(number << 30, (number << 30) + 512)
    window.wrote(1 << 40, (1 << 40) + MIB)
    assert window.pushed == [(1 << 40, (1 << 40) + MIB)]
