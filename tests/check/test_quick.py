"""`make quick` selects tests by what they start; what other commands run exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import quick, repository

#: Commands that run some tests, and what they run is named in them.
COMMANDS = (
    "Makefile",
    "tools/lowest",
    "tools/newest",
    "tools/prove",
    "tools/test-image",
    "tests/proofs/mutants.py",
)
#: Files, and whether they have quick tests.
FILES = {
    "formats/qcow2/test_header.py": True,
    "importer/test_plan.py": True,
    "scratch/test_journal.py": True,
    "end_to_end/test_formats.py": False,
    "images/targets/test_block.py": False,
    "check/test_release.py": False,
    "proofs/simulation/test_simulation.py": False,
}


def test_file_is_selected_by_its_text() -> None:
    assert {name: quick.has_quick_tests(quick.TESTS / name) for name in FILES} == FILES


def test_modules_that_start_something_are_known() -> None:
    starting = ("openstack", "misbehave", "uploads", "vmware", "devices", "limits", "clones")
    others = ("disks", "reading", "placing", "hostile", "worker")
    assert [name for name in (*starting, *others) if quick._starts_module(name)] == [*starting]


def test_many_tests_are_quick_and_most_files_are_not() -> None:
    files = sorted(quick.TESTS.rglob("test_*.py"))
    selected: list[Path] = list(filter(quick.has_quick_tests, files))
    assert len(files) // 4 < len(selected) < len(files) // 2


def test_fixture_of_a_server_is_seen(request: pytest.FixtureRequest, server: object) -> None:
    assert server
    assert not quick.is_quick(request.node)


def test_tests_of_commands_exist() -> None:
    found = {
        name
        for command in COMMANDS
        for name in re.findall(r"\btests/[\w/.]*\w", (repository.ROOT / command).read_text())
    }
    assert len(found) > 10
    assert not [name for name in found if not (repository.ROOT / name).exists()]
