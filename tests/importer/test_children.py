"""Programs that run for an import get no secret in their arguments or environment, and a kill leaves none."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import disks as disks_module
from tests.support import processes, servers, vmware, vmware_stages, worker

MARK = "hunter2"


def children(of: int) -> list[int]:
    """Return the processes below one: those that each of its threads has started."""
    found = []
    for each in Path(f"/proc/{of}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in each.read_text().split()]
    return found + [below for child in found for below in children(child)]


def shown(process: int) -> str:
    """Return what other users of a machine, or its administrator, see of a process."""
    texts = []
    with contextlib.suppress(OSError):
        texts = [Path(f"/proc/{process}/{name}").read_bytes() for name in ("cmdline", "environ")]
    return b"\0".join(texts).replace(b"\0", b" ").decode("utf-8", "replace")


def check(pod: worker.Pod, env: dict[str, str], tool: str, *arguments: str) -> None:
    """Run a pod until ``tool`` runs, look at all programs until then, and kill it."""
    # The path of a pod's folder is too long for a socket: the worker would use /dev/shm.
    with tempfile.TemporaryDirectory() as temporary:
        _check(pod, {**env, "TMPDIR": temporary}, tool, *arguments)


def _check(pod: worker.Pod, env: dict[str, str], tool: str, *arguments: str) -> None:
    seen: set[str] = set()
    with worker.started(*pod.arguments, *arguments, env=env, is_forked=False) as process:

        def runs() -> bool:
            seen.update(map(shown, children(process.pid)))
            assert process.poll() is None
            return any(Path(each.split(" ")[0]).name == tool for each in seen)

        processes.wait_for(runs, tool)
        own = shown(process.pid)
        assert MARK in own  # what is looked at has secrets where there are some
    # Until a child has become its program, it shows what the process itself shows.
    assert not [each for each in seen - {own} if MARK in each]
    folders = (pod.directory, Path(env["TMPDIR"]))
    assert list(folders[1].iterdir())
    left = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert left
    assert not [path for path in left if MARK.encode() in path.read_bytes()]


@contextlib.contextmanager
def served(disk: Path, folder: Path) -> Iterator[dict[str, str]]:
    """Serve a disk slowly; yield the variables of its import, with a password and a signature."""
    (folder / "nginx").mkdir()
    settings = servers.Settings(password=("me", f"pw-{MARK}"), limit_rate=512 << 10)
    with servers.nginx(folder / "nginx", disk.parent, settings) as web:
        yield {
            "IMPORTER_SOURCE": "http",
            "IMPORTER_ENDPOINT": f"{web.url(disk)}?X-Amz-Signature={MARK}-signature",
            "IMPORTER_ACCESS_KEY_ID": "me",
            "IMPORTER_SECRET_KEY": f"pw-{MARK}",
        }


def test_qemu_nbd_and_what_a_kill_leaves_have_no_secret(disks: disks_module.Disks, tmp_path: Path) -> None:
    with served(disks.image("vhdx-log"), tmp_path) as env:
        check(worker.Pod(tmp_path / "pod"), env, "qemu-nbd")


def test_journal_that_a_kill_leaves_has_no_secret(disks: disks_module.Disks, tmp_path: Path) -> None:
    pod, disk = worker.Pod(tmp_path / "pod"), disks.image("raw")
    (pod.headers / "X-Key").write_text(f"X-Key: key-{MARK}")
    part = pod.data / "disk.img.part"
    # The journal is behind the disk.
    size = disk.stat().st_size

    def has_journal() -> bool:
        return part.exists() and bool(part.read_bytes()[size:].strip(b"\0"))

    with served(disk, tmp_path) as env, worker.started(*pod.arguments, env=env):
        processes.wait_for(has_journal, "a journal")
    assert has_journal()
    assert all(MARK.encode() not in path.read_bytes() for path in pod.data.iterdir())


def test_nbdkit_and_what_a_kill_leaves_have_no_secret(tmp_path: Path) -> None:
    pytest.importorskip("pyVmomi")
    folder = tmp_path / "vmware"
    folder.mkdir()
    made = vmware_stages.migration(folder)
    made.settings["password"] = password = f"pw-{MARK}"
    made.password = password
    with made.running():
        env = {"IMPORTER_SOURCE": "vddk", "IMPORTER_ENDPOINT": f"https://localhost:{made.port}/sdk"}
        env |= {"IMPORTER_ACCESS_KEY_ID": vmware.USER, "IMPORTER_SECRET_KEY": password}
        env |= {"IMPORTER_UUID": vmware.INSTANCE_UUID, "IMPORTER_BACKING_FILE": made.file(0)}
        env |= {"IMPORTER_THUMBPRINT": made.thumbprint}
        check(worker.Pod(tmp_path / "pod"), env, "nbdkit", f"--vddk-libdir={made.libdir}")
