"""Combinations of values for tests of two or three dimensions, without the whole product."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any


def covering(*dimensions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations in which each value meets each value of every other dimension."""
    every = list(itertools.product(*(range(len(values)) for values in dimensions)))
    pairs = {numbers: set(itertools.combinations(enumerate(numbers), 2)) for numbers in every}
    left = set().union(*pairs.values())
    found = []
    while left:
        best = max(every, key=lambda numbers: len(pairs[numbers] & left))
        left -= pairs[best]
        found.append(tuple(values[at] for values, at in zip(dimensions, best, strict=True)))
    return found


def dealt(values: Iterable[Any], others: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return each value with one of ``others``, in turn."""
    return list(zip(values, itertools.cycle(others), strict=False))
