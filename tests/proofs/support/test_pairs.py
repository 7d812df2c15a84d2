"""Combinations of values: no pair is left out."""

from __future__ import annotations

import itertools

from tests.support import pairs


def test_every_pair_of_values_occurs() -> None:
    dimensions = range(13), "abcde", (True, False, None)
    found = pairs.covering(*dimensions)
    for first, second in itertools.combinations(range(3), 2):
        expected = set(itertools.product(dimensions[first], dimensions[second]))
        assert {(each[first], each[second]) for each in found} == expected
    assert len(found) < 2 * 13 * 5


def test_values_are_dealt_in_turn() -> None:
    assert pairs.dealt("abcd", [1, 2, 3]) == [("a", 1), ("b", 2), ("c", 3), ("d", 1)]
