"""Each mutant fits the product and its tests. Running them takes too long for every change."""

from __future__ import annotations

import pytest

from tests.proofs.mutation import mutants
from tests.proofs.mutation.__main__ import ROOT


@pytest.mark.parametrize("area", mutants.AREAS)
def test_mutants_fit_the_product(area: str) -> None:
    for each in mutants.AREAS[area]:
        assert (ROOT / each.file).read_text().count(each.old) == 1, each.what
        assert each.old != each.new


@pytest.mark.parametrize("area", mutants.AREAS)
def test_tests_of_mutants_exist(area: str) -> None:
    for node in {test for each in mutants.AREAS[area] for test in each.tests}:
        path, _, name = node.partition("[")[0].partition("::")
        assert (ROOT / path).exists(), node
        assert not name or f"def {name}(" in (ROOT / path).read_text(), node
