"""Options and their values, from the command line and from the environment."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from cdi_worker.importer.commands import command, group, options, parameters
from tests.support import disks as disks_module
from tests.support import misbehave, worker

MIB = 1 << 20
REQUEST = 2


def test_every_option_has_a_variable_with_its_name() -> None:
    for name in group.COMMANDS:
        made = group.command_of(name)
        if not isinstance(made, command.Command):
            continue
        for option in made.options:
            assert option.variable == f"CDI_WORKER_{option.key.upper().replace('-', '_')}"


@pytest.mark.parametrize(("name", "option"), [("DRY_RUN", "--dry-run"), ("ALL", "--all")])
def test_variable_of_what_only_the_command_line_says_is_refused(
    tmp_path: Path, name: str, option: str
) -> None:
    """It would be dropped in silence: an import in place of a plan."""
    source, disk = tmp_path / "image", tmp_path / "disk.img"
    source.write_bytes(bytes(4096))
    done = worker.call("import", source, disk, env={f"CDI_WORKER_{name}": "true"})
    assert done.status == REQUEST
    assert f"CDI_WORKER_{name}: this is an option only; unset it, and give {option}" in done.error_message
    assert not disk.exists()


def test_option_wins_over_variable(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path
) -> None:
    """A wrong value is refused where it is used, with the place that it comes from."""
    url = server.serve("/disk", misbehave.Page(disks.raw().read_bytes()))
    env = {"CDI_WORKER_CONNECTIONS": "98"}
    done = worker.call("import", url, tmp_path / "disk.img", env=env)
    assert (done.status, "(from CDI_WORKER_CONNECTIONS)" in done.errors) == (REQUEST, True), done.errors
    done = worker.call("import", url, tmp_path / "disk.img", "--connections=2", env=env)
    assert done.status == 0, done.errors


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("VDDK_CONNECTIONS", "few", "(from CDI_WORKER_VDDK_CONNECTIONS)"),
        ("PROGRESS", "lnes", "id you mean 'lines'?"),
    ],
)
def test_variables_of_all_sources_are_checked(
    disks: disks_module.Disks, tmp_path: Path, name: str, value: str, words: str
) -> None:
    done = worker.call("import", disks.raw(), tmp_path / "disk.img", env={f"CDI_WORKER_{name}": value})
    assert (done.status, words in done.errors) == (REQUEST, True), done.errors
    assert f"CDI_WORKER_{name}" in done.errors


def test_help_is_shown_whatever_the_variables_are() -> None:
    for env in ({"CDI_WORKER_CONNECTIONS": "many"}, {"CDI_WORKER_CONECTIONS": "2"}):
        assert worker.call("import", "--help", env=env).status == 0


def test_several_values_in_a_variable_are_lines(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path
) -> None:
    url = server.serve("/disk", misbehave.Page(disks.raw().read_bytes()))
    env = {"CDI_WORKER_HEADER": "X-One: a b\nX-Two: c", "CDI_WORKER_JSON": "true"}
    done = worker.call("import", url, tmp_path / "disk.img", env=env)
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
    assert pod.call(**env, CDI_WORKER_CONNECTIONS="2", CDI_WORKER_DIRECT="true").status == 0
    assert pod.disk.read_bytes() == disks.raw().read_bytes()
    done = pod.call(**env, CDI_WORKER_READ_BACK="true")
    assert f"read back sha256={disks_module.digest(disks.raw(), 'sha256')}" in done.errors
    assert pod.call(**env, CDI_WORKER_CONNECTIONS="200").status == 1
    words = "Unable to process data: Invalid value for '--connections': 200 is not in the range"
    assert pod.message.startswith(words)
    assert pod.message.endswith("(from CDI_WORKER_CONNECTIONS)")
    stalled = server.serve("/stalled", misbehave.Page(disks.raw().read_bytes(), cut=MIB, stall=60))
    done = pod.call(**{**env, "IMPORTER_ENDPOINT": stalled}, CDI_WORKER_STALL_TIMEOUT="1")
    assert done.status == 1
    done = pod.call(**env, CDI_WORKER_CONECTIONS="2")
    assert (done.status, "did you mean 'CDI_WORKER_CONNECTIONS'?" in pod.message) == (1, True)


def test_value_of_unknown_origin_is_a_default() -> None:
    """Click 8.4.0 knows the origin of a value only after the value is processed."""
    option = parameters.Option(["--disk"], default="")
    context = click.Context(click.Command("import", params=[option]))
    assert context.get_parameter_source("disk") is None
    assert option.process_value(context, "") == ""


def test_minimum_speed_takes_units() -> None:
    option = next(each for each in options.of("import") if "--min-speed" in each.opts)
    context = click.Context(click.Command("import", params=[option]))
    assert option.process_value(context, "10M") == 10_000_000
    with pytest.raises(click.BadParameter, match="write 10Mi for powers of 1024, 10M for powers of 1000"):
        option.process_value(context, "10MB")
