"""Tests of several parameters: a sample of their combinations (make test), or all (make prove).

A test's sample has each value of each parameter. Which of them meet is drawn from the name of the test: it is
the same in every run. Only files that start something are sampled: tests of the others take milliseconds.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Iterable, Sequence

import pytest

from tests.support import pairs, quick


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that are not in the sample."""
    functions: dict[str, list[pytest.Function]] = collections.defaultdict(list)
    for item in items:
        assert isinstance(item, pytest.Function)
        if not quick.has_quick_tests(item.path):
            functions[item.nodeid.partition("[")[0]].append(item)
    found: list[pytest.Item] = []
    for name, cases in functions.items():
        rows = dict(zip(_rows(cases), cases, strict=True))
        assert len(rows) == len(cases), name
        if () not in rows:
            sample = pairs.sufficient(random.Random(name).sample([*rows], len(rows)), 1)
            assert sample, name
            found += [rows[row] for row in rows.keys() - sample]
    return found


def _rows(cases: Sequence[pytest.Function]) -> list[tuple[int, ...]]:
    """Return the number of each value of a test's parameters, for each of its cases.

    What one ``parametrize`` sets together is one value.
    """
    numbers: dict[str, dict[tuple[int, ...], int]] = collections.defaultdict(dict)
    rows = []
    for case in cases:
        row = []
        for names, values in _parameters(case).items():
            known = numbers[names]
            row.append(known.setdefault(values, len(known)))
        rows.append(tuple(row))
    return rows


def _parameters(case: pytest.Function) -> dict[str, tuple[int, ...]]:
    """Return the identity of each value: the cases of a test share them."""
    values = dict(case.callspec.params) if hasattr(case, "callspec") else {}
    found = {}
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        found[",".join(names)] = tuple(id(values.pop(name.strip(), None)) for name in names)
    return found | {name: (id(value),) for name, value in values.items()}
