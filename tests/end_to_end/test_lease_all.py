"""All disks of a machine by one export lease: at the same time, and usable together or not at all."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyVmomi")

import cdi_worker
from cdi_worker import errors
from cdi_worker.importer import together
from tests.support import devices, kills, leases, oracle, processes, vmdk_stream, vmware, worker

MiB = 1 << 20
SIZES = (16 * MiB, MiB, 8 * MiB, 12 * MiB)
NAMES = ("disk.img", "disk_1.img", "disk_2.img", "disk_3.img")
#: Lets ``kills`` run all disks.
ALL = "import cdi_worker; from cdi_worker.importer import together; cdi_worker.run = together.run_all"
#: The number of the disks after the last snapshot.
NOW = 3
#: A journal that is saved after each write.
OPTIONS = {"journal_interval": 0.0}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vmware.Vcsim]:
    made = vmware.Vcsim(tmp_path_factory.mktemp("leases"), SIZES[0], more=SIZES[1:], exports=True)
    dice = random.Random(51)
    for disk, size in enumerate(SIZES):
        made.write((4096, dice.randbytes(size // 2)), disk=disk)
    made.take_snapshot()
    for disk in range(len(SIZES)):
        made.write((8192, b"later, of disk %d" % disk), (256 << 10, 64 << 10), disk=disk)
    made.take_snapshot()
    made.take_snapshot((MiB, b"of the last snapshot"))
    made.write((MiB, b"after all snapshots"))
    with made.running():
        yield made


@pytest.fixture
def vcsim(running: vmware.Vcsim) -> Iterator[vmware.Vcsim]:
    yield running
    running.reset()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "disks"
    made.mkdir()
    return made


def host(vcsim: vmware.Vcsim) -> leases.Host:
    assert vcsim.host is not None
    return vcsim.host


def request(
    vcsim: vmware.Vcsim, folder: Path, options: dict[str, object] | None = None, **fields: str
) -> cdi_worker.Request:
    """Return the request for the machine; ``fields``: of the location."""
    where = vcsim.machine(**fields)
    return cdi_worker.Request(
        source="vsphere", location=where, target=str(folder), **{**OPTIONS, **(options or {})}
    )


def check(vcsim: vmware.Vcsim, folder: Path, number: int) -> None:
    """Check that the folder has the disks of a snapshot and nothing else, and vSphere nothing of ours."""
    assert sorted(os.listdir(folder)) == sorted(NAMES)
    for disk, name in enumerate(NAMES):
        oracle.same(folder / name, vcsim.content(number, disk))
    check_left(vcsim)


def check_left(vcsim: vmware.Vcsim) -> None:
    """Check that no lease is held, and no snapshot is left."""
    assert len(vcsim.calls("lease")) == len(vcsim.calls("ended"))
    # While a lease is held, vSphere refuses to remove its snapshot.
    assert len(vcsim.calls("CreateSnapshot_Task")) <= len(vcsim.calls("RemoveSnapshot_Task"))


@pytest.mark.parametrize("maker", [leases.by_qemu, leases.by_esxi])
def test_four_disks_of_a_running_machine_are_read_at_once(
    vcsim: vmware.Vcsim, folder: Path, maker: leases.Maker
) -> None:
    host(vcsim).makers = (maker,)
    host(vcsim).page = dataclasses.replace(leases.PAGE, drip=(MiB, 0.1))
    results = together.run_all(request(vcsim, folder))
    check(vcsim, folder, NOW)
    # A response that has ended may still count.
    assert host(vcsim).busiest >= len(SIZES)
    assert [len(host(vcsim).requested(disk)) for disk in range(len(SIZES))] == [1] * len(SIZES)
    assert [Path(each.target).name for each in results] == list(NAMES)
    labels = [f"export of Hard disk {disk + 1}" for disk in range(len(SIZES))]
    assert all(sorted(each.verified) == labels for each in results)
    assert all("export lease" in each.vddk_info["Version"] for each in results)
    called = [each["call"] for each in vcsim.calls()]
    ends = ["HttpNfcLeaseGetManifest", "HttpNfcLeaseComplete", "RemoveSnapshot_Task"]
    assert [call for call in called if call in ends] == ends


def test_stages_of_all_disks(vcsim: vmware.Vcsim, folder: Path) -> None:
    """Only what differs is written."""
    together.run_all(request(vcsim, folder, **vcsim.stage(0)))
    check(vcsim, folder, 0)
    with pytest.raises(errors.TargetError, match="run the stages in order"):
        together.run_all(request(vcsim, folder, **vcsim.stage(2)))
    results = together.run_all(request(vcsim, folder, **vcsim.stage(1)))
    check(vcsim, folder, 1)
    assert all(each.written <= 3 * 64 * 1024 for each in results), [each.written for each in results]


def test_stage_of_which_one_disk_is_wrong_is_run_again(vcsim: vmware.Vcsim, folder: Path) -> None:
    """Nothing says that a disk of it is at the new checkpoint: no later stage may begin there."""
    together.run_all(request(vcsim, folder, **vcsim.stage(0)))
    host(vcsim).state = lambda disk, entry: {**entry, "SHA256": "0" * 64} if disk == 3 else entry
    with pytest.raises(errors.DigestMismatch):
        together.run_all(request(vcsim, folder, **vcsim.stage(1)))
    refused(vcsim, folder)
    host(vcsim).state = None
    for number in (1, 2):
        together.run_all(request(vcsim, folder, **vcsim.stage(number)))
        check(vcsim, folder, number)


def test_killed_stage_is_run_again(vcsim: vmware.Vcsim, folder: Path) -> None:
    together.run_all(request(vcsim, folder, **vcsim.stage(0)))
    host(vcsim).requests.clear()
    host(vcsim).page = dataclasses.replace(leases.PAGE, drip=(256 << 10, 0.02), stall_at=5 * MiB)
    with kills.started(request(vcsim, folder, **vcsim.stage(1)), before=ALL) as run:
        large = [disk for disk, size in enumerate(SIZES) if size > 10 * MiB]
        processes.wait_for(
            lambda: all(each and each[-1].sent >= 5 * MiB for each in map(host(vcsim).requested, large)),
            "the streams",
        )
        run.kill()
        run.wait(processes.PATIENCE)
    end_lease(vcsim)
    host(vcsim).page = leases.PAGE
    refused(vcsim, folder)
    for number in (1, 2):
        together.run_all(request(vcsim, folder, **vcsim.stage(number)))
        check(vcsim, folder, number)


def refused(vcsim: vmware.Vcsim, folder: Path) -> None:
    """Check that no disk is at the checkpoint of the second stage, and the third is applied to none."""
    for disk, name in enumerate(NAMES):
        asked = request(vcsim, folder / name, {"disk": str(disk + 1)}, **vcsim.stage(2))
        with pytest.raises(errors.TargetError, match="run the stages in order"):
            cdi_worker.run(asked)


def end_lease(vcsim: vmware.Vcsim) -> None:
    """End the lease of a killed run, as its time does."""
    vcsim.lease = {"Ends": "error"}
    vcsim.save()
    count = len(vcsim.calls("lease"))
    processes.wait_for(lambda: len(vcsim.calls("ended")) == count, "the lease of the killed")
    vcsim.lease = {}
    vcsim.save()


def test_wrong_stream_of_one_disk_makes_none_usable(vcsim: vmware.Vcsim, folder: Path) -> None:
    def state(disk: int, entry: dict[str, object]) -> dict[str, object]:
        wrong = {"SHA1": "0" * 40, "SHA256": "0" * 64} if disk == 1 else {}
        return {**entry, **wrong}

    host(vcsim).state = state
    with pytest.raises(errors.DigestMismatch):
        together.run_all(request(vcsim, folder))
    assert os.listdir(folder) == []
    check_left(vcsim)
    host(vcsim).state = None
    together.run_all(request(vcsim, folder))
    check(vcsim, folder, NOW)


def test_lost_lease_ends_all_disks(vcsim: vmware.Vcsim, folder: Path) -> None:
    """Another client ends it, while each disk has sent a part."""
    host(vcsim).page = dataclasses.replace(leases.PAGE, drip=(16 << 10, 0.05))
    with worker.started(*command(vcsim, folder)) as run:
        processes.wait_for(lambda: sent(vcsim) == len(SIZES), "the streams")
        vcsim.lease = {"Ends": "error"}
        vcsim.save()
        began = time.monotonic()
        _, said = run.communicate(timeout=processes.PATIENCE)
    assert run.returncode != 0
    assert "the lease ended" in said
    assert time.monotonic() - began < 20
    assert not [name for name in os.listdir(folder) if name.endswith(".img")]
    assert len(vcsim.calls("CreateSnapshot_Task")) == len(vcsim.calls("RemoveSnapshot_Task")) == 1


def sent(vcsim: vmware.Vcsim) -> int:
    """Return how many disks have sent a part."""
    return sum(each.sent > 256 << 10 for each in host(vcsim).requests)


def command(vcsim: vmware.Vcsim, folder: Path, *options: str) -> list[str]:
    secret = folder.parent / "password"
    secret.write_text(vcsim.password)
    where = ["--source=vsphere", f"--uuid={vmware.INSTANCE_UUID}", f"--thumbprint={vcsim.thumbprint}"]
    login = [f"--user={vmware.USER}", f"--password-file={secret}"]
    return ["import", "--all", *where, *login, *options, f"https://localhost:{vcsim.port}/sdk", str(folder)]


#: At least so many bytes of a large disk are noted before the kill.
NOTED = 2 * MiB


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_same_command_continues_each_disk(vcsim: vmware.Vcsim, folder: Path, number: int) -> None:
    """The second lease has other bytes for the same disks."""
    large = [disk for disk, size in enumerate(SIZES) if size > 10 * MiB]
    host(vcsim).makers = (leases.by_qemu, leases.by_esxi)
    host(vcsim).page = dataclasses.replace(leases.PAGE, drip=(128 << 10, 0.02), stall_at=5 * MiB)
    asked = request(vcsim, folder, current=vcsim.snapshot(0))
    with kills.started(asked, before=ALL) as run:
        processes.wait_for(lambda: min(kills.noted(folder / NAMES[each]) for each in large) >= NOTED, "noted")
        run.send_signal(number)
        assert run.wait(processes.PATIENCE) != 0
    assert not [name for name in os.listdir(folder) if name.endswith(".img")]
    if number == signal.SIGTERM:
        check_left(vcsim)
    else:
        end_lease(vcsim)
    host(vcsim).page = leases.PAGE
    results = together.run_all(asked)
    check(vcsim, folder, 0)
    for disk in large:
        assert results[disk].resumed >= NOTED
        assert results[disk].written <= SIZES[disk] // 2 - NOTED + 64 * 1024


def test_verify_compares_all_disks(vcsim: vmware.Vcsim, folder: Path) -> None:
    asked = request(vcsim, folder, current=vcsim.snapshot(1))
    together.run_all(asked)
    assert all(each.is_equal for each in together.verify_all(asked))
    devices.change(folder / NAMES[2], MiB, b"other")
    # The second request of a disk has other bytes, as of another export.
    host(vcsim).makers = (leases.by_esxi, leases.by_qemu)
    found = together.verify_all(asked)
    assert [each.is_equal for each in found] == [True, True, False, True]
    assert found[2].first == MiB
    check_left(vcsim)


def test_disks_are_listed_and_chosen(vcsim: vmware.Vcsim, folder: Path, tmp_path: Path) -> None:
    vcsim.power = "poweredOff"
    vcsim.save()
    with pytest.raises(errors.Refused) as caught:
        cdi_worker.run(request(vcsim, tmp_path / "disk.img"))
    first = f"1 Hard disk 1 ({vcsim.file(NOW)}, 2000, {SIZES[0]} bytes), 2 Hard disk 2 ("
    assert f"holds {len(SIZES)} disks: {first}" in str(caught.value)
    check_left(vcsim)
    for number, choice in enumerate(("1", "Hard disk 2", "2002", vcsim.file(NOW, 3))):
        target = tmp_path / f"{number}.img"
        cdi_worker.run(request(vcsim, target, {"disk": choice}))
        oracle.same(target, vcsim.content(NOW, number))
    check_left(vcsim)


def test_disk_without_a_snapshot_is_not_left_out(vcsim: vmware.Vcsim, folder: Path) -> None:
    """Of a running machine, an independent disk cannot be exported: then all are not all."""
    vcsim.independent = {2}
    vcsim.save()
    with pytest.raises(errors.Unsupported, match=r"disk 'Hard disk 3' is independent of snapshots; power"):
        together.run_all(request(vcsim, folder))
    assert os.listdir(folder) == []
    check_left(vcsim)
    for choice in ("Hard disk 4", "Hard disk 2"):
        cdi_worker.run(request(vcsim, folder / f"{choice}.img", {"disk": choice}))
    oracle.same(folder / "Hard disk 4.img", vcsim.content(NOW, 3))
    oracle.same(folder / "Hard disk 2.img", vcsim.content(NOW, 1))
    vcsim.power = "poweredOff"
    vcsim.save()
    (folder / "all").mkdir()
    together.run_all(request(vcsim, folder / "all"))
    check(vcsim, folder / "all", NOW)


def test_machine_without_disks_is_refused(
    vcsim: vmware.Vcsim, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vcsim, "count", 0)
    vcsim.save()
    with pytest.raises(errors.SourceError, match="the machine has no disk"):
        together.run_all(request(vcsim, folder))
    monkeypatch.undo()


def test_two_runs_at_once_disturb_neither(vcsim: vmware.Vcsim, folder: Path) -> None:
    """The second waits for the machine, and then finds the disks of the first."""
    host(vcsim).page = dataclasses.replace(leases.PAGE, drip=(MiB, 0.3))
    with worker.started(*command(vcsim, folder)) as first:
        processes.wait_for(lambda: sent(vcsim) == len(SIZES), "the streams")
        with worker.started(*command(vcsim, folder)) as second:
            _, said = first.communicate(timeout=processes.PATIENCE)
            assert first.returncode == 0, said
            host(vcsim).page = leases.PAGE
            _, said = second.communicate(timeout=2 * processes.PATIENCE)
    assert second.returncode != 0
    assert "exists" in said
    check(vcsim, folder, NOW)


def test_update_of_all_disks(vcsim: vmware.Vcsim, folder: Path) -> None:
    """What differs is written; a disk is not usable again before all are verified."""
    together.run_all(request(vcsim, folder, current=vcsim.snapshot(0)))
    update: dict[str, object] = {"existing": "update"}
    host(vcsim).state = lambda disk, entry: {**entry, "SHA256": "0" * 64} if disk == 3 else entry
    with pytest.raises(errors.DigestMismatch):
        together.run_all(request(vcsim, folder, update))
    assert sorted(os.listdir(folder)) == [f"{name}.changing" for name in sorted(NAMES)]
    host(vcsim).state = None
    results = together.run_all(request(vcsim, folder, update))
    check(vcsim, folder, NOW)
    assert all(each.changes is not None and each.changes.written <= MiB for each in results)


def test_cut_stream_of_one_disk_begins_again(vcsim: vmware.Vcsim, folder: Path) -> None:
    """The host compresses it in another way then; the other disks are not read again."""
    again = vmdk_stream.streamed(vcsim.content(2, 3).read_bytes(), level=6)
    host(vcsim).makers = (leases.by_esxi,)
    host(vcsim).turns = {3: [(dataclasses.replace(leases.PAGE, cut=4 * MiB), 1)]}
    host(vcsim).change = lambda disk, number, data: again if (disk, number > 0) == (3, True) else data
    together.run_all(request(vcsim, folder, current=vcsim.snapshot(2)))
    for disk, name in enumerate(NAMES):
        oracle.same(folder / name, vcsim.content(2, disk))
    assert [len(host(vcsim).requested(disk)) > 1 for disk in range(4)] == [False, False, False, True]
    check_left(vcsim)
