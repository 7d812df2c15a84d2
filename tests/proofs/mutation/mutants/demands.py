"""Demands of a request, and of an administrator, that are dropped in silence."""

from __future__ import annotations

from tests.proofs.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "importer/contract.py",
        "ignores an empty variable of ours",
        "        elif not env[name].strip() and name not in may_be_empty:\n",
        "        elif False:\n",
        "tests/contract/test_settings_that_demand.py::test_empty_variable_of_ours_is_refused_in_a_pod",
    ),
    mutant(
        "formats/checksum.py",
        "verifies only the first of several digests",
        "        self._expected = (checksum, *checksum.more)\n",
        "        self._expected = (checksum,)\n",
        "tests/formats/test_checksum.py::test_all_checksums_that_are_stated_are_verified",
    ),
    mutant(
        "cdi_worker/units.py",
        "takes a size that no disk has",
        "    if not 0 <= value < 1 << 63:\n",
        "    if False:\n",
        "tests/importer/test_units.py::test_malformed_quantity_is_refused",
    ),
    mutant(
        "importer/contract.py",
        "ignores a misspelt variable",
        "        if name not in known:\n",
        "        if False:\n",
        "tests/contract/test_settings_that_demand.py::test_misspelt_variable_is_refused",
    ),
    mutant(
        "cdi_worker/units.py",
        "takes a size with a huge exponent",
        "    if exponent and abs(int(exponent[1:])) > 30:\n",
        "    if False:\n",
        "tests/importer/test_units.py::test_malformed_quantity_is_refused[1e-31]",
    ),
)
