"""Combinations of values for tests of two or three dimensions, without the whole product."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any


def covering(*dimensions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations in which each value meets each value of every other dimension."""
    every = list(itertools.product(*(range(len(values)) for values in dimensions)))
    return [
        tuple(values[at] for values, at in zip(dimensions, row, strict=True)) for row in sufficient(every, 2)
    ]


def sufficient(rows: Sequence[tuple[Hashable, ...]], size: int) -> list[tuple[Hashable, ...]]:
    """Return some of the rows: they have all that ``size`` columns have together in any row."""
    parts = {row: set(itertools.combinations(enumerate(row), size)) for row in rows}
    left = set().union(*parts.values())
    found = []
    while left:
        best = max(rows, key=lambda row: len(parts[row] & left))
        left -= parts[best]
        found.append(best)
    return found


def dealt(values: Iterable[Any], others: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return each value with one of ``others``, in turn."""
    return list(zip(values, itertools.cycle(others), strict=False))
