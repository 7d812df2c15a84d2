"""Warm migration from VMware by export leases: after each stage the target is what the snapshot holds.

vcsim is the real one, with leases of ours; the host behind them is ours, too. VDDK is not needed.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyVmomi")

import cdi_worker
from cdi_worker import errors
from tests.end_to_end import test_memory
from tests.support import devices, leases, limits, oracle, processes, vmware, vmware_stages, worker

MiB = vmware_stages.MiB
SIZE, STAGES = vmware_stages.SIZE, vmware_stages.STAGES
#: Of a machine that is imported as a whole.
DISKS = 4
FORMS = pytest.mark.parametrize("maker", [leases.by_qemu, leases.by_esxi])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vmware.Vcsim]:
    made = vmware_stages.migration(tmp_path_factory.mktemp("vmware"), exports=True)
    with made.running():
        yield made


@pytest.fixture
def vcsim(running: vmware.Vcsim) -> Iterator[vmware.Vcsim]:
    """Return a machine after a migration, as no test has changed it; a test leaves nothing on vSphere."""
    running.reset()
    yield running
    left = vmware_stages.untidy(running)
    running.reset()
    assert not left


target = devices.targets("file", "block512", "block4096", size=SIZE + MiB)


def request(vcsim: vmware.Vcsim, target: Path, stage: int, **changes: Any) -> cdi_worker.Request:
    return vmware_stages.exported(vcsim, target, stage, **changes)


def run(vcsim: vmware.Vcsim, target: Path, stage: int, **changes: Any) -> cdi_worker.Result:
    """Run a stage, and check the target."""
    result = cdi_worker.run(request(vcsim, target, stage, **changes))
    vmware_stages.check(vcsim, target, stage)
    return result


def host(vcsim: vmware.Vcsim) -> leases.Host:
    assert vcsim.host
    return vcsim.host


# -- stages


@FORMS
def test_stages_of_a_migration_reproduce_each_snapshot(
    vcsim: vmware.Vcsim, target: Path, maker: leases.Maker
) -> None:
    host(vcsim).makers = (maker,)
    for stage in range(STAGES):
        result = run(vcsim, target, stage)
        assert result.plan.compared == (stage > 0)
        # As the manifest has it.
        assert result.verified["export of Hard disk 1"].startswith("sha256:")
    # The last two sectors, and the second: what differs is written, of all that is read.
    assert result.written <= 8192
    assert result.read == host(vcsim).stream(vcsim.snapshot(4), 0).stat().st_size
    assert not vcsim.calls("QueryChangedDiskAreas", "CreateSnapshot_Task", "RemoveSnapshot_Task")
    assert [each["why"] for each in vcsim.calls("ended")] == ["completed"] * STAGES


def test_stages_of_another_disk_of_the_machine(tmp_path: Path) -> None:
    """VSphere lists it first, and on another controller. Its change ids are its own."""
    vcsim = vmware.Vcsim(tmp_path / "vcsim", MiB, more=[8 * MiB], exports=True)
    target = tmp_path / "disk.img"
    for stage in range(2):
        vcsim.write((stage * 4096, vmware_stages.noise(stage, 70_000)), disk=1)
        vcsim.take_snapshot()
    with vcsim.running():
        for stage in range(2):
            made = dataclasses.replace(request(vcsim, target, stage), disk="Hard disk 2")
            result = cdi_worker.run(made)
            oracle.same(target, vcsim.content(stage, 1))
        assert result.verified.keys() == {"export of Hard disk 2"}
        assert not host(vcsim).requested(0)


def test_stages_by_vddk_and_by_lease_follow_each_other(vcsim: vmware.Vcsim, target: Path) -> None:
    """A checkpoint has the same name for both."""
    vmware.need()
    for stage in range(STAGES):
        read_by = "lease" if stage % 2 else "vddk"
        cdi_worker.run(vmware_stages.request(vcsim, target, stage, read_by=read_by))
        vmware_stages.check(vcsim, target, stage)
    assert len(vcsim.calls("ExportSnapshot")) == STAGES // 2


@devices.on("file", "block512")
def test_delta_by_change_id_of_a_deleted_snapshot(tmp_path: Path, target: Path) -> None:
    vcsim = vmware_stages.migration(tmp_path / "vcsim", exports=True)
    with vcsim.running():
        run(vcsim, target, 1, previous="")
    vcsim.deleted = {0, 1}
    # vcsim reads which snapshots there are when it starts.
    with vcsim.running():
        result = run(vcsim, target, 3, previous=vcsim.change_id(1))
        with pytest.raises(errors.Unreachable, match=f"no snapshot {vcsim.snapshot(1)!r}"):
            cdi_worker.run(request(vcsim, target, 1))
    assert result.plan.compared
    assert not vcsim.calls("QueryChangedDiskAreas")


def test_disk_that_grows_between_stages(tmp_path: Path, target: Path) -> None:
    """A device has old data where the disk will be larger; the volume has room for it from the beginning."""
    vcsim = vmware.Vcsim(tmp_path / "vcsim", SIZE // 2, exports=True)
    vcsim.take_snapshot((0, vmware_stages.noise(1, MiB)))
    vcsim.grow(SIZE)
    vcsim.take_snapshot((4096, vmware_stages.noise(2, 4096)), (SIZE * 3 // 4, vmware_stages.noise(3, 70_000)))
    vcsim.take_snapshot((SIZE - 512, b"grown" * 100))
    with vcsim.running():
        for stage in range(3):
            made = request(vcsim, target, stage)
            cdi_worker.run(dataclasses.replace(made, image_size=SIZE) if stage == 0 else made)
            oracle.same(target, vcsim.content(stage), beyond=b"\0" if stage or target.is_file() else None)
        cdi_worker.run(dataclasses.replace(request(vcsim, target, 0), image_size=SIZE))
    # Again, by the change id of a snapshot that is gone: of which size the disk was is not known.
    vcsim.deleted = {0}
    with vcsim.running():
        run(vcsim, target, 1, previous=vcsim.change_id(0))


def test_disk_larger_than_the_target_is_refused_before_a_byte(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    """Only a first stage grows a disk. What the earlier stage has left is not touched."""
    target = tmp_path / "disk.img"
    devices.fill(target, SIZE - 512)
    with pytest.raises(errors.TooLarge):
        cdi_worker.run(request(vcsim, target, 1))
    assert target.read_bytes() == devices.DIRT * (SIZE - 512)


# -- changed block tracking is not needed


@devices.on("file", "block512")
@pytest.mark.parametrize("since", [0, 2])
def test_stages_without_changed_block_tracking(
    tmp_path: Path, target: Path, since: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was never on, or was reset as by a crash of the host: later change ids are of another epoch."""
    vcsim = vmware_stages.migration(tmp_path / "vcsim", exports=True)
    vcsim.tracks, earlier = bool(since), vcsim.change_id

    def change_id(number: int, disk: int = 0) -> str:
        return ("ff " if number >= since else "") + earlier(number, disk)

    monkeypatch.setattr(vcsim, "change_id", change_id)
    with vcsim.running():
        for stage in range(STAGES):
            run(vcsim, target, stage)
        if target.is_file():
            name = vcsim.change_id(4) if since else vcsim.snapshot(4)
            with pytest.raises(errors.TargetError, match=f"holds the disk at checkpoint.* {name}"):
                cdi_worker.run(request(vcsim, target, 1))
    assert not vcsim.calls("QueryChangedDiskAreas")


def test_what_tracking_does_not_know_is_found(vcsim: vmware.Vcsim, target: Path) -> None:
    """Changed behind its back, on the source or on the target: all of the disk is compared."""
    vcsim.listed = []
    vcsim.save()
    run(vcsim, target, 3, previous="")
    with target.open("r+b") as out:
        out.seek(7 * MiB)
        out.write(b"written by a guest that was started")
    result = run(vcsim, target, 4)
    assert result.changes is not None
    assert result.changes.differed > 8192


# -- what a stage is applied to


def test_delta_needs_the_previous_stage(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    with pytest.raises(errors.TargetError, match="no disk of an earlier stage"):
        cdi_worker.run(request(vcsim, tmp_path / "disk.img", 1))
    # Looked at, not read. The rest has waited in sockets.
    assert sum(each.sent for each in host(vcsim).requests) < SIZE // 4


@devices.on("file")
def test_stage_is_not_applied_to_another_checkpoint(vcsim: vmware.Vcsim, target: Path) -> None:
    run(vcsim, target, 0)
    for previous in ("snapshot-12", "stage 1", vcsim.change_id(1)):
        with pytest.raises(errors.TargetError, match=f"holds the disk at checkpoint {vcsim.change_id(0)},"):
            cdi_worker.run(request(vcsim, target, 2, previous=previous))
    vmware_stages.check(vcsim, target, 0)
    run(vcsim, target, 1, previous=vcsim.change_id(0))
    # The same one again.
    for _ in range(2):
        run(vcsim, target, 2, previous="stage 1")


def test_stage_is_not_applied_to_another_disk(
    vcsim: vmware.Vcsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshots of all disks of a machine have one reference; on other hosts they have the same, too."""
    target = tmp_path / "disk.img"
    run(vcsim, target, 0)
    monkeypatch.setattr(vmware, "CHANGE_ID", vmware.CHANGE_ID.replace("52 de", "52 df"))
    other = vmware_stages.migration(tmp_path / "other", exports=True)
    with other.running(), pytest.raises(errors.TargetError, match=r"holds the disk at checkpoint 52 de"):
        cdi_worker.run(request(other, target, 1))
    monkeypatch.undo()
    vmware_stages.check(vcsim, target, 0)


def test_unfinished_delta_is_only_applied_again(vcsim: vmware.Vcsim, target: Path) -> None:
    """Its stream is cut each time, when a part of the disk was changed. A device knows no checkpoints."""
    run(vcsim, target, 0)
    size = host(vcsim).stream(vcsim.snapshot(1), 0).stat().st_size
    host(vcsim).page = dataclasses.replace(leases.PAGE, cut=size // 2)
    with pytest.raises(errors.TransferFailed, match="connection broke"):
        cdi_worker.run(request(vcsim, target, 1))
    host(vcsim).page = leases.PAGE
    for previous, current in ((0, 2), (1, 2)):
        changes = {"previous": vcsim.snapshot(previous), "current": vcsim.snapshot(current)}
        if target.is_block_device():
            # All of the disk is read.
            run(vcsim, target, 2, **changes)
            continue
        with pytest.raises(errors.TargetError, match=r"with a part of the delta to "):
            cdi_worker.run(request(vcsim, target, 2, **changes))
    run(vcsim, target, 1)
    run(vcsim, target, 2)


# -- faults in the middle of a delta


def test_wrong_manifest_of_a_delta_is_no_checkpoint(vcsim: vmware.Vcsim, target: Path) -> None:
    """What was written is right or not: only the same stage may follow."""
    run(vcsim, target, 0)
    host(vcsim).state = lambda _, entry: {**entry, "SHA256": "0" * 64}
    with pytest.raises(errors.DigestMismatch):
        cdi_worker.run(request(vcsim, target, 1))
    host(vcsim).state = None
    if target.is_file():
        oracle.unusable(target)
        with pytest.raises(errors.TargetError, match="with a part of the delta to"):
            cdi_worker.run(request(vcsim, target, 2))
    run(vcsim, target, 1)


@pytest.mark.parametrize("bytes_change", [False, True])
@pytest.mark.parametrize(
    "fault",
    [{"cut": 3 * MiB}, {"stall": 3 * MiB}, {"status": 503, "framing": "length"}, {"silent": True}],
    ids=["cut", "stall", "503", "silent"],
)
def test_delta_goes_on_after_a_fault(
    vcsim: vmware.Vcsim, tmp_path: Path, fault: dict[str, Any], bytes_change: bool
) -> None:
    """By another request of the same lease, for which the host may export the disk again."""

    def renamed(_: int, number: int, stream: bytes) -> bytes:
        at = stream.index(b"CID=") + 4
        return stream[:at] + b"%08x" % (number + 1) + stream[at + 8 :]

    target = tmp_path / "disk.img"
    run(vcsim, target, 0)
    host(vcsim).change = renamed if bytes_change else None
    # The first answer in each lease.
    host(vcsim).turns[0] = [(dataclasses.replace(leases.PAGE, **fault), 1)]
    made = request(vcsim, target, 1)
    access = dataclasses.replace(made.location.access, patience=0.5)
    location = dataclasses.replace(made.location, access=access)
    fetch = dataclasses.replace(made.fetch, no_progress=3)
    cdi_worker.run(dataclasses.replace(made, location=location, fetch=fetch, connect_patience=3))
    vmware_stages.check(vcsim, target, 1)
    assert len(vcsim.calls("ExportSnapshot")) == 2
    assert len(host(vcsim).requested(0)) >= 3
    host(vcsim).turns.clear()
    run(vcsim, target, 2)


def test_lease_that_ends_in_a_delta(vcsim: vmware.Vcsim, target: Path) -> None:
    """Another client ends it when a part of the disk was changed."""
    run(vcsim, target, 0)
    host(vcsim).page = dataclasses.replace(leases.PAGE, drip=(64 << 10, 0.01))
    before = sum(each.sent for each in host(vcsim).requested(0))

    def end() -> None:
        processes.wait_for(
            lambda: sum(each.sent for each in host(vcsim).requested(0)) - before > 4 * MiB, "a part"
        )
        vcsim.lease = {"Ends": "error"}
        vcsim.save()

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(errors.TransferFailed, match="the lease ended"):
        cdi_worker.run(request(vcsim, target, 1))
    ending.join()
    vcsim.lease = {}
    vcsim.save()
    host(vcsim).page = leases.PAGE
    run(vcsim, target, 1)


@FORMS
@pytest.mark.parametrize("power", ["poweredOn", "poweredOff"])
def test_qcow2_file_holds_the_disk_of_the_machine(
    vcsim: vmware.Vcsim, tmp_path: Path, power: str, maker: leases.Maker
) -> None:
    pytest.importorskip("nbd")
    host(vcsim).makers = (maker,)
    vcsim.power = power
    vcsim.save()
    target, guest = tmp_path / "disk.qcow2", tmp_path / "guest"
    made = request(vcsim, target, 0, previous="", current="")
    result = cdi_worker.run(dataclasses.replace(made, format="qcow2"))
    processes.run("qemu-img", "check", "-q", "-f", "qcow2", target)
    processes.run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", target, guest)
    oracle.same(guest, vcsim.current())
    assert result.verified
    assert len(vcsim.calls("created")) == (power == "poweredOn")


# -- memory


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vmware.Vcsim]:
    """Return a machine whose disks have together more data, also in each change, than a worker has memory."""
    size, data = vmware_stages.GiB // 2, test_memory.DATA // DISKS
    made = vmware.Vcsim(tmp_path_factory.mktemp("large"), size, more=[size] * (DISKS - 1), exports=True)
    for stage in range(2):
        for disk in range(DISKS):
            part = vmware_stages.noise(10 * stage + disk, data // 8)
            for at in range(8):
                made.write((stage * data // 4 + at * len(part), part), disk=disk)
        made.take_snapshot()
    with made.running():
        yield made


def test_stages_on_slow_storage_stay_below_the_memory_limit(large: vmware.Vcsim, tmp_path: Path) -> None:
    """All disks at once; what differs is found by reading what is there."""
    with (
        devices.slow(tmp_path, 3 * vmware_stages.GiB, bytes_per_second=40 * MiB) as device,
        devices.mounted("ext4", device, tmp_path / "volume") as volume,
        limits.cgroup(memory=test_memory.MEMORY, cpus=0.75) as group,
    ):
        for stage in range(2):
            options = [f"--current-checkpoint={large.snapshot(stage)}", "--thumbprint", large.thumbprint]
            if stage:
                options.append(f"--previous-checkpoint={large.snapshot(stage - 1)}")
            url = f"vsphere://localhost:{large.port}/{vmware.INSTANCE_UUID}"
            env = {"GOVC_USERNAME": vmware.USER, "GOVC_PASSWORD": large.password}
            done = worker.run("import", "--all", *options, url, volume, env=env, prefix=group.prefix)
            assert done.status == 0, done.errors
            for disk in range(DISKS):
                oracle.same(
                    volume / large.content(0, disk).with_suffix(".img").name, large.content(stage, disk)
                )
        assert group.killed() == 0
        assert group.peak() <= test_memory.MEMORY
    assert large.host
    assert large.host.busiest == DISKS
