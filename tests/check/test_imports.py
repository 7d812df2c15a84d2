"""What a start imports, and when: commands, routes, public names, readers of formats."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

import cdi_worker
from cdi_worker import collector
from cdi_worker.formats import detect, safety
from cdi_worker.importer import execute, plan, survey
from cdi_worker.importer.commands import group


@pytest.mark.parametrize("is_enabled", [True, False])
def test_start_pauses_the_collector_and_keeps_what_was_loaded(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with collector.pause():
            assert not gc.isenabled()
            loaded = [object()]
        assert gc.isenabled() is is_enabled
        assert any(each is loaded for each in gc.get_objects(generation=2))
        assert gc.get_freeze_count() == 0
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_start_that_fails_resumes_the_collector() -> None:
    was_enabled = gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector.pause():
        _ = 1 // 0
    assert gc.isenabled() is was_enabled


@pytest.mark.parametrize("name", group.COMMANDS)
def test_every_command_is_imported_by_its_name(name: str) -> None:
    assert group.command_of(name).name == name


@pytest.mark.parametrize("route", plan.Route)
def test_modules_of_every_route_are_imported(route: plan.Route) -> None:
    execute.load(plan.Plan(route, ""), survey.Survey())


def test_public_names_are_complete() -> None:
    assert set(cdi_worker._PUBLIC) == set(cdi_worker.__all__)


@pytest.mark.parametrize("name", cdi_worker.__all__)
def test_every_public_name_is_imported(name: str) -> None:
    assert cdi_worker.__getattr__(name) is not None


def test_every_format_has_its_readers() -> None:
    for name in detect.DISKS:
        checks = safety.checks(name)
        assert callable(checks.check)
        assert callable(checks.required_length)


def test_every_command_is_found_without_the_libraries_of_extras() -> None:
    """Help, completion and the check of misspelt variables load all commands."""
    code = """
import sys
for name in ("yaml", "jsonschema", "boto3", "google", "keystoneauth1", "pyVmomi", "ovirtsdk4",
             "ovirt_imageio", "nbd", "prometheus_client", "h11", "multipart", "cramjam"):
    sys.modules[name] = None
from cdi_worker.importer.commands import group
print([group.command_of(name).name for name in group.COMMANDS] == list(group.COMMANDS))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
