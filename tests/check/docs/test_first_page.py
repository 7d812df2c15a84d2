"""README, whose beginning is the home of the site: what it states is stated by the pages that it names."""

from __future__ import annotations

import re

from tests.bench import page, report, rows
from tests.support import repository

assert rows  # declares all rows
README = (repository.ROOT / "README.md").read_text()
DOCS = repository.ROOT / "docs"


def plain(text: str) -> str:
    """Return a text without line breaks, in lower case."""
    return " ".join(text.split()).lower()


def test_figures_are_those_of_the_benchmarks() -> None:
    """``python -m tests.bench --page`` writes both."""
    results = sorted((DOCS / "about/benchmarks").glob("*.jsonl"))
    reports = [report.load(path) for path in results]
    assert page.page(reports) == (DOCS / "about/benchmarks.md").read_text()
    assert page.first(reports, README) == README


def test_figures_of_a_cluster_are_on_its_page() -> None:
    paragraph = README[README.index("Compared with CDI's") :].partition("\n\n")[0]
    figures = re.findall(r"\d[\d.]*(?: to \d+)?(?: kb/s| s)", plain(paragraph))
    assert len(figures) == 5
    known = plain((DOCS / "pods/cluster.md").read_text())
    assert not [each for each in figures if each not in known]


def test_promises_are_those_of_the_pages() -> None:
    known = plain("".join((DOCS / f"about/{name}.md").read_text() for name in ("guarantees", "security")))
    promised = plain(README[README.index("**Safe**") : README.index("Look first")])
    phrases = re.split(r"[.:] | cannot ", promised.partition("- ")[2].replace(" - ", " ").rstrip("."))
    assert len(phrases) == 7
    assert not [phrase for phrase in phrases if phrase not in known]
