"""Each promise of guarantees.md and each row of the contract names tests that exist."""

from __future__ import annotations

import functools
import re

import pytest

from tests.support import repository

TESTS = repository.ROOT / "tests"
#: Pages whose rows need a test each, and pages that only name some.
PROMISES, CONTRACT = "docs/about/guarantees.md", "tests/contract/README.md"
PAGES = (PROMISES, CONTRACT, "docs/about/security.md")
#: A file or a function; ``::test_…`` alone is in the file named before it.
NAME = re.compile(r"`(?:tests/)?((?:[\w-]+/)+(?:[\w.-]+)?)?(?:::(test_\w+))?`")


def rows(page: str) -> list[list[str]]:
    """Return the cells of each row of each table that has a column ``shown by``."""
    text = (repository.ROOT / page).read_text()
    tables = re.findall(r"^\|[^\n]*shown by \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    lines = "".join(tables).splitlines()
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


def names(text: str) -> list[tuple[str, str]]:
    """Return the files and functions that a text names."""
    found, path = [], ""
    for file, function in NAME.findall(text):
        path = file or path
        if function or file.endswith(".py"):
            found.append((path, function))
    return found


@functools.cache
def functions(path: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)\(", (TESTS / path).read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", [PROMISES, CONTRACT])
def test_each_row_names_its_test(page: str) -> None:
    table = rows(page)
    assert len(table) >= 45
    for first, *_, shown in table:
        assert any(function for _, function in names(shown)), first


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page: str) -> None:
    for path, function in names((repository.ROOT / page).read_text()):
        assert not function or function in functions(path), f"{path}::{function}"
        assert (TESTS / path).exists(), path
