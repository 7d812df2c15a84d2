"""Export leases of a vCenter that states anything or answers late, and of machines that were changed."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyVmomi")

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import cancelling, fetch
from cdi_worker.sources import base
from cdi_worker.sources.packages import choice
from cdi_worker.sources.vmware import exported, session
from tests.support import devices, leases, misbehave, oracle, vmware

MiB = 1 << 20
SIZE = 4 * MiB


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vmware.Vcsim]:
    made = vmware.Vcsim(tmp_path_factory.mktemp("leases"), SIZE, more=(SIZE,), exports=True)
    for disk in range(2):
        made.write((0, b"disk %d" % disk), (65536, os.urandom(SIZE // 4)), disk=disk)
    made.take_snapshot()
    made.take_snapshot((3 * MiB, b"between the snapshots" * 5000))
    made.write((MiB, b"after the snapshots"))
    with made.running():
        yield made


@pytest.fixture
def vcsim(running: vmware.Vcsim) -> Iterator[vmware.Vcsim]:
    running.power = "poweredOff"
    running.save()
    yield running
    running.reset()


target = devices.targets("file", size=SIZE)


def host(vcsim: vmware.Vcsim) -> leases.Host:
    assert vcsim.host
    return vcsim.host


def request(vcsim: vmware.Vcsim, target: Path, source: str = "vsphere", **changes: Any) -> cdi_worker.Request:
    no_progress = changes.pop("no_progress", 2)
    access = base.Access(user=vmware.USER, password=vcsim.password, patience=no_progress)
    location = (vcsim.machine if source == "vsphere" else vcsim.location)(access=access, **changes)
    return cdi_worker.Request(
        source=source,
        location=location,
        target=str(target),
        disk="1" if source == "vsphere" else "",
        existing="replace",
        fetch=fetch.FetchOptions(no_progress=no_progress),
        connect_patience=1,
    )


def test_disk_that_has_moved_to_another_controller(
    vcsim: vmware.Vcsim, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named by its file at a snapshot; since then both disks have changed places."""
    scenario = vcsim._scenario
    places = [leases.place(disk)[2] for disk in range(2)]
    swapped = dict(zip(places, reversed(places), strict=True))

    def moved() -> dict[str, Any]:
        found = scenario()
        one, two = found["Disks"]
        for name in ("Controller", "Unit"):
            one[name], two[name] = two[name], one[name]
        for device in found["Lease"]["Devices"]:
            device["Key"] = swapped.get(device["Key"], device["Key"])
        return found

    host(vcsim).state = lambda _, entry: {**entry, "Key": swapped[entry["Key"]]}
    monkeypatch.setattr(vcsim, "_scenario", moved)
    vcsim.save()
    cdi_worker.run(request(vcsim, target, "vddk", read_by="lease"))
    oracle.same(target, vcsim.current(0))


@pytest.mark.parametrize(
    "url",
    [
        "https://[/disk.vmdk",
        "https://host:port/x",
        "https://host:99999/",
        "ftp://host/",
        "",
        "disk.vmdk",
        "https:///x",
    ],
)
def test_malformed_url_is_refused(vcsim: vmware.Vcsim, target: Path, url: str) -> None:
    devices = [dict(each, URL=url) for each in host(vcsim).devices()]
    vcsim.lease = {"Devices": devices}
    vcsim.save()
    with pytest.raises(errors.SourceError, match="URL"):
        cdi_worker.run(request(vcsim, target))


def test_plain_http_is_refused(vcsim: vmware.Vcsim, target: Path) -> None:
    with misbehave.Server() as plain:
        stream = host(vcsim).stream("current", 0)
        url = plain.serve("/nfc/x/disk-1.vmdk", dataclasses.replace(leases.PAGE, body=stream.read_bytes()))
        devices = [dict(each, URL=url) for each in host(vcsim).devices()]
        vcsim.lease = {"Devices": devices}
        vcsim.save()
        with pytest.raises(errors.SourceError, match="https"):
            cdi_worker.run(request(vcsim, target))
        assert not plain.requests


@pytest.mark.parametrize("times", [1, 0])
def test_manifest_that_vsphere_does_not_return_now(
    vcsim: vmware.Vcsim, target: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """It is asked again. A failure does not mean that there is none."""
    monkeypatch.setattr(exported, "MANIFEST", 1.0)
    vcsim.lease = {"Faults": {"HttpNfcLeaseGetManifest": {"Name": "HostCommunication", "Times": times}}}
    vcsim.save()
    if times:
        assert cdi_worker.run(request(vcsim, target)).verified
    else:
        with pytest.raises(errors.SourceError, match="manifest"):
            cdi_worker.run(request(vcsim, target))
        oracle.unusable(target)


def test_slow_host_is_waited_for(vcsim: vmware.Vcsim, target: Path) -> None:
    """It sends almost nothing while it looks for data where the disk is empty: no speed is too low."""
    host(vcsim).page = dataclasses.replace(leases.PAGE, drip=(16 << 10, 0.05))
    options = fetch.FetchOptions(no_progress=1, min_speed=64 * MiB)
    cdi_worker.run(dataclasses.replace(request(vcsim, target), fetch=options))
    oracle.same(target, vcsim.current(0))


def wrong(raw: Path, stream: Path) -> None:
    """Write a stream of another disk of the same size."""
    other = stream.with_suffix(".raw")
    other.write_bytes(raw.read_bytes())
    with other.open("r+b") as file:
        file.seek(2 * MiB)
        file.write(b"wrong")
    leases.by_qemu(other, stream)


@devices.on("file", "block512")
def test_changes_are_not_written_over_wrong_bytes_of_a_lease(vcsim: vmware.Vcsim, target: Path) -> None:
    """A stage by a lease writes anywhere, and is verified at the end: only another such one may follow."""
    vmware.need()
    cdi_worker.run(request(vcsim, target, "vddk", read_by="vddk", **vcsim.stage(0)))
    host(vcsim).makers = (wrong,)
    host(vcsim).state = lambda _, entry: {**entry, "SHA256": "0" * 64}
    with pytest.raises(errors.DigestMismatch):
        cdi_worker.run(request(vcsim, target, "vddk", read_by="lease", **vcsim.stage(1)))
    host(vcsim).reset()
    with pytest.raises(errors.TargetError, match=r"with a part of the delta to|holds an incomplete disk"):
        cdi_worker.run(request(vcsim, target, "vddk", read_by="vddk", **vcsim.stage(1)))
    cdi_worker.run(request(vcsim, target, "vddk", read_by="lease", **vcsim.stage(1)))
    oracle.same(target, vcsim.content(1))


def test_request_for_sha256_is_repeated(vcsim: vmware.Vcsim, target: Path) -> None:
    fault = {"Name": "HostCommunication", "Times": 1}
    vcsim.lease = {"Faults": {"HttpNfcLeaseSetManifestChecksumType": fault}}
    vcsim.save()
    result = cdi_worker.run(request(vcsim, target))
    assert [each.partition(":")[0] for each in result.verified.values()] == ["sha256"]


def test_target_with_invalid_utf8_names_a_snapshot(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    vcsim.power = "poweredOn"
    vcsim.save()
    target = tmp_path / os.fsdecode(b"disk\xff\x01.img")
    cdi_worker.run(request(vcsim, target))
    oracle.same(target, vcsim.current(0))


def test_host_that_exports_again_for_each_request(vcsim: vmware.Vcsim, target: Path) -> None:
    """It is asked once, although it offers ranges: the new export has another CID."""
    host(vcsim).page = dataclasses.replace(leases.PAGE, ranges=True, framing="length")

    def renamed(_disk: int, number: int, data: bytes) -> bytes:
        at = data.index(b"CID=") + 4
        return data[:at] + b"%08x" % (number + 1) + data[at + 8 :]

    host(vcsim).change = renamed
    cdi_worker.run(request(vcsim, target))
    oracle.same(target, vcsim.current(0))
    assert len(host(vcsim).requested(0)) == 1


def test_label_of_two_disks_chooses_none() -> None:
    def make(*_: object) -> None:
        raise AssertionError

    disks = [base.Held(("Hard disk 1", f"[ds] {name}"), f"{name}.img", 1, make) for name in "ab"]
    _, obstacle = choice.choose("vc", "vsphere", disks, "Hard disk 1")
    assert obstacle is not None
    assert choice.choose("vc", "vsphere", disks, "[ds] b") == (1, None)


def test_expired_session_is_renewed_once_for_all_threads(
    vcsim: vmware.Vcsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session.Session(vcsim.machine()) as opened:
        opened._content.sessionManager.Logout()
        log_in, logins = opened._log_in, []
        monkeypatch.setattr(opened, "_log_in", lambda: (logins.append(1), log_in()))
        both = threading.Barrier(2)
        fault = session.pyvmomi().vim.fault.NotAuthenticated

        def work() -> Any:
            answers: Iterator[Any] = iter([fault()])

            def call() -> Any:
                for each in answers:
                    both.wait()
                    raise each
                return opened.find(vmware.UUID)

            return opened.call("find", call)

        with futures.ThreadPoolExecutor(2) as pool:
            assert all(pool.map(lambda _: work(), range(2)))
        assert logins == [1]


def test_renewal_that_is_under_way_does_not_log_in_again(
    vcsim: vmware.Vcsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that begins after the logout would stay on vSphere."""
    vcsim.lease = {"Timeout": 3}
    vcsim.save()
    call, log_in = session.Session.call, session.Session._log_in
    renewing, ended = threading.Event(), threading.Event()
    logins = []

    def slow(self: session.Session, doing: str, *args: Any) -> Any:
        if doing != "renew the lease":
            return call(self, doing, *args)
        renewing.set()
        ended.wait(0.5)
        try:
            return call(self, doing, *args)
        finally:
            ended.set()

    def counted(self: session.Session) -> None:
        logins.append(1)
        log_in(self)

    monkeypatch.setattr(session.Session, "call", slow)
    monkeypatch.setattr(session.Session, "_log_in", counted)
    source = exported.LeaseSource(vcsim.machine(), cancelling.Cancel())
    source.open(base.Opening())
    assert renewing.wait(5)
    source.close()
    assert ended.wait(5)
    assert logins == [1]
