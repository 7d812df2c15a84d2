"""vSphere sessions with a real vcsim: the machine, its disk, and the changed areas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyVmomi")

from cdi_worker import errors
from cdi_worker.sources import base
from cdi_worker.sources.vmware import locations, session
from cdi_worker.sources.vmware import machine as vsphere_machine
from tests.support import processes, vmware

MiB = 1 << 20


def estate_of(directory: Path, *, stages: int = 3) -> vmware.Estate:
    estate = vmware.Estate(directory, 16 * MiB)
    for number in range(stages):
        estate.take((number * MiB, b"x" * vmware.BLOCK))
    return estate


@pytest.fixture(scope="module")
def estate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vmware.Estate]:
    made = estate_of(tmp_path_factory.mktemp("vsphere"))
    with made.running():
        yield made


def logins(estate: vmware.Estate) -> list[Any]:
    """Return the open sessions, without the one that lists them."""
    with session.Session(estate.location()) as opened:
        manager = opened._content.sessionManager
        return [each for each in manager.sessionList if each.key != manager.currentSession.key]


def look(location: base.Location) -> vsphere_machine.Disk:
    with session.Session(location) as opened:
        machine = vsphere_machine.Machine(opened, location.uuid)
        disk = machine.disk(location.backing_file)
        return machine.at(location.current, disk) if location.current else disk


def test_session_ends_with_its_block(estate: vmware.Estate) -> None:
    look(estate.location())
    with session.Session(estate.location()):
        assert len(logins(estate)) == 1
    assert not logins(estate)


@pytest.mark.parametrize("uuid", [vmware.INSTANCE_UUID, vmware.UUID])
def test_machine_is_found_by_either_uuid(estate: vmware.Estate, uuid: str) -> None:
    assert look(estate.location(uuid=uuid)).key == 2000


@pytest.mark.parametrize("number", [0, 2, 3])
def test_disk_is_found_by_any_of_its_files(estate: vmware.Estate, number: int) -> None:
    found = look(estate.location(backing_file=estate.file(number), current="snapshot-12"))
    assert (found.file, found.snapshot, found.size) == (estate.file(1), "snapshot-12", 16 * MiB)
    assert found.change_id == estate.change_id(1)


def test_snapshot_is_found_by_its_name(estate: vmware.Estate) -> None:
    assert look(estate.location(current="stage 2")).snapshot == "snapshot-13"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"uuid": "0"}, "no virtual machine with instance or BIOS uuid '0'"),
        ({"backing_file": "[LocalDS_0] vm/other.vmdk"}, r"has no disk '\[LocalDS_0\] vm/other.vmdk'; it has"),
        ({"current": "snapshot-99"}, r"no snapshot 'snapshot-99'; there is snapshot-11 \(stage 0\), snap"),
        ({"access": base.Access("root", "wrong")}, "log in: wrong user name or password"),
        ({"thumbprint": ":".join(["AB"] * 20)}, "has thumbprint [0-9A-F:]*, not AB:AB.*another server"),
        ({"thumbprint": ""}, "not trusted: .*; give its authority or thumbprint"),
    ],
)
def test_wrong_location_is_explained(estate: vmware.Estate, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(errors.Unreachable, match=reason) as caught:
        look(estate.location(**changes))
    assert "wrong'" not in str(caught.value)
    assert not logins(estate)


def test_malformed_thumbprint_is_refused(estate: vmware.Estate) -> None:
    with pytest.raises(errors.RequestError, match="20 bytes in hex"):
        look(estate.location(thumbprint="AB:CD"))


def test_certificate_authority_or_insecure_is_accepted(estate: vmware.Estate) -> None:
    access = base.Access(vmware.USER, vmware.PASSWORD, ca_files=(str(estate.authority),))
    for trusting in (access, dataclasses.replace(access, ca_files=(), insecure=True)):
        with session.Session(estate.location(thumbprint="", access=trusting)) as opened:
            assert opened.server == session.Server("localhost", estate.port, estate.thumbprint)


def test_thumbprint_is_accepted_in_any_form(estate: vmware.Estate) -> None:
    plain = estate.thumbprint.replace(":", "").lower()
    with session.Session(estate.location(thumbprint=plain)) as opened:
        assert opened.server.thumbprint == estate.thumbprint
        assert opened.is_vcenter


def test_unreachable_server_is_reported() -> None:
    location = locations.Vddk(f"https://localhost:{processes.free_port()}", thumbprint="AB" * 20)
    with pytest.raises(errors.Transient, match="refused"):
        session.Session(location)


def test_esxi_host_is_recognised(tmp_path: Path) -> None:
    estate = estate_of(tmp_path)
    with estate.running("-esx"), session.Session(estate.location()) as opened:
        assert not opened.is_vcenter
        machine = vsphere_machine.Machine(opened, vmware.INSTANCE_UUID)
        assert machine.at("snapshot-11", machine.disk(estate.file(3))).file == estate.file(0)


# -- what has changed ----------------------------------------------------------------------------


def test_changed_areas_are_read_through_lost_sessions(tmp_path: Path) -> None:
    estate = vmware.Estate(tmp_path, 5 << 30)
    estate.take()
    offsets = [number * 2 * vmware.BLOCK for number in range(5003)] + [(5 << 30) - vmware.BLOCK]
    estate.take()
    estate._changes[1] = [(offset, vmware.BLOCK) for offset in offsets]
    estate.answers = 1
    with estate.running(), session.Session(estate.location()) as opened:
        machine = vsphere_machine.Machine(opened, vmware.INSTANCE_UUID)
        disk = machine.at("snapshot-12", machine.disk(estate.file(0)))
        assert machine.changed(disk, estate.change_id(0)) == estate._changes[1]


def test_missing_change_tracking_is_reported(estate: vmware.Estate) -> None:
    with session.Session(estate.location()) as opened:
        machine = vsphere_machine.Machine(opened, vmware.INSTANCE_UUID)
        disk = machine.at("snapshot-12", machine.disk(estate.file(0)))
        with pytest.raises(errors.Unreachable, match="changed block tracking is off or was reset"):
            machine.changed(disk, "52 de/9")


@pytest.mark.parametrize(
    ("areas", "merged"),
    [
        ([], []),
        ([(0, 512)], [(0, 512)]),
        ([(1024, 512), (0, 512)], [(0, 512), (1024, 512)]),
        ([(0, 512), (512, 512)], [(0, 1024)]),
        ([(0, 2048), (512, 512)], [(0, 2048)]),
        ([(0, 1024), (512, 1024)], [(0, 1536)]),
        ([(100, 1)], [(0, 512)]),
        ([(4000, 1000), (8192, 512)], [(3584, 512)]),
        ([(0, 0)], []),
    ],
)
def test_areas_are_sorted_and_merged(areas: list[tuple[int, int]], merged: list[tuple[int, int]]) -> None:
    assert vsphere_machine.merged(areas, 4096) == merged
