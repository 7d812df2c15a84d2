"""The imageio source with an engine that delays, pauses or ends the transfer at any moment."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import progress
from cdi_worker.sources import base
from cdi_worker.sources.ovirt import engine
from cdi_worker.sources.ovirt import source as imageio
from tests.support import ovirt_disks, processes, reading, upload_relay


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look every half second whether a locked disk is free again."""
    monkeypatch.setattr(engine, "LONGEST_LOOK", 0.5)


def test_slow_initialization_is_waited_for(ovirt_disk: ovirt_disks.Setup) -> None:
    ovirt_disk.engine.slow = 1.0
    with ovirt_disk.opened() as image:
        assert ovirt_disks.read(image) == ovirt_disk.now.read_bytes()


def test_transfer_that_is_never_ready_fails(ovirt_disk: ovirt_disks.Setup) -> None:
    ovirt_disk.engine.slow = 60.0
    with pytest.raises(errors.Unreachable, match=r"not ready \(phase initializing\)"):
        ovirt_disk.source(patience=dataclasses.replace(ovirt_disks.QUICK, ready=0.5)).open(base.Opening())
    ovirt_disk.check_ended("finished_cleanup")


def test_transfer_paused_before_it_is_ready_is_resumed(ovirt_disk: ovirt_disks.Setup) -> None:
    ovirt_disk.engine.slow = 0.5

    def pause() -> None:
        processes.wait_for(lambda: ovirt_disk.engine.transfers, "a transfer")
        ovirt_disk.engine.enter(ovirt_disk.engine.last, "paused_system")

    threading.Thread(target=pause).start()
    with ovirt_disk.opened() as image:
        assert ovirt_disks.read(image) == ovirt_disk.now.read_bytes()
    assert "resuming" in ovirt_disk.engine.last.log


def test_unreachable_host_is_read_through_the_proxy(ovirt_disk: ovirt_disks.Setup) -> None:
    ovirt_disk.engine.host = False
    with ovirt_disk.opened() as image:
        assert ovirt_disks.read(image) == ovirt_disk.now.read_bytes()


def test_engine_with_https_cannot_name_only_http_urls(
    ovirt_disk: ovirt_disks.Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads the ticket on the way reads the disk."""
    monkeypatch.setattr(ovirt_disk.engine.daemon, "url", lambda ticket: f"http://127.0.0.1:1/images/{ticket}")
    with pytest.raises(errors.Unreachable, match="has only http URLs, and the engine has https"):
        ovirt_disk.source().open(base.Opening())
    ovirt_disk.check_ended("finished_cleanup")


def test_broken_first_connections_need_no_second_transfer(ovirt_disk: ovirt_disks.Setup) -> None:
    """Before each attempt, both the host and the proxy are tried."""
    with upload_relay.Relay(ovirt_disk.engine.daemon.port, 0, 0) as relay:
        ovirt_disk.engine.front = relay.port
        with ovirt_disk.opened() as image:
            assert ovirt_disks.read(image) == ovirt_disk.now.read_bytes()
    ovirt_disk.check_ended("finished_cleanup")


@pytest.mark.parametrize("checkpoint", ["", "disk-0", "disk-1"])
def test_disk_that_ends_early_is_refused(ovirt_disk: ovirt_disks.Setup, checkpoint: str) -> None:
    """The data server serves a truncated volume to its end, as a smaller disk."""
    ovirt_disk.engine.flat, ovirt_disk.engine.short = True, 512
    with pytest.raises(errors.SourceError, match=f"has {ovirt_disks.SIZE - 512} bytes, the disk"):
        ovirt_disk.source(checkpoint).open(base.Opening())
    ovirt_disk.check_ended("finished_cleanup")


def test_locked_disk_is_waited_for(ovirt_disk: ovirt_disks.Setup) -> None:
    ovirt_disk.engine.locked.add("disk")
    threading.Timer(1.0, ovirt_disk.engine.locked.discard, ["disk"]).start()
    with ovirt_disk.opened() as image:
        assert ovirt_disks.read(image) == ovirt_disk.now.read_bytes()


def test_disk_that_stays_locked_fails(ovirt_disk: ovirt_disks.Setup) -> None:
    ovirt_disk.engine.locked.add("disk")
    try:
        with pytest.raises(errors.Unreachable, match="Disk is locked"):
            ovirt_disk.source(patience=dataclasses.replace(ovirt_disks.QUICK, locked=0)).open(base.Opening())
    finally:
        ovirt_disk.engine.locked.clear()
    ovirt_disk.check_ended()


def test_snapshot_that_changes_before_it_is_locked_is_not_read(ovirt_disk: ovirt_disks.Setup) -> None:
    """Removing another snapshot has merged data into it since it was found."""

    def merge() -> None:
        with ovirt_disk.engine.chains["disk"].volumes[0].path.open("ab") as stream:
            stream.write(bytes(1 << 20))

    ovirt_disk.engine.ending = merge
    with pytest.raises(errors.SourceChanged, match="snapshot was"):
        ovirt_disk.source("disk-0").open(base.Opening())
    ovirt_disk.check_ended("finished_cleanup")


def test_cancel_ends_waiting_for_the_disk(ovirt_disk: ovirt_disks.Setup) -> None:
    ovirt_disk.engine.slow = 60.0
    cancel = cancelling.Cancel()
    threading.Timer(0.5, cancel.set).start()
    with pytest.raises(errors.Cancelled):
        imageio.ImageioSource(ovirt_disk.location(), cancel, ovirt_disks.QUICK).open(base.Opening())
    ovirt_disk.check_ended("finished_cleanup")


def test_unreachable_engine_is_reported(ovirt_disk: ovirt_disks.Setup, tmp_path: Path) -> None:
    nowhere = f"https://127.0.0.1:{processes.free_port()}/ovirt-engine/api"
    location = dataclasses.replace(ovirt_disk.location(), endpoint=nowhere)
    fetch = cdi_worker.FetchOptions(no_progress=1)
    request = cdi_worker.Request(
        source="imageio",
        location=location,
        target=str(tmp_path / "disk.img"),
        fetch=fetch,
        connect_patience=1.0,
    )
    with pytest.raises(errors.Unreachable, match=rf"{nowhere}: .*connect"):
        cdi_worker.run(request)


def test_cancel_ends_the_wait_for_a_silent_engine(ovirt_disk: ovirt_disks.Setup) -> None:
    ovirt_disk.engine.mute = True
    cancel = cancelling.Cancel()
    threading.Timer(0.5, cancel.set).start()
    started = time.monotonic()
    with pytest.raises(errors.Cancelled):
        imageio.ImageioSource(ovirt_disk.location(), cancel, ovirt_disks.QUICK).open(base.Opening())
    assert time.monotonic() - started < processes.PATIENCE
    ovirt_disk.engine.mute = False


def test_silent_engine_does_not_delay_the_end(
    ovirt_disk: ovirt_disks.Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped pod has 30 s in all; the engine ends an unused transfer by itself."""
    monkeypatch.setattr(engine, "GRACE", 0.5)
    monkeypatch.setattr(engine, "LOGOUT", 0.5)
    cancel = cancelling.Cancel()
    ovirt_disk.engine.inactivity = 2
    quick = dataclasses.replace(ovirt_disks.QUICK, last=1)
    source = imageio.ImageioSource(ovirt_disk.location(), cancel, quick)
    source.open(base.Opening())
    ovirt_disk.engine.mute = True
    started = time.monotonic()
    cancel.set()
    source.close()
    assert time.monotonic() - started < quick.last + 10
    ovirt_disk.engine.mute = False
    processes.wait_for(lambda: not ovirt_disk.engine.locked, "the transfer is given up")
    left_behind = lambda: any(thread.name == "apart" for thread in threading.enumerate())  # noqa: E731  (one expression)
    processes.wait_for(lambda: not left_behind(), "what was asked is answered")


def test_engine_that_is_away_after_it_began_a_transfer_is_asked_again(ovirt_disk: ovirt_disks.Setup) -> None:
    """The disk is found again then; the import is begun anew, within its patience."""
    ovirt_disk.engine.inactivity = 2
    ovirt_disk.engine.ending = lambda: setattr(ovirt_disk.engine, "broken", 1 << 20)
    with pytest.raises(errors.Transient):
        ovirt_disk.source(patience=dataclasses.replace(ovirt_disks.QUICK, first=0.5, last=1)).open(
            base.Opening()
        )
    ovirt_disk.engine.broken = 0
    processes.wait_for(lambda: not ovirt_disk.engine.locked, "the transfer is given up")


def test_starting_engine_is_waited_for(ovirt_disk: ovirt_disks.Setup) -> None:
    ovirt_disk.engine.broken = 2
    with pytest.raises(errors.Transient, match=r"503|invalid response|content type"):
        ovirt_disk.source().open(base.Opening())
    target = ovirt_disk.before.parent / "target"
    cdi_worker.run(
        cdi_worker.Request(
            existing="replace", source="imageio", location=ovirt_disk.location(), target=str(target)
        )
    )
    processes.run("cmp", target, ovirt_disk.now)


def test_unused_ticket_is_renewed(ovirt_disk: ovirt_disks.Setup) -> None:
    ovirt_disk.engine.inactivity = 3  # the daemon counts whole seconds
    with ovirt_disk.opened() as image:
        time.sleep(4.2)
        assert ovirt_disk.engine.last.phase == "transferring"
        assert ovirt_disks.read(image) == ovirt_disk.now.read_bytes()


def test_engine_unreachable_at_the_end_is_an_error(ovirt_disk: ovirt_disks.Setup) -> None:
    with ovirt_disk.opened() as image:
        ovirt_disk.engine.stop()
        threading.Timer(1.0, ovirt_disk.engine.start).start()
        image.verify()
    ovirt_disk.check_ended("finished_success")


# -- during the transfer -----------------------------------------------------------------------------


class ActHalfWay(progress.NullProgress):
    """Call ``act`` after the first MiB of data; zeros do not count, because they are not read.

    All threads wait for ``act``: otherwise a busy machine might finish the transfer before it.
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
    ovirt_disk: ovirt_disks.Setup, act: Callable[[], object], current: str = "", connections: int = 2
) -> Path:
    """Import, with ``act`` called half-way; return the target."""
    target = ovirt_disk.before.parent / "target"
    request = cdi_worker.Request(
        existing="replace",
        source="imageio",
        location=ovirt_disk.location(current),
        target=str(target),
        fetch=cdi_worker.FetchOptions(connections=connections, chunk=256 << 10, no_progress=15),
    )
    cdi_worker.run(request, ActHalfWay(act))
    return target


def test_expired_ticket_is_extended_once_for_all_connections(ovirt_disk: ovirt_disks.Setup) -> None:
    target = run(ovirt_disk, lambda: ovirt_disk.engine.expire(ovirt_disk.engine.last), connections=6)
    processes.run("cmp", target, ovirt_disk.now)
    ovirt_disk.check_ended("finished_success")
    assert sum(call.endswith("/extend") for call in ovirt_disk.engine.calls) == 1


def test_new_transfer_replaces_lost_ticket_of_a_snapshot(ovirt_disk: ovirt_disks.Setup) -> None:
    ovirt_disk.engine.extends = False
    target = run(ovirt_disk, lambda: ovirt_disk.engine.expire(ovirt_disk.engine.last), "disk-0")
    processes.run("cmp", target, ovirt_disk.before)
    ovirt_disk.check_ended("finished_cleanup", "finished_success")


def test_snapshot_that_has_changed_is_not_read_on_by_a_new_transfer(ovirt_disk: ovirt_disks.Setup) -> None:
    """Between two transfers the disk is not locked: removing another snapshot merges data into this one."""

    def merge() -> None:
        with ovirt_disk.engine.last.volume.path.open("ab") as stream:
            stream.write(bytes(1 << 20))
        ovirt_disk.engine.expire(ovirt_disk.engine.last)

    ovirt_disk.engine.extends = False
    with pytest.raises(errors.SourceChanged, match="snapshot"):
        run(ovirt_disk, merge, "disk-0")
    ovirt_disk.check_ended("finished_cleanup", "finished_cleanup")


def test_lost_ticket_of_the_active_disk_fails(ovirt_disk: ovirt_disks.Setup) -> None:
    ovirt_disk.engine.extends = False
    with pytest.raises(errors.TransferFailed, match=r"ticket of image transfer transfer-.* has expired"):
        run(ovirt_disk, lambda: ovirt_disk.engine.expire(ovirt_disk.engine.last))
    ovirt_disk.check_ended("finished_cleanup")


def test_transfer_paused_by_the_engine_is_resumed(ovirt_disk: ovirt_disks.Setup) -> None:
    target = run(ovirt_disk, lambda: ovirt_disk.engine.enter(ovirt_disk.engine.last, "paused_system"))
    processes.run("cmp", target, ovirt_disk.now)
    assert ovirt_disk.engine.last.log.count("resuming") == 1
    ovirt_disk.check_ended("finished_success")


def test_transfer_paused_by_an_administrator_is_resumed(ovirt_disk: ovirt_disks.Setup) -> None:
    def pause() -> None:
        transfer = ovirt_disk.engine.last
        ovirt_disk.engine.enter(transfer, "paused_user")
        threading.Timer(1.0, ovirt_disk.engine.enter, [transfer, "resuming"]).start()

    target = run(ovirt_disk, pause)
    processes.run("cmp", target, ovirt_disk.now)
    assert ovirt_disk.engine.last.log.count("resuming") == 1
    ovirt_disk.check_ended("finished_success")


def test_transfer_cancelled_by_an_administrator_fails(ovirt_disk: ovirt_disks.Setup) -> None:
    with pytest.raises(errors.TransferFailed, match="was cancelled in the engine"):
        run(ovirt_disk, lambda: ovirt_disk.engine.enter(ovirt_disk.engine.last, "cancelled_user"), "disk-0")
    ovirt_disk.check_ended("finished_cleanup")


def test_transfer_cancelled_by_the_engine_fails(ovirt_disk: ovirt_disks.Setup) -> None:
    target = run(
        ovirt_disk, lambda: ovirt_disk.engine.enter(ovirt_disk.engine.last, "cancelled_system"), "disk-0"
    )
    processes.run("cmp", target, ovirt_disk.before)
    ovirt_disk.check_ended("finished_failure", "finished_success")


def test_restart_of_engine_and_host_is_survived(ovirt_disk: ovirt_disks.Setup) -> None:
    def restart() -> None:
        ovirt_disk.engine.stop()
        ovirt_disk.engine.expire(ovirt_disk.engine.last)
        threading.Timer(1.0, ovirt_disk.engine.start).start()

    target = run(ovirt_disk, restart)
    processes.run("cmp", target, ovirt_disk.now)
    ovirt_disk.check_ended("finished_success")


def test_interrupted_read_returns_only_data(ovirt_disk: ovirt_disks.Setup) -> None:
    reads = cancelling.Reads(cancelling.Cancel())
    with ovirt_disk.opened(cancel=reads) as image:
        reading.check_interrupted_reads(image.source.ranges, reads, ovirt_disk.now.read_bytes())


def test_cancel_ends_the_transfer(ovirt_disk: ovirt_disks.Setup) -> None:
    cancel = cancelling.Cancel()
    request = cdi_worker.Request(
    existing="replace",
        source="imageio", location=ovirt_disk.location(), target=str(ovirt_disk.before.parent / "target"),
        fetch=cdi_worker.FetchOptions(connections=2, chunk=256 << 10),
    )  # fmt: skip
    began: list[float] = []

    def act() -> None:
        began.append(time.monotonic())
        cancel.set()

    with pytest.raises(errors.Cancelled):
        cdi_worker.run(request, ActHalfWay(act), cancel)
    assert time.monotonic() - began[0] < processes.PATIENCE  # the limit of other ends is 120 s
    ovirt_disk.check_ended("finished_cleanup")
    with contextlib.suppress(FileNotFoundError):
        (ovirt_disk.before.parent / "target").unlink()
