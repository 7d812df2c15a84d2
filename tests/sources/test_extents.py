"""Changed areas are combined with the allocation; short runs are merged."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi_worker import errors
from cdi_worker.sources import base, extents

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
Areas = list[tuple[int, int]]


def runs(*lengths: int, start: int = 0) -> list[base.Extent]:
    """Return runs that alternate between data and zeros, data first."""
    found, offset = [], start
    for number, length in enumerate(lengths):
        found.append(base.Extent(offset, length, zero=bool(number % 2)))
        offset += length
    return found


def data(*areas: tuple[int, int]) -> list[base.Extent]:
    """Return areas given as (start, length)."""
    return [base.Extent(start, length, zero=False) for start, length in areas]


def test_areas_are_split_where_allocation_changes() -> None:
    assert list(extents.overlay(data((5, 10), (25, 5)), iter(runs(10, 10, 20)))) == [
        base.Extent(5, 5, zero=False),
        base.Extent(10, 5, zero=True),
        base.Extent(25, 5, zero=False),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=9),
    st.lists(st.integers(1, 40), min_size=5, max_size=30),
)
def test_every_byte_of_an_area_has_its_allocation(gaps: Areas, lengths: list[int]) -> None:
    areas, end = [], 0
    for gap, length in gaps:
        areas.append((end + gap, length))
        end += gap + length
    lengths.append(max(1, end - sum(lengths)))
    kinds = [extent.zero for extent in runs(*lengths) for _ in range(extent.length)]
    found = list(extents.overlay(data(*areas), iter(runs(*lengths))))
    bytes_of = [offset for extent in found for offset in range(extent.offset, extent.offset + extent.length)]
    assert bytes_of == [offset for start, length in areas for offset in range(start, start + length)]
    assert all(
        kinds[offset] == extent.zero
        for extent in found
        for offset in range(extent.offset, extent.offset + extent.length)
    )


def test_long_run_of_data_is_reported_in_parts() -> None:
    endless = (base.Extent(number * GiB, GiB, zero=False) for number in itertools.count())
    assert next(extents.coarse(endless)) == base.Extent(0, GiB, zero=False)


@pytest.mark.parametrize("allocation", [runs(10, 5), runs(10, 5, start=20), []])
def test_missing_allocation_is_an_error(allocation: list[base.Extent]) -> None:
    with pytest.raises(errors.SourceError, match="extents are missing from byte"):
        list(extents.overlay(data((12, 10)), iter(allocation)))


@pytest.mark.parametrize(
    ("areas", "pieces"),
    [
        ([], []),
        ([(5, 1)], [(5, 6)]),
        ([(0, MiB), (GiB, MiB)], [(0, GiB + MiB)]),
        ([(0, MiB), (GiB + MiB + 1, 1)], [(0, MiB), (GiB + MiB + 1, GiB + MiB + 2)]),
    ],
)
def test_allocation_is_queried_only_near_areas(areas: Areas, pieces: Areas) -> None:
    assert list(extents.pieces(data(*areas))) == pieces


@pytest.mark.parametrize(
    ("lengths", "whole"),
    [
        ((), ()),
        ((MiB,), (MiB,)),
        ((MiB, 128 * KiB - 512, MiB), (2 * MiB + 128 * KiB - 512,)),
        ((MiB, 128 * KiB, MiB), (MiB, 128 * KiB, MiB)),
        ((MiB, 512, MiB, 512, MiB), (3 * MiB + 1024,)),
        ((512, MiB), (512, MiB)),
    ],
)
def test_short_zeros_between_data_are_read_as_data(lengths: tuple[int, ...], whole: tuple[int, ...]) -> None:
    assert list(extents.coarse(runs(*lengths))) == runs(*whole)


def test_isolated_zeros_stay_zeros() -> None:
    alone = [base.Extent(0, 512, zero=True), base.Extent(512, 512, zero=False)]
    apart = [*alone, base.Extent(2048, 512, zero=True), base.Extent(4096, 512, zero=False)]
    assert list(extents.coarse(apart)) == apart


def test_adjacent_zeros_are_merged() -> None:
    zeros = [base.Extent(start, GiB, zero=True) for start in range(0, 5 * GiB, GiB)]
    assert list(extents.coarse(zeros)) == [base.Extent(0, 5 * GiB, zero=True)]


def covered(listed: Iterable[base.Extent], zero: bool) -> set[int]:
    """Return the bytes of the extents, in sectors."""
    return {
        sector
        for extent in listed
        if extent.zero == zero
        for sector in range(extent.offset // 512, (extent.offset + extent.length) // 512)
    }


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300), st.booleans()), max_size=60),
    st.integers(4, 40),
)
def test_more_extents_than_fit_in_memory_become_coarse(steps: list[tuple[int, int, bool]], most: int) -> None:
    listed, end = [], 0
    for gap, length, zero in steps:
        listed.append(base.Extent((end + gap) * 512, length * 512, zero))
        end += gap + length
    kept = extents.Kept(listed, most=most)
    found = list(kept)
    assert len(found) == len(kept) <= most
    assert all(last.offset + last.length <= following.offset for last, following in itertools.pairwise(found))
    assert covered(listed, zero=False) <= covered(found, zero=False)
    assert covered(listed, zero=True) <= covered(found, zero=True) | covered(found, zero=False)
    assert covered(found, zero=True) <= covered(listed, zero=True)
    assert kept.end == max((extent.offset + extent.length for extent in listed), default=0)


def test_few_extents_are_kept_as_they_are() -> None:
    listed = runs(512, MiB, 512, GiB, start=4096)
    assert list(extents.Kept(listed)) == listed
    assert list(extents.Kept(data((0, 512), (512, 512), (4096, 512)))) == data((0, 1024), (4096, 512))


def test_long_zeros_stay_zeros_among_many_extents() -> None:
    listed = [*runs(*[512] * 100), *runs(512, GiB, 512, start=100 * 512)]
    assert list(extents.Kept(listed, most=8)) == runs(101 * 512, GiB, 512)
