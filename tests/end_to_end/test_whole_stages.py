"""Stages of a source that sends all of a disk in each, as a VMDK: only what differs is written."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.importer import verification
from tests.support import devices, kills, machines, oracle, processes

MIB = 1 << 20
SIZE = 12 * MIB
ONE = random.Random(1).randbytes(4 * MIB) + bytes(4 * MIB) + random.Random(2).randbytes(4 * MIB)


def changed(disk: bytes, *changes: tuple[int, bytes]) -> bytes:
    data = bytearray(disk)
    for offset, new in changes:
        data[offset : offset + len(new)] = new
    return bytes(data)


#: Data over data and over a hole, zeros over data, at both ends.
TWO = changed(
    ONE,
    (0, b"boot"),
    (5 * MIB, b"y" * 70_000),
    (2 * MIB, bytes(MIB)),
    (3 * MIB + 100, b"x" * 5000),
    (SIZE - 512, b"z" * 512),
)
THREE = changed(TWO, (8 * MIB - 512, b"w" * 1024), (5 * MIB, bytes(70_000)))


target = devices.targets("file", "block512", "block4096", size=16 * MIB)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[machines.Machine]:
    machines.register()
    folder = tmp_path / "machine"
    folder.mkdir()
    made = machines.Machine(folder)
    for name, disk in (("one", ONE), ("two", TWO), ("three", THREE)):
        made.take(name, disk)
    yield made
    cdi_worker.unregister("machine")


def check(target: Path, disk: bytes, tmp_path: Path) -> None:
    """Compare the disk, which zeros follow: a first stage and each delta zero the rest of a device."""
    (tmp_path / "expected").write_bytes(disk)
    oracle.same(target, tmp_path / "expected")
    if not target.is_block_device():
        assert [each.name for each in target.parent.glob(f"{target.name}*")] == [target.name]


def test_only_what_differs_is_written_in_each_stage(
    machine: machines.Machine, target: Path, tmp_path: Path
) -> None:
    cdi_worker.run(machine.request(target, "one"))
    check(target, ONE, tmp_path)
    for number, (name, previous, disk) in enumerate((("two", "one", TWO), ("three", "two", THREE))):
        # Again, with another compression: the disk is the same.
        for again in range(2):
            machine.tell(level=1 + 4 * number + again)
            wanted = machine.request(target, name, previous, final=name == "three")
            result = cdi_worker.run(wanted)
            assert (result.plan.route, result.plan.compared) == ("place", True)
            check(target, disk, tmp_path)
            assert result.changes is not None
            assert result.changes.compared == SIZE
            assert result.changes.differed <= result.changes.written < 2 * MIB
            assert bool(result.changes.written) is not again


def test_delta_is_applied_to_no_other_disk(machine: machines.Machine, tmp_path: Path) -> None:
    target = tmp_path / "disk.img"
    with pytest.raises(errors.TargetError, match="no disk of an earlier stage"):
        cdi_worker.run(machine.request(target, "two", "one"))
    cdi_worker.run(machine.request(target, "one"))
    with pytest.raises(errors.TargetError, match="holds the disk at checkpoint one, the delta is from two"):
        cdi_worker.run(machine.request(target, "three", "two"))
    check(target, ONE, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_delta_that_was_stopped_is_only_applied_again(
    machine: machines.Machine, target: Path, tmp_path: Path, number: signal.Signals
) -> None:
    cdi_worker.run(machine.request(target, "one"))
    machine.tell(slow="")
    is_device = target.is_block_device()
    changing = target if is_device else target.with_name("disk.img.changing")

    def is_changed() -> bool:
        with changing.open("rb") as file:
            return os.pread(file.fileno(), 5000, 3 * MIB + 100) == b"x" * 5000

    wanted = machine.request(target, "two", "one")
    kills.kill(wanted, lambda: changing.exists() and is_changed(), number, before=machines.REGISTERED)
    machine.tell(slow=None)
    if not is_device:  # a device has no place for a checkpoint
        assert not target.exists()
        for other in (("three", "two"), ("three", "one")):
            with pytest.raises(errors.TargetError, match="with a part of the delta to two"):
                cdi_worker.run(machine.request(target, *other))
    assert cdi_worker.run(wanted).changes.differed > 0
    check(target, TWO, tmp_path)
    cdi_worker.run(machine.request(target, "three", "two"))
    check(target, THREE, tmp_path)


@devices.on("block512")
def test_delta_over_a_first_stage_that_was_killed_zeroes_the_rest(
    machine: machines.Machine, target: Path, tmp_path: Path
) -> None:
    """A later stage of changes may not know by how much the disk has grown."""
    machine.tell(slow="")
    wanted = machine.request(target, "one")
    kills.kill(wanted, lambda: kills.noted(target) > 2 * MIB, before=machines.REGISTERED)
    machine.tell(slow=None)
    cdi_worker.run(machine.request(target, "two", "one"))
    check(target, TWO, tmp_path)


@pytest.mark.parametrize("target", ["file", "block4096"], indirect=True)
def test_kills_at_random_moments_of_a_delta(
    machine: machines.Machine, target: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    for moment in kills.moments(pytestconfig):
        cdi_worker.run(machine.request(target, "one"))
        wanted = machine.request(target, "two", "one")
        kills.after(moment, wanted, before=machines.REGISTERED)
        cdi_worker.run(wanted)
        check(target, TWO, tmp_path)


def test_disk_that_grows_and_shrinks_between_stages(
    machine: machines.Machine, target: Path, tmp_path: Path
) -> None:
    machine.take("one", ONE[: 8 * MIB])
    cdi_worker.run(machine.request(target, "one", image_size=SIZE))
    cdi_worker.run(machine.request(target, "two", "one"))
    check(target, TWO, tmp_path)
    machine.take("three", THREE[: 6 * MIB])
    cdi_worker.run(machine.request(target, "three", "two"))
    check(target, THREE[: 6 * MIB], tmp_path)
    if not target.is_block_device():
        assert target.stat().st_size == SIZE
    # In its new space it has only what was written since.
    machine.take("four", THREE[: 6 * MIB] + bytes(4 * MIB) + b"new" + bytes(2 * MIB - 3))
    cdi_worker.run(machine.request(target, "four", "three"))
    check(target, THREE[: 6 * MIB] + bytes(4 * MIB) + b"new", tmp_path)


def test_delta_needs_no_room_for_another_disk(machine: machines.Machine, tmp_path: Path) -> None:
    """As in a volume that is as large as its disk."""
    with devices.filesystem("ext4", tmp_path) as point:
        target = point / "disk.img"
        cdi_worker.run(machine.request(target, "one"))
        room = os.statvfs(point)
        devices.fill(point / "others", room.f_bavail * room.f_frsize - 6 * MIB)
        cdi_worker.run(machine.request(target, "two", "one"))
        check(target, TWO, tmp_path)


def test_delta_is_compared_with_storage(machine: machines.Machine, tmp_path: Path) -> None:
    """Not with the page cache: another machine may have written to a shared device."""
    backing = devices.fill(tmp_path / "backing", 16 * MIB)
    with devices.attached(backing) as device, device.open("rb"):
        cdi_worker.run(machine.request(device, "one"))
        assert device.read_bytes()[:SIZE] == ONE
        devices.change(backing, 9 * MIB, b"of another machine")
        cdi_worker.run(machine.request(device, "two", "one"))
        processes.run("blockdev", "--flushbufs", device)
        check(device, TWO, tmp_path)


def test_disk_that_has_become_larger_than_the_target_is_refused(
    machine: machines.Machine, tmp_path: Path
) -> None:
    target = tmp_path / "disk.img"
    cdi_worker.run(machine.request(target, "one"))
    machine.take("two", TWO + bytes(MIB))
    with pytest.raises(errors.TooLarge):
        cdi_worker.run(machine.request(target, "two", "one"))
    check(target, ONE, tmp_path)


def test_disk_of_another_size_than_the_protocol_states_is_refused(
    machine: machines.Machine, tmp_path: Path
) -> None:
    target = tmp_path / "disk.img"
    cdi_worker.run(machine.request(target, "one"))
    machine.tell(stated=SIZE + MIB)
    with pytest.raises(errors.Refused, match=f"a disk of {SIZE + MIB} bytes is stated, this one has {SIZE}"):
        cdi_worker.run(machine.request(target, "two", "one"))
    check(target, ONE, tmp_path)


def test_stage_whose_tables_cannot_be_followed_goes_through_scratch(
    machine: machines.Machine, target: Path, tmp_path: Path, scratch: Path
) -> None:
    machine.tell(scratch="")
    cdi_worker.run(machine.request(target, "one", scratch=str(scratch)))
    result = cdi_worker.run(machine.request(target, "two", "one", scratch=str(scratch)))
    assert (result.plan.route, result.plan.compared) == ("spool", True)
    assert result.changes is not None
    # The start of a device is written in any case.
    assert 0 < result.changes.written < 3 * MIB
    check(target, TWO, tmp_path)
    assert not [*scratch.iterdir()]


def test_stage_is_compared_with_the_whole_disk(machine: machines.Machine, tmp_path: Path) -> None:
    """Also with what the delta has not changed."""
    target = tmp_path / "disk.img"
    for stage in (("one", ""), ("two", "one")):
        cdi_worker.run(machine.request(target, *stage))
        assert verification.verify(machine.request(target, *stage)).is_equal
    devices.change(target, 9 * MIB, b"lost")
    found = verification.verify(machine.request(target, "two", "one"))
    assert (found.first, found.is_equal) == (9 * MIB, False)
    assert target.read_bytes()[9 * MIB :].startswith(b"lost")


@pytest.mark.parametrize("target", ["file", "block4096"], indirect=True)
def test_export_with_other_bytes_continues_what_a_killed_run_has_written(
    machine: machines.Machine, target: Path, tmp_path: Path
) -> None:
    """The first stage. Each export is compressed anew; the identity is that of the disk."""
    machine.tell(slow="", level=9)
    wanted = machine.request(target, "one")
    status = kills.kill(wanted, lambda: kills.noted(target) > 2 * MIB, before=machines.REGISTERED)
    assert status == -signal.SIGKILL
    noted = kills.noted(target)
    machine.tell(slow=None, level=1)
    result = cdi_worker.run(wanted)
    assert result.resumed > 0
    assert (result.refetched, result.written <= 8 * MIB - noted) == (0, True)
    check(target, ONE, tmp_path)
