"""Options from the environment and from a configuration file."""

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
        made = group.COMMANDS[name]
        if not isinstance(made, command.Command):
            continue
        made.complete()
        for option in made.options:
            assert option.variable == f"CDI_WORKER_{option.key.upper().replace('-', '_')}"


@pytest.mark.parametrize(
    ("name", "option", "command"),
    [
        ("DRY_RUN", "--dry-run", ("import", "SOURCE", "DISK")),
        ("ALL", "--all", ("import", "SOURCE", "DISK")),
        ("OUTPUT", "--output", ("map", "SOURCE")),
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


def test_table_of_a_command_is_before_keys_for_all(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("json = true\n[blank]\njson = false\n[inspect]\njson = false\n")
    env = {"CDI_WORKER_CONFIG": str(path)}
    image, disk = tmp_path / "image", tmp_path / "disk.img"
    assert "size" not in worker.run("blank", image, "1Mi", env=env).output
    assert json.loads(worker.run("import", image, disk, env=env).output)["size"] == MIB


def test_option_wins_over_variable_and_file(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path
) -> None:
    """A wrong value is refused where it is used, with the place that it comes from."""
    path = tmp_path / "config.toml"
    path.write_text("connections = 99\n")
    url = server.serve("/disk", misbehave.Page(disks.raw().read_bytes()))
    done = worker.run("import", url, tmp_path / "disk.img", "--config", path)
    assert (done.status, f"(from {path})" in done.errors) == (REQUEST, True), done.errors
    env = {"CDI_WORKER_CONNECTIONS": "98"}
    done = worker.run("import", url, tmp_path / "disk.img", "--config", path, env=env)
    assert (done.status, "(from CDI_WORKER_CONNECTIONS)" in done.errors) == (REQUEST, True), done.errors
    done = worker.run("import", url, tmp_path / "disk.img", "--config", path, "--connections=2", env=env)
    assert done.status == 0, done.errors


@pytest.mark.parametrize("place", ["home", "config_home", "config_dirs"])
def test_file_is_found_in_the_xdg_directories(tmp_path: Path, place: str) -> None:
    folder = tmp_path / (".config" if place == "home" else place) / "cdi-worker"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("quiet = true\n")
    env = {
        "home": {"HOME": str(tmp_path)},
        "config_home": {"XDG_CONFIG_HOME": str(tmp_path / place)},
        "config_dirs": {"XDG_CONFIG_DIRS": f"/nowhere:{tmp_path / place}", "HOME": "/nowhere"},
    }[place]
    done = worker.run("blank", tmp_path / "disk.img", "1Mi", env=env)
    assert (done.status, done.output, done.errors) == (0, "", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("conections = 3\n", "'conections' is not an option; did you mean 'connections'?"),
        ("[import]\ntoken-file = 'x'\n", "'token-file' is not an option of import"),
        ("[imports]\nwait = 3\n", "[imports] is not a command"),
        ("wait = \n", "Invalid value (at line 1"),
        ("\udcff", "codec can't decode"),
        ("wait = " + "[" * 5000, "nested too deeply"),
    ],
)
def test_faulty_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text, errors="surrogateescape")
    disk = tmp_path / "disk.img"
    done = worker.run("import", tmp_path, disk, "--config", path)
    assert (done.status, message in done.error_message) == (REQUEST, True), done.errors
    assert str(path) in done.error_message
    assert worker.run("blank", disk, "1Mi", "--config", tmp_path / "missing").status == REQUEST
    (tmp_path / "good.toml").write_text("wait = 1\n")
    env = {"CDI_WORKER_CONFIG": str(path)}
    done = worker.run("blank", disk, "1Mi", "--config", tmp_path / "good.toml", env=env)
    assert done.status == 0, done.errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wait = [[1]]", "'--wait': an array; give one value"),
        ("connections = true", "'--connections': true is no value of it"),
        ("header = 'x-nothing'", "'--header': malformed extra header"),
    ],
)
def test_value_of_another_type_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[import]\n{text}\n")
    done = worker.run("import", tmp_path, tmp_path / "disk.img", "--config", path)
    assert done.status == 2
    assert message in done.errors
    assert f"(from {path})" in done.errors


def test_file_may_hold_options_of_other_commands_and_of_sources(
    disks: disks_module.Disks, tmp_path: Path
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'region = "eu-west-1"\ntoken-file = "{path}"\nfrom = "x"\ndata-dir = "{tmp_path}"\n')
    done = worker.run("import", disks.raw(), tmp_path / "disk.img", "--config", path)
    assert done.status == 0, done.errors
    path.write_text('vddk-connections = "many"\n')
    env = {"CDI_WORKER_CONFIG": str(path)}
    done = worker.run("import", disks.raw(), tmp_path / "disk.img", env=env)
    assert (done.status, f"(from {path})" in done.errors) == (REQUEST, True), done.errors
    env["CDI_WORKER_VDDK_CONNECTIONS"] = "few"
    done = worker.run("import", disks.raw(), tmp_path / "disk.img", env=env)
    assert (done.status, "(from CDI_WORKER_VDDK_CONNECTIONS)" in done.errors) == (REQUEST, True), done.errors


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
    (tmp_path / "config.toml").write_text("connections = 200\n")
    done = pod.run(**env, CDI_WORKER_CONFIG=str(tmp_path / "config.toml"))
    assert (done.status, "config.toml)" in pod.message) == (1, True)
    (tmp_path / "config.toml").write_text("connections = \n")
    done = pod.run(**env, CDI_WORKER_CONFIG=str(tmp_path / "config.toml"))
    assert (done.status, "config.toml: Invalid value (at line 1" in pod.message) == (1, True)
    (tmp_path / "config.toml").write_text("conections = 2\n")
    done = pod.run(**env, CDI_WORKER_CONFIG=str(tmp_path / "config.toml"))
    assert (done.status, "did you mean 'connections'?" in pod.message) == (1, True)


MIB = 1 << 20
