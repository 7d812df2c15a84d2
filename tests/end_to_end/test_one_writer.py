"""Two runs with one target: one writes, and its disk is whole; the other fails or waits."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker.importer import contract
from tests.support import clones, devices, kills, misbehave, processes, uploads, worker

MIB = 1 << 20
SIZE = 8 * MIB
ONE, OTHER = (random.Random(seed).randbytes(SIZE) for seed in (1, 2))
#: Takes more than a second over six connections.
SLOW = misbehave.Page(ONE, drip=(64 << 10, 0.06))
#: Wait for the first bytes, not for the end.
BEGUN = MIB


target = devices.targets("file", "block", size=SIZE)


def started_slowly(
    server: misbehave.Server, target: Path
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Start an import that takes some seconds."""
    return worker.started("import", server.serve("/slow", SLOW), target)


def wait_until_begun(server: misbehave.Server) -> None:
    processes.wait_for(lambda: server.sent("/slow") > BEGUN, "the first import to begin")


def check_refused(done: worker.Completed, process: subprocess.Popen[str]) -> None:
    assert done.status == 6, done.errors
    message = done.error_message
    for part in ("busy: another run writes to it", f"process {process.pid}", "since 20", "--wait SECONDS"):
        assert part in message


@pytest.mark.parametrize(("target", "same"), [("file", True), ("block", False)], indirect=["target"])
def test_second_import_fails_soon(server: misbehave.Server, target: Path, same: bool) -> None:
    url = server.serve("/fast", misbehave.Page(OTHER))
    with started_slowly(server, target) as first:
        wait_until_begun(server)
        done = worker.call("import", server.url("/slow") if same else url, target)
        assert first.poll() is None
        check_refused(done, first)
        assert first.wait(60) == 0
    assert target.read_bytes() == ONE


def test_suspended_worker_never_changes_the_disk_of_its_replacement(
    server: misbehave.Server, target: Path
) -> None:
    """The replacement of a pod that was deleted by force resumes; then a virtual machine uses the disk."""
    url = server.serve("/slow", SLOW)
    wanted = kills.request(url, target, existing="refuse", fetch=cdi_worker.FetchOptions())
    with kills.started(wanted) as first:
        processes.wait_for(lambda: server.sent("/slow") > SIZE * 9 // 16, "more than half of the disk")
        first.send_signal(signal.SIGSTOP)
        server.serve("/slow", dataclasses.replace(SLOW, drip=None))
        replaced = worker.call("import", url, target)
        if replaced.status == 0:
            target.write_bytes(OTHER)
        first.send_signal(signal.SIGCONT)
        status = first.wait(60)
    assert (replaced.status == 0) != (status == 0)
    assert target.read_bytes() == (OTHER if replaced.status == 0 else ONE)


@devices.on("file")
def test_replacement_waits(server: misbehave.Server, target: Path) -> None:
    url = server.serve("/fast", misbehave.Page(OTHER))
    with started_slowly(server, target) as first:
        wait_until_begun(server)
        done = worker.call("import", url, target, "--wait=60", "--force")
        assert first.wait(0) == 0
    assert done.status == 0, done.errors
    assert target.read_bytes() == OTHER


@devices.on("block")
def test_killed_run_leaves_nothing_to_clean_up(server: misbehave.Server, target: Path) -> None:
    url = server.serve("/fast", misbehave.Page(OTHER))
    with started_slowly(server, target) as first:
        wait_until_begun(server)
        first.kill()
        first.wait(20)
    done = worker.call("import", url, target)
    assert done.status == 0, done.errors
    assert target.read_bytes() == OTHER
    assert not {name for name in os.listdir(target.parent) if name.startswith(f"{target.name}.")}


def patient(server: uploads.Server, seconds: float) -> uploads.Server:
    server.settings = dataclasses.replace(
        server.settings, request=dataclasses.replace(server.settings.request, wait=seconds)
    )
    return server


@pytest.mark.parametrize("kind", ["", "filesystem-clone"])
def test_second_upload_server_is_refused(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path, kind: str
) -> None:
    """A replaced pod is still uploading; its replacement gets an upload, or a clone."""
    data = uploads.DATA
    with (
        uploads.Server(certificates, {}, paths) as first,
        patient(uploads.Server(certificates, {}, paths), 0) as second,
        first.connect() as connection,
    ):
        first.begin(connection, uploads.SYNC, len(data))
        connection.send(data[: 2 * MIB])
        first.wait_until_busy()
        processes.wait_for(lambda: Path(paths.data, "disk.img.part").exists(), "the disk to be written")
        body, headers = second_body(tmp_path, kind)
        answer = second.ask("POST", uploads.SYNC, body, headers)
        connection.send(data[2 * MIB :])
        assert connection.getresponse().status == 200
        second.cancel.set()
    assert (answer.status, "busy: another run writes to it" in answer.text) == (503, True), answer.text
    assert Path(paths.data, "disk.img").read_bytes() == data
    assert os.listdir(paths.data) == ["disk.img"]


def second_body(tmp_path: Path, kind: str) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of an upload, or of a clone."""
    if not kind:
        return OTHER, {}
    (tmp_path / "volume").mkdir()
    folder = clones.fill_volume(tmp_path / "volume")
    return clones.body(folder, "filesystem", ours=False), {"x-cdi-content-type": kind}
