"""What the documentation takes from the code is complete."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from cdi_worker import sources
from cdi_worker.importer import variables
from cdi_worker.importer.commands import group
from tests.support import repository

sys.path.insert(0, str(repository.ROOT / "docs"))
import tables

PARTS = ("importer", "sources", "images", "formats", "scratch")
#: Readers of the environment: methods of a mapping, and of ``contract.Reading``.
READERS = {"get", "boolean", "quantity", "fraction"}


def names_read() -> set[str]:
    """Return the variables that the code reads by name."""
    found = set()
    for part in PARTS:
        for path in Path(repository.ROOT, part).rglob("*.py"):
            tree = ast.parse(path.read_text())
            found |= {name for node in ast.walk(tree) for name in _names(node)}
    return found


def _names(node: ast.AST) -> set[str]:
    """Return the variables in ``env.get("NAME")``, ``env["NAME"]`` and ``reading.boolean("NAME")``."""
    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr=reader), args=[ast.Constant(value=str(name)), *_]):
            if reader == "get" and ast.unparse(owner) in {"env", "self.env", "reading.env", "environ"}:
                return {name}
            return {name} if reader in READERS - {"get"} else set()
        case ast.Subscript(value=ast.Name(id="env"), slice=ast.Constant(value=str(name))):
            return {name}
        case _:
            return set()


def known() -> set[str]:
    """Return the variables that the documentation lists."""
    from cdi_worker.importer.kubernetes import populators

    of_sources = {field.env for kind in sources.own() for field, _ in kind.table.values() if field.env}
    return {each.name for each in variables.VARIABLES} | of_sources | set(populators.OPENSTACK)


def test_every_variable_that_is_read_is_listed() -> None:
    missing = names_read() - known()
    assert not missing, f"add to importer/variables.py: {', '.join(sorted(missing))}"


def test_every_variable_that_is_listed_is_read() -> None:
    text = "\n".join(
        path.read_text()
        for part in PARTS
        for path in Path(repository.ROOT, part).rglob("*.py")
        if path.name != "variables.py"
    )
    unread = [each.name for each in variables.VARIABLES if f'"{each.name.partition("<")[0]}' not in text]
    assert not unread


def test_every_variable_has_a_meaning() -> None:
    assert not [each.name for each in variables.VARIABLES if not each.meaning or not each.roles]
    of_sources = {
        (kind.name, field.env) for kind in sources.own() for field, _ in kind.table.values() if not field.help
    }
    assert not of_sources, f"these fields need a help: {of_sources}"


def test_every_role_has_its_table() -> None:
    page = (repository.ROOT / "docs/reference/environment.md").read_text()
    roles = {role for each in variables.VARIABLES for role in each.roles}
    assert set(re.findall(r"```\{variables\} (\w+)", page)) == roles


def test_every_mount_of_a_source_is_listed() -> None:
    page = (repository.ROOT / "docs/reference/environment.md").read_text().partition("## Mounts")[2]
    fields = [field for kind in sources.own() for field, _ in kind.table.values() if field.mount]
    assert len(fields) > 4
    assert [field.mount for field in fields if f"| `{field.mount}` | `{field.option}` |" not in page] == []


def test_every_command_and_option_is_in_the_reference() -> None:
    text = "\n".join(tables.commands())
    for name in group.COMMANDS:
        command = group.COMMANDS[name]
        if command.hidden or name.startswith("cdi-"):
            continue
        assert f"## {name}\n" in text
        for param in command.params:
            shown = [option for option in param.opts if option.startswith("--")]
            assert getattr(param, "hidden", False) or all(option in text for option in shown)


def test_every_source_is_in_the_matrix() -> None:
    listed = {name for column in tables.COLUMNS for name in column.kinds}
    assert {kind.name for kind in sources.own()} - {"none"} == listed


@pytest.mark.parametrize(
    ("form", "compressions", "column", "route"),
    [
        ("raw", (), "http with byte ranges", "stream"),
        ("raw", (), "imageio", "extents"),
        ("qcow2", (), "http with byte ranges", "place"),
        ("qcow2", ("gz",), "http with byte ranges", "place, in order"),
        ("vhdx", (), "http with byte ranges", "convert"),
        ("vhdx", (), "registry", "spool, **scratch**"),
        ("vhdx", ("gz",), "http with byte ranges", "spool, **scratch**"),
        ("qcow2", (), "imageio", "not possible"),
    ],
)
def test_matrix_is_the_planner(form: str, compressions: tuple[str, ...], column: str, route: str) -> None:
    found = next(each for each in tables.COLUMNS if each.title.startswith(column))
    assert tables.cell(form, compressions, found) == route


def test_every_option_is_listed_as_a_variable() -> None:
    text = "\n".join(tables.settings())
    for variable in ("CDI_WORKER_CONNECTIONS", "CDI_WORKER_REGION", "CDI_WORKER_RETRIES", "CDI_WORKER_CERT"):
        assert f"| `{variable}` |" in text
