"""The reads that fetch the pieces of a disk, and the tables of a file: few, with few extra bytes."""

from __future__ import annotations

import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi_worker.formats import views
from cdi_worker.formats.mapped import pieces

MIB = 1 << 20


@pytest.mark.parametrize(("packed", "most"), [(False, 1 << 20), (True, 4 << 20)])
def test_adjacent_pieces_are_read_in_one_batch(packed: bool, most: int) -> None:
    def piece(host: int, length: int) -> pieces.Piece:
        return pieces.Piece(host, length, host, length, compressed=packed)

    half, far = most // 2, 100 << 20
    requested = [
        piece(0, half),
        piece(half, half),
        piece(most, half),
        piece(most + half + 1000, 512),
        piece(far, 512),
    ]
    found = list(pieces.batches(requested, far + 100))
    assert [batch[:2] for batch in found] == [(0, most), (most, half + 1512), (far, 100)]
    assert [len(batch.pieces) for batch in found] == [2, 2, 1]


def test_long_piece_is_split() -> None:
    requested = [pieces.Piece(0, (2 << 20) + 512, 4096, (2 << 20) + 512, compressed=False)]
    found = list(pieces.batches(requested, 3 << 20))
    assert [batch[:2] for batch in found] == [(0, 1 << 20), (1 << 20, 1 << 20), (2 << 20, 512)]
    assert [batch.pieces[0].guest for batch in found] == [4096, 4096 + (1 << 20), 4096 + (2 << 20)]


def test_tables_are_not_split() -> None:
    table = pieces.Piece(2 << 20, 2 << 20, 0, 512 << 30, compressed=False)
    (batch,) = pieces.whole([table], 8 << 20)
    assert batch == (2 << 20, 2 << 20, [table])


def test_ranges_of_tables_contain_no_holes() -> None:
    """Most entries of a disk with little data are holes: they cost no step of the interpreter."""
    for table, ranges in (
        ([], []),
        ([0, 0, 0], []),
        ([8], [(0, 1)]),
        ([0, 0, 8, 12, 16, 0, 0, 0], [(2, 5)]),
        ([8, 0, 16, 20, 40, 36], [(0, 1), (2, 4), (4, 5), (5, 6)]),
        # A hole is not joined with the entry after it; repeated entries are not joined either.
        ([0, 4, 8, 8], [(1, 3), (3, 4)]),
    ):
        assert list(pieces.steady(array.array("Q", table), 4)) == ranges


def test_other_holes_cost_no_step_either() -> None:
    """Clusters of zeros, as qemu-img and a trimmed disk leave them, are entries with the value 1."""
    table = array.array("Q", [1] * 1000 + [5, 9, 1, 1, 13])
    assert list(pieces.steady(table, 4, 2)) == [(1000, 1002), (1004, 1005)]


def test_hole_that_continues_a_falling_run_ends_it() -> None:
    """The map of a VDI is read inverted: entries fall, and 1 is a discarded block."""
    assert list(pieces.steady(array.array("Q", [4, 3, 2, 1, 7]), -1, 2)) == [(0, 3), (4, 5)]


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 200), st.sampled_from([0, 4])), max_size=8))
def test_long_holes_change_no_range(parts: list[tuple[int, int, int]]) -> None:
    """Blocks of zeros are skipped as a whole."""
    table = array.array("Q")
    for zeros, used, step in parts:
        table.extend([0] * zeros)
        table.extend(range(8, 8 + used * step, step) if step else [9] * used)
    expected, first = [], 0
    for index in range(1, len(table) + 1):
        if (
            index == len(table)
            or not table[index]
            or not table[first]
            or table[index] - table[index - 1] != 4
        ):
            if table[first]:
                expected.append((first, index))
            first = index
    assert list(pieces.steady(table, 4)) == expected


@pytest.mark.parametrize(
    ("distance", "requests", "most"),
    [
        (2048, 1, 64 * 2048),
        (65536 + 2048, 4, 4 * MIB),  # a sparse disk: a table after each grain
        (16 * MIB, 64, 64 * 2048),  # a fully allocated one
    ],
)
def test_neighbouring_tables_are_read_together(distance: int, requests: int, most: int) -> None:
    read: list[int] = []

    def pread(offset: int, length: int) -> bytes:
        read.append(length)
        return b"".join(
            (at // distance).to_bytes(2) if at % distance == 0 else b"--"
            for at in range(offset, offset + length, 2)
        )

    view = views.View(b"", pread, 1 << 40)
    found = [int.from_bytes(table[:2]) for table in view.tables((distance * i for i in range(64)), 2048)]
    assert found == list(range(64))
    assert len(read) == requests
    assert sum(read) <= most
