"""Clones as processes, and clones whose ends are killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path

import pytest

from cdi_worker.importer import contract
from tests.support import clones, devices, oracle, processes, uploads

MIB = uploads.MIB
SYNC = uploads.SYNC
SIZE = clones.SIZE
DONE = clones.DONE
server = uploads.server
receiver = clones.receiver


def test_clone_runs_as_a_process(
    server: uploads.Server, folder: Path, paths: contract.Paths, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with clones.start_source(clones.environment(server, "filesystem", folder), log) as process:
        assert process.wait(30) == 0
    assert log.read_text() == "Clone Complete"
    clones.same_tree(folder, paths.data)


def noise(directory: Path, mode: str, seed: int, size: int = SIZE) -> tuple[Path, Path]:
    """Write a disk without holes; return the volume for a clone source of ``mode``, and the disk."""
    volume = directory / "noise"
    volume.mkdir()
    disk = volume / "disk.img"
    disk.write_bytes(random.Random(seed).randbytes(size))
    (volume / "file").write_text("beside the disk")
    return (disk if mode == "block" else volume), disk


@pytest.mark.parametrize(("mode", "number"), [("block", signal.SIGTERM), ("filesystem", signal.SIGKILL)])
def test_restarted_source_completes_the_clone(
    receiver: clones.Receiver, tmp_path: Path, mode: str, number: int
) -> None:
    log = tmp_path / "log"
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(devices.slow(tmp_path, SIZE, bytes_per_second=12 * MIB))
        volume, source = noise(tmp_path, mode, 1)
        server = stack.enter_context(receiver.server({"DESTINATION": str(target)}))
        env = clones.environment(server, mode, volume)
        with clones.start_source(env, log) as process:
            processes.wait_for(lambda: server.received > MIB, "the first bytes")
            process.send_signal(number)
            assert process.wait(20)
        if number == signal.SIGTERM:
            assert log.read_text() == "Unable to process data: cancelled"

        def again() -> bool:
            with clones.start_source(env, log) as process:
                return process.wait(30) == 0

        # As the kubelet does: the target may not have noticed the kill yet.
        processes.wait_for(again, "a run that succeeds", 60)
        assert log.read_text() == "Clone Complete"
        assert server.result().message == DONE
        oracle.same(target, source)


@pytest.mark.parametrize(("mode", "changed"), [("block", True), ("filesystem", False)])
def test_source_that_was_killed_after_the_last_byte_gets_its_success(
    receiver: clones.Receiver, tmp_path: Path, mode: str, changed: bool
) -> None:
    """The target still writes. Only a source that sends the same gets a success for what has arrived."""
    log, size = tmp_path / "log", 2 * MIB
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(devices.slow(tmp_path, size, bytes_per_second=MIB))
        volume, source = noise(tmp_path, mode, 4, size)
        server = stack.enter_context(receiver.server({"DESTINATION": str(target)}))
        env = clones.environment(server, mode, volume, OWNER_UID="a-clone")
        with clones.start_source(env, log) as process:
            processes.wait_for(
                lambda: (running := server.running_upload) is not None and running.body.is_complete,
                "the last byte",
            )
            process.kill()
        assert not server.running_upload.work.done()  # type: ignore[union-attr]
        if changed:
            env["OWNER_UID"] = "another-clone"
        with clones.start_source(env, log) as process:
            assert (process.wait(30) == 0) is not changed
        assert ("Clone Complete" in log.read_text()) is not changed
        assert server.result().message == DONE
        oracle.same(target, source)


@pytest.mark.parametrize(("mode", "number"), [("block", signal.SIGTERM), ("filesystem", signal.SIGKILL)])
def test_restarted_target_receives_the_clone(
    receiver: clones.Receiver, tmp_path: Path, mode: str, number: int
) -> None:
    """The same source continues with the pod that is started as a replacement."""
    volume, source = noise(tmp_path, mode, 2)
    with devices.slow(tmp_path, SIZE, bytes_per_second=16 * MIB) as target:
        first, second = receiver.replaced({"DESTINATION": str(target)})
        log = tmp_path / "log"
        with clones.target(first, receiver.paths, log) as pod:
            sender = clones.start_source(clones.environment(first, mode, volume), tmp_path / "message")
            processes.wait_for(lambda: "] plan " in log.read_text(), "the clone to begin")
            pod.send_signal(number)
            pod.wait(20)
        with second, sender:
            assert sender.wait(30) == 0
            assert second.result().message == DONE
        oracle.same(target, source)


@pytest.mark.parametrize("killed", ["source", "target"])
def test_clone_to_a_folder_completes_after_a_kill(
    receiver: clones.Receiver, tmp_path: Path, killed: str
) -> None:
    """The volume has no room for what the killed attempt left and the new disk."""
    volume, _ = noise(tmp_path, "filesystem", 3)
    message, log = tmp_path / "message", tmp_path / "log"
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(devices.slow(tmp_path, 40 * MIB, bytes_per_second=10 * MIB))
        data = stack.enter_context(devices.mounted("ext4", device, tmp_path / "mounted"))
        processes.run("mount", "-o", "remount,sync", data)
        staged = data / ".cdi-worker-unpacking" / "disk.img.part"
        there = receiver.paths._replace(data=str(data))
        server = uploads.Server(receiver.certificates, {}, there)
        env = clones.environment(server, "filesystem", volume)

        def has_begun() -> bool:
            return staged.exists() and staged.stat().st_blocks * 512 > 4 * MIB

        def attempt(kills: str = "") -> bool:
            with clones.target(server, there, log) as receiving, clones.start_source(env, message) as sending:
                if kills:
                    processes.wait_for(has_begun, "the first bytes")
                    (sending if kills == "source" else receiving).kill()
                    assert not (data / "disk.img").exists()
                    sending.kill()
                    return False
                return sending.wait(60) == 0 and receiving.wait(60) == 0

        attempt(killed)
        assert attempt(), message.read_text()
        clones.same_tree(volume, data)
        assert sorted(os.listdir(data)) == ["disk.img", "file", "lost+found"]
