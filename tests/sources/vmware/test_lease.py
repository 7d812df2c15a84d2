"""Disks of a machine by an export lease, with a real vcsim and a host of ours: promises and faults."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyVmomi")

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import fetch
from cdi_worker.sources import base
from tests.support import leases, oracle, processes, vmware, worker

MiB = 1 << 20
SIZES = (24 * MiB, 4 * MiB, 8 * MiB)
LABELS = ("Hard disk 1", "Hard disk 2", "Hard disk 3")
MAKERS = {"qemu-img": leases.by_qemu, "ESXi": leases.by_esxi, "waiting ESXi": leases.by_waiting_esxi}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vmware.Vcsim]:
    made = vmware.Vcsim(tmp_path_factory.mktemp("leases"), SIZES[0], more=SIZES[1:], exports=True)
    for disk, size in enumerate(SIZES):
        made.write(
            (0, b"disk %d" % disk), (65536, os.urandom(size // 4)), (size - 512, b"end " * 128), disk=disk
        )
    made.take_snapshot()
    made.write((5 * MiB, b"after the snapshot" * 5000))
    with made.running():
        yield made


@pytest.fixture
def vcsim(running: vmware.Vcsim) -> Iterator[vmware.Vcsim]:
    """A machine that is off. At the end of the test, nothing of it may be left."""
    running.power = "poweredOff"
    running.save()
    yield running
    left = untidy(running)
    running.reset()
    assert not left


def untidy(vcsim: vmware.Vcsim) -> list[str]:
    """Return what was begun and not ended: leases, and snapshots."""
    begun = {each["lease"] for each in vcsim.calls("lease")} | {
        each["snapshot"] for each in vcsim.calls("created")
    }
    ended = {each["lease"] for each in vcsim.calls("ended")} | {
        each["snapshot"] for each in vcsim.calls("removed")
    }
    return sorted(begun - ended)


def why(vcsim: vmware.Vcsim) -> list[str]:
    """Return how leases have ended."""
    return [each["why"] for each in vcsim.calls("ended")]


def host(vcsim: vmware.Vcsim) -> leases.Host:
    assert vcsim.host
    return vcsim.host


def serve(vcsim: vmware.Vcsim, **changes: Any) -> None:
    """Serve all disks with faults of ``misbehave.Page``."""
    host(vcsim).page = dataclasses.replace(leases.PAGE, **changes)


def first(vcsim: vmware.Vcsim, times: int = 1, disk: int = 0, **changes: Any) -> None:
    """Serve the first responses of a disk with faults."""
    host(vcsim).turns[disk] = [(dataclasses.replace(leases.PAGE, **changes), times)]


def set_lease(vcsim: vmware.Vcsim, **fields: Any) -> None:
    vcsim.lease |= fields
    vcsim.save()


def request(vcsim: vmware.Vcsim, target: Path, disk: str = "1", **changes: Any) -> cdi_worker.Request:
    """Return a request; changes of its location, and ``no_progress``: seconds."""
    no_progress = changes.pop("no_progress", 2)
    request_changes = {name: changes.pop(name) for name in ("room", "existing") if name in changes}
    access = base.Access(user=vmware.USER, password=vcsim.password, patience=no_progress)
    return cdi_worker.Request(
        source="vsphere",
        location=vcsim.machine(**{"access": access, **changes}),
        target=str(target),
        disk=disk,
        fetch=fetch.FetchOptions(no_progress=no_progress),
        connect_patience=1,
        **request_changes,
    )


def run(vcsim: vmware.Vcsim, target: Path, disk: str = "1", **changes: Any) -> cdi_worker.Result:
    return cdi_worker.run(request(vcsim, target, disk, **changes))


def fails(
    vcsim: vmware.Vcsim, target: Path, reason: str, kind: type[Exception] = errors.Error, **changes: Any
) -> None:
    """Run an import that fails for a reason, and check that it leaves nothing."""
    with pytest.raises(kind, match=reason):
        run(vcsim, target, **changes)
    oracle.unusable(target)
    assert not untidy(vcsim)
    # While a lease is held, the machine is locked.
    for sent, ended in zip(host(vcsim).requests[-1:], vcsim.calls("ended")[-1:], strict=False):
        assert ended["at"] - time.time() + time.monotonic() - sent.ended < 1


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "disk.img"


# -- the way of a lease


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("disk", range(len(SIZES)))
def test_disk_is_imported(vcsim: vmware.Vcsim, target: Path, disk: int, maker: str) -> None:
    """VSphere lists the last disk first, and names its file disk-0."""
    host(vcsim).makers = (MAKERS[maker],)
    names = (str(disk + 1), LABELS[disk], vcsim.file(1, disk))
    for name in names:
        result = run(vcsim, target, name, existing="replace")
        oracle.same(target, vcsim.current(disk))
        assert result.verified.keys() == {f"export of {LABELS[disk]}"}
        assert result.facts.identity is None
    assert why(vcsim) == ["completed"] * len(names)


def test_snapshot_is_imported_of_a_running_machine(vcsim: vmware.Vcsim, target: Path) -> None:
    vcsim.power = "poweredOn"
    vcsim.save()
    for snapshot in (vcsim.snapshot(0), "stage 0"):
        result = run(vcsim, target, snapshot=snapshot, existing="replace")
        oracle.same(target, vcsim.content(0))
        assert vcsim.snapshot(0) in (result.identity or "")
    assert not vcsim.calls("CreateSnapshot_Task", "RemoveSnapshot_Task", "ExportVm")


def test_lease_is_ended_within_a_second_of_the_last_byte(vcsim: vmware.Vcsim, target: Path) -> None:
    run(vcsim, target)
    (sent,) = host(vcsim).requested(0)
    (completed,) = vcsim.calls("HttpNfcLeaseComplete")
    assert completed["at"] - time.time() + time.monotonic() - sent.ended < 1
    names = [each["call"] for each in vcsim.calls()]
    ask, read = (names.index(f"HttpNfcLease{each}") for each in ("SetManifestChecksumType", "GetManifest"))
    assert ask < read < names.index("HttpNfcLeaseComplete")


def test_host_gets_no_credentials(vcsim: vmware.Vcsim, target: Path) -> None:
    run(vcsim, target)
    for sent in host(vcsim).requests:
        assert not {"cookie", "authorization", "vmware-api-session-id"} & sent.headers.keys()
        assert vcsim.password not in str(sent.headers)


def test_lease_is_kept_while_a_host_is_slow(vcsim: vmware.Vcsim, target: Path) -> None:
    """The time-out of the lease is shorter than the transfer; progress is reported each third of it."""
    set_lease(vcsim, Timeout=3.0)
    size = host(vcsim).stream("current", 0, 1).stat().st_size
    serve(vcsim, drip=(size // 40, 0.125))
    begun = time.monotonic()
    run(vcsim, target)
    assert time.monotonic() - begun > 4
    oracle.same(target, vcsim.current())
    progress = vcsim.calls("HttpNfcLeaseProgress")
    assert 3 <= len(progress) <= 8
    percents = [each["percent"] for each in progress]
    assert percents == sorted(percents)
    assert 0 < percents[-1] < 100
    assert why(vcsim) == ["completed"]


def test_host_may_be_silent_for_longer_than_other_servers(vcsim: vmware.Vcsim, target: Path) -> None:
    """Where a disk is empty it sends nothing, or next to nothing."""
    serve(vcsim, drip=(5 * MiB, 3))
    run(vcsim, target, no_progress=2)
    oracle.same(target, vcsim.current())
    assert len(host(vcsim).requested(0)) == 1


def test_report_that_fails_once_is_made_again(vcsim: vmware.Vcsim, target: Path) -> None:
    set_lease(vcsim, Timeout=3.0, Faults={"HttpNfcLeaseProgress": {"Name": "HostCommunication", "Times": 1}})
    size = host(vcsim).stream("current", 0, 1).stat().st_size
    serve(vcsim, drip=(size // 40, 0.125))
    run(vcsim, target)
    oracle.same(target, vcsim.current())
    assert why(vcsim) == ["completed"]


@pytest.mark.parametrize("how", ["Complete", "Abort"])
def test_end_of_a_lease_is_asked_for_again(vcsim: vmware.Vcsim, target: Path, how: str) -> None:
    """It locks the machine for minutes otherwise."""
    set_lease(vcsim, Faults={f"HttpNfcLease{how}": {"Name": "HostCommunication", "Times": 2}})
    if how == "Complete":
        run(vcsim, target)
    else:
        serve(vcsim, status=404, framing="length")
        with pytest.raises(errors.Error, match="the URL of the lease"):
            run(vcsim, target)
    assert why(vcsim) == ["completed" if how == "Complete" else "aborted"]


def test_lease_that_cannot_be_completed_is_said(
    vcsim: vmware.Vcsim, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is right, and the lease ends by itself."""
    set_lease(vcsim, Timeout=3.0, Faults={"HttpNfcLeaseComplete": {"Name": "HostCommunication"}})
    run(vcsim, target)
    oracle.same(target, vcsim.current())
    assert "when the lease times out" in caplog.text
    processes.wait_for(lambda: why(vcsim) == ["timed out"], "the end of the lease")


@pytest.mark.parametrize(("stated", "believed"), [(300_000_000, 900), (1, 3)])
def test_absurd_timeout_is_not_believed(
    vcsim: vmware.Vcsim, target: Path, caplog: pytest.LogCaptureFixture, stated: int, believed: int
) -> None:
    caplog.set_level(logging.INFO)
    set_lease(vcsim, Stated=stated)
    run(vcsim, target)
    oracle.same(target, vcsim.current())
    assert f"timeout={believed}" in caplog.text


def test_lease_is_waited_for(vcsim: vmware.Vcsim, target: Path) -> None:
    set_lease(vcsim, Initializing=3)
    run(vcsim, target)
    oracle.same(target, vcsim.current())


def test_star_is_the_server_that_was_asked(vcsim: vmware.Vcsim, target: Path) -> None:
    host(vcsim).star = True
    vcsim.save()
    run(vcsim, target)
    oracle.same(target, vcsim.current())


def test_independent_disk_is_exported_without_a_snapshot_only(vcsim: vmware.Vcsim, target: Path) -> None:
    vcsim.independent = {1}
    vcsim.save()
    run(vcsim, target, LABELS[1])
    oracle.same(target, vcsim.current(1))
    target.unlink()
    vcsim.power = "poweredOn"
    vcsim.save()
    fails(vcsim, target, "Hard disk 2|disk '2'", disk=LABELS[1])


# -- what the manifest proves


@pytest.mark.parametrize("algorithm", ["sha1", "sha256"])
def test_stream_is_compared_with_the_manifest(vcsim: vmware.Vcsim, target: Path, algorithm: str) -> None:
    set_lease(vcsim, NoChecksumType=algorithm == "sha1")
    result = run(vcsim, target)
    assert result.verified[f"export of {LABELS[0]}"].startswith(f"{algorithm}:")
    target.unlink()
    host(vcsim).state = lambda _, entry: {**entry, algorithm.upper(): "0" * 40}
    fails(vcsim, target, "digest|checksum", errors.DigestMismatch)
    assert why(vcsim) == ["completed", "aborted"]


def test_byte_that_was_changed_on_the_way_is_found(vcsim: vmware.Vcsim, target: Path) -> None:
    """In the padding after a grain, which no reader of the stream looks at."""
    host(vcsim).makers = (leases.by_esxi,)
    stream = host(vcsim).stream("current", 0, 1).read_bytes()
    at = next(at for at in range(70_000, len(stream)) if not any(stream[at : at + 16]))

    def damage(offset: int, data: bytes) -> bytes:
        return data[: at - offset] + b"\1" + data[at - offset + 1 :]

    serve(vcsim, damage=damage)
    fails(vcsim, target, "digest|checksum|padding", errors.Error)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"Size": 4096}, "the host has sent 4096"),
        ({"Capacity": 4096}, "exported with 4096 bytes, the disk has"),
    ],
)
def test_sizes_of_the_manifest_are_compared(
    vcsim: vmware.Vcsim, target: Path, change: dict[str, Any], reason: str
) -> None:
    host(vcsim).state = lambda _, entry: {**entry, **change}
    fails(vcsim, target, reason)


def test_missing_manifest_is_said(
    vcsim: vmware.Vcsim, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    set_lease(vcsim, NoManifest=True)
    result = run(vcsim, target)
    oracle.same(target, vcsim.current())
    assert not result.verified
    assert "not verified" in caplog.text


def test_capacity_of_the_stream_is_that_of_the_machine(
    vcsim: vmware.Vcsim, target: Path, tmp_path: Path
) -> None:
    def another(raw: Path, stream: Path) -> None:
        (tmp_path / "larger").write_bytes(raw.read_bytes() + bytes(MiB))
        leases.by_qemu(tmp_path / "larger", stream)

    host(vcsim).makers = (another,)
    fails(vcsim, target, f"{SIZES[0]}")


# -- the stream breaks


@pytest.mark.parametrize("again", ["equal", "another CID", "another writer"])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_cut_stream_starts_again_with_the_same_lease(
    vcsim: vmware.Vcsim, target: Path, again: str, checkpoint: bool
) -> None:
    """Another request may get other bytes: the disk in them is compared with what was written."""
    first(vcsim, 2, cut=5 * MiB)
    state = vcsim.snapshot(0) if checkpoint else "current"
    streams = [leases.by_qemu, leases.by_esxi]

    def change(disk: int, number: int, data: bytes) -> bytes:
        if again == "another writer":
            host(vcsim).makers = (streams[number % 2],)
            return host(vcsim).stream(state, disk, 1).read_bytes()
        return renamed(data, number if again == "another CID" else 0)

    host(vcsim).change = change
    result = run(vcsim, target, current=vcsim.snapshot(0) if checkpoint else "")
    oracle.same(target, vcsim.content(0 if checkpoint else 1))
    assert len(host(vcsim).requested(0)) >= 3
    assert len(vcsim.calls("lease")) == 1
    assert why(vcsim) == ["completed"]
    assert result.verified
    if checkpoint and again != "equal":
        # Without an identity, nothing is noted to be compared with.
        assert result.written < 3 * MiB


def test_stream_that_is_another_one_each_time_fails(vcsim: vmware.Vcsim, target: Path) -> None:
    serve(vcsim, cut=3 * MiB)
    host(vcsim).change = lambda disk, number, data: renamed(data, number)
    fails(vcsim, target, "changed during the transfer", errors.SourceChanged, no_progress=1)
    assert len(host(vcsim).requested(0)) < 30


def renamed(stream: bytes, number: int) -> bytes:
    """Return a stream of the same disk with another CID, as of another export."""
    at = stream.index(b"CID=") + 4
    return stream[:at] + b"%08x" % (number + 1) + stream[at + 8 :]


def test_stream_that_is_always_cut_fails(vcsim: vmware.Vcsim, target: Path) -> None:
    serve(vcsim, cut=MiB)
    fails(
        vcsim, target, "the connection broke .* times before this byte", errors.TransferFailed, no_progress=1
    )
    assert why(vcsim) == ["aborted"]


def test_stream_that_stalls_is_asked_again(vcsim: vmware.Vcsim, target: Path) -> None:
    first(vcsim, stall=2 * MiB)
    run(vcsim, target, no_progress=1)
    oracle.same(target, vcsim.current())


def test_stream_that_always_stalls_fails(vcsim: vmware.Vcsim, target: Path) -> None:
    serve(vcsim, stall=2 * MiB)
    fails(
        vcsim,
        target,
        "the connection broke .* times before this byte",
        errors.TransferFailed,
        no_progress=0.5,
    )
    assert why(vcsim) == ["aborted"]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        ((bytes(65536), None), "more than .* bytes follow the end of the image"),
        ((b"x" * 65536, None), "more than .* bytes follow the end of the image"),
        ((b"more", 1), "bytes were received, the host has sent"),
    ],
)
def test_stream_that_is_too_long_is_refused(
    vcsim: vmware.Vcsim, target: Path, maker: str, tail: tuple[bytes, int | None], reason: str
) -> None:
    host(vcsim).makers = (MAKERS[maker],)
    serve(vcsim, tail=tail)
    begun = time.monotonic()
    fails(vcsim, target, reason, no_progress=1)
    assert time.monotonic() - begun < 15


@pytest.mark.parametrize(
    ("maker", "end"), [("qemu-img", 1 << 17), *(("ESXi", end) for end in (1, 512, 1024, 1536, 8192))]
)
def test_stream_that_ends_early_is_not_a_disk(
    vcsim: vmware.Vcsim, target: Path, maker: str, end: int
) -> None:
    """The response is complete, and the manifest is of it. That of qemu-img ends with padding."""
    host(vcsim).makers = (MAKERS[maker],)
    host(vcsim).change = lambda disk, number, data: data[:-end]
    fails(vcsim, target, "vmdk", no_progress=1)


@pytest.mark.parametrize(
    "at", [-1536, -1024, -512], ids=["marker of the footer", "footer", "end of the stream"]
)
def test_wrong_end_of_the_stream_is_refused(vcsim: vmware.Vcsim, target: Path, at: int) -> None:
    def change(disk: int, number: int, data: bytes) -> bytes:
        where = len(data) + at
        return data[:where] + b"\xee" * 512 + data[where + 512 :]

    host(vcsim).makers = (leases.by_esxi,)
    host(vcsim).change = change
    fails(vcsim, target, "vmdk", no_progress=1)


def test_grain_that_is_damaged_is_refused(vcsim: vmware.Vcsim, target: Path) -> None:
    """The manifest is of the damaged bytes, as if the host had read them so."""
    host(vcsim).change = lambda disk, number, data: data[:MiB] + b"\xee" * 512 + data[MiB + 512 :]
    fails(vcsim, target, "vmdk", no_progress=1)


def test_other_format_is_refused(vcsim: vmware.Vcsim, target: Path) -> None:
    """The protocol states VMDK: a guest could write the header of anything to its disk."""
    host(vcsim).change = lambda disk, number, data: b"QFI\xfb" + data[4:]
    fails(vcsim, target, "vmdk|VMDK")


# -- the host


@pytest.mark.parametrize("status", [401, 403, 404])
def test_url_that_is_refused_ends_the_import(vcsim: vmware.Vcsim, target: Path, status: int) -> None:
    serve(vcsim, status=status, framing="length")
    fails(vcsim, target, "the URL of the lease")
    assert len(host(vcsim).requested(0)) == 1
    assert why(vcsim) == ["aborted"]


@pytest.mark.parametrize("status", [500, 503])
def test_busy_host_is_asked_again(vcsim: vmware.Vcsim, target: Path, status: int) -> None:
    first(vcsim, status=status, framing="length")
    run(vcsim, target)
    oracle.same(target, vcsim.current())
    target.unlink()
    serve(vcsim, status=status, framing="length")
    host(vcsim).turns.clear()
    fails(vcsim, target, str(status), no_progress=1)
    assert why(vcsim) == ["completed", "aborted"]


def test_redirect_is_not_followed(vcsim: vmware.Vcsim, target: Path) -> None:
    serve(vcsim, to=(host(vcsim).url("/elsewhere"),))
    fails(vcsim, target, "redirects elsewhere")
    assert {each.path.rpartition("/")[2] for each in host(vcsim).requests} == {"disk-2.vmdk"}


@pytest.mark.parametrize("framing", ["length", "close"])
def test_other_framing_is_read(vcsim: vmware.Vcsim, target: Path, framing: str) -> None:
    serve(vcsim, framing=framing)
    run(vcsim, target)
    oracle.same(target, vcsim.current())


def test_response_shorter_than_its_length_is_not_a_disk(vcsim: vmware.Vcsim, target: Path) -> None:
    serve(vcsim, framing="length", missing=512)
    fails(vcsim, target, "the connection broke .* times before this byte", no_progress=1)


def test_host_that_offers_ranges(vcsim: vmware.Vcsim, target: Path) -> None:
    serve(vcsim, ranges=True, framing="length")
    host(vcsim).turns = {0: [(dataclasses.replace(host(vcsim).page, cut=2_000_000), 1)]}
    result = run(vcsim, target)
    oracle.same(target, vcsim.current())
    assert result.verified
    sent = [each.headers.get("range") for each in host(vcsim).requested(0)]
    assert sent == [None, f"bytes={2_000_000 - 512}-"]


# -- certificates


def test_host_with_another_certificate_is_refused(vcsim: vmware.Vcsim, target: Path) -> None:
    host(vcsim).stated = vcsim.thumbprint
    vcsim.save()
    fails(vcsim, target, "thumbprint")
    assert not host(vcsim).requests


def test_thumbprint_may_be_of_sha256(vcsim: vmware.Vcsim, target: Path) -> None:
    der = ssl.PEM_cert_to_DER_cert(host(vcsim).pair.certificate.read_text())
    host(vcsim).stated = hashlib.sha256(der).digest().hex(":")
    vcsim.save()
    run(vcsim, target)
    oracle.same(target, vcsim.current())


def test_host_without_a_thumbprint_needs_a_trusted_certificate(vcsim: vmware.Vcsim, target: Path) -> None:
    host(vcsim).stated = ""
    vcsim.save()
    fails(vcsim, target, "certificate")
    assert not host(vcsim).requests
    access = base.Access(
        user=vmware.USER, password=vcsim.password, ca_files=(str(host(vcsim).authority.certificate),)
    )
    run(vcsim, target, access=access)
    oracle.same(target, vcsim.current())


def test_thumbprint_of_sha1_needs_another_trust(
    vcsim: vmware.Vcsim, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose policy has no SHA-1 for security."""
    monkeypatch.setattr(hashlib, "sha1", refuse)
    login, pin = base.Access(user=vmware.USER, password=vcsim.password), vcsim.pair.digest("sha256")
    fails(
        vcsim,
        target,
        "policy of this machine forbids; give that of SHA-256",
        thumbprint=vcsim.pair.digest("sha1"),
    )
    host(vcsim).stated = host(vcsim).pair.digest("sha1")
    vcsim.save()
    fails(vcsim, target, "certificate verify failed", thumbprint=pin)
    assert not host(vcsim).requests
    trusting = dataclasses.replace(login, ca_files=(str(host(vcsim).authority.certificate),))
    run(vcsim, target, access=trusting, thumbprint=pin)
    oracle.same(target, vcsim.current())


def test_host_of_the_session_has_its_thumbprint(
    vcsim: vmware.Vcsim, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of the request, of SHA-256, and not that of SHA-1 which the lease states."""
    monkeypatch.setattr(hashlib, "sha1", refuse)
    host(vcsim).star, host(vcsim).stated = True, vcsim.pair.digest("sha1")
    vcsim.save()
    run(vcsim, target, thumbprint=vcsim.pair.digest("sha256"))
    oracle.same(target, vcsim.current())


def refuse(*data: bytes, usedforsecurity: bool = True) -> Any:
    if usedforsecurity:
        raise ValueError("[digital envelope routines] unsupported")
    return hashlib.new("sha1", *data, usedforsecurity=False)


def test_insecure_needs_no_certificate(vcsim: vmware.Vcsim, target: Path) -> None:
    host(vcsim).stated = ""
    vcsim.save()
    access = base.Access(user=vmware.USER, password=vcsim.password, insecure=True)
    run(vcsim, target, access=access, thumbprint="")
    oracle.same(target, vcsim.current())


def test_malformed_thumbprint_is_refused(vcsim: vmware.Vcsim, target: Path) -> None:
    host(vcsim).stated = "12:34"
    vcsim.save()
    fails(vcsim, target, "the lease is malformed: thumbprint")


# -- the lease ends


@pytest.mark.parametrize("how", ["error", "done", "gone"])
@pytest.mark.parametrize("after", [0, MiB])
def test_another_client_ends_the_lease(vcsim: vmware.Vcsim, target: Path, how: str, after: int) -> None:
    """The host ends the response then."""
    serve(vcsim, drip=(65536, 0.02))

    def end() -> None:
        processes.wait_for(lambda: host(vcsim).sent_of(0) > after, "a part of the disk")
        set_lease(vcsim, Ends=how)

    ending = threading.Thread(target=end)
    ending.start()
    begun = time.monotonic()
    fails(vcsim, target, "the lease ended.*another client", errors.TransferFailed)
    ending.join()
    assert time.monotonic() - begun < 10
    assert why(vcsim) == ["another client"]


def test_end_of_a_lease_explains_a_host_that_only_resets(vcsim: vmware.Vcsim, target: Path) -> None:
    host(vcsim).gone = dataclasses.replace(leases.PAGE, body=b"x" * 1024, cut=0)
    set_lease(vcsim, Timeout=3.0, Faults={"HttpNfcLeaseProgress": {"Name": "HostCommunication"}})
    serve(vcsim, drip=(65536, 0.05))
    fails(vcsim, target, "the lease ended.*heard nothing", errors.TransferFailed, no_progress=20)
    assert why(vcsim) == ["timed out"]


@pytest.mark.parametrize("fault", ["FileFault", "InvalidState"])
def test_lease_that_fails_before_it_is_ready(vcsim: vmware.Vcsim, target: Path, fault: str) -> None:
    set_lease(vcsim, Initializing=1, Fails=fault)
    fails(vcsim, target, "lease")
    assert not host(vcsim).requests


def test_session_that_expires_is_renewed(vcsim: vmware.Vcsim, target: Path) -> None:
    set_lease(vcsim, Faults={"HttpNfcLeaseGetManifest": {"Name": "NotAuthenticated", "Times": 1}})
    run(vcsim, target)
    oracle.same(target, vcsim.current())


# -- what vSphere refuses


def test_missing_privilege_is_named(vcsim: vmware.Vcsim, target: Path) -> None:
    set_lease(vcsim, Denied=["VApp.Export"])
    fails(vcsim, target, "no privilege VApp.Export on .*vm-")
    fails(vcsim, target, "no privilege VApp.Export on .*vm-", current=vcsim.snapshot(0))
    set_lease(vcsim, Denied=["VirtualMachine.State.CreateSnapshot"])
    vcsim.power = "poweredOn"
    vcsim.save()
    fails(vcsim, target, "no privilege VirtualMachine.State.CreateSnapshot on .*vm-")
    assert not vcsim.calls("lease", "created")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("RestrictedVersion", "licen[cs]e"),
        ("NotSupported", "encrypted"),
        ("FileFault", "cannot read the files"),
        ("InvalidPowerState", "runs"),
    ],
)
def test_refused_export_says_why(vcsim: vmware.Vcsim, target: Path, fault: str, reason: str) -> None:
    set_lease(vcsim, Faults={"ExportVm": {"Name": fault}})
    fails(vcsim, target, reason)
    assert len(vcsim.calls("ExportVm")) == 1


def test_lease_of_another_run_is_waited_for(vcsim: vmware.Vcsim, target: Path, tmp_path: Path) -> None:
    """Of two at once, the second begins when the first has ended."""
    serve(vcsim, drip=(131072, 0.02))
    done: list[cdi_worker.Result] = []
    other = threading.Thread(target=lambda: done.append(run(vcsim, tmp_path / "other.img")))
    other.start()
    processes.wait_for(lambda: host(vcsim).requested(0), "a request of the disk")
    run(vcsim, target)
    other.join()
    assert done
    oracle.same(target, vcsim.current())
    oracle.same(tmp_path / "other.img", vcsim.current())
    refused = len(vcsim.calls("ExportVm")) - 2
    assert refused >= 1
    assert why(vcsim) == ["completed"] * 2


# -- snapshots of the worker


@pytest.fixture
def on(vcsim: vmware.Vcsim) -> vmware.Vcsim:
    vcsim.power = "poweredOn"
    vcsim.save()
    return vcsim


@pytest.mark.parametrize("quiesce", [False, True])
def test_running_machine_is_exported_at_a_snapshot_of_its_own(
    on: vmware.Vcsim, target: Path, quiesce: bool
) -> None:
    set_lease(on, Task=0.3)
    run(on, target, quiesce=quiesce)
    oracle.same(target, on.current())
    (taken,) = on.calls("CreateSnapshot_Task")
    assert (taken["memory"], taken["quiesce"]) == (False, quiesce)
    assert str(target) in taken["description"]
    (removed,) = on.calls("RemoveSnapshot_Task")
    assert removed["removeChildren"] is False
    names = [each["call"] for each in on.calls()]
    assert names.index("HttpNfcLeaseComplete") < names.index("RemoveSnapshot_Task")


@pytest.mark.parametrize("fault", ["ApplicationQuiesceFault", "SnapshotFault"])
def test_snapshot_that_fails_says_why(on: vmware.Vcsim, target: Path, fault: str) -> None:
    set_lease(on, Faults={"CreateSnapshot": {"Name": fault}})
    fails(on, target, "snapshot", quiesce=True)
    assert not on.calls("ExportSnapshot")


def test_snapshot_is_removed_after_a_failure(on: vmware.Vcsim, target: Path) -> None:
    serve(on, status=404, framing="length")
    fails(on, target, "the URL of the lease")
    names = [each["call"] for each in on.calls()]
    assert names.index("HttpNfcLeaseAbort") < names.index("RemoveSnapshot_Task")


def test_snapshot_that_cannot_be_removed_is_named(
    on: vmware.Vcsim, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is right; the next run of the same import removes it."""
    set_lease(on, Denied=["VirtualMachine.State.RemoveSnapshot"])
    run(on, target)
    oracle.same(target, on.current())
    (taken,) = on.calls("CreateSnapshot_Task")
    assert "is left" in caplog.text
    assert taken["name"] in caplog.text
    assert "VirtualMachine.State.RemoveSnapshot" in caplog.text
    on.lease.clear()
    on.save()
    run(on, target, existing="replace")
    assert len(on.calls("removed")) == 2


def test_snapshots_of_others_stay(on: vmware.Vcsim, target: Path, tmp_path: Path) -> None:
    """Another import of the machine has one, too."""
    serve(on, drip=(131072, 0.02))
    other = threading.Thread(target=lambda: run(on, tmp_path / "other.img"))
    other.start()
    processes.wait_for(lambda: host(on).requested(0), "a request of the disk")
    run(on, target)
    other.join()
    oracle.same(target, on.current())
    oracle.same(tmp_path / "other.img", on.current())
    names = {each["name"] for each in on.calls("CreateSnapshot_Task")}
    assert len(names) == 2
    assert len(on.calls("removed")) == 2


def test_inspect_takes_no_snapshot(on: vmware.Vcsim) -> None:
    done = worker.call(
        "inspect",
        *("--source", "vsphere", "--uuid", vmware.INSTANCE_UUID, "--thumbprint", on.thumbprint),
        f"https://localhost:{on.port}/sdk",
        env={"GOVC_USERNAME": vmware.USER, "GOVC_PASSWORD": on.password},
    )
    assert not on.calls("CreateSnapshot_Task", "lease")
    assert done.status, done.output


def command(vcsim: vmware.Vcsim, target: Path, *options: str) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment of a worker of its own."""
    env = {"GOVC_USERNAME": vmware.USER, "GOVC_PASSWORD": vcsim.password}
    url = f"vsphere://localhost:{vcsim.port}/{vmware.INSTANCE_UUID}"
    arguments = ["import", "--disk", "1", "--thumbprint", vcsim.thumbprint, *options, url, str(target)]
    return arguments, env


def test_sigterm_leaves_nothing(on: vmware.Vcsim, target: Path) -> None:
    set_lease(on, Task=0.2)
    serve(on, drip=(65536, 0.05))
    arguments, env = command(on, target)
    with worker.started(*arguments, env=env) as process:
        processes.wait_for(lambda: host(on).sent_of(0) > MiB, "a part of the disk")
        process.terminate()
        begun = time.monotonic()
        process.wait(processes.PATIENCE)
        assert time.monotonic() - begun < 5
    assert why(on) == ["aborted"]
    assert not untidy(on)
    oracle.unusable(target)


def test_next_run_removes_what_a_killed_one_has_left(on: vmware.Vcsim, target: Path) -> None:
    set_lease(on, Timeout=2.0)
    serve(on, drip=(65536, 0.05))
    arguments, env = command(on, target)
    with worker.started(*arguments, env=env) as process:
        processes.wait_for(lambda: host(on).sent_of(0) > MiB, "a part of the disk")
        process.kill()
        process.wait(processes.PATIENCE)
    assert len(untidy(on)) == 2
    serve(on)
    done = worker.run(*arguments, env=env)
    assert not done.status, done.errors
    oracle.same(target, on.current())
    assert why(on) == ["timed out", "completed"]
    assert len(on.calls("removed")) == 2


def test_password_is_in_no_log(vcsim: vmware.Vcsim, target: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    run(vcsim, target)
    assert vcsim.password not in caplog.text
