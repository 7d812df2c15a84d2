"""The imageio source with an engine that takes its time, or part of it away, at any moment."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors, progress
from cdi_worker.images.engine import cancelling
from cdi_worker.sources.ovirt import source as imageio
from tests.support import ovirt_disks, processes, reading


def test_slow_to_initialize(ovirt_disk: ovirt_disks.Place) -> None:
    ovirt_disk.engine.slow = 1.0
    with ovirt_disk.source() as source:
        assert ovirt_disks.read(source) == ovirt_disk.now.read_bytes()


def test_never_ready(ovirt_disk: ovirt_disks.Place) -> None:
    ovirt_disk.engine.slow = 60.0
    with pytest.raises(errors.Unreachable, match=r"not ready \(phase initializing\)"):
        ovirt_disk.source(patience=dataclasses.replace(ovirt_disks.QUICK, ready=0.5)).__enter__()
    ovirt_disk.ended("finished_cleanup")


def test_paused_before_it_is_ready(ovirt_disk: ovirt_disks.Place) -> None:
    ovirt_disk.engine.slow = 0.5

    def pause() -> None:
        processes.wait_for(lambda: ovirt_disk.engine.transfers, "a transfer")
        ovirt_disk.engine.enter(ovirt_disk.engine.last, "paused_system")

    threading.Thread(target=pause).start()
    with ovirt_disk.source() as source:
        assert ovirt_disks.read(source) == ovirt_disk.now.read_bytes()
    assert "resuming" in ovirt_disk.engine.last.log


def test_a_host_out_of_reach(ovirt_disk: ovirt_disks.Place) -> None:
    ovirt_disk.engine.host = False
    with ovirt_disk.source() as source:
        assert ovirt_disks.read(source) == ovirt_disk.now.read_bytes()


def test_a_locked_disk_is_waited_for(ovirt_disk: ovirt_disks.Place) -> None:
    ovirt_disk.engine.locked.add("disk")
    threading.Timer(1.0, ovirt_disk.engine.locked.discard, ["disk"]).start()
    with ovirt_disk.source() as source:
        assert ovirt_disks.read(source) == ovirt_disk.now.read_bytes()


def test_a_disk_that_stays_locked(ovirt_disk: ovirt_disks.Place) -> None:
    ovirt_disk.engine.locked.add("disk")
    try:
        with pytest.raises(errors.Unreachable, match="Disk is locked"):
            ovirt_disk.source(patience=dataclasses.replace(ovirt_disks.QUICK, locked=0)).__enter__()
    finally:
        ovirt_disk.engine.locked.clear()
    ovirt_disk.ended()


def test_waiting_ends_with_the_worker(ovirt_disk: ovirt_disks.Place) -> None:
    ovirt_disk.engine.slow = 60.0
    cancel = cancelling.Cancel()
    threading.Timer(0.5, cancel.set).start()
    with pytest.raises(errors.Cancelled):
        imageio.ImageioSource(ovirt_disk.location(), cancel, ovirt_disks.QUICK).__enter__()
    ovirt_disk.ended("finished_cleanup")


def test_an_engine_that_does_not_answer(ovirt_disk: ovirt_disks.Place) -> None:
    ovirt_disk.engine.mute = True
    cancel = cancelling.Cancel()
    threading.Timer(0.5, cancel.set).start()
    started = time.monotonic()
    with pytest.raises(errors.Cancelled):
        imageio.ImageioSource(ovirt_disk.location(), cancel, ovirt_disks.QUICK).__enter__()
    assert time.monotonic() - started < 5
    ovirt_disk.engine.mute = False


def test_an_engine_that_falls_silent_keeps_no_end_waiting(ovirt_disk: ovirt_disks.Place) -> None:
    """A pod that is stopped has 30 s for everything; the engine ends by itself what nobody uses."""
    cancel = cancelling.Cancel()
    ovirt_disk.engine.inactivity = 2
    source = imageio.ImageioSource(ovirt_disk.location(), cancel, ovirt_disks.QUICK).__enter__()
    ovirt_disk.engine.mute = True
    started = time.monotonic()
    cancel.set()
    source.close()
    assert time.monotonic() - started < ovirt_disks.QUICK.last + 10
    ovirt_disk.engine.mute = False
    processes.wait_for(lambda: not ovirt_disk.engine.locked, "the transfer is given up")
    left_behind = lambda: any(thread.name == "apart" for thread in threading.enumerate())  # noqa: E731
    processes.wait_for(lambda: not left_behind(), "what was asked is answered")


def test_an_engine_that_is_starting(ovirt_disk: ovirt_disks.Place) -> None:
    ovirt_disk.engine.broken = 2
    with pytest.raises(errors.Transient, match=r"503|makes no sense|content type"):
        ovirt_disk.source().__enter__()
    target = ovirt_disk.before.parent / "target"
    cdi_worker.run(cdi_worker.Request(source="imageio", location=ovirt_disk.location(), target=str(target)))
    processes.run("cmp", target, ovirt_disk.now)


def test_a_ticket_in_use_is_kept_and_one_without_use_renewed(ovirt_disk: ovirt_disks.Place) -> None:
    ovirt_disk.engine.inactivity = 4  # the daemon counts in whole seconds
    with ovirt_disk.source() as source:
        time.sleep(5.5)
        assert ovirt_disk.engine.last.phase == "transferring"
        assert ovirt_disks.read(source) == ovirt_disk.now.read_bytes()


def test_an_engine_that_goes_away_at_the_end(ovirt_disk: ovirt_disks.Place) -> None:
    with ovirt_disk.source() as source:
        ovirt_disk.engine.stop()
        threading.Timer(1.0, ovirt_disk.engine.start).start()
        source.verify()
    ovirt_disk.ended("finished_success")


# -- in the middle of it -----------------------------------------------------------------------------


class Then(progress.NullProgress):
    """Does something when some data has come; zeros do not count, for they are not read.

    Meanwhile nobody else goes on: on a busy machine everything might have come before it is done.
    """

    def __init__(self, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act
        self._left = ovirt_disks.MIB
        self._lock = threading.Lock()

    def read(self, count: int) -> None:
        with self._lock:
            self._left -= count
            if self._left < 0 and self._act is not None:
                act, self._act = self._act, None
                act()


def run(
    ovirt_disk: ovirt_disks.Place, act: Callable[[], object], current: str = "", connections: int = 2
) -> Path:
    """Import with ``act`` happening half-way; return the target."""
    target = ovirt_disk.before.parent / "target"
    wanted = cdi_worker.Request(
        source="imageio",
        location=ovirt_disk.location(current),
        target=str(target),
        fetch=cdi_worker.FetchOptions(connections=connections, chunk=256 << 10, no_progress=15),
    )
    cdi_worker.run(wanted, Then(act))
    return target


def test_a_ticket_that_expires_is_extended(ovirt_disk: ovirt_disks.Place) -> None:
    target = run(ovirt_disk, lambda: ovirt_disk.engine.expire(ovirt_disk.engine.last))
    processes.run("cmp", target, ovirt_disk.now)
    ovirt_disk.ended("finished_success")


def test_a_ticket_that_expires_is_extended_once_for_all_connections(ovirt_disk: ovirt_disks.Place) -> None:
    target = run(ovirt_disk, lambda: ovirt_disk.engine.expire(ovirt_disk.engine.last), connections=6)
    processes.run("cmp", target, ovirt_disk.now)
    ovirt_disk.ended("finished_success")
    assert sum(call.endswith("/extend") for call in ovirt_disk.engine.calls) == 1


def test_a_ticket_that_cannot_be_extended_of_a_snapshot(ovirt_disk: ovirt_disks.Place) -> None:
    ovirt_disk.engine.extends = False
    target = run(ovirt_disk, lambda: ovirt_disk.engine.expire(ovirt_disk.engine.last), "disk-0")
    processes.run("cmp", target, ovirt_disk.before)
    ovirt_disk.ended("finished_cleanup", "finished_success")


def test_a_ticket_that_cannot_be_extended_of_a_disk_in_use(ovirt_disk: ovirt_disks.Place) -> None:
    ovirt_disk.engine.extends = False
    with pytest.raises(errors.TransferFailed, match=r"ticket of image transfer transfer-.* is gone"):
        run(ovirt_disk, lambda: ovirt_disk.engine.expire(ovirt_disk.engine.last))
    ovirt_disk.ended("finished_cleanup")


def test_a_pause_of_the_engine(ovirt_disk: ovirt_disks.Place) -> None:
    target = run(ovirt_disk, lambda: ovirt_disk.engine.enter(ovirt_disk.engine.last, "paused_system"))
    processes.run("cmp", target, ovirt_disk.now)
    assert ovirt_disk.engine.last.log.count("resuming") == 1
    ovirt_disk.ended("finished_success")


def test_a_pause_of_an_administrator(ovirt_disk: ovirt_disks.Place) -> None:
    def pause() -> None:
        transfer = ovirt_disk.engine.last
        ovirt_disk.engine.enter(transfer, "paused_user")
        threading.Timer(1.0, ovirt_disk.engine.enter, [transfer, "resuming"]).start()

    target = run(ovirt_disk, pause)
    processes.run("cmp", target, ovirt_disk.now)
    assert ovirt_disk.engine.last.log.count("resuming") == 1
    ovirt_disk.ended("finished_success")


def test_cancelled_by_an_administrator(ovirt_disk: ovirt_disks.Place) -> None:
    with pytest.raises(errors.TransferFailed, match="was cancelled in the engine"):
        run(ovirt_disk, lambda: ovirt_disk.engine.enter(ovirt_disk.engine.last, "cancelled_user"), "disk-0")
    ovirt_disk.ended("finished_cleanup")


def test_given_up_by_the_engine(ovirt_disk: ovirt_disks.Place) -> None:
    target = run(
        ovirt_disk, lambda: ovirt_disk.engine.enter(ovirt_disk.engine.last, "cancelled_system"), "disk-0"
    )
    processes.run("cmp", target, ovirt_disk.before)
    ovirt_disk.ended("finished_failure", "finished_success")


def test_a_restart_of_engine_and_host(ovirt_disk: ovirt_disks.Place) -> None:
    def restart() -> None:
        ovirt_disk.engine.stop()
        ovirt_disk.engine.expire(ovirt_disk.engine.last)
        threading.Timer(1.0, ovirt_disk.engine.start).start()

    target = run(ovirt_disk, restart)
    processes.run("cmp", target, ovirt_disk.now)
    ovirt_disk.ended("finished_success")


def test_what_an_interrupted_read_brings_is_data(ovirt_disk: ovirt_disks.Place) -> None:
    reads = cancelling.Reads(cancelling.Cancel())
    with ovirt_disk.source(cancel=reads) as source:
        reading.interrupted(source, reads, ovirt_disk.now.read_bytes())


def test_an_end_in_the_middle(ovirt_disk: ovirt_disks.Place) -> None:
    cancel = cancelling.Cancel()
    wanted = cdi_worker.Request(
        source="imageio", location=ovirt_disk.location(), target=str(ovirt_disk.before.parent / "target"),
        fetch=cdi_worker.FetchOptions(connections=2, chunk=256 << 10),
    )  # fmt: skip
    started = time.monotonic()
    with pytest.raises(errors.Cancelled):
        cdi_worker.run(wanted, Then(cancel.set), cancel)
    assert time.monotonic() - started < 10
    ovirt_disk.ended("finished_cleanup")
    with contextlib.suppress(FileNotFoundError):
        (ovirt_disk.before.parent / "target").unlink()
