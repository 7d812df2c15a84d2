"""Names that are imported when they are used: commands, routes, public names, readers of formats."""

from __future__ import annotations

import subprocess
import sys

import cdi_worker
from cdi_worker.formats import detect, safety
from cdi_worker.importer import execute, plan, survey
from cdi_worker.importer.commands import group


def test_every_name_is_imported() -> None:
    for name in group.COMMANDS:
        assert group.command_of(name).name == name
    for route in plan.Route:
        execute.load(plan.Plan(route, ""), survey.Survey())
    assert set(cdi_worker._PUBLIC) == set(cdi_worker.__all__)
    for name in cdi_worker.__all__:
        assert cdi_worker.__getattr__(name) is not None
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
