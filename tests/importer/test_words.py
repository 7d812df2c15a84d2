"""The same failure has CDI's phrase in a pod and a remedy at a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import disks as disks_module
from tests.support import misbehave, servers, worker

MIB = 1 << 20
REQUEST, SCRATCH, TOO_LARGE = 2, 7, 8


def test_disk_that_is_too_large(
    web: servers.Web, disks: disks_module.Disks, tmp_path: Path, device: Path
) -> None:
    (tmp_path / "image").write_bytes(b"x" * (17 * MIB))
    done = worker.run("import", tmp_path / "image", device)
    needs = f"the disk needs {17 * MIB} bytes (17.0 MiB)"
    room = f"the target has room for {16 * MIB} bytes (16.0 MiB)"
    assert done.status == TOO_LARGE
    assert done.error_message == f"{needs}, {room}; free space or name a larger target"
    pod = worker.Pod(tmp_path)
    pod.run(IMPORTER_SOURCE="http", IMPORTER_ENDPOINT=web.url(disks.raw()), IMPORTER_IMAGE_SIZE="4Mi")
    assert f"virtual image size {8 * MIB} is larger than the reported available storage" in pod.message
    assert pod.message.endswith("A larger PVC is required")


def test_scratch(server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path) -> None:
    url = server.serve("/disk", misbehave.Page(disks.image("vhdx-log").read_bytes(), ranges=False))
    done = worker.run("import", url, tmp_path)
    assert done.status == SCRATCH
    assert done.error_message.startswith("scratch space required: ")
    assert done.error_message.endswith("; name a folder with --scratch DIRECTORY")
    pod = worker.Pod(tmp_path)
    pod.run(IMPORTER_SOURCE="http", IMPORTER_ENDPOINT=url)
    assert pod.outcome["scratchSpaceRequired"] is True


@pytest.mark.parametrize(
    ("kind", "options", "variable"),
    [
        ("imageio", ("--disk-id",), "IMPORTER_DISK_ID"),
        ("glance", ("--image-id",), "IMPORTER_IMAGE_ID"),
        ("vddk", ("--uuid", "--backing-file"), "IMPORTER_UUID"),
    ],
)
def test_missing_setting(tmp_path: Path, kind: str, options: tuple[str, ...], variable: str) -> None:
    done = worker.run("import", "--source", kind, "https://127.0.0.1:1/", tmp_path)
    assert (done.status, "IMPORTER_" in done.errors) == (REQUEST, False)
    assert all(f"({option})" in done.error_message for option in options)
    answer = worker.run("import", "--source", kind, "https://127.0.0.1:1/", tmp_path, "--json").output
    assert json.loads(answer)["error"]["message"] == done.error_message
    pod = worker.Pod(tmp_path)
    pod.run(IMPORTER_SOURCE=kind, IMPORTER_ENDPOINT="https://127.0.0.1:1/")
    assert f"({variable})" in pod.message


def test_options_are_named_instead_of_variables(tmp_path: Path) -> None:
    stage = ("--source=imageio", "--disk-id=1", "--previous-checkpoint=1")
    done = worker.run("import", *stage, "https://127.0.0.1:1/", tmp_path)
    assert "a previous checkpoint without a current one; use --current-checkpoint" in done.error_message
