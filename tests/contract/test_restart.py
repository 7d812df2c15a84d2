"""The importer's contract: killed and restarted on the same volumes; without privileges."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support import contract, devices, limits, misbehave, oracle, processes, servers, worker
from tests.support import disks as disks_module

MiB = 1 << 20

# -- killed and restarted ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "number", "volume"),
    [
        ("raw", signal.SIGTERM, "file"),
        ("raw", signal.SIGKILL, "block"),
        ("qcow2", signal.SIGKILL, "file"),
        ("vhdx-log", signal.SIGTERM, "block"),
    ],
)
def test_killed_worker_can_be_restarted(
    pod: worker.Pod,
    server: misbehave.Server,
    disks: disks_module.Disks,
    device: Path,
    variant: str,
    number: int,
    volume: str,
) -> None:
    pod.block = device if volume == "block" else None
    data = disks.image(variant).read_bytes()
    good = misbehave.Page(data)
    url = server.serve("/disk", (good, 2), misbehave.Page(data, stall=1000))
    pod.env["IMPORTER_ENDPOINT"] = url
    with worker.started(*pod.arguments, env=pod.env) as process:
        processes.wait_for(lambda: len(server.gets("/disk")) > 2, "the stall")
        process.send_signal(number)
        status = process.wait(20)
    assert status != 0
    oracle.unusable(pod.disk)
    server.serve("/disk", good)
    assert pod.call().status == 0
    assert pod.message == contract.COMPLETE
    contract.check_disk(pod, disks.expected(variant))


def test_archive_is_unpacked_again_after_a_kill(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, tmp_path: Path
) -> None:
    """Killed after its end, or while files were moved: there is no space for both trees."""
    env = {**pod.env, "IMPORTER_ENDPOINT": web.url(disks.tar("gz")), "IMPORTER_CONTENTTYPE": "archive"}
    with devices.filesystem("tmpfs", tmp_path, 2 * MiB) as volume:
        (volume / "lost+found").mkdir()
        for _ in range(2):
            done = worker.call(*pod.arguments, f"--data-dir={volume}", env=env)
            assert (done.status, pod.message) == (0, contract.COMPLETE)
            (volume / "old").mkdir()
        names = {path.name for path in disks.tree().iterdir()} | {"lost+found", "old"}
        assert {path.name for path in volume.iterdir()} == names


def test_volume_is_not_emptied_for_a_file_that_is_not_an_archive(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, tmp_path: Path
) -> None:
    env = {**pod.env, "IMPORTER_ENDPOINT": web.url(disks.raw()), "IMPORTER_CONTENTTYPE": "archive"}
    with devices.filesystem("tmpfs", tmp_path) as volume:
        (volume / "old").touch()
        (volume / ".cdi-worker-unpacking").mkdir()
        assert worker.call(*pod.arguments, f"--data-dir={volume}", env=env).status == 1
        assert "archive needs a tar archive, this is raw" in pod.message
        assert [path.name for path in volume.iterdir()] == ["old"]


def test_folder_that_is_not_a_volume_is_not_emptied(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, tmp_path: Path
) -> None:
    """A folder that is not a mount, or not the pod's, may hold files of others."""
    (pod.data / "precious").touch()
    env = {"IMPORTER_ENDPOINT": web.url(disks.tar("gz")), "IMPORTER_CONTENTTYPE": "archive"}
    assert pod.call(**env).status == 0
    assert (pod.data / "precious").exists()
    with devices.filesystem("tmpfs", tmp_path) as volume:
        (volume / "precious").touch()
        arguments = ("import", web.url(disks.tar("gz")), volume, "--content-type=archive")
        assert worker.call(*arguments).status == 0
        assert (volume / "precious").exists()


def test_disk_replaces_leftovers_of_a_killed_archive(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, tmp_path: Path
) -> None:
    env = {**pod.env, "IMPORTER_ENDPOINT": web.url(disks.raw("dense"))}
    with devices.filesystem("tmpfs", tmp_path, 6 * MiB) as volume:
        (volume / ".cdi-worker-unpacking").mkdir()
        devices.fill(volume / ".cdi-worker-unpacking" / "x", 4 * MiB)
        done = worker.call(*pod.arguments, f"--data-dir={volume}", env=env)
        assert (done.status, pod.message) == (0, contract.COMPLETE)
        oracle.same(volume / "disk.img", disks.raw("dense"))
        assert [path.name for path in volume.iterdir()] == ["disk.img"]


# -- privileges -------------------------------------------------------------------------------


def test_unprivileged_user_can_import(pod: worker.Pod, web: servers.Web, disks: disks_module.Disks) -> None:
    """A user of its own, a volume writable by its group, and nothing else writable."""
    for path in (pod.directory, pod.data):
        processes.run("chown", "107:107", path)
    for path in [*pod.directory.parents][:-1]:
        path.chmod(path.stat().st_mode | 0o055)
    pod.env["IMPORTER_ENDPOINT"] = web.url(disks.image("vhdx-log"))
    done = pod.run(prefix=limits.unprivileged())
    assert (done.status, pod.message) == (0, contract.COMPLETE), done.errors
    contract.check_disk(pod, disks.expected("vhdx-log"))
    assert pod.disk.stat().st_uid == 107
