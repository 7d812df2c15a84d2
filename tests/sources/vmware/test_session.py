"""vSphere sessions with a real vcsim: the machine, its disk, and the changed areas."""

from __future__ import annotations

import dataclasses
import gzip
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyVmomi")

from cdi_worker import errors
from cdi_worker.sources import base, extents
from cdi_worker.sources.vmware import locations, session
from cdi_worker.sources.vmware import machine as vsphere_machine
from tests.support import objectservers, processes, tls, upload_relay, vmware

MiB = 1 << 20
#: Of a response.
LONGEST = 8 * MiB


def vcsim_with_snapshots(directory: Path, *, stages: int = 3) -> vmware.Vcsim:
    vcsim = vmware.Vcsim(directory, 16 * MiB)
    for number in range(stages):
        vcsim.take_snapshot((number * MiB, b"x" * vmware.BLOCK))
    return vcsim


@pytest.fixture(scope="module")
def vcsim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vmware.Vcsim]:
    made = vcsim_with_snapshots(tmp_path_factory.mktemp("vsphere"))
    with made.running():
        yield made


@pytest.fixture(scope="module")
def bare_running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vmware.Vcsim]:
    made = vmware.Vcsim(tmp_path_factory.mktemp("bare"), 1 << 40)
    made.take_snapshot()
    made.take_snapshot()
    with made.running():
        yield made


@pytest.fixture
def bare(bare_running: vmware.Vcsim) -> Iterator[vmware.Vcsim]:
    """A machine whose disk of 1 TiB has no changes, unless a test sets others."""
    yield bare_running
    bare_running.listed, bare_running.covers = None, 0


def changed(vcsim: vmware.Vcsim, change_id: str) -> list[tuple[int, int]]:
    """Return the areas that have changed between ``change_id`` and the second snapshot."""
    with session.Session(vcsim.location()) as opened:
        machine = vsphere_machine.Machine(opened, vmware.INSTANCE_UUID)
        disk = machine.at("snapshot-12", machine.disk(vcsim.file(0)))
        return [(area.offset, area.length) for area in machine.changed(disk, change_id)]


def logins(vcsim: vmware.Vcsim) -> list[Any]:
    """Return the open sessions, without the one that lists them."""
    with session.Session(vcsim.location()) as opened:
        manager = opened._content.sessionManager
        return [each for each in manager.sessionList if each.key != manager.currentSession.key]


def look(location: base.Location) -> vsphere_machine.VirtualDisk:
    with session.Session(location) as opened:
        machine = vsphere_machine.Machine(opened, location.uuid)
        disk = machine.disk(location.backing_file)
        return machine.at(location.current, disk) if location.current else disk


def test_session_ends_with_its_block(vcsim: vmware.Vcsim) -> None:
    look(vcsim.location())
    with session.Session(vcsim.location()):
        assert len(logins(vcsim)) == 1
    assert not logins(vcsim)


def test_allocated_areas_that_cannot_be_listed_are_unknown(
    vcsim: vmware.Vcsim, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """VDDK may know them. A list of changes is not optional."""
    failures = 0
    answer = session.Session.call

    def call(self: session.Session, doing: str, function: Callable[[], Any], *more: Any) -> Any:
        nonlocal failures
        if doing.startswith("list the areas") and failures:
            failures -= 1
            raise errors.Transient(url="vSphere", reason="the host is not responding")
        return answer(self, doing, function, *more)

    monkeypatch.setattr(session.Session, "call", call)
    with session.Session(vcsim.location()) as opened:
        machine = vsphere_machine.Machine(opened, vmware.INSTANCE_UUID)
        disk = machine.at("snapshot-12", machine.disk(vcsim.file(0)))
        failures = 1
        assert machine.allocated(disk) is not None
        assert failures == 0
        failures = 100
        assert machine.allocated(disk) is None
        assert failures > 90
        assert "the host is not responding" in caplog.text
        with pytest.raises(errors.Transient):
            machine.changed(disk, vcsim.change_id(0))


@pytest.mark.parametrize("uuid", [vmware.INSTANCE_UUID, vmware.UUID])
def test_machine_is_found_by_either_uuid(vcsim: vmware.Vcsim, uuid: str) -> None:
    assert look(vcsim.location(uuid=uuid)).key == 2000


@pytest.mark.parametrize("number", [0, 2, 3])
def test_disk_is_found_by_any_of_its_files(vcsim: vmware.Vcsim, number: int) -> None:
    found = look(vcsim.location(backing_file=vcsim.file(number), current="snapshot-12"))
    assert (found.file, found.snapshot, found.size) == (vcsim.file(1), "snapshot-12", 16 * MiB)
    assert found.change_id == vcsim.change_id(1)


def test_snapshot_is_found_by_its_name(vcsim: vmware.Vcsim) -> None:
    assert look(vcsim.location(current="stage 2")).snapshot == "snapshot-13"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"uuid": "0"}, "no virtual machine with instance or BIOS UUID '0'"),
        ({"backing_file": "[LocalDS_0] vm/other.vmdk"}, r"has no disk '\[LocalDS_0\] vm/other.vmdk'; it has"),
        ({"current": "snapshot-99"}, r"no snapshot 'snapshot-99'; available: snapshot-11 \(stage 0\), snap"),
        ({"access": base.Access("root", "wrong")}, "log in: wrong user name or password"),
        ({"thumbprint": ":".join(["AB"] * 20)}, "has thumbprint [0-9A-F:]*, not AB:AB.*check the server"),
        ({"thumbprint": ""}, "verify failed: .*; add the CA .*pin the certificate .thumbprint"),
    ],
)
def test_wrong_location_is_explained(vcsim: vmware.Vcsim, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(errors.Unreachable, match=reason) as caught:
        look(vcsim.location(**changes))
    assert "wrong'" not in str(caught.value)
    assert not logins(vcsim)


@pytest.mark.parametrize("url", ["https://[::1", "ftp://host", "host", "https://", "https://host:99999"])
def test_malformed_url_is_refused_at_once(url: str) -> None:
    location = locations.Vddk(url, uuid="x", backing_file="x")
    assert [*location.faults()] == [
        "malformed URL of vCenter or ESXi (IMPORTER_ENDPOINT); expected https://host[:port] or vsphere://host[:port]/UUID"
    ]


def test_malformed_thumbprint_is_refused(vcsim: vmware.Vcsim) -> None:
    with pytest.raises(errors.RequestError, match="20 or 32 bytes in hex"):
        look(vcsim.location(thumbprint="AB:CD"))


def test_certificate_authority_or_insecure_is_accepted(vcsim: vmware.Vcsim) -> None:
    access = base.Access(vmware.USER, vmware.PASSWORD, ca_files=(str(vcsim.authority),))
    for trusting in (access, dataclasses.replace(access, ca_files=(), insecure=True)):
        with session.Session(vcsim.location(thumbprint="", access=trusting)) as opened:
            assert opened.server == session.Server("localhost", vcsim.port, vcsim.thumbprint)


def test_thumbprint_is_accepted_in_any_form(vcsim: vmware.Vcsim) -> None:
    plain = vcsim.thumbprint.replace(":", "").lower()
    with session.Session(vcsim.location(thumbprint=plain)) as opened:
        assert opened.server.thumbprint == vcsim.thumbprint
        assert opened.is_vcenter


def test_one_connection_serves_the_session_and_the_thumbprint(vcsim: vmware.Vcsim) -> None:
    # The relay cuts the second one.
    with upload_relay.Relay(vcsim.port, None, 1) as relay:
        location = vcsim.location(endpoint=f"https://localhost:{relay.port}/sdk")
        with session.Session(location) as opened:
            assert vsphere_machine.Machine(opened, vmware.INSTANCE_UUID).disk(vcsim.file(0))
            assert opened.server == session.Server("localhost", relay.port, vcsim.thumbprint)
            # Connecting has a shorter one.
            ((connection, _),) = opened._stub.pool
            assert connection.sock.gettimeout() == session.TIMEOUT


def test_thumbprint_is_read_if_pyvmomi_has_not_connected_yet(
    vcsim: vmware.Vcsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pyvmomi 8 does."""
    monkeypatch.setattr("pyVmomi.SoapAdapter._Connect", lambda **_: None, raising=False)
    with session.Session(vcsim.location()) as opened:
        assert opened.server.thumbprint == vcsim.thumbprint


def test_unreachable_server_is_reported() -> None:
    location = locations.Vddk(f"https://localhost:{processes.free_port()}", thumbprint="AB" * 20)
    with pytest.raises(errors.Transient, match="refused"):
        session.Session(location)


@pytest.mark.parametrize("status", [200, 500])
def test_another_server_is_recognised(tmp_path: Path, status: int) -> None:
    pair = tls.Authority(tmp_path).issue()
    access = base.Access(vmware.USER, vmware.PASSWORD, insecure=True)
    with (
        objectservers.post_service("<html></html>", "text/html", status=status, pair=pair) as service,
        pytest.raises(errors.Unreachable, match="not a vSphere server"),
        session.Session(locations.Vddk(service.url, access)),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "headers"),
    [
        (f"<a>{' ' * LONGEST}</a>", {}),
        # 16 KiB of it expand to 16 MiB.
        (gzip.compress(f"<a>{' ' * (2 * LONGEST)}</a>".encode()), {"Content-Encoding": "gzip"}),
    ],
)
def test_long_response_is_refused(tmp_path: Path, text: str | bytes, headers: dict[str, str]) -> None:
    pair = tls.Authority(tmp_path).issue()
    access = base.Access(vmware.USER, vmware.PASSWORD, insecure=True)
    with (
        objectservers.post_service(text, "text/xml", headers=headers, pair=pair) as service,
        pytest.raises(
            errors.Unreachable, match=r"response (has more than 8 MiB|is compressed).*check the server"
        ),
        session.Session(locations.Vddk(service.url, access)),
    ):
        pass


def test_esxi_host_is_recognised(tmp_path: Path) -> None:
    vcsim = vcsim_with_snapshots(tmp_path)
    with vcsim.running("-esx"), session.Session(vcsim.location()) as opened:
        assert not opened.is_vcenter
        machine = vsphere_machine.Machine(opened, vmware.INSTANCE_UUID)
        assert machine.at("snapshot-11", machine.disk(vcsim.file(3))).file == vcsim.file(0)


# -- what has changed ----------------------------------------------------------------------------


def test_changed_areas_are_read_through_lost_sessions(tmp_path: Path) -> None:
    vcsim = vmware.Vcsim(tmp_path, 5 << 30)
    vcsim.take_snapshot()
    offsets = [number * 2 * vmware.BLOCK for number in range(5003)] + [(5 << 30) - vmware.BLOCK]
    vcsim.take_snapshot()
    vcsim._changes[1] = [(offset, vmware.BLOCK) for offset in offsets]
    vcsim.answers = 1
    with vcsim.running():
        assert changed(vcsim, vcsim.change_id(0)) == vcsim._changes[1]


@pytest.mark.parametrize(
    "areas",
    [
        [(-512, 512)],
        [(0, -512)],
        [(0, 512), (1024, -512)],
        [(0, 1024), (512, 1024)],
        [(1024, 512), (0, 512)],
        [(0, 512), (0, 512)],
    ],
)
def test_malformed_list_of_areas_is_refused(bare: vmware.Vcsim, areas: list[tuple[int, int]]) -> None:
    bare.listed = areas
    bare.save()
    with pytest.raises(errors.SourceError, match=r"list of changed areas .*; start again"):
        changed(bare, bare.change_id(0))


@pytest.mark.parametrize("answer", [None, "text", 5])
def test_answer_that_is_no_list_of_areas_is_an_error(
    vcsim: vmware.Vcsim, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    """The library makes an object of whatever type the server names."""
    with session.Session(vcsim.location()) as opened:
        machine = vsphere_machine.Machine(opened, vmware.INSTANCE_UUID)
        disk = machine.at("snapshot-12", machine.disk(vcsim.file(0)))
        odd = types.SimpleNamespace(_stub=None, QueryChangedDiskAreas=lambda *_: answer)
        monkeypatch.setattr(machine, "_machine", odd)
        with pytest.raises(errors.Unreachable, match=r"list the areas .*: unexpected response"):
            machine.changed(disk, vcsim.change_id(0))


def test_product_without_a_name_is_an_error(vcsim: vmware.Vcsim, monkeypatch: pytest.MonkeyPatch) -> None:
    def log_in(self: session.Session) -> None:
        self._content = types.SimpleNamespace(about=None)

    monkeypatch.setattr(session.Session, "_log_in", log_in)
    with (
        pytest.raises(errors.Unreachable, match="log in: unexpected response"),
        session.Session(vcsim.location()),
    ):
        pass


@pytest.mark.parametrize("covers", [1, 1023, 32 << 20])
def test_list_of_areas_in_too_many_parts_is_refused(bare: vmware.Vcsim, covers: int) -> None:
    """For example one byte each: that would be requests for years."""
    bare.covers = covers
    bare.save()
    with pytest.raises(errors.SourceError, match=r"reaches only byte \d+ of .* requests; start again"):
        changed(bare, bare.change_id(0))


def test_parts_of_a_disk_beyond_the_largest_are_not_asked_for(
    bare: vmware.Vcsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server states the size: 8 EiB would be requests for years."""
    monkeypatch.setattr(vsphere_machine, "LARGEST", 1 << 30)
    bare.covers = 64 << 20
    bare.save()
    with pytest.raises(errors.SourceError, match="after 1040 requests; start again"):
        changed(bare, bare.change_id(0))


def test_list_of_areas_in_many_parts_is_read(bare: vmware.Vcsim) -> None:
    bare.covers = 1 << 30
    bare.save()
    assert not changed(bare, bare.change_id(0))


def test_missing_change_tracking_is_reported(vcsim: vmware.Vcsim) -> None:
    with pytest.raises(errors.Unreachable, match="changed block tracking is off or was reset"):
        changed(vcsim, "52 de/9")


@pytest.mark.parametrize(
    ("areas", "added"),
    [
        ([], []),
        ([(0, 512)], [(0, 512)]),
        ([(0, 512), (512, 1024)], [(0, 1024)]),
        ([(0, 2048), (4000, 4001)], [(0, 2048), (3584, 512)]),
        ([(100, 101), (300, 301)], [(0, 512)]),
        ([(100, 101), (511, 513)], [(0, 1024)]),
        ([(4000, 5000), (8192, 8704)], [(3584, 512)]),
        ([(0, 0)], []),
    ],
)
def test_areas_are_extended_to_sectors(areas: list[tuple[int, int]], added: list[tuple[int, int]]) -> None:
    found = extents.Kept()
    for start, end in areas:
        vsphere_machine.add(found, start, end, 4096)
    assert [(area.offset, area.length) for area in found] == added


@pytest.mark.parametrize(
    ("before", "changed"),
    [
        (512, [(0, 8192)]),
        (1024, [(0, 512), (1024, 7168)]),
        (1536, [(0, 512), (1024, 7168)]),
        (4096, [(0, 512), (1024, 1024), (4096, 4096)]),
        (9000, [(0, 512), (1024, 1024)]),
    ],
)
def test_new_space_has_changed(
    vcsim: vmware.Vcsim, monkeypatch: pytest.MonkeyPatch, before: int, changed: list[tuple[int, int]]
) -> None:
    written = [types.SimpleNamespace(start=0, length=512), types.SimpleNamespace(start=1024, length=1024)]
    answer = types.SimpleNamespace(startOffset=0, length=8192, changedArea=written)
    with session.Session(vcsim.location()) as opened:
        machine = vsphere_machine.Machine(opened, vmware.INSTANCE_UUID)
        disk = dataclasses.replace(machine.at("snapshot-12", machine.disk(vcsim.file(0))), size=8192)
        grown = types.SimpleNamespace(_stub=None, QueryChangedDiskAreas=lambda *_: answer)
        monkeypatch.setattr(machine, "_machine", grown)
        areas = machine.changed(disk, vcsim.change_id(0), before)
    assert [(area.offset, area.length) for area in areas] == changed
