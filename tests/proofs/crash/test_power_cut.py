"""No power cut during an import leaves an accepted disk that is not whole, and the next run writes it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.proofs.crash import checking, imports

#: Of each epoch between two flushes.
PLAN = checking.Plan(epochs=12, cuts=8, sets=5, reruns=2)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Select all cases, or as many as ``--cases`` says, drawn by ``--first-seed``."""
    cases = [(name, kind) for name, (_, kinds) in imports.CASES.items() for kind in kinds]
    if count := metafunc.config.getoption("--cases"):
        cases = random.Random(metafunc.config.getoption("--first-seed")).sample(cases, count)
    metafunc.parametrize("case", cases, ids=["-".join(case) for case in cases])


@pytest.mark.timeout(600)
def test_power_cut_leaves_no_incomplete_disk(
    case: tuple[str, str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    imports.check(case, request, tmp_path, PLAN)
