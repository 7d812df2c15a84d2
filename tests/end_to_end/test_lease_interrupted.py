"""Imports by an export lease that are killed or stopped: vSphere has nothing of them after the next run."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyVmomi")

import cdi_worker
from cdi_worker.sources.vmware import machine
from tests.support import devices, kills, leases, oracle, processes, vmware, vmware_stages

MiB = vmware_stages.MiB
SIZE = vmware_stages.SIZE
#: A disk of a stage takes about half a second.
SLOW = dataclasses.replace(leases.PAGE, drip=(128 << 10, 0.01))


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
    give_up(running)
    running.reset()
    assert not left


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often whether the machine is free again."""
    monkeypatch.setattr(machine, "LOOK", 0.02)


target = devices.targets("file", "block512", "block4096", size=SIZE + MiB)


def host(vcsim: vmware.Vcsim) -> leases.Host:
    assert vcsim.host
    return vcsim.host


def give_up(vcsim: vmware.Vcsim) -> None:
    """End the lease of a worker that was killed, as vSphere does when it times out."""
    with changed(vcsim, Ends="error"):
        held = {each["lease"] for each in vcsim.calls("lease")}
        processes.wait_for(
            lambda: held == {each["lease"] for each in vcsim.calls("ended")}, "the end of the lease"
        )


@contextlib.contextmanager
def changed(vcsim: vmware.Vcsim, **fields: Any) -> Iterator[None]:
    before, vcsim.lease = vcsim.lease, {**vcsim.lease, **fields}
    vcsim.save()
    try:
        yield
    finally:
        vcsim.lease = before
        vcsim.save()


def request(vcsim: vmware.Vcsim, target: Path, stage: int, **changes: Any) -> cdi_worker.Request:
    """Return the request of a stage, with a journal that is saved all the time.

    ``current`` and ``previous`` empty: of the running machine, at a snapshot of the worker's.
    """
    made = vmware_stages.exported(vcsim, target, stage, **changes)
    fetch = cdi_worker.FetchOptions(no_progress=20)
    return dataclasses.replace(made, journal_interval=0.0, fetch=fetch, connect_patience=20)


OWN = {"current": "", "previous": ""}


def sent(vcsim: vmware.Vcsim, count: int) -> Callable[[], bool]:
    """Return a moment: when so many bytes more of the disk were sent."""
    before = sum(each.sent for each in host(vcsim).requested(0))
    return lambda: sum(each.sent for each in host(vcsim).requested(0)) - before > count


def most_at_once(vcsim: vmware.Vcsim) -> int:
    """Return how many snapshots of the worker there were at the same time, at most."""
    count = most = 0
    for each in vcsim.calls("created", "removed"):
        count += 1 if each["call"] == "created" else -1
        most = max(most, count)
    return most


# -- killed


def test_killed_copy_of_a_snapshot_continues(vcsim: vmware.Vcsim, target: Path) -> None:
    """The lease of the killed run is held until it times out: the next one waits for that."""
    host(vcsim).makers = (leases.by_esxi,)
    host(vcsim).page = dataclasses.replace(SLOW, stall=6 * MiB)
    wanted = request(vcsim, target, 0)
    with changed(vcsim, Timeout=3.0):
        kills.kill(wanted, lambda: kills.noted(target) > 2 * MiB)
        oracle.unusable(target)
        host(vcsim).page = leases.PAGE
        result = cdi_worker.run(wanted)
    vmware_stages.check(vcsim, target, 0)
    assert result.resumed > 2 * MiB
    assert result.written < 6 * MiB + MiB // 2
    assert [each["why"] for each in vcsim.calls("ended")] == ["timed out", "completed"]


@devices.on("file", "block4096")
@pytest.mark.parametrize("ends", ["before", "meanwhile"])
def test_killed_copy_of_a_running_machine_starts_over(vcsim: vmware.Vcsim, target: Path, ends: str) -> None:
    """The next run removes the snapshot, whose lease must have ended before, and takes another."""
    host(vcsim).page = dataclasses.replace(SLOW, stall=6 * MiB)
    wanted = request(vcsim, target, 0, **OWN)
    with changed(vcsim, Timeout=2.0):
        kills.kill(wanted, sent(vcsim, 4 * MiB))
        oracle.unusable(target)
        host(vcsim).page = leases.PAGE
        if ends == "before":
            give_up(vcsim)
        vcsim.write((3 * MiB, b"the machine runs"))
        result = cdi_worker.run(wanted)
    oracle.same(target, vcsim.current(), beyond=None)
    assert not result.resumed
    assert most_at_once(vcsim) == 1
    assert len(vcsim.calls("created")) == 2
    vcsim.write((3 * MiB, bytes(16)))


@devices.on("file")
def test_snapshot_of_a_killed_run_that_appears_later_is_removed(vcsim: vmware.Vcsim, target: Path) -> None:
    """VSphere takes it to its end, one after the other."""
    with changed(vcsim, Task=1.0):
        kills.kill(request(vcsim, target, 0, **OWN), lambda: vcsim.calls("CreateSnapshot_Task"))
        with changed(vcsim, Task=1.5):
            cdi_worker.run(request(vcsim, target, 0, **OWN))
    oracle.same(target, vcsim.current())
    assert len(vcsim.calls("created")) == 2


@devices.on("file", "block512")
def test_killed_delta_is_applied_again(vcsim: vmware.Vcsim, target: Path) -> None:
    cdi_worker.run(request(vcsim, target, 0))
    for stage, part in ((1, MiB), (2, 6 * MiB)):
        host(vcsim).page = dataclasses.replace(SLOW, stall=7 * MiB)
        kills.kill(request(vcsim, target, stage), sent(vcsim, part))
        give_up(vcsim)
        host(vcsim).page = leases.PAGE
        cdi_worker.run(request(vcsim, target, stage))
        vmware_stages.check(vcsim, target, stage)
    if target.is_file():
        assert [path.name for path in target.parent.glob("disk.img*")] == ["disk.img"]


@devices.on("file", "block4096")
@pytest.mark.parametrize("what", ["snapshot", "own", "delta"])
@pytest.mark.timeout(1800)
def test_kills_at_random_moments(
    vcsim: vmware.Vcsim, target: Path, what: str, pytestconfig: pytest.Config
) -> None:
    """The target is the disk or not usable; the next run makes it the disk, and leaves nothing on vSphere."""
    host(vcsim).makers = (leases.by_esxi, leases.by_qemu)
    changes = OWN if what == "own" else {}
    stage, content = (1, vcsim.content(1)) if what == "delta" else (0, vcsim.content(0))
    content = vcsim.current() if what == "own" else content
    dice, count, midway = random.Random(1), 0, 0
    for moment in kills.moments(pytestconfig):
        count += 1
        if target.is_block_device():
            devices.fill(target, SIZE + MiB)
        else:
            target.unlink(missing_ok=True)
        host(vcsim).page = leases.PAGE
        if what == "delta":
            cdi_worker.run(request(vcsim, target, 0))
        wanted = request(vcsim, target, stage, **changes)
        host(vcsim).page = SLOW
        vcsim.lease = {"Timeout": 2.0, "Task": dice.choice([0, 0.1])}
        vcsim.save()
        # A session and a lease are begun before the first byte.
        begun = sent(vcsim, 0)
        kills.after(3 * moment, wanted)
        midway += begun() and bool(vmware_stages.untidy(vcsim))
        if what != "delta" and (not target.exists() or target.read_bytes()[:SIZE] != content.read_bytes()):
            oracle.unusable(target, disk=content.read_bytes())
        if dice.random() < 0.7:
            give_up(vcsim)
        host(vcsim).page = leases.PAGE
        cdi_worker.run(wanted)
        oracle.same(target, content, beyond=None)
        assert not vmware_stages.untidy(vcsim)
        # That of a killed run may appear when the next run has its own.
        assert most_at_once(vcsim) <= 2
    assert midway or count < 20


# -- stopped


def stop(
    vcsim: vmware.Vcsim, wanted: cdi_worker.Request, when: Callable[[], object], before: str = ""
) -> str:
    """Send SIGTERM to a run when it is time, which must end within seconds; return what it has logged."""
    with kills.started(wanted, before=before, stderr=subprocess.PIPE) as process:
        processes.wait_for(lambda: when() or process.poll() is not None, "the moment to stop")
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _, said = process.communicate(timeout=processes.PATIENCE)
        assert time.monotonic() - began < 10
    if process.returncode:
        oracle.unusable(Path(wanted.target))
    else:
        # It had verified all bytes before.
        assert vcsim.calls("HttpNfcLeaseComplete")
        vmware_stages.check(vcsim, Path(wanted.target), vmware_stages.STAGES)
    return str(said)


@devices.on("file")
@pytest.mark.parametrize(
    ("fields", "page", "call"),
    [
        ({"Task": 1.0}, leases.PAGE, "CreateSnapshot_Task"),
        ({"Initializing": 1000}, leases.PAGE, "lease"),
        ({}, dataclasses.replace(leases.PAGE, silent=True), "HttpNfcLeaseSetManifestChecksumType"),
        ({}, dataclasses.replace(SLOW, stall=6 * MiB), "HttpNfcLeaseSetManifestChecksumType"),
        ({"Task": 1.0}, leases.PAGE, "RemoveSnapshot_Task"),
    ],
    ids=["snapshot", "initializing", "silent host", "transfer", "removal"],
)
def test_stopped_run_leaves_nothing(
    vcsim: vmware.Vcsim, target: Path, fields: dict[str, Any], page: Any, call: str
) -> None:
    host(vcsim).page = page
    with changed(vcsim, **fields):
        stop(vcsim, request(vcsim, target, 0, **OWN), lambda: vcsim.calls(call))
    assert len(vcsim.calls("created")) == 1
    assert not vmware_stages.untidy(vcsim)


@devices.on("file")
def test_snapshot_that_is_taken_too_long_is_left_to_the_next_run(vcsim: vmware.Vcsim, target: Path) -> None:
    """As a guest that flushes for longer than the kubelet waits."""
    impatient = """
import logging
from cdi_worker.sources.vmware import exported
logging.basicConfig()
exported.GRACE = 0.3
"""
    with changed(vcsim, Task=2.0):
        wanted = request(vcsim, target, 0, **OWN)
        said = stop(vcsim, wanted, lambda: vcsim.calls("CreateSnapshot_Task"), impatient)
    (asked,) = vcsim.calls("CreateSnapshot_Task")
    assert f"for snapshot {asked['name']!r}, to remove it" in said
    processes.wait_for(lambda: vcsim.calls("created"), "the snapshot")
    cdi_worker.run(wanted)
    oracle.same(target, vcsim.current())
    assert most_at_once(vcsim) == 1


@devices.on("file")
def test_stopped_delta_is_applied_again(vcsim: vmware.Vcsim, target: Path) -> None:
    cdi_worker.run(request(vcsim, target, 0))
    host(vcsim).page = dataclasses.replace(SLOW, stall=6 * MiB)
    stop(vcsim, request(vcsim, target, 1), sent(vcsim, 5 * MiB))
    assert [each["why"] for each in vcsim.calls("ended")] == ["completed", "aborted"]
    host(vcsim).page = leases.PAGE
    cdi_worker.run(request(vcsim, target, 1))
    vmware_stages.check(vcsim, target, 1)


@devices.on("file")
def test_run_that_waits_for_a_lease_can_be_stopped(vcsim: vmware.Vcsim, target: Path) -> None:
    """Another client exports the machine."""
    host(vcsim).page = dataclasses.replace(SLOW, stall=6 * MiB)
    kills.kill(request(vcsim, target, 0), sent(vcsim, MiB))
    refused = len(vcsim.calls("ExportSnapshot"))
    stop(vcsim, request(vcsim, target, 0), lambda: len(vcsim.calls("ExportSnapshot")) > refused)
    give_up(vcsim)
