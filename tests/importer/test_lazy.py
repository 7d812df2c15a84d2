"""References to objects: what they name, and when it is imported."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

import cdi_worker
from cdi_worker import lazy
from cdi_worker.formats import detect, safety
from cdi_worker.importer import execute, plan
from cdi_worker.importer.commands import group
from cdi_worker.importer.roles import run


def test_load_returns_an_attribute_or_a_module() -> None:
    assert lazy.load("posixpath:join") is __import__("posixpath").join
    assert lazy.load("posixpath") is __import__("posixpath")


@pytest.mark.parametrize(
    ("reference", "error"),
    [("cdi_worker.nothing", ModuleNotFoundError), ("cdi_worker.lazy:nothing", AttributeError)],
)
def test_load_raises_for_missing_object(reference: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        lazy.load(reference)


def test_table_imports_on_lookup(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazily_loaded.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    table: lazy.Table[str, int] = lazy.Table({"seven": "lazily_loaded:value"})
    assert (list(table), len(table), "seven" in table, "eight" in table) == (["seven"], 1, True, False)
    assert table.get("eight") is None
    assert "lazily_loaded" not in sys.modules
    assert table["seven"] == 7
    assert sys.modules.pop("lazily_loaded")
    with pytest.raises(KeyError):
        _ = table["eight"]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_start_pauses_the_collector_and_keeps_what_was_loaded(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with lazy.start():
            assert not gc.isenabled()
            loaded = [object()]
        assert gc.isenabled() is is_enabled
        assert any(each is loaded for each in gc.get_objects(generation=2))
        assert gc.get_freeze_count() == 0
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_start_that_fails_resumes_the_collector() -> None:
    was_enabled = gc.isenabled()
    with pytest.raises(ModuleNotFoundError), lazy.start():
        lazy.load("cdi_worker.nothing")
    assert gc.isenabled() is was_enabled


TABLES: dict[str, lazy.Table[Any, Any]] = {
    "commands": group.COMMANDS,
    "public names": cdi_worker._PUBLIC,
    "roles": run.ROLES,
    "routes": execute.ROUTES,
    "safety": safety.FORMATS,
}


@pytest.mark.parametrize("name", TABLES)
def test_every_reference_resolves(name: str) -> None:
    table = TABLES[name]
    assert len(table) >= 2
    for key in table:
        assert table[key] is not None


def test_tables_are_complete() -> None:
    assert set(execute.ROUTES) == set(plan.Route)
    assert set(safety.FORMATS) == detect.DISKS
    assert set(cdi_worker._PUBLIC) == set(cdi_worker.__all__)


def test_every_format_has_its_readers() -> None:
    for checks in safety.FORMATS.values():
        assert callable(checks.check)
        assert callable(checks.required_length)
