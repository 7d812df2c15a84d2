"""What the documentation takes from the code is complete."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker import sources
from cdi_worker.importer import contract, request
from cdi_worker.importer.commands import group
from cdi_worker.importer.send import volume
from cdi_worker.sources import base, fields
from tests.check import test_deploy
from tests.support import kubernetes_schemas, repository

sys.path.insert(0, str(repository.ROOT / "docs"))
import tables

PARTS = ("importer", "sources", "images", "formats", "scratch")
#: Readers of the environment: methods of ``contract.Reading``, and of a mapping.
READERS = {"text"}
MAPPINGS = {"env", "self.env", "reading.env", "obj.env", "environ"}
#: What selects the role: ``contract.role``, and the source that ``roles/run`` names in its messages.
SELECT = {"IMPORTER_SOURCE", "CLIENT_NAME", "TLS_CERT_FILE", "UPLOAD_URL"}


def _calls() -> Iterator[tuple[str, str, str]]:
    """Yield the owner, the method and the name of calls such as ``reading.boolean("NAME")``."""
    for part in PARTS:
        for path in Path(repository.ROOT, part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Call(ast.Attribute(owner, method), [ast.Constant(str(name)), *_]):
                        yield ast.unparse(owner), method, name
                    case ast.Call(ast.Name(method), [ast.Constant(str(name))]):
                        yield "", method, name
                    case ast.Subscript(owner, ast.Constant(str(name))):
                        yield ast.unparse(owner), "get", name


def _listed() -> set[str]:
    """Return the variables in the documentation's tables, but for those of sources."""
    return {each.name for found in tables.VARIABLES.values() for each in found}


@pytest.mark.slow
def test_every_variable_that_is_read_is_listed() -> None:
    """A role reads by ``contract.Reading``, which has its table."""
    read = {name for _, method, name in _calls() if method in READERS}
    declared = {
        field.env
        for owner in (request.Request, base.Access, volume.Settings)
        for _, field, _ in fields.declared(owner)
        if field.env
    }
    assert len(read | declared) > 30
    assert not read - _listed()
    lines = "\n".join(line for role in tables.VARIABLES for line in tables.environment(role))
    assert not {name for name in declared if f"| `{name}` |" not in lines}
    assert {name for owner, method, name in _calls() if method == "get" and owner in MAPPINGS} == SELECT


def test_reading_an_undeclared_variable_fails() -> None:
    with pytest.raises(KeyError):
        contract.Reading({"UPLOAD_URL": "x"}).text("UPLOAD_URL")


def test_every_table_of_variables_is_listed() -> None:
    declared = {
        name
        for part in PARTS
        for path in Path(repository.ROOT, part).rglob("*.py")
        for name in re.findall(r'\bVariable\(\s*"([^"]+)"', path.read_text())
    }
    assert declared == _listed()


def test_every_variable_that_is_listed_is_read() -> None:
    read = {name for _, method, name in _calls() if method in READERS}
    assert _listed() - read == {contract.HEADERS.name, "username", "user"}


def test_every_variable_has_a_meaning() -> None:
    assert not [each.name for found in tables.VARIABLES.values() for each in found if not each.meaning]
    of_sources = {
        (kind.name, field.env) for kind in sources.own() for field, _ in kind.table.values() if not field.help
    }
    assert not of_sources, f"these fields need a help: {of_sources}"


def test_every_role_has_its_table() -> None:
    page = (repository.ROOT / "docs/reference/environment.md").read_text()
    assert set(re.findall(r"```\{variables\} (\w+)", page)) == set(tables.VARIABLES)


def test_every_mount_of_a_source_is_listed() -> None:
    page = (repository.ROOT / "docs/reference/environment.md").read_text().partition("## Mounts")[2]
    fields = [field for kind in sources.own() for field, _ in kind.table.values() if field.mount]
    assert len(fields) > 4
    assert [field.mount for field in fields if f"| `{field.mount}` | `{field.option}` |" not in page] == []


def test_every_command_and_option_is_in_the_reference() -> None:
    text = "\n".join(tables.commands())
    for name in group.COMMANDS:
        command = group.command_of(name)
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
        ("vhdx", (), "http with byte ranges", "place"),
        (tables.OTHERS, (), "http with byte ranges", "convert"),
        (tables.OTHERS, (), "registry", "spool, **scratch**"),
        (tables.OTHERS, ("gz",), "http with byte ranges", "spool, **scratch**"),
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


def test_supported_versions_are_those_that_run() -> None:
    """Each row has versions, and each is that of the tests' own declarations."""
    cells = {line.split(" | ")[0][2:]: line for line in tables.support()[3:-1]}
    assert all(re.search(r"\w", line.partition(" | ")[2]) for line in cells.values())
    pythons = [tables.benchmarked(each)["Python"] for each in tables.DEBIAN.values()]
    project = tomllib.loads((repository.ROOT / "pyproject.toml").read_text())["project"]
    classified = [each.rpartition(" ")[2] for each in project["classifiers"] if " :: Python :: 3." in each]
    assert [each.rpartition(".")[0] for each in pythons] == classified
    assert "Kubernetes" in cells
    assert f"| {kubernetes_schemas.OLDEST}, and the latest: " in cells["Kubernetes"]
    assert " and ".join(test_deploy.RELEASES) in cells["CDI"]


def test_version_of_the_cluster_is_one_that_schemas_check() -> None:
    ran = tables.on_cluster()
    assert set(ran) > {"cdi-worker", "CDI", "Kubernetes"}
    from kubernetes_validate import utils

    (newest,) = tables._named(r'"kubernetes-validate>=(\S+)"', "pyproject.toml")

    def number(text: str) -> list[int]:
        return [int(each) for each in text.split(".")[:2]]

    known = (kubernetes_schemas.OLDEST, ran["Kubernetes"], newest, utils.latest_version())
    assert sorted(known, key=number) == list(known)
    assert all(
        ran[name] in line for line in tables.support() for name in ran if line.startswith(f"| {name} ")
    )
