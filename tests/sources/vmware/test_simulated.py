"""Export leases of the simulated vSphere, by pyVmomi alone: the tests of the product build on them."""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import ssl
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyVmomi")

from pyVmomi import SoapStubAdapter, vim, vmodl

from tests.support import disks, leases, oracle, processes, vmware

MiB = 1 << 20
GONE = (vmodl.fault.ManagedObjectNotFound,)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vmware.Vcsim]:
    made = vmware.Vcsim(tmp_path_factory.mktemp("leases"), 16 * MiB, more=(MiB, 8 * MiB), exports=True)
    for disk in range(3):
        made.write((4096, b"disk %d" % disk), disk=disk)
    made.take_snapshot((2 * MiB, b"before the snapshot"))
    made.write((3 * MiB, b"after the snapshot"))
    with made.running():
        yield made


@pytest.fixture
def vcsim(running: vmware.Vcsim) -> Iterator[vmware.Vcsim]:
    yield running
    running.reset()


@pytest.fixture
def machine(vcsim: vmware.Vcsim) -> Iterator[Any]:
    """The machine, of a session that ends all its leases."""
    context = ssl._create_unverified_context()
    stub = SoapStubAdapter("localhost", vcsim.port, version="vim.version.version12", sslContext=context)
    content = vim.ServiceInstance("ServiceInstance", stub).RetrieveContent()
    content.sessionManager.Login(vmware.USER, vmware.PASSWORD, None)
    found = content.searchIndex.FindByUuid(None, vmware.INSTANCE_UUID, True, True)
    try:
        yield found
    finally:
        # Ends what a failed test has left.
        vcsim.lease["Ends"] = "done"
        vcsim.save()
        time.sleep(0.1)  # until vcsim has looked at it
        content.sessionManager.Logout()
        stub.DropConnections()


def ready(lease: Any) -> Any:
    processes.wait_for(lambda: lease.state != "initializing", "the lease is ready")
    assert lease.state == "ready", lease.error
    return lease.info


def fetched(url: str) -> tuple[int, bytes]:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPSConnection(
        parts.hostname or "", parts.port, context=ssl._create_unverified_context(), timeout=20
    )
    try:
        connection.request("GET", parts.path.replace(" ", "%20"))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def waited(task: Any) -> Any:
    processes.wait_for(lambda: task.info.state in ("success", "error"), "the task ends")
    return task.info


def by_key(info: Any) -> dict[str, Any]:
    return {each.key.rpartition("/")[2]: each for each in info.deviceUrl}


def power_off(vcsim: vmware.Vcsim) -> None:
    vcsim.power = "poweredOff"
    vcsim.save()


@pytest.mark.parametrize("maker", [leases.by_qemu, leases.by_esxi])
def test_lease_goes_its_whole_way(
    vcsim: vmware.Vcsim, machine: Any, maker: leases.Maker, tmp_path: Path
) -> None:
    assert vcsim.host
    vcsim.host.makers = (maker,)
    vcsim.lease = {"Initializing": 2}
    power_off(vcsim)
    lease = machine.ExportVm()
    assert (lease.state, lease.info) == ("initializing", None)
    info = ready(lease)
    assert (info.entity, info.leaseTimeout) == (machine, 300)
    keys = [each.key for each in info.deviceUrl if each.disk]
    places = ["ParaVirtualSCSIController0:1", "VirtualAHCIController0:1", "ParaVirtualSCSIController0:0"]
    assert keys == [f"/{machine._moId}/{place}" for place in places]
    assert [each.targetId for each in info.deviceUrl if not each.disk] == [leases.NVRAM]
    lease.HttpNfcLeaseSetManifestChecksumType([vim.KeyValue(key=keys[0], value="sha256")])
    sent = {}
    for disk, key in enumerate(reversed(keys)):
        url = by_key(info)[key.rpartition("/")[2]]
        status, sent[key] = fetched(url.url)
        assert status == 200
        assert url.sslThumbprint == vcsim.host.pair.thumbprint != vcsim.thumbprint
        (tmp_path / "disk.vmdk").write_bytes(sent[key])
        disks.to_raw(tmp_path / "disk.vmdk", "vmdk", tmp_path / "disk.img")
        oracle.same(tmp_path / "disk.img", vcsim.current(disk))
        assert not {"cookie", "authorization"} & vcsim.host.requested(disk)[0].headers.keys()
    lease.HttpNfcLeaseProgress(50)
    manifest = {each.key: each for each in lease.HttpNfcLeaseGetManifest()}
    for key, data in sent.items():
        assert (manifest[key].sha1, manifest[key].size) == (
            hashlib.sha1(data, usedforsecurity=False).hexdigest(),
            len(data),
        )
    assert manifest[keys[0]].checksum == hashlib.sha256(sent[keys[0]]).hexdigest()
    assert [manifest[key].capacity for key in keys] == [8 * MiB, MiB, 16 * MiB]
    lease.HttpNfcLeaseComplete()
    assert fetched(info.deviceUrl[0].url)[0] == 404
    with pytest.raises(GONE):
        lease.HttpNfcLeaseComplete()
    calls = [each["call"] for each in vcsim.calls()]
    assert calls[:2] == ["ExportVm", "lease"]
    assert calls[-2:] == ["HttpNfcLeaseComplete", "ended"]


def test_snapshot_is_exported_as_it_was(vcsim: vmware.Vcsim, machine: Any, tmp_path: Path) -> None:
    (tree,) = machine.snapshot.rootSnapshotList
    lease = tree.snapshot.ExportSnapshot()
    (tmp_path / "disk.vmdk").write_bytes(fetched(by_key(ready(lease))["ParaVirtualSCSIController0:0"].url)[1])
    disks.to_raw(tmp_path / "disk.vmdk", "vmdk", tmp_path / "disk.img")
    oracle.same(tmp_path / "disk.img", vcsim.content(0))
    lease.HttpNfcLeaseAbort(None)
    assert [each["why"] for each in vcsim.calls("ended")] == ["aborted"]


def test_machine_has_its_disks_on_controllers(vcsim: vmware.Vcsim, machine: Any) -> None:
    devices = machine.config.hardware.device
    controllers = {
        each.key: (type(each).__name__.rpartition(".")[2], getattr(each, "busNumber", 0)) for each in devices
    }
    found = [
        (each.key, each.deviceInfo.label, controllers[each.controllerKey], each.unitNumber)
        for each in devices
        if isinstance(each, vim.vm.device.VirtualDisk)
    ]
    scsi, sata = ("ParaVirtualSCSIController", 0), ("VirtualAHCIController", 0)
    assert [(key, label, name.rpartition(".")[2], unit) for key, label, (name, _), unit in found] == [
        (2000, "Hard disk 1", scsi[0], 0),
        (2001, "Hard disk 2", sata[0], 1),
        (2002, "Hard disk 3", scsi[0], 1),
    ]
    assert any(isinstance(each, vim.vm.device.VirtualCdrom) for each in devices)


def test_machine_that_is_on_is_not_exported(vcsim: vmware.Vcsim, machine: Any) -> None:
    with pytest.raises(vim.fault.InvalidPowerState):
        machine.ExportVm()
    assert machine.runtime.powerState == "poweredOn"
    power_off(vcsim)
    assert machine.runtime.powerState == "poweredOff"
    machine.ExportVm().HttpNfcLeaseAbort(None)


def test_second_lease_waits_for_the_time_of_the_first(vcsim: vmware.Vcsim, machine: Any) -> None:
    vcsim.lease = {"Timeout": 0.5, "Stated": 300_000_000}
    power_off(vcsim)
    lease = machine.ExportVm()
    info = ready(lease)
    assert info.leaseTimeout == 300_000_000
    with pytest.raises(vim.fault.TaskInProgress):
        machine.ExportVm()
    for _ in range(3):
        time.sleep(0.3)  # less than the time-out, which a progress starts again
        lease.HttpNfcLeaseProgress(1)
    processes.wait_for(lambda: vcsim.calls("ended"), "the lease ends")
    assert (lease.state, type(lease.error)) == ("error", vim.fault.Timedout)
    with pytest.raises(vim.fault.Timedout):
        lease.HttpNfcLeaseProgress(2)
    assert fetched(info.deviceUrl[0].url)[0] == 404
    machine.ExportVm().HttpNfcLeaseAbort(None)


@pytest.mark.parametrize(("how", "state"), [("error", "error"), ("done", "done"), ("gone", None)])
def test_another_client_ends_a_lease(vcsim: vmware.Vcsim, machine: Any, how: str, state: str | None) -> None:
    power_off(vcsim)
    lease = machine.ExportVm()
    ready(lease)
    vcsim.lease["Ends"] = how
    vcsim.save()
    processes.wait_for(lambda: vcsim.calls("ended"), "the lease ends")
    if state:
        assert lease.state == state
    else:
        with pytest.raises(GONE):
            lease.HttpNfcLeaseProgress(2)


def test_response_ends_with_its_lease(vcsim: vmware.Vcsim, machine: Any) -> None:
    assert vcsim.host
    power_off(vcsim)
    vcsim.host.page = dataclasses.replace(vcsim.host.page, drip=(512, 0.02))
    lease = machine.ExportVm()
    url = by_key(ready(lease))["ParaVirtualSCSIController0:0"].url
    vcsim.lease = {"Timeout": 0.5}
    vcsim.save()
    with pytest.raises((OSError, http.client.HTTPException)):
        fetched(url)


def test_lease_that_fails_says_why(vcsim: vmware.Vcsim, machine: Any) -> None:
    vcsim.lease = {"Initializing": 1, "Fails": "FileFault"}
    power_off(vcsim)
    lease = machine.ExportVm()
    processes.wait_for(lambda: lease.state == "error", "the lease fails")
    assert isinstance(lease.error, vim.fault.FileFault)


def test_privilege_that_is_missing_is_named(vcsim: vmware.Vcsim, machine: Any) -> None:
    create, remove = "VirtualMachine.State.CreateSnapshot", "VirtualMachine.State.RemoveSnapshot"
    vcsim.lease = {"Denied": ["VApp.Export", create, remove]}
    power_off(vcsim)
    snapshot = machine.snapshot.rootSnapshotList[0].snapshot
    for privilege, call in {
        "VApp.Export": machine.ExportVm,
        create: lambda: machine.CreateSnapshot_Task("ours", "", False, True),
        remove: lambda: snapshot.RemoveSnapshot_Task(False, True),
    }.items():
        with pytest.raises(vim.fault.NoPermission) as caught:
            call()
        assert (caught.value.privilegeId, caught.value.object) == (privilege, machine)


def test_snapshot_is_made_exported_and_removed(vcsim: vmware.Vcsim, machine: Any, tmp_path: Path) -> None:
    vcsim.lease = {"Task": 0.2}
    vcsim.independent = {1}
    vcsim.save()
    before = [
        each.backing.fileName for each in machine.config.hardware.device if hasattr(each, "diskObjectId")
    ]
    made = waited(machine.CreateSnapshot_Task("ours", "whose", False, True)).result
    assert vcsim.calls("CreateSnapshot_Task")[0]["quiesce"] is True
    tree = machine.snapshot.rootSnapshotList[0].childSnapshotList[0]
    assert (tree.name, tree.description, tree.snapshot) == ("ours", "whose", made)
    kept = [each for each in made.config.hardware.device if hasattr(each, "diskObjectId")]
    assert [each.key for each in kept] == [2000, 2002]
    assert [each.backing.fileName for each in kept] == [before[0], before[2]]
    now = [each.backing for each in machine.config.hardware.device if hasattr(each, "diskObjectId")]
    assert now[0].fileName != before[0] == now[0].parent.fileName
    lease = made.ExportSnapshot()
    info = ready(lease)
    assert len(by_key(info)) == 3
    (tmp_path / "disk.vmdk").write_bytes(fetched(by_key(info)["ParaVirtualSCSIController0:0"].url)[1])
    disks.to_raw(tmp_path / "disk.vmdk", "vmdk", tmp_path / "disk.img")
    oracle.same(tmp_path / "disk.img", vcsim.current())
    with pytest.raises(vim.fault.TaskInProgress):
        made.RemoveSnapshot_Task(False, True)
    lease.HttpNfcLeaseComplete()
    assert waited(made.RemoveSnapshot_Task(False, True)).state == "success"
    assert not machine.snapshot.rootSnapshotList[0].childSnapshotList
    after = [
        each.backing.fileName for each in machine.config.hardware.device if hasattr(each, "diskObjectId")
    ]
    assert after == before


def test_task_that_fails_has_its_fault(vcsim: vmware.Vcsim, machine: Any) -> None:
    vcsim.lease = {"Faults": {"CreateSnapshot": {"Name": "ApplicationQuiesceFault", "Times": 1}}}
    vcsim.save()
    failed = waited(machine.CreateSnapshot_Task("ours", "", False, True))
    assert (failed.state, type(failed.error)) == ("error", vim.fault.ApplicationQuiesceFault)
    made = waited(machine.CreateSnapshot_Task("ours", "", False, True)).result
    waited(made.RemoveSnapshot_Task(False, True))


def test_host_behind_a_star_is_the_server_itself(vcsim: vmware.Vcsim, machine: Any) -> None:
    assert vcsim.host
    vcsim.host.star = True
    power_off(vcsim)
    lease = machine.ExportVm()
    url = by_key(ready(lease))["VirtualAHCIController0:1"]
    assert url.url.startswith("https://*/ha-nfc/")
    assert url.sslThumbprint == vcsim.thumbprint
    status, body = fetched(url.url.replace("*", f"localhost:{vcsim.port}"))
    assert (status, body[:4]) == (200, b"KDMV")


def test_old_api_has_no_digests(vcsim: vmware.Vcsim, machine: Any) -> None:
    vcsim.lease = {"NoChecksumType": True, "NoManifest": True}
    power_off(vcsim)
    lease = machine.ExportVm()
    ready(lease)
    with pytest.raises(vmodl.fault.MethodNotFound):
        lease.HttpNfcLeaseSetManifestChecksumType([])
    with pytest.raises(vmodl.fault.MethodNotFound):
        lease.HttpNfcLeaseGetManifest()


def test_streams_of_two_leases_differ(vcsim: vmware.Vcsim, machine: Any) -> None:
    power_off(vcsim)
    found = []
    for _ in range(2):
        lease = machine.ExportVm()
        found.append(fetched(by_key(ready(lease))["ParaVirtualSCSIController0:0"].url)[1])
        lease.HttpNfcLeaseComplete()
    assert len(found[0]) == len(found[1])
    assert found[0] != found[1]
