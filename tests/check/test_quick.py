"""`make quick` selects tests by what they start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import quick


@pytest.mark.parametrize(
    ("name", "is_quick"),
    [
        ("formats/qcow2/test_header.py", True),
        ("importer/test_plan.py", True),
        ("scratch/test_journal.py", True),
        ("end_to_end/test_formats.py", False),
        ("images/targets/test_block.py", False),
        ("test_release.py", False),
        ("simulation/test_simulation.py", False),
    ],
)
def test_file_is_selected_by_its_text(name: str, is_quick: bool) -> None:
    assert quick.has_quick_tests(quick.TESTS / name) == is_quick


@pytest.mark.parametrize(
    "name", ["openstack", "misbehave", "uploads", "vmware", "devices", "limits", "clones"]
)
def test_module_that_starts_something_is_known(name: str) -> None:
    assert quick._starts_module(name)


@pytest.mark.parametrize("name", ["disks", "reading", "placing", "hostile", "worker"])
def test_module_that_starts_nothing_is_known(name: str) -> None:
    assert not quick._starts_module(name)


def test_many_tests_are_quick_and_most_files_are_not() -> None:
    files = sorted(quick.TESTS.rglob("test_*.py"))
    selected: list[Path] = list(filter(quick.has_quick_tests, files))
    assert len(files) // 4 < len(selected) < len(files) // 2


def test_test_is_selected_by_its_fixtures(request: pytest.FixtureRequest) -> None:
    assert quick.is_quick(request.node)


def test_fixture_of_a_server_is_seen(request: pytest.FixtureRequest, server: object) -> None:
    assert server
    assert not quick.is_quick(request.node)
