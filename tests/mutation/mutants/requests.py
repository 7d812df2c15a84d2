# ruff: noqa: E501 - lines of the product
"""Checks of requests that are left out."""

from __future__ import annotations

from tests.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "importer/kubernetes/documents.py",
        "_check_events: does not check nodes > NODES",
        "        if nodes > NODES:\n",
        "        if False:\n",
        "tests/importer/kubernetes/test_datavolume.py::test_malformed_yaml_is_reported_by_line[text19-, line 1, column ]",
    ),
    mutant(
        "importer/plan.py",
        "_unpack: does not check content.format != 'tar'",
        '    if content.format != "tar":\n',
        "    if False:\n",
        "tests/importer/test_plan.py::test_archive_is_unpacked",
    ),
    mutant(
        "importer/plan.py",
        "plan: does not check content.format == 'tar'",
        '    if content.format == "tar":\n',
        "    if False:\n",
        "tests/importer/test_plan.py::test_archive_is_unpacked",
    ),
)
