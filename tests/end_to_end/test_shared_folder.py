"""In a folder where others write, what they have left there is not continued."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.support import devices, kills, misbehave, processes, worker

MIB = 1 << 20
DATA = random.Random(8).randbytes(8 * MIB)
NOBODY = 65534
SLOW = kills.slow(misbehave.Page(DATA))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder as /tmp is."""
    processes.need_root()
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def interrupt(server: misbehave.Server, target: Path, *options: str) -> str:
    """Start an import, and kill it with a half of the disk, as another user may have done before."""
    url = server.serve("/disk", SLOW)
    with worker.started("import", url, target, *options) as process:
        processes.wait_for(lambda: server.sent("/disk") > len(DATA) // 2, "half of the disk")
        # It saves its journal.
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=processes.PATIENCE)
    processes.wait_for(server.is_quiet, "the connections of the killed")
    return server.serve("/disk", misbehave.Page(DATA))


def leave(target: Path, how: str) -> Path:
    """Make the left-over that of another user, or one that another user can write to; return it."""
    part = target.with_name(f"{target.name}.part")
    journal = target.with_name(f"{target.name}.journal.part")
    for path in filter(Path.exists, (part, journal)):
        if how == "another user's":
            os.chown(path, NOBODY, NOBODY)
        elif how == "for all":
            path.chmod(0o666)
        else:
            (target.parent / f"link-{path.name}").hardlink_to(path)
    return part


@pytest.mark.parametrize(
    ("form", "how"),
    [("raw", "another user's"), ("raw", "for all"), ("raw", "linked"), ("raw", "ours"), ("qcow2", "for all")],
)
def test_left_over_that_others_may_write_is_not_continued(
    server: misbehave.Server, folder: Path, form: str, how: str
) -> None:
    target = folder / "disk"
    url = interrupt(server, target, "--format", form)
    theirs = leave(target, how).open("r+b") if how != "ours" else None
    sent = server.sent("/disk")
    done = worker.call("import", "--format", form, url, target)
    assert done.status == 0, done.errors
    assert ("from an earlier attempt" in done.output) == (how == "ours"), done.output
    assert (target.stat().st_uid, target.stat().st_mode & 0o022) == (os.geteuid(), 0)
    assert (server.sent("/disk") - sent >= len(DATA)) == (how != "ours")
    before = target.read_bytes()
    if theirs is not None:
        with theirs:
            theirs.write(b"written by another user, who has kept it open")
    assert target.read_bytes() == before
    if form == "raw":
        assert before == DATA


def test_left_over_that_cannot_be_removed_is_an_error(server: misbehave.Server, tmp_path: Path) -> None:
    """In a folder with the sticky bit the kernel refuses it, as it does for an immutable file."""
    with devices.filesystem("ext4", tmp_path) as folder:
        part = folder / "disk.img.part"
        part.write_bytes(b"theirs")
        os.chown(part, NOBODY, NOBODY)
        processes.run("chattr", "+i", part)
        try:
            url = server.serve("/disk", misbehave.Page(DATA))
            done = worker.call("import", url, folder / "disk.img")
        finally:
            processes.run("chattr", "-i", part)
        assert done.status == 6
        assert f"{part}: belongs to another user" in done.error_message
        assert part.read_bytes() == b"theirs"


def test_half_changed_disk_of_another_user_is_not_updated(server: misbehave.Server, folder: Path) -> None:
    target, changing = folder / "disk.img", folder / "disk.img.changing"
    changing.write_bytes(DATA[:MIB])
    os.chown(changing, NOBODY, NOBODY)
    url = server.serve("/disk", misbehave.Page(DATA))
    done = worker.call("import", "--update", url, target)
    assert done.status == 6
    assert f"{changing}: belongs to user {NOBODY}" in done.error_message
    assert (changing.read_bytes(), target.exists()) == (DATA[:MIB], False)


def test_killed_update_of_a_disk_of_any_owner_is_repeated(server: misbehave.Server, tmp_path: Path) -> None:
    """Where only we and our group write, the half of the disk is the one that we were to change."""
    processes.need_root()
    folder = tmp_path / "volume"
    folder.mkdir()
    folder.chmod(0o2775)
    target = folder / "disk.img"
    target.write_bytes(bytes(len(DATA)))
    target.chmod(0o666)
    os.chown(target, NOBODY, 0)
    url = server.serve("/disk", SLOW)
    with worker.started("import", "--update", url, target) as process:
        processes.wait_for(lambda: server.sent("/disk") > len(DATA) // 2, "half of the disk")
        process.kill()
    assert (folder / "disk.img.changing").exists()
    server.serve("/disk", misbehave.Page(DATA))
    done = worker.call("import", "--update", url, target)
    assert done.status == 0, done.errors
    assert target.read_bytes() == DATA


def test_left_over_of_a_run_without_a_umask_is_continued(server: misbehave.Server, tmp_path: Path) -> None:
    target = tmp_path / "disk.img"
    url = server.serve("/disk", SLOW)
    before = os.umask(0)
    try:
        with worker.started("import", url, target, is_forked=False) as process:
            processes.wait_for(lambda: server.sent("/disk") > len(DATA) // 2, "half of the disk")
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=processes.PATIENCE)
    finally:
        os.umask(before)
    processes.wait_for(server.is_quiet, "the connections of the killed")
    server.serve("/disk", misbehave.Page(DATA))
    done = worker.call("import", url, target)
    assert (done.status, "from an earlier attempt" in done.output) == (0, True), done.output
