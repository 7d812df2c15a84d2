"""What docs/about/comparison.md claims of this program is shown by tests and pages that exist."""

from __future__ import annotations

import re

import pytest

from tests.support import repository

PAGE = repository.ROOT / "docs/about/comparison.md"


def rows(title: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its first two lines."""
    section = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


TOOLS = rows("Next to other tools")


def test_there_are_twenty_points_and_ours_are_yes() -> None:
    assert len({point for point, *_ in TOOLS}) == 20
    for point, ours, shown, *others in TOOLS:
        assert ours.split(",")[0] == "yes", point
        assert "::test_" in shown, point
        assert len(others) == 5, point


def test_what_others_do_is_cited() -> None:
    """A cell is empty, or links to the page that says so."""
    defined = dict(re.findall(r"^\[([\w-]+)\]: (https://\S+)$", PAGE.read_text(), re.MULTILINE))
    used = set(re.findall(r"\]\[([\w-]+)\]", PAGE.read_text()))
    assert used == set(defined)
    for point, _, _, *others in TOOLS:
        for cell in filter(None, others):
            assert re.fullmatch(r"(?:\[[^]]+\]\[[\w-]+\](?:, )?)+", cell), (point, cell)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE.read_text()))))
def test_named_test_exists(name: str) -> None:
    path, _, function = name.partition("::")
    assert (repository.ROOT / path).exists()
    if function:
        assert re.search(rf"^def {function}\(", (repository.ROOT / path).read_text(), re.MULTILINE)
