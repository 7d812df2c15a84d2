"""What an interrupted import has left is not a disk, for whatever reads it."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.importer import contract
from tests.support import clones, devices, kills, misbehave, processes, uploads, worker

MIB = 1 << 20
DATA = random.Random(5).randbytes(8 * MIB)
REASON = "an import to it is running or was interrupted; finish it first"


def interrupt(server: misbehave.Server, target: Path, how: int, *options: str) -> None:
    """Start an import to ``target`` and end it, when half of the disk was sent."""
    url = server.serve("/disk", kills.slow(misbehave.Page(DATA)))
    with worker.started("import", url, target, *options) as process:
        processes.wait_for(lambda: server.sent("/disk") > len(DATA) // 2, "half of the disk")
        process.send_signal(how)
        process.wait(timeout=processes.PATIENCE)


@pytest.fixture
def device(server: misbehave.Server, tmp_path: Path) -> Iterator[Path]:
    with devices.loop(tmp_path, len(DATA)) as path:
        interrupt(server, path, signal.SIGKILL)
        yield path


def test_unfinished_device_is_not_a_source(device: Path, tmp_path: Path) -> None:
    (tmp_path / "disk.img").write_bytes(DATA)
    commands: list[list[str | Path]] = [
        ["import", device, tmp_path / "new.img"],
        ["import", device, tmp_path / "new.img", "--source=volume"],
        ["import", device, tmp_path / "disk.img", "--update"],
        ["inspect", device],
        ["verify", device, tmp_path / "disk.img"],
        ["verify", tmp_path / "disk.img", device],
    ]
    for command in commands:
        done = worker.call(*command)
        assert done.status not in {0, 1}, done.output
        assert REASON in done.error_message
        # For the target of a comparison, it says which of the two disks.
        assert command[-1] != device or command[0] != "verify" or f"{device}: it" in done.error_message
        assert (tmp_path / "disk.img").read_bytes() == DATA
        assert not (tmp_path / "new.img").exists()


def test_unfinished_device_is_not_uploaded(
    device: Path, certificates: uploads.Certificates, paths: contract.Paths
) -> None:
    made = certificates
    given = (
        "--ca-file",
        made.authority.certificate,
        "--cert",
        made.client.certificate,
        "--key",
        made.client.key,
    )
    with uploads.Server(certificates, {}, paths) as server:
        done = worker.call("upload", device, server.url(""), *given)
    assert REASON in done.error_message


def test_unfinished_device_is_not_cloned(
    device: Path, certificates: uploads.Certificates, paths: contract.Paths
) -> None:
    with uploads.Server(certificates, {}, paths) as server, pytest.raises(errors.Unsupported, match=REASON):
        clones.run(clones.environment(server, "block", device))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_unfinished_file_is_not_a_source(server: misbehave.Server, tmp_path: Path, how: int) -> None:
    target = tmp_path / "disk.img"
    interrupt(server, target, how)
    part = tmp_path / "disk.img.part"
    assert part.exists()
    for command in (["import", part, tmp_path / "new.img"], ["inspect", part]):
        done = worker.call(*command)
        assert REASON in done.error_message
    assert REASON in worker.call("verify", server.url("/disk"), part).error_message


def test_unfinished_file_is_not_cloned(
    server: misbehave.Server, tmp_path: Path, certificates: uploads.Certificates, paths: contract.Paths
) -> None:
    interrupt(server, tmp_path / "disk.img", signal.SIGKILL)
    # The record in the first sector may be missing; the journal is there.
    part = tmp_path / "disk.img.part"
    with part.open("r+b") as stream:
        stream.write(bytes(MIB))
    with uploads.Server(certificates, {}, paths) as receiver, pytest.raises(errors.Unsupported, match=REASON):
        clones.run(clones.environment(receiver, "block", part))


def test_unfinished_file_of_an_earlier_version_is_not_a_source(tmp_path: Path) -> None:
    part = tmp_path / "disk.img.part"
    part.write_bytes(bytes(MIB) + b"cdi-worker journal 3 ".ljust(704 << 10, b"\n"))
    done = worker.call("import", part, tmp_path / "new.img")
    assert REASON in done.error_message


def test_download_of_a_browser_is_a_source(tmp_path: Path) -> None:
    part = tmp_path / "disk.img.part"
    part.write_bytes(DATA)
    assert worker.call("import", part, tmp_path / "new.img").status == 0
    assert (tmp_path / "new.img").read_bytes() == DATA
