"""Options from the environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cdi_worker.importer.commands import command, group
from tests.support import disks as disks_module
from tests.support import misbehave, worker

REQUEST, SOURCE = 2, 3


def test_every_option_has_a_variable_with_its_name() -> None:
    for name in group.COMMANDS:
        made = group.command_of(name)
        if not isinstance(made, command.Command):
            continue
        for option in made.options:
            assert option.variable == f"CDI_WORKER_{option.key.upper().replace('-', '_')}"


@pytest.mark.parametrize(
    ("name", "option", "command"),
    [
        ("DRY_RUN", "--dry-run", ("import", "SOURCE", "DISK")),
        ("ALL", "--all", ("import", "SOURCE", "DISK")),
    ],
)
def test_variable_of_what_only_the_command_line_says_is_refused(
    tmp_path: Path, name: str, option: str, command: tuple[str, ...]
) -> None:
    """It would be dropped in silence: an import in place of a plan."""
    source, disk = tmp_path / "image", tmp_path / "disk.img"
    source.write_bytes(bytes(4096))
    paths = {"SOURCE": str(source), "DISK": str(disk)}
    done = worker.run(*(paths.get(word, word) for word in command), env={f"CDI_WORKER_{name}": "true"})
    assert done.status == REQUEST
    assert f"CDI_WORKER_{name}: this is an option only; unset it, and give {option}" in done.error_message
    assert not disk.exists()


def test_option_wins_over_variable(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path
) -> None:
    """A wrong value is refused where it is used, with the place that it comes from."""
    url = server.serve("/disk", misbehave.Page(disks.raw().read_bytes()))
    env = {"CDI_WORKER_CONNECTIONS": "98"}
    done = worker.run("import", url, tmp_path / "disk.img", env=env)
    assert (done.status, "(from CDI_WORKER_CONNECTIONS)" in done.errors) == (REQUEST, True), done.errors
    done = worker.run("import", url, tmp_path / "disk.img", "--connections=2", env=env)
    assert done.status == 0, done.errors


def test_variables_of_all_sources_are_checked(disks: disks_module.Disks, tmp_path: Path) -> None:
    env = {"CDI_WORKER_VDDK_CONNECTIONS": "few"}
    done = worker.run("import", disks.raw(), tmp_path / "disk.img", env=env)
    assert (done.status, "(from CDI_WORKER_VDDK_CONNECTIONS)" in done.errors) == (REQUEST, True), done.errors


def test_help_is_shown_whatever_the_variables_are() -> None:
    for env in ({"CDI_WORKER_CONNECTIONS": "many"}, {"CDI_WORKER_CONECTIONS": "2"}):
        assert worker.run("import", "--help", env=env).status == 0


def test_several_values_in_a_variable_are_lines(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path
) -> None:
    url = server.serve("/disk", misbehave.Page(disks.raw().read_bytes()))
    env = {"CDI_WORKER_HEADER": "X-One: a b\nX-Two: c", "CDI_WORKER_JSON": "true"}
    done = worker.run("import", url, tmp_path / "disk.img", env=env)
    assert done.status == 0, done.errors
    assert json.loads(done.output)["source"] == url
    sent = server.requests[0].headers
    assert (sent["x-one"], sent["x-two"]) == ("a b", "c")


def test_administrator_sets_options_of_all_pods(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path
) -> None:
    pod = worker.Pod(tmp_path)
    url = server.serve("/disk", misbehave.Page(disks.raw().read_bytes()))
    env = {"IMPORTER_SOURCE": "http", "IMPORTER_ENDPOINT": url}
    assert pod.run(**env, CDI_WORKER_CONNECTIONS="2", CDI_WORKER_DIRECT="true").status == 0
    assert pod.disk.read_bytes() == disks.raw().read_bytes()
    done = pod.run(**env, CDI_WORKER_READ_BACK="true")
    assert f"read back sha256={disks_module.digest(disks.raw(), 'sha256')}" in done.errors
    assert pod.run(**env, CDI_WORKER_CONNECTIONS="200").status == 1
    words = "Unable to process data: Invalid value for '--connections': 200 is not in the range"
    assert pod.message.startswith(words)
    assert pod.message.endswith("(from CDI_WORKER_CONNECTIONS)")
    stalled = server.serve("/stalled", misbehave.Page(disks.raw().read_bytes(), cut=MIB, stall=60))
    done = pod.run(**{**env, "IMPORTER_ENDPOINT": stalled}, CDI_WORKER_STALL_TIMEOUT="2")
    assert done.status == 1
    done = pod.run(**env, CDI_WORKER_CONECTIONS="2")
    assert (done.status, "did you mean 'CDI_WORKER_CONNECTIONS'?" in pod.message) == (1, True)


MIB = 1 << 20
