"""A private directory for temporary files: the next one removes what killed processes have left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images.tools import workspace
from tests.support import disks as disks_module
from tests.support import misbehave, oracle, processes, repository, worker

HOLD = """
import sys
from cdi_worker.images.tools import workspace
with workspace.Workspace() as name:
    print(name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a directory for temporary files whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        monkeypatch.setattr("tempfile.tempdir", made)
        yield Path(made)


def held(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process with a workspace."""
    started = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=repository.ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert started.stdout is not None
    return started, Path(started.stdout.readline().strip())


def end(process: subprocess.Popen[str], number: int) -> None:
    process.send_signal(number)
    process.communicate(timeout=processes.PATIENCE)


def fill(folder: Path) -> None:
    """Put into a folder what a run leaves: a socket, files, folders."""
    (folder / "inner").mkdir()
    (folder / "inner" / "file").write_bytes(b"left")
    (folder / "link").symlink_to("/")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "nbd"))


def test_directory_that_cannot_be_made_is_reported(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(temporary / "file"))
    with pytest.raises(
        errors.Error, match=r"file: no temporary directory can be made: not a directory; free"
    ):
        workspace.Workspace()


def test_directory_of_a_killed_process_is_removed(temporary: Path) -> None:
    process, left = held(temporary)
    fill(left)
    end(process, signal.SIGKILL)
    assert left.exists()
    with workspace.Workspace() as name:
        assert os.listdir(temporary) == [Path(name).name]


def test_directory_of_a_running_process_stays(temporary: Path) -> None:
    process, used = held(temporary)
    fill(used)
    try:
        with workspace.Workspace() as mine, workspace.Workspace() as other:
            assert {Path(mine).name, Path(other).name, used.name} == set(os.listdir(temporary))
        assert sorted(os.listdir(used)) == ["inner", "link", "nbd"]
    finally:
        end(process, signal.SIGKILL)


def test_many_processes_do_not_remove_the_directories_of_each_other(temporary: Path) -> None:
    """Between its creation and its lock a directory looks like one that is left."""
    code = """
import os
from cdi_worker.images.tools import workspace
for _ in range(300):
    with workspace.Workspace() as name:
        open(name + "/file", "x").close()
        assert os.listdir(name) == ["file"]
"""
    argv = [sys.executable, "-W", "error", "-c", code]
    env = {**os.environ, "TMPDIR": str(temporary)}
    running = [subprocess.Popen(argv, cwd=repository.ROOT, env=env) for _ in range(4)]
    assert [process.wait(120) for process in running] == [0, 0, 0, 0]
    assert os.listdir(temporary) == []


def test_directory_that_is_removed_before_it_is_locked_is_not_used(temporary: Path) -> None:
    """Python reports each call of flock just before it is made."""
    code = """
import os, sys
from cdi_worker.images.tools import workspace
removed = []
def hook(event, _):
    if event == "fcntl.flock" and not removed:
        removed.extend(os.listdir())
        os.rmdir(*removed)
sys.addaudithook(hook)
with workspace.Workspace() as name:
    assert [os.path.basename(name)] == os.listdir() != removed
"""
    env = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(repository.ROOT)}
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=temporary, env=env, check=True)


def hostile(name: Path, kind: str) -> None:
    """Make what another user of a shared directory may put there, or what is not ours to remove."""
    precious = name.parent / "precious"
    precious.mkdir(mode=0o700)
    (precious / "file").write_bytes(b"precious")
    if kind == "link":
        name.symlink_to(precious)
    elif kind == "fifo":
        os.mkfifo(name)
    elif kind == "file":
        name.write_bytes(b"precious")
    else:
        name.mkdir(mode=0o700)
        (name / "file").write_bytes(b"precious")
    if kind == "readable":
        name.chmod(0o755)
    if kind == "of another user":
        os.chown(name, 65534, 65534)


@pytest.mark.parametrize("kind", ["link", "fifo", "file", "readable", "of another user"])
def test_what_is_not_ours_is_not_removed(temporary: Path, kind: str) -> None:
    if kind == "of another user":
        processes.need_root()
    name = temporary / "cdi-worker-tmp-abcdefgh"
    hostile(name, kind)
    before = name.lstat()
    with workspace.Workspace():
        pass
    assert os.path.samestat(name.lstat(), before)
    assert (temporary / "precious" / "file").read_bytes() == b"precious"
    if kind in {"readable", "of another user"}:
        assert os.listdir(name) == ["file"]


def test_another_name_is_not_removed(temporary: Path) -> None:
    """The first is scratch that a killed run resumes."""
    names = [
        "cdi-worker-0123456789abcdef",
        "cdi-worker-tmp-",
        "cdi-worker-tmp-short",
        "cdi-worker-tmp-abcdefghi",
        "cdi-worker-tmp-ABCDEFGH",
        "cdi-worker-output.img",
        os.fsdecode(b"cdi-worker-tmp-\xff\xff\xff\xff\xff\xff\xff\xff"),
    ]
    for name in names:
        (temporary / name).mkdir(mode=0o700)
        (temporary / name / "file").write_bytes(b"precious")
    with workspace.Workspace():
        pass
    assert sorted(os.listdir(temporary)) == sorted(names)
    assert all((temporary / name / "file").read_bytes() == b"precious" for name in names)


def test_link_in_a_left_directory_is_not_followed(temporary: Path) -> None:
    precious = temporary / "precious"
    precious.mkdir()
    (precious / "file").write_bytes(b"precious")
    left = temporary / "cdi-worker-tmp-abcdefgh"
    left.mkdir(mode=0o700)
    (left / "folder").symlink_to(precious)
    (left / "file").symlink_to(precious / "file")
    with workspace.Workspace():
        pass
    assert os.listdir(temporary) == ["precious"]
    assert (precious / "file").read_bytes() == b"precious"


def test_without_locks_nothing_is_removed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory on NFS cannot be locked exclusively (flock(2))."""

    def refuse(*_: object) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr("fcntl.flock", refuse)
    left = temporary / "cdi-worker-tmp-abcdefgh"
    left.mkdir(mode=0o700)
    with workspace.Workspace() as name:
        assert set(os.listdir(temporary)) == {left.name, Path(name).name}
    assert os.listdir(temporary) == [left.name]


def test_import_after_a_kill_while_qemu_nbd_serves_leaves_nothing(
    server: misbehave.Server, disks: disks_module.Disks, temporary: Path, tmp_path: Path
) -> None:
    image = disks.image("vhdx-log").read_bytes()
    slow = misbehave.Page(image, drip=(16 << 10, 0.05))
    url, target = server.serve("/disk.vhdx", slow), tmp_path / "disk.img"
    env = {"TMPDIR": str(temporary)}
    with worker.started("import", url, target, env=env) as first:
        # Of our export's socket, of qemu-nbd's, and where qemu-nbd runs.
        processes.wait_for(lambda: len([*temporary.glob("*/nbd")]) == 2, "both sockets")
        first.kill()
        first.wait(processes.PATIENCE)
    assert len(os.listdir(temporary)) == 3
    server.serve("/disk.vhdx", misbehave.Page(image))
    done = worker.run("import", url, target, env=env)
    assert done.status == 0, done.errors
    oracle.same(target, disks.expected("vhdx-log"))
    assert os.listdir(temporary) == []
