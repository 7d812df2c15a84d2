"""Stages of a migration from VMware that are stopped, killed or fail temporarily."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from tests.support import devices, kills, oracle, processes, vmware, vmware_stages

pytest.importorskip("pyVmomi")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vmware.Vcsim]:
    made = vmware_stages.migration(tmp_path_factory.mktemp("vmware"))
    with made.running():
        yield made


@pytest.fixture
def vcsim(running: vmware.Vcsim) -> vmware.Vcsim:
    running.reset()
    return running


target = devices.targets("file", "block512", "block4096", size=vmware_stages.SIZE + vmware_stages.MiB)


def test_cancel_stops_a_stage(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    target, cancel = tmp_path / "disk.img", threading.Event()
    slow(vcsim, 500_000)

    def stop() -> None:
        processes.wait_for(lambda: reads(vcsim) and calls("ConnectEx") > 1, "reads of two connections")
        cancel.set()

    def calls(name: str) -> int:
        return [line.split()[0] for line in vcsim.library_calls()].count(name)

    threading.Thread(target=stop).start()
    with pytest.raises(errors.Cancelled):
        cdi_worker.run(vmware_stages.request(vcsim, target, 0), cancel=cancel)
    assert calls("ConnectEx") == calls("Disconnect") > 1
    oracle.unusable(target)


def nbdkit_of(vcsim: vmware.Vcsim) -> int | None:
    """Return the process id of the nbdkit that serves a disk of ``vcsim``."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            argv = path.read_bytes().split(b"\0")
            if argv[0].endswith(b"nbdkit") and f"libdir={vcsim.libdir}".encode() in argv:
                return int(path.parent.name)
    return None


@contextlib.contextmanager
def beside(work: Callable[[], object]) -> Iterator[None]:
    """Run ``work`` in a thread, and wait for its end after the block."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.mark.parametrize("stage", [0, 1])
def test_killed_nbdkit_is_started_again(tmp_path: Path, stage: int) -> None:
    size = 320 * vmware_stages.MiB
    vcsim = vmware.Vcsim(tmp_path / "vcsim", size)
    vcsim.take_snapshot((0, vmware_stages.noise(1, 8 * vmware_stages.MiB)))
    vcsim.take_snapshot((vmware_stages.MiB, vmware_stages.noise(2, 16 * vmware_stages.MiB)))
    target = tmp_path / "disk.img"
    with vcsim.running():
        for earlier in range(stage):
            cdi_worker.run(vmware_stages.request(vcsim, target, earlier))
        slow(vcsim, 200_000)
        before = reads(vcsim)

        def kill() -> None:
            processes.wait_for(lambda: reads(vcsim) > before + 2, "a read")
            os.kill(nbdkit_of(vcsim) or -1, signal.SIGKILL)
            slow(vcsim, 0)

        with beside(kill):
            request = dataclasses.replace(
                vmware_stages.request(vcsim, target, stage), fetch=cdi_worker.FetchOptions(no_progress=30)
            )
            started = time.monotonic()
            cdi_worker.run(request)
        assert time.monotonic() - started < 20
        vmware_stages.check(vcsim, target, stage)


def test_nbdkit_that_always_dies_is_a_clear_failure(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    target, done = tmp_path / "disk.img", threading.Event()
    slow(vcsim, 200_000)
    request = dataclasses.replace(vmware_stages.request(vcsim, target, 0), fetch=cdi_worker.FetchOptions())

    def kill() -> None:
        processes.wait_for(lambda: reads(vcsim), "a read")
        while not done.wait(0.05):
            if number := nbdkit_of(vcsim):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)

    def run() -> None:
        try:
            cdi_worker.run(request)
        finally:
            done.set()

    with beside(kill):
        started = time.monotonic()
        with pytest.raises(errors.TransferFailed, match=r"nbdkit failed.*SIGKILL.*run the import again"):
            run()
    assert time.monotonic() - started < 20
    oracle.unusable(target)
    slow(vcsim, 0)
    cdi_worker.run(request)
    vmware_stages.check(vcsim, target, 0)


def test_temporary_error_is_retried(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    target = tmp_path / "disk.img"
    vcsim.settings |= {"fail": "read@2050", "delay": "20000"}
    vcsim.save()

    def mend() -> None:
        processes.wait_for(
            lambda: sum("Read 0+" in line for line in vcsim.library_calls()) > 1, "a second try"
        )
        del vcsim.settings["fail"]
        vcsim.save()

    with beside(mend):
        cdi_worker.run(killable(vcsim, target, 0))
    vmware_stages.check(vcsim, target, 0)


def impatient(vcsim: vmware.Vcsim, target: Path, patience: int, min_speed: int) -> cdi_worker.Request:
    """Return a request for the first stage that waits as with ``--stall-timeout``, in seconds."""
    request = vmware_stages.request(vcsim, target, 0)
    access = dataclasses.replace(request.location.access, patience=patience, min_speed=min_speed)
    location = dataclasses.replace(request.location, access=access)
    # One read after the other: several at once may have all that there is in time.
    fetch = dataclasses.replace(request.fetch, no_progress=patience, min_speed=min_speed, connections=1)
    return dataclasses.replace(request, location=location, fetch=fetch)


def test_silent_or_slow_library_is_given_up(vcsim: vmware.Vcsim, tmp_path: Path) -> None:
    """The slow one answers each read, long before it would count as silent."""
    for microseconds, patience, min_speed, reason in (
        (3_000_000, 1, 0, "no answer within 1 s"),
        (1_500_000, 2, 1 << 30, r"in [2-9] s, less than 1.0 GiB per second"),
    ):
        slow(vcsim, microseconds)
        with pytest.raises(errors.TransferFailed, match=reason):
            cdi_worker.run(impatient(vcsim, tmp_path / "disk.img", patience, min_speed))


# -- killed at any moment --------------------------------------------------------------------------


def killable(vcsim: vmware.Vcsim, target: Path, stage: int) -> cdi_worker.Request:
    """Return the request of a stage with the usual patience, and a journal that is saved all the time."""
    request = vmware_stages.request(vcsim, target, stage)
    fetch = cdi_worker.FetchOptions()
    return dataclasses.replace(request, journal_interval=0.1, fetch=fetch, connect_patience=20)


@pytest.mark.parametrize("target", ["block512"], indirect=True)
def test_killed_stages_can_be_run_again(vcsim: vmware.Vcsim, target: Path) -> None:
    # Not an event: the kill may come at any moment.
    for stage, later in ((0, 0.15), (1, 0.0), (2, 0.15)):
        slow(vcsim, 100_000)
        before = reads(vcsim)
        with kills.started(killable(vcsim, target, stage)):
            processes.wait_for(lambda before=before: reads(vcsim) > before, "a read")
            time.sleep(later)
        slow(vcsim, 0)
        vmware_stages.run(vcsim, target, stage)


def test_killed_copy_is_resumed(tmp_path: Path) -> None:
    data = 48 * vmware_stages.MiB
    vcsim = vmware.Vcsim(tmp_path / "vcsim", 64 * vmware_stages.MiB)
    vcsim.take_snapshot((4 * vmware_stages.MiB, vmware_stages.noise(1, data)))
    vcsim.settings["delay"] = 500_000
    target, part = tmp_path / "disk.img", tmp_path / "disk.img.part"
    with vcsim.running():
        # The journal is behind the last byte.
        when = lambda: part.exists() and part.stat().st_size > vcsim.size  # noqa: E731  (one expression)
        kills.kill(killable(vcsim, target, 0), when)
        slow(vcsim, 0)
        result = vmware_stages.run(vcsim, target, 0)
    assert result.resumed > 0
    assert result.read < data


def slow(vcsim: vmware.Vcsim, microseconds: int) -> None:
    vcsim.settings["delay"] = microseconds
    vcsim.save()


def reads(vcsim: vmware.Vcsim) -> int:
    return sum(line.startswith("Read") for line in vcsim.library_calls())
