"""No name that users depend on changes without a line in the changelog (docs/about/stability.md)."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from typing import Any

import pytest

from cdi_worker.importer.commands import command, group
from tests.support import repository

FOLDER = repository.ROOT / "docs/about/surfaces"


@pytest.fixture(scope="module")
def surfaces() -> dict[str, Any]:
    """The names of the program tools/surfaces."""
    return runpy.run_path(str(repository.ROOT / "tools/surfaces"))


def lines(name: str) -> list[str]:
    return (FOLDER / f"{name}.txt").read_text().splitlines()


def names(name: str, where: str) -> set[str]:
    """Return the names of one place in a list."""
    return {each.partition(" ")[2] for each in lines(name) if each.startswith(f"{where} ")}


@pytest.mark.slow
def test_what_differs_from_the_last_release_is_in_the_changelog() -> None:
    done = subprocess.run(
        [sys.executable, repository.ROOT / "tools/surfaces"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


#: A line of each list, and what an incompatible change makes of it; None: it is dropped.
CHANGES = {
    "command-line": ("import --checksum: text", "import --digest: text"),
    "environment": ("uploadserver DEADLINE", None),
    "exit-statuses": ("status ChecksumMismatch: 5, final", "status ChecksumMismatch: 4, final"),
    "json": ("verify diskSize: number", "verify diskSize: text"),
    "kubernetes-objects": ("Job importer-name", None),
    "library": ("cdi_worker run: (request, progress = None, cancel = None)", "cdi_worker run: (request)"),
    "metrics": (
        "importer kubevirt_cdi_import_progress_total: counter, labels ownerUID",
        "importer kubevirt_cdi_import_progress_total: counter, labels owner",
    ),
    "termination-messages": (
        "upload message: Upload Complete (exit status 0)",
        "upload message: Uploaded (exit status 0)",
    ),
}
LOG = "## [Unreleased]\n\n{}\n\n## [1.0.0] - 2026-12-01\n\n### Removed\n\n- `{}`\n"


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_named_under_a_heading_that_warns(surfaces: dict[str, Any], name: str) -> None:
    line, changed = CHANGES[name]
    before = lines(name)
    now = [each for each in (*before, changed) if each not in {line, None}]
    word = line.split()[1].rstrip(":")
    told = f"gone or changed, name it under Changed, Deprecated, Removed: {line}"
    # Not in words, not among the additions, not in an earlier release.
    for entry in ("", f"### Changed\n\n- the {word} is another", f"### Added\n\n- `{word}`"):
        missing = surfaces["missing_entries"](before, now, LOG.format(entry, word))
        assert told in missing, entry
    for title in ("Changed", "Deprecated", "Removed"):
        entry = f"### {title}\n\n#### Commands\n\n- `x {word} y`, and `--digest`\n\n### Fixed\n"
        assert not surfaces["missing_entries"](before, now, LOG.format(entry, "x"))


def test_new_name_is_anywhere_among_the_changes(surfaces: dict[str, Any]) -> None:
    before, now = ["import --force: flag"], ["import --force: flag", "import --for: text"]
    assert surfaces["missing_entries"](before, now, LOG.format("### Added\n\n- `--force`", "--for"))
    assert not surfaces["missing_entries"](before, now, LOG.format("### Added\n\n- `import --for DAYS`", "x"))


def test_lists_are_complete(surfaces: dict[str, Any]) -> None:
    """Each list is of the code, sorted, and has a page that names it."""
    assert {path.stem for path in FOLDER.iterdir()} == {*surfaces["SURFACES"]} == {*CHANGES}
    page = (repository.ROOT / "docs/about/stability.md").read_text()
    for name in CHANGES:
        found = lines(name)
        assert found == sorted(set(found))
        assert CHANGES[name][0] in found
        assert f"(surfaces/{name}.txt)" in page


def test_options_without_a_variable_say_so() -> None:
    commands = {"cdi-worker": group.cli} | {name: group.command_of(name) for name in group.COMMANDS}
    for name, made in commands.items():
        listed = [each.partition(" ")[2] for each in lines("command-line") if each.startswith(f"{name} -")]
        options = {each.partition(":")[0] for each in listed if ": -" not in each}
        without = {each.partition(":")[0] for each in listed if each.endswith("no variable")}
        own = made.options if isinstance(made, command.Command) else []
        assert options - without == {f"--{each.key}" for each in own if not each.here}, name


def test_documented_fields_are_those_that_are_promised() -> None:
    page = (repository.ROOT / "docs/reference/terminal.md").read_text()
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    for title, where in (("The result of an import", "import"), ("Progress", "progress")):
        cells = re.findall(r"^\| (`.*?) \|", sections[title], re.MULTILINE)
        documented = {field for cell in cells for field in re.findall(r"`(\w+)`", cell)}
        assert documented == {each.partition(":")[0] for each in names("json", where) if "." not in each}
