"""Warm migration from VMware, stage by stage: after each the target is what the snapshot holds.

vcsim, nbdkit and its vddk plugin are the real ones; the VDDK library is a stand-in.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.targets import checkpoint
from tests.support import devices, meters, oracle, vmware, vmware_stages, worker

pytest.importorskip("pyVmomi")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vmware.Vcsim]:
    made = vmware_stages.migration(tmp_path_factory.mktemp("vmware"))
    with made.running():
        yield made


@pytest.fixture
def vcsim(running: vmware.Vcsim) -> vmware.Vcsim:
    """Return a machine after a migration, as no test has changed it."""
    running.reset()
    return running


target = devices.targets("file", "block512", "block4096", size=vmware_stages.SIZE + vmware_stages.MiB)


def test_stages_of_a_migration_reproduce_each_snapshot(vcsim: vmware.Vcsim, target: Path) -> None:
    for stage in range(vmware_stages.STAGES):
        result = cdi_worker.run(vmware_stages.request(vcsim, target, stage))
        assert result.plan.route == ("update" if stage else "extents")
        vmware_stages.check(vcsim, target, stage)
        assert 0 < result.read < vmware_stages.SIZE
    assert result.read <= 4 * vmware.BLOCK
    assert result.vddk_info == {"Version": "8.0.1", "Host": "esx12.test.local"}
    # VDDK needs seconds to list what vSphere knows in milliseconds. nbdkit's plugin finds out by a call
    # whether the library can.
    assert set(_calls(vcsim, "QueryAllocatedBlocks")) == {"QueryAllocatedBlocks 0+128"}


def test_progress_is_that_of_the_allocated_data(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    shown = meters.Totals()
    cdi_worker.run(vmware_stages.request(vcsim, tmp_path / "disk.img", 0), shown)
    assert shown.totals == {shown.moved}
    assert 0 < shown.moved < vmware_stages.SIZE


@pytest.mark.parametrize("target", ["block512"], indirect=True)
def test_delta_by_change_id_of_a_deleted_snapshot(vcsim: vmware.Vcsim, target: Path) -> None:
    vcsim.deleted = {0, 1}
    vcsim.save()
    with target.open("r+b") as out:
        out.write(vcsim.content(1).read_bytes())
    cdi_worker.run(vmware_stages.request(vcsim, target, 3, previous=vcsim.change_id(1)))
    oracle.same(target, vcsim.content(3), beyond=b"\0")


def test_first_stage_grows_the_disk_and_deltas_do_not(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    target = tmp_path / "disk.img"
    for stage in range(2):
        request = vmware_stages.request(vcsim, target, stage)
        cdi_worker.run(dataclasses.replace(request, image_size=40 * vmware_stages.MiB))
        oracle.same(target, vcsim.content(stage))
        assert target.stat().st_size == 40 * vmware_stages.MiB


@pytest.mark.parametrize(
    ("snapshot", "target"),
    [("named", "file"), ("by change id", "block512"), ("deleted", "block4096")],
    indirect=["target"],
)
def test_disk_that_grows_between_stages(tmp_path: Path, target: Path, snapshot: str) -> None:
    """VSphere does not list the new space, and a device has old data there."""
    vcsim = vmware.Vcsim(tmp_path / "vcsim", vmware_stages.SIZE // 2)
    vcsim.take_snapshot((0, vmware_stages.noise(1, vmware_stages.MiB)))
    vcsim.grow(vmware_stages.SIZE)
    vcsim.take_snapshot(
        (4096, vmware_stages.noise(2, 4096)), (vmware_stages.SIZE * 3 // 4, vmware_stages.noise(3, 70_000))
    )
    previous = vcsim.snapshot(0) if snapshot == "named" else vcsim.change_id(0)
    with vcsim.running():
        first = vmware_stages.request(vcsim, target, 0)
        cdi_worker.run(dataclasses.replace(first, image_size=vmware_stages.SIZE))
        if snapshot == "deleted":
            vcsim.deleted = {0}
            vcsim.save()
        for _ in range(2):
            vmware_stages.run(vcsim, target, 1, previous=previous)


def test_full_copy_is_what_vddk_serves(tmp_path: Path) -> None:
    """Also if vSphere states a larger disk, as in CDI. Its list of changes does not cover another size."""
    vcsim, target = vmware_stages.migration(tmp_path / "vcsim"), tmp_path / "disk.img"
    with vcsim.running():
        short = vmware_stages.SIZE - 512
        os.truncate(vcsim.content(0), short)
        assert cdi_worker.run(vmware_stages.request(vcsim, target, 0)).size == short
        oracle.same(target, vcsim.content(0))
        os.truncate(vcsim.content(1), vmware_stages.SIZE + vmware_stages.MiB)
        with pytest.raises(errors.SourceError, match=f"vSphere lists changes of {vmware_stages.SIZE}"):
            cdi_worker.run(vmware_stages.request(vcsim, target, 1))


@pytest.mark.parametrize("target", ["file", "block512"], indirect=True)
def test_delta_to_a_grown_disk_after_another_worker(tmp_path: Path, target: Path) -> None:
    """The first stage was copied by a worker that left old data behind the disk."""
    vcsim = vmware.Vcsim(tmp_path / "vcsim", vmware_stages.SIZE // 2)
    vcsim.take_snapshot((0, vmware_stages.noise(1, vmware_stages.MiB)))
    with target.open("r+b" if target.is_block_device() else "xb") as out:
        out.write(vcsim.content(0).read_bytes())
        if target.is_file():
            out.truncate(vmware_stages.SIZE)
    vcsim.grow(vmware_stages.SIZE)
    vcsim.take_snapshot((4096, vmware_stages.noise(2, 4096)))
    with vcsim.running():
        cdi_worker.run(vmware_stages.request(vcsim, target, 1))
        oracle.same(target, vcsim.content(1), beyond=b"\0")


@pytest.mark.parametrize(
    ("there", "reason"),
    [(None, "no disk of an earlier stage"), (vmware_stages.SIZE - 512, "is larger than the reported")],
)
def test_delta_needs_the_previous_stage(
    vcsim: vmware.Vcsim, tmp_path: Path, there: int | None, reason: str
) -> None:
    target = tmp_path / "disk.img"
    if there is not None:
        devices.fill(target, there)
    with pytest.raises(errors.TargetError, match=reason):
        cdi_worker.run(vmware_stages.request(vcsim, target, 1))


def test_stage_is_not_applied_to_another_checkpoint(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    target = tmp_path / "disk.img"
    for _ in range(2):  # a first stage starts over
        cdi_worker.run(dataclasses.replace(vmware_stages.request(vcsim, target, 0), existing="replace"))
        for previous in ("snapshot-12", "stage 1", vcsim.change_id(1)):
            with pytest.raises(
                errors.TargetError, match=f"holds the disk at checkpoint {vcsim.change_id(0)},"
            ):
                cdi_worker.run(vmware_stages.request(vcsim, target, 2, previous=previous))
        vmware_stages.check(vcsim, target, 0)
        cdi_worker.run(vmware_stages.request(vcsim, target, 1, previous=vcsim.change_id(0)))
        for _ in range(2):
            vmware_stages.run(vcsim, target, 2, previous="stage 1")


def test_stage_is_not_applied_to_another_disk(
    vcsim: vmware.Vcsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshots of all disks of a machine have one reference; on other hosts they have the same, too."""
    target = tmp_path / "disk.img"
    cdi_worker.run(vmware_stages.request(vcsim, target, 0))
    monkeypatch.setattr(vmware, "CHANGE_ID", vmware.CHANGE_ID.replace("52 de", "52 df"))
    other = vmware_stages.migration(tmp_path / "other")
    with (
        other.running(),
        pytest.raises(errors.TargetError, match=r"holds the disk at checkpoint 52 de .*, the delta is from"),
    ):
        cdi_worker.run(vmware_stages.request(other, target, 1))
    monkeypatch.undo()
    vmware_stages.check(vcsim, target, 0)


def test_unfinished_delta_is_only_applied_again(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    target, changing = tmp_path / "disk.img", tmp_path / "disk.img.changing"
    cdi_worker.run(vmware_stages.request(vcsim, target, 0))
    target.rename(changing)
    # As earlier workers wrote it, with the references of snapshots.
    names = [frozenset({vcsim.snapshot(stage), vcsim.change_id(stage)}) for stage in range(2)]
    checkpoint.Checkpoint(*names).write(str(changing))
    for previous, current in ((0, 2), (1, 2)):
        changes = {"previous": vcsim.snapshot(previous), "current": vcsim.snapshot(current)}
        with pytest.raises(errors.TargetError, match=r"with a part of the delta to .*snapshot-12"):
            cdi_worker.run(vmware_stages.request(vcsim, target, 2, **changes))
    vmware_stages.run(vcsim, target, 1)


@pytest.mark.parametrize("target", ["block4096"], indirect=True)
def test_disk_without_known_allocation_is_copied(vcsim: vmware.Vcsim, target: Path) -> None:
    vcsim.settings["fail"] = "qab"
    vcsim.knows_allocated = False
    vcsim.save()
    for stage in range(2):
        vmware_stages.run(vcsim, target, stage)


@pytest.mark.parametrize("stage", [0, 1])
def test_part_whose_allocation_the_host_cannot_list_is_copied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stage: int
) -> None:
    """Hosts fail near the end of large disks. The other parts are read by their extents."""
    size = 2 * vmware_stages.GiB + 16 * vmware_stages.MiB
    vcsim = vmware.Vcsim(tmp_path / "vcsim", size)
    vcsim.knows_allocated = False
    for seed in (1, 2):
        data = vmware_stages.noise(seed, vmware_stages.MiB)
        vcsim.take_snapshot((seed * vmware_stages.MiB, data), (size - seed * 4 * vmware_stages.MiB, data))
    target = tmp_path / "disk.img"
    with vcsim.running():
        for earlier in range(stage):
            cdi_worker.run(vmware_stages.request(vcsim, target, earlier))
        vcsim.settings["fail"] = f"qab@{(size - 8 * vmware_stages.MiB) // 512}"
        vcsim.save()
        result = vmware_stages.run(vcsim, target, stage)
    assert result.read <= (17 if stage == 0 else 2) * vmware_stages.MiB
    assert "no extents at byte" in caplog.text
    assert "VixDiskLib_QueryAllocatedBlocks" in caplog.text


def test_disk_without_snapshot_is_copied(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    target = tmp_path / "disk.img"
    cdi_worker.run(
        vmware_stages.request(vcsim, target, 0, current="", backing_file=vcsim.file(vmware_stages.STAGES))
    )
    vmware_stages.check(vcsim, target, vmware_stages.STAGES)


def test_vcenter_gets_many_short_reads(tmp_path: Path) -> None:
    """Reads of 2 MiB, which a vCenter handles; as many as use the memory of longer ones."""
    vcsim = vmware.Vcsim(tmp_path / "vcsim", 40 * vmware_stages.MiB)
    vcsim.take_snapshot((0, vmware_stages.noise(1, 36 * vmware_stages.MiB)))
    vcsim.settings["delay"] = 300_000
    with vcsim.running():
        vmware_stages.run(vcsim, tmp_path / "disk.img", 0)
    under_way = most = 0
    for call in vcsim.library_calls():
        under_way += call.startswith("Read") - call.startswith("Done")
        most = max(most, under_way)
        if call.startswith("Read"):
            assert int(call.rpartition("+")[2]) * 512 <= 2 * vmware_stages.MiB
    assert 6 < most <= 12
    calls = [call.split()[0] for call in vcsim.library_calls()]
    assert calls.count("Open") == 3


def _calls(vcsim: vmware.Vcsim, name: str) -> list[str]:
    return [call for call in vcsim.library_calls() if call.split()[0] == name]


def test_mounted_configuration_replaces_ours(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    """Ours sets the buffers of asynchronous reads."""
    target, configuration = tmp_path / "disk.img", tmp_path / "configuration"
    cdi_worker.run(vmware_stages.request(vcsim, target, 0))
    assert _calls(vcsim, "Config") == [
        "Config vixDiskLib.nfcAio.Session.BufSizeIn64KB=16",
        "Config vixDiskLib.nfcAio.Session.BufCount=4",
    ]
    vcsim.reset()
    configuration.write_text("vixDiskLib.nfcAio.Session.BufCount=8\n")
    changes = {"vddk_config": str(configuration)}
    cdi_worker.run(vmware_stages.request(vcsim, target, 0, **changes))
    assert _calls(vcsim, "Config") == ["Config vixDiskLib.nfcAio.Session.BufCount=8"]
    configuration.unlink()
    with pytest.raises(errors.RequestError, match=f"{configuration}: no such file"):
        cdi_worker.run(vmware_stages.request(vcsim, target, 0, **changes))


@pytest.mark.parametrize("target", ["block512"], indirect=True)
def test_allocated_areas_that_vsphere_does_not_know_are_those_of_vddk(
    vcsim: vmware.Vcsim, target: Path
) -> None:
    vcsim.knows_allocated = False
    vcsim.save()
    for stage in range(2):
        result = vmware_stages.run(vcsim, target, stage)
        assert 0 < result.read < vmware_stages.SIZE
    assert len(set(_calls(vcsim, "QueryAllocatedBlocks"))) > 1


def test_number_of_sessions_can_be_lowered(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    vcsim.settings["delay"] = 50_000
    vcsim.save()
    vmware_stages.run(vcsim, tmp_path / "disk.img", 0, vddk_connections=1)
    assert len(_calls(vcsim, "Open")) == 1


def test_esxi_host_gets_longer_reads(tmp_path: Path) -> None:
    vcsim = vmware_stages.migration(tmp_path / "vcsim")
    target = tmp_path / "disk.img"
    with vcsim.running("-esx"):
        for stage in range(2):
            vmware_stages.run(vcsim, target, stage)
    assert (
        max(int(call.rpartition("+")[2]) * 512 for call in vcsim.library_calls() if call[:5] == "Read ")
        == 4 * vmware_stages.MiB
    )


# -- many areas, large disks -----------------------------------------------------------------------


def test_lone_sectors_are_read_in_batches(tmp_path: Path) -> None:
    """Also where each session of vSphere ends after one part of the list."""
    target = tmp_path / "disk.img"
    vcsim = vmware.Vcsim(tmp_path / "vcsim", vmware_stages.SIZE)
    vcsim.take_snapshot((0, vmware_stages.noise(1, vmware_stages.MiB)))
    offsets = range(512, vmware_stages.SIZE, 10 * 1024)
    vcsim.take_snapshot(*((offset, vmware_stages.noise(offset, 512)) for offset in offsets))
    vcsim.listed = [(offset, 512) for offset in offsets]
    vcsim.answers = 1
    with vcsim.running():
        cdi_worker.run(vmware_stages.request(vcsim, target, 0))
        before = len(vcsim.library_calls())
        result = vmware_stages.run(vcsim, target, 1)
    calls = [call for call in vcsim.library_calls()[before:] if call.startswith("Read ")]
    assert len(offsets) > 2000
    assert len(calls) < 30
    assert result.read == len(offsets) * 512


def test_disk_larger_than_32_bits_is_copied(tmp_path: Path) -> None:
    size = 9 * vmware_stages.GiB
    edge = 4 * vmware_stages.GiB
    vcsim = vmware.Vcsim(tmp_path / "vcsim", size)
    vcsim.take_snapshot(
        (0, vmware_stages.noise(1, vmware_stages.MiB)),
        (edge - vmware_stages.MiB, vmware_stages.noise(2, 2 * vmware_stages.MiB)),
        (size - vmware_stages.MiB, vmware_stages.noise(3, vmware_stages.MiB)),
    )
    vcsim.take_snapshot(
        (edge - vmware.BLOCK, vmware_stages.noise(4, 2 * vmware.BLOCK)),
        (edge + vmware_stages.MiB // 2, vmware_stages.MiB // 2),
    )
    vcsim.take_snapshot(
        (8 * vmware_stages.GiB, vmware_stages.noise(5, 4096)),
        (edge - vmware_stages.MiB, vmware_stages.MiB // 2),
    )
    target = tmp_path / "disk.img"
    with vcsim.running():
        for stage in range(3):
            vmware_stages.run(vcsim, target, stage)


# -- errors ----------------------------------------------------------------------------------------


def test_message_of_the_library_is_reported(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    target = tmp_path / "disk.img"
    for stage, settings, reason in (
        (0, {"fail": "connect"}, "VDDK: VixDiskLib_ConnectEx: Unknown error"),
        (0, {"fail": "open"}, "VDDK: VixDiskLib_Open: .*Unknown error"),
        (0, {"fail": "read@2050"}, r"transfer failed at byte \d+: .*VDDK: .*read failed"),
        (0, {"password": "another"}, "wrong user name or password"),
        (0, {"thumbprint": "AB"}, "the host's certificate has another thumbprint"),
        (0, {"snapshot": "snapshot-7"}, "the host has no such disk or snapshot"),
        (0, {}, ""),
        (1, {"fail": "read@2050"}, r"transfer failed at byte \d+: .*VDDK: .*read failed"),
        (1, {}, ""),
    ):
        vcsim.reset()
        vcsim.settings |= settings
        vcsim.save()
        if not settings:  # what has failed before succeeds
            vmware_stages.run(vcsim, target, stage)
            continue
        with pytest.raises(errors.SourceError, match=reason) as caught:
            cdi_worker.run(vmware_stages.request(vcsim, target, stage))
        assert vmware.PASSWORD not in str(caught.value)


def test_library_that_is_missing_or_cannot_be_loaded(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    demanded = {"vddk_libdir": str(tmp_path), "read_by": "vddk"}
    request = vmware_stages.request(vcsim, tmp_path / "disk.img", 0, **demanded)
    with pytest.raises(errors.RequestError, match=f"{tmp_path}: VDDK library not found"):
        cdi_worker.run(request)
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libvixDiskLib.so.8").write_bytes(b"not ELF")
    with pytest.raises(errors.SourceError, match="the VDDK library cannot be loaded"):
        cdi_worker.run(request)


def test_all_missing_fields_are_reported_at_once(tmp_path: Path) -> None:
    location = cdi_worker.Location("https://localhost")
    with pytest.raises(errors.RequestError, match=r"IMPORTER_UUID.*IMPORTER_BACKING_FILE"):
        cdi_worker.run(
            cdi_worker.Request(
                existing="replace", source="vddk", location=location, target=str(tmp_path / "disk.img")
            )
        )


# -- as a pod --------------------------------------------------------------------------------------


def test_pod_migrates_a_disk(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    config = tmp_path / "vddk-config"
    config.write_text("vixDiskLib.nfcAio.Session.BufCount=4\n")
    pod = worker.Pod(tmp_path / "pod")
    options = ["-v=3", f"--vddk-libdir={vcsim.libdir}", f"--vddk-config={config}"]
    for stage in range(2):
        known = vcsim.location(**vcsim.stage(stage))
        env = {
            "IMPORTER_SOURCE": "vddk",
            "IMPORTER_ENDPOINT": known.endpoint,
            "IMPORTER_ACCESS_KEY_ID": vmware.USER,
            "IMPORTER_SECRET_KEY": vmware.PASSWORD,
            "IMPORTER_UUID": known.uuid,
            "IMPORTER_BACKING_FILE": known.backing_file,
            "IMPORTER_THUMBPRINT": known.thumbprint,
            "IMPORTER_CURRENT_CHECKPOINT": known.current,
            "IMPORTER_PREVIOUS_CHECKPOINT": known.previous,
            "IMPORTER_FINAL_CHECKPOINT": "false",
        }
        done = worker.run(*pod.arguments, *options, env=env)
        assert done.status == 0, pod.message + done.errors
        assert pod.outcome["vddkInfo"] == {"Version": "8.0.1", "Host": "esx12.test.local"}
        assert vmware.PASSWORD not in pod.message + done.errors
        assert "running=True" in done.errors
        vmware_stages.check(vcsim, pod.disk, stage)
    assert any(line.endswith(f"config={config}") for line in vcsim.library_calls())
    env["IMPORTER_SECRET_KEY"] = "not-this"
    assert worker.call(*pod.arguments, *options, env=env).status == 1
    assert pod.message.startswith("Unable to connect to vddk data source: https://localhost")
    assert "wrong user name or password" in pod.message
