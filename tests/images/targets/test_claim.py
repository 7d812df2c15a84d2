"""One run writes to a target; a run that has lost it changes nothing more."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cdi_worker import errors
from cdi_worker.images import kernel, targets
from cdi_worker.images.engine import cancelling
from cdi_worker.images.targets import claim
from cdi_worker.scratch import journal
from tests.support import devices, repository

MiB = 1 << 20
SIZE = 4 * MiB


@pytest.fixture(autouse=True)
def _short_wait(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait a second for each run that another one is refused for."""
    if request.function is not test_program_that_a_killed_run_was_starting_is_waited_for:
        monkeypatch.setattr(claim, "_REMNANT", 0.1)


def write(disk: targets.Target, byte: bytes, size: int = SIZE) -> None:
    disk.write(0, memoryview(byte * size))


@contextlib.contextmanager
def lost_lock(path: Path) -> Iterator[None]:
    """Release a run's lock without its knowledge, as NFS does when its lease expires."""
    name = f"{path}.lock"
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(int(number)), os.stat(name)):  # noqa: PTH116  (not a path)
                unlock = struct.pack("hhqqi0q", fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)
                fcntl.fcntl(int(number), fcntl.F_OFD_SETLK, unlock)
                yield
                return
    pytest.fail("no lock")


def test_second_run_fails_and_names_the_first(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    with targets.open(path, SIZE) as first:
        with pytest.raises(errors.TargetBusy) as caught:
            targets.open(path, SIZE)
        assert caught.value.retryable
        for part in (str(path), "another run", os.uname().nodename, f"process {os.getpid()}", "since 20"):
            assert part in str(caught.value)
        assert "--wait SECONDS" in caught.value.at_terminal()
        write(first, b"1")
        first.commit()
    assert path.read_bytes() == b"1" * SIZE
    assert os.listdir(tmp_path) == ["disk.img"]


def test_links_and_their_file_are_one_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("disk.img")
    with targets.open(tmp_path / "disk.img", SIZE), pytest.raises(errors.TargetBusy):
        targets.open(targets.follow_link(tmp_path / "link"), SIZE)


def test_folder_and_its_disk_are_one_target(tmp_path: Path) -> None:
    with targets.take(tmp_path, folder=True):
        for path, folder in ((tmp_path, True), (tmp_path / "disk.img", False)):
            with pytest.raises(errors.TargetBusy):
                targets.take(path, folder=folder)
    with targets.take(tmp_path / "disk.img"), pytest.raises(errors.TargetBusy):
        targets.take(tmp_path, folder=True)
    assert os.listdir(tmp_path) == []


def test_waits_for_the_first_run(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    first = targets.take(path)
    threading.Timer(0.5, first.close).start()
    with targets.take(path, targets.Terms(wait=20)):
        assert first.lost is None


KILLED = """
import os, signal, sys, time
from cdi_worker.images import targets
taken = targets.take(sys.argv[1])
if os.fork():
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.4)
"""


def test_program_that_a_killed_run_was_starting_is_waited_for(tmp_path: Path) -> None:
    """It has the descriptor of the lock until it executes its own code."""
    path = tmp_path / "disk.img"
    done = subprocess.run([sys.executable, "-c", KILLED, path], cwd=repository.ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    targets.take(path).close()


def test_cancel_ends_the_wait(tmp_path: Path) -> None:
    cancel = cancelling.Cancel()
    with targets.take(tmp_path / "disk.img"):
        threading.Timer(0.3, cancel.set).start()
        with pytest.raises(errors.Cancelled):
            targets.take(tmp_path / "disk.img", targets.Terms(wait=60, cancel=cancel))


def record(path: Path) -> bytes:
    """Return what a run writes into its lock file."""
    with targets.take(path):
        return Path(f"{path}.lock").read_bytes()


@pytest.mark.parametrize("state", ["empty", "torn", "whole", "not stored before a power cut"])
def test_lock_file_of_a_killed_run_is_taken_over(tmp_path: Path, state: str) -> None:
    whole = record(tmp_path / "disk.img")
    left_over = {"empty": b"", "torn": whole[:10], "whole": whole}.get(state, bytes(512))
    (tmp_path / "disk.img.lock").write_bytes(left_over)
    with targets.take(tmp_path / "disk.img"):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("prepared", [7, {"a": 1}, [1], ["a", None], ["a"] * 3])
def test_lock_file_with_malformed_notes_is_taken_over(tmp_path: Path, prepared: Any) -> None:
    """What it says of disks that were to become usable together is not believed."""
    path = tmp_path / "disk.img"
    lock = tmp_path / "disk.img.lock"
    lock.write_bytes(claim.Holder("0", "host", 1, "2026-11-20", prepared).record())
    with targets.take(path, targets.Terms(key="key")) as held:
        assert not held.may_replace
        found = claim.holder(claim.read(str(lock)))
        assert found is not None
        assert not found.prepared
    assert not lock.exists()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("link")])
def test_lock_of_another_kind_is_refused(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "disk.img.lock")
    with pytest.raises(errors.TargetError):
        targets.take(tmp_path / "disk.img")
    assert os.listdir(tmp_path) == ["disk.img.lock"]


def test_lock_file_that_was_removed_meanwhile_is_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder has ended after it was opened, and another run has locked a new file with its name."""
    path = tmp_path / "disk.img"
    first = [targets.take(path)]
    lock = kernel.lock

    def late(fd: int, offset: int) -> bool | None:
        while first:
            first.pop().close()
            other.append(targets.take(path))
        return lock(fd, offset)

    other: list[claim.Claim] = []
    monkeypatch.setattr(kernel, "lock", late)
    with pytest.raises(errors.TargetBusy):
        targets.take(path)
    other[0].check()
    other[0].close()


def test_file_of_another_program_is_not_a_lock_file(tmp_path: Path) -> None:
    """An image of the name "Cargo" has the lock file "Cargo.lock"."""
    (tmp_path / "Cargo.lock").write_text("of another program")
    with pytest.raises(errors.TargetError, match=r"Cargo\.lock is not a lock file of cdi-worker"):
        targets.take(tmp_path / "Cargo")
    assert (tmp_path / "Cargo.lock").read_text() == "of another program"


@pytest.mark.parametrize("suffix", ["part", "changing", "lock"])
def test_disk_with_the_name_of_an_incomplete_one_is_refused(tmp_path: Path, suffix: str) -> None:
    """A run to ``disk.img`` would remove it."""
    with pytest.raises(errors.TargetError, match="choose another name"):
        targets.take(tmp_path / f"disk.img.{suffix}")
    assert os.listdir(tmp_path) == []


def test_many_runs_one_at_a_time(tmp_path: Path) -> None:
    """A lock file is removed by its holder while others wait for it."""
    inside, most, failures = [], [], []

    def run() -> None:
        for _ in range(20):
            try:
                with targets.take(tmp_path / "disk.img", targets.Terms(wait=60)) as held:
                    inside.append(held)
                    most.append(len(inside))
                    held.check()
                    inside.remove(held)
            except BaseException as err:  # noqa: BLE001  (kept for the assertion)
                failures.append(err)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert set(most) == {1}
    assert os.listdir(tmp_path) == []


def test_full_file_system_can_be_claimed(tmp_path: Path) -> None:
    """The left-over that fills it is removed by the run that holds the claim."""
    with devices.filesystem("tmpfs", tmp_path, MiB) as point:
        with pytest.raises(OSError, match="No space"):
            devices.fill(point / "disk.img.part", 2 * MiB)
        with targets.open(point / "disk.img", MiB // 2) as disk:
            disk.write(0, memoryview(b"1" * (MiB // 2)))
            disk.commit()
        assert os.listdir(point) == ["disk.img"]


@pytest.mark.parametrize("resume", [False, True], ids=["new", "resume"])
def test_stale_run_does_not_touch_the_disk_of_its_replacement(tmp_path: Path, *, resume: bool) -> None:
    path = tmp_path / "disk.img"
    stale = targets.open(path, SIZE)
    write(stale, b"1", MiB)
    with lost_lock(path), targets.open(path, SIZE, targets.TargetOptions(resume=resume)) as disk:
        write(disk, b"2")
        disk.commit()
    check_stale(stale)
    assert path.read_bytes() == b"2" * SIZE
    assert os.listdir(tmp_path) == ["disk.img"]


def test_stale_run_stops_while_its_replacement_resumes_the_same_file(tmp_path: Path) -> None:
    """Only the record in the lock file says so: the file has the same inode, and the lock its name."""
    path = tmp_path / "disk.img"
    stale = targets.open(path, SIZE)
    write(stale, b"1", MiB)
    with lost_lock(path), targets.open(path, SIZE, targets.TargetOptions(resume=True)) as disk:
        check_stale(stale)
        write(disk, b"2")
        disk.commit()
    assert path.read_bytes() == b"2" * SIZE


def check_stale(stale: targets.Target) -> None:
    """Check that each call fails as the first one does, and that closing is harmless."""
    for call in (stale.flush, stale.commit, lambda: write(stale, b"1"), lambda: stale.zero(0, SIZE)):
        with pytest.raises(errors.TargetLost, match="taken over"):
            call()
    stale.close()


def test_stale_run_does_not_remove_the_left_over_of_its_replacement(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    stale = targets.open(path, SIZE)
    with lost_lock(path), targets.open(path, SIZE) as disk:
        stale.close()
        write(disk, b"2")
        disk.commit()
    assert path.read_bytes() == b"2" * SIZE


@pytest.mark.parametrize("existing", ["replace", "remove"])
def test_stale_run_that_begins_again_removes_nothing(tmp_path: Path, existing: str) -> None:
    path = tmp_path / "disk.img"
    with targets.take(path) as held:
        options = targets.TargetOptions(claim=held, existing=existing)
        targets.open(path, SIZE, options).close()  # the first route failed
        with lost_lock(path), targets.open(path, SIZE) as disk:
            write(disk, b"2")
            disk.commit()
        with pytest.raises(errors.TargetLost):
            targets.open(path, SIZE, options)
    assert path.read_bytes() == b"2" * SIZE
    assert os.listdir(tmp_path) == ["disk.img"]


def test_stale_run_does_not_save_its_journal_in_the_disk_of_its_replacement(tmp_path: Path) -> None:
    """Its own disk is smaller, so that its journal begins within the other disk."""
    path = tmp_path / "disk.img"
    noted = journal.Journal(targets.journal_slots(path, SIZE), "stale", SIZE)
    with contextlib.ExitStack() as stack:
        stale = stack.enter_context(targets.open(path, SIZE))
        noted.store_in(stale.storage.readable)

        def replaced() -> None:
            stack.enter_context(lost_lock(path))
            disk = stack.enter_context(targets.open(path, 2 * SIZE))
            write(disk, b"2", 2 * SIZE)
            stack.callback(disk.commit)

        noted.save(replaced)
    assert path.read_bytes() == b"2" * 2 * SIZE


def test_stale_update_does_not_change_the_next_stage(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    path.write_bytes(b"0" * SIZE)
    stale = targets.open(path, None, targets.TargetOptions(mode="delta"))
    with lost_lock(path), targets.open(path, None, targets.TargetOptions(mode="delta")) as disk:
        write(disk, b"2")
        disk.commit()
    check_stale(stale)
    assert path.read_bytes() == b"2" * SIZE


def test_replaced_part_is_not_renamed(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    with targets.open(path, SIZE) as disk:
        write(disk, b"1")
        (tmp_path / "disk.img.part").unlink()
        (tmp_path / "disk.img.part").write_bytes(b"of another")
        with pytest.raises(errors.TargetLost):
            disk.commit()
    assert os.listdir(tmp_path) == ["disk.img.part"] or not path.exists()


@contextlib.contextmanager
def two_machines(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield two devices with the same content, as two machines see one volume: O_EXCL knows only one."""
    backing = devices.fill(tmp_path / "shared", 8 * MiB)
    with devices.attached(backing) as one, devices.attached(backing) as other:
        yield one, other


@pytest.mark.parametrize(("size", "finished"), [(SIZE, True), (SIZE, False), (512, True), (None, False)])
def test_stale_run_on_another_machine_stops(tmp_path: Path, size: int | None, finished: bool) -> None:
    with two_machines(tmp_path) as (one, other):
        stale = targets.open(one, SIZE)
        write(stale, b"1")
        stale.flush()
        with targets.open(other, size) as disk:
            disk.write(0, memoryview(b"2" * (size or SIZE)))
            if finished:
                disk.commit()
            else:
                disk.flush()
            expected = (tmp_path / "shared").read_bytes()
            check_stale(stale)
            assert (tmp_path / "shared").read_bytes() == expected
            if not finished:
                disk.commit()
        assert (tmp_path / "shared").read_bytes().startswith(b"2" * (size or SIZE))


@pytest.fixture
def _no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for another run with each call."""
    monkeypatch.setattr(claim, "INTERVAL", 0.0)


@pytest.mark.usefixtures("_no_interval")
def test_stale_run_on_another_machine_writes_no_longer_than_an_interval(tmp_path: Path) -> None:
    """A write finds it by itself: a run may write for long before it flushes."""
    with two_machines(tmp_path) as (one, other):
        stale = targets.open(one, SIZE)
        write(stale, b"1")
        with targets.open(other, SIZE) as disk:
            write(disk, b"2")
            with pytest.raises(errors.TargetLost, match="taken over"):
                write(stale, b"1")
        stale.close()


@pytest.fixture
def refreshing(tmp_path: Path) -> Iterator[tuple[targets.Target, Path]]:
    """Yield a run that compares a finished disk on one machine, and the device of the other machine."""
    with two_machines(tmp_path) as (one, other):
        with targets.open(one, SIZE) as disk:
            write(disk, b"1")
            disk.commit()
        stale = targets.open(one, SIZE, targets.TargetOptions(mode="update"))
        yield stale, other
        stale.close()


def write_the_rest(other: Path) -> targets.Target:
    """Open the device of the other machine, and change all but the first pages, which are looked at most."""
    disk = targets.open(other, SIZE)
    disk.write(0, memoryview(b"1" * 4096 + b"2" * (SIZE - 4096)))
    return disk


@pytest.mark.parametrize("state", ["taken", "abandoned", "finished"])
def test_stale_refresh_does_not_begin(
    refreshing: tuple[targets.Target, Path], tmp_path: Path, state: str
) -> None:
    """It stood still before its first change, and another run wrote what it had compared."""
    stale, other = refreshing
    assert stale.storage.read(0, SIZE) == b"1" * SIZE
    with write_the_rest(other) as disk:
        {"taken": disk.flush, "abandoned": disk.close, "finished": disk.commit}[state]()
        expected = (tmp_path / "shared").read_bytes()
        with pytest.raises(errors.TargetLost, match="another run"):
            stale.write(SIZE - 512, memoryview(b"3" * 512))
        check_stale(stale)
        assert (tmp_path / "shared").read_bytes() == expected


@pytest.mark.usefixtures("_no_interval")
def test_stale_refresh_ends_while_it_compares(refreshing: tuple[targets.Target, Path]) -> None:
    stale, other = refreshing
    with targets.open(other, SIZE), pytest.raises(errors.TargetLost, match="another run writes to it"):
        stale.storage.read(0, SIZE)


@pytest.mark.parametrize("finished", [True, False])
def test_stale_refresh_that_found_no_difference_does_not_succeed(
    refreshing: tuple[targets.Target, Path], finished: bool
) -> None:
    stale, other = refreshing
    with write_the_rest(other) as disk:
        if finished:
            disk.commit()
        with pytest.raises(errors.TargetLost, match="another run"):
            stale.commit()


def test_stale_run_on_another_machine_does_not_finish(tmp_path: Path) -> None:
    """Its last write may have been before the other run began, and its next is that of the head."""
    with two_machines(tmp_path) as (one, other):
        stale = targets.open(one, SIZE)
        write(stale, b"1")
        stale.prepare()
        with targets.open(other, SIZE) as disk:
            write(disk, b"2")
            with pytest.raises(errors.TargetLost, match="taken over"):
                stale.publish()
            stale.close()
            disk.commit()
        assert (tmp_path / "shared").read_bytes().startswith(b"2" * SIZE)


def test_device_used_by_others_meanwhile_is_not_written(tmp_path: Path) -> None:
    with two_machines(tmp_path) as (one, other):
        stale = targets.open(one, SIZE)
        other.write_bytes(b"a file system".ljust(MiB))
        os.sync()
        check_stale(stale)
        assert other.read_bytes()[:MiB] == b"a file system".ljust(MiB)


@pytest.mark.parametrize("block", [512], indirect=True)
def test_busy_device_names_the_run(block: Path) -> None:
    with targets.open(block, SIZE), pytest.raises(errors.TargetBusy, match=f"process {os.getpid()}"):
        targets.open(block, SIZE)


def test_existing_file_is_refused_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    with targets.take(path) as held:
        targets.check_replaceable(held, force=False)
        path.write_bytes(b"of yesterday")
        with pytest.raises(errors.TargetExists, match="replace it"):
            targets.check_replaceable(held, force=False)
        targets.check_replaceable(held, force=True)


def test_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    with targets.open(path, SIZE, targets.TargetOptions(existing="refuse")) as disk:
        path.write_bytes(b"of another program")
        with pytest.raises(errors.TargetExists):
            disk.commit()
    assert path.read_bytes() == b"of another program"
    assert os.listdir(tmp_path) == ["disk.img"]


@pytest.mark.parametrize("force", [False, True])
def test_special_file_is_never_replaced(tmp_path: Path, force: bool) -> None:
    os.mkfifo(tmp_path / "disk.img")
    with (
        targets.take(tmp_path / "disk.img") as held,
        pytest.raises(errors.TargetError, match="regular file"),
    ):
        targets.check_replaceable(held, force=force)


def test_lock_of_a_removed_file_is_not_the_disk_s(tmp_path: Path) -> None:
    """A run may get the lock of a file that its holder has removed, while a third has a new one."""
    path = tmp_path / "disk.img.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        assert claim._is_named(fd, str(path))
        path.unlink()
        path.touch()
        assert not claim._is_named(fd, str(path))
    finally:
        os.close(fd)
