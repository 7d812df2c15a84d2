"""Each option, variable, exit status and file that a page names exists; each status is on its page."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator

import click

from cdi_worker import errors
from cdi_worker.importer.commands import group
from tests.check.docs.test_tables import tables
from tests.check.test_estimate import estimate
from tests.support import repository

#: Written by the tests of speed and of proofs, the history, and options of other tools.
LEFT_OUT = {
    "benchmarks.md",
    "proofs.md",
    "changelog.md",
    "contributing.md",
    "releases.md",
}
PAGES = [path for path in (repository.ROOT / "docs").rglob("*.md") if path.name not in LEFT_OUT]
PAGES.append(repository.ROOT / "README.md")
#: Options of other programs: python3 -m venv, qemu-nbd and qemu-storage-daemon, GNU tar, deploy/estimate.py.
OTHERS = {"--shared", "--sparse", "--system-site-packages", "--tls-creds"}
OTHERS |= {name for action in estimate._parser()._actions for name in action.option_strings}


def names(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield the page and the name of each match."""
    for path in PAGES:
        for found in re.findall(pattern, path.read_text()):
            yield path.name, found


@functools.cache
def options() -> frozenset[str]:
    top = click.Context(group.cli, info_name="cdi-worker")
    found = {"--help"}
    for name in ("", *group.cli.list_commands(top)):
        made = group.cli.get_command(top, name) if name else group.cli
        assert made is not None
        context = click.Context(made, parent=top, info_name=name)
        found |= {
            option for param in made.get_params(context) for option in (*param.opts, *param.secondary_opts)
        }
    return frozenset(found)


def test_every_option_exists() -> None:
    named = set(names(r"`(--[a-z][a-z0-9-]+)"))
    named |= {
        (path.name, option)
        for path in PAGES
        for line in re.findall(r"^    cdi-worker [^|#\n]*", path.read_text(), re.MULTILINE)
        for option in re.findall(r"(?<= )--[a-z][a-z0-9-]+", line)
    }
    assert len(named) > 100
    assert not {each for each in named if each[1] not in options() | OTHERS}


def test_every_variable_exists() -> None:
    source = (repository.ROOT / "docs/tables.py", *(repository.ROOT / "importer").rglob("*.py"))
    source += (*(repository.ROOT / "sources").rglob("*.py"), *(repository.ROOT / "cdi_worker").glob("*.py"))
    known = {name for path in source for name in re.findall(r"IMPORTER_[A-Z0-9_]+", path.read_text())}
    known |= set(re.findall(r"CDI_WORKER_[A-Z0-9_]+", "\n".join(tables.settings(""))))
    known |= {each.name for found in tables.VARIABLES.values() for each in found} | OUR_OWN
    assert not {
        each for each in names(r"`(CDI_WORKER_[A-Z0-9_]+|IMPORTER_[A-Z0-9_]+)\b") if each[1] not in known
    }


#: Of CDI's operator, of a shell, of the example of a plug-in, and prefixes.
OUR_OWN = {
    "CDI_WORKER_",
    "CDI_WORKER_COMPLETE",
    "IMPORTER_",
    "IMPORTER_EXTRA_HEADER_",
    "IMPORTER_FTP_PORT",
    "IMPORTER_IMAGE",
}


def test_every_exit_status_exists_and_is_listed() -> None:
    classes = inspect.getmembers(
        errors, lambda each: inspect.isclass(each) and issubclass(each, errors.Error)
    )
    known = {kind.status for _, kind in classes}
    named = {int(each) for _, each in names(r"(?:exit status|[Ss]tatus) (\d+)\b(?! [A-Z])") if len(each) < 3}
    assert named <= known | {0}
    page = (repository.ROOT / "docs/reference/exit-status.md").read_text()
    assert not {each for each in known if not re.search(rf"^\| {each} \|", page, re.MULTILINE)}


def test_every_file_exists() -> None:
    folders = "importer|sources|images|formats|scratch|tests|docs|tools|deploy|share|cdi_worker|node-server"
    named = {(page, path) for page, path in names(rf"`((?:{folders})/[\w./-]+)`") if "NAME" not in path}
    assert len(named) > 20
    assert not {(page, path) for page, path in named if not _exists(path)}


def test_pages_for_users_name_no_test() -> None:
    """Tests and proofs are named in about/ and architecture.md; a plug-in to copy is among the tests."""
    proofs = "test|crash|simulate|soak|mutants|prove|fuzz"
    named = set(names(rf"\btests/(?!sources/plugin)\S*|make (?:{proofs})\b"))
    about = {"README.md", "architecture.md", "guarantees.md", "security.md"}
    assert len(named) > len(about)
    assert not {each for each in named if each[0] not in about}


def _exists(path: str) -> bool:
    """Return whether it is a file or a folder, or a name in a module: ``formats/safety.check``."""
    module = path.rpartition(".")[0]
    return any((repository.ROOT / each).exists() for each in (path, f"{module}.py", f"{module}/__init__.py"))
