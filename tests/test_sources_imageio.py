"""The imageio source against the real daemon and a fake engine: what it reads, and how transfers end."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import importer
from images import fetch
from importer import errors, progress
from sources import base, imageio
from tests import engine as engine_module
from tests import processes, tls

MIB = 1 << 20
SIZE = 8 * MIB
#: Patience for tests: short, for everything is near.
QUICK = imageio.Patience(renew=0.3, locked=20, ready=20, end=10, last=5)


@dataclasses.dataclass
class Place:
    """An engine with a disk of two volumes. ``before``, ``now``: the raw disk at the first and last."""

    engine: engine_module.Engine
    authority: tls.Authority
    before: Path
    now: Path

    def location(self, current: str = "", previous: str = "", disk: str = "disk") -> base.Location:
        access = base.Access(
            user=engine_module.USER,
            password=engine_module.PASSWORD,
            ca_files=(str(self.authority.certificate),),
        )
        return base.Location(self.engine.url, access, disk_id=disk, current=current, previous=previous)

    def source(self, *checkpoints: str, patience: imageio.Patience = QUICK) -> imageio.ImageioSource:
        return imageio.ImageioSource(self.location(*checkpoints), threading.Event(), patience)

    def ended(self, *phases: str) -> None:
        """Check how the transfers have ended, that the disk is free and that nobody is logged in."""
        assert tuple(transfer.phase for transfer in self.engine.transfers) == phases
        assert not self.engine.locked
        assert not self.engine.logged_in


def raw_disk(path: Path) -> Path:
    """Write a disk with data, text, and zeros before and between them."""
    with path.open("wb") as file:
        file.truncate(SIZE)
        for offset, length in ((64 << 10, 100_000), (MIB, 3 * MIB), (6 * MIB, MIB), (SIZE - 512, 512)):
            file.seek(offset)
            file.write(random.Random(offset).randbytes(length))
    return path


@contextlib.contextmanager
def placed(directory: Path, *, local: bool) -> Iterator[Place]:
    with engine_module.running(directory, local=local, level="DEBUG") as (engine, authority):
        chain = engine.add_disk("disk", raw_disk(directory / "raw"))
        chain.snapshot("write -P 7 2M 300k", "write -z 3M 64k")
        before = chain.content("disk-0", directory / "before")
        now = chain.content("disk-1", directory / "now")
        yield Place(engine, authority, before, now)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with placed(tmp_path_factory.mktemp("ovirt"), local=False) as place:
        yield place


@pytest.fixture
def place(running: Place) -> Iterator[Place]:
    """Give the engine as it is when nothing is wrong."""
    engine = running.engine
    engine.transfers.clear()
    engine.calls.clear()
    engine.slow, engine.broken, engine.inactivity, engine.host, engine.extends = 0.05, 0, 60.0, True, True
    engine.flat = engine.mute = False
    yield running
    assert not engine.locked


def read(source: imageio.ImageioSource) -> bytes:
    """Read all of it, in order."""
    data = bytearray(source.size or 0)
    reader, done = source.stream(), 0
    while count := reader.readinto(memoryview(data)[done : done + MIB]):
        done += count
    return bytes(data[:done])


def test_the_disk_as_it_is(place: Place) -> None:
    with place.source() as source:
        assert (source.size, source.format, source.identity) == (SIZE, "raw", None)
        assert source.head == place.now.read_bytes()[: len(source.head)]
        assert read(source) == place.now.read_bytes()
        extents = list(source.extents() or ())
        assert any(extent.zero for extent in extents)
        assert sum(extent.length for extent in extents) == SIZE
        for extent in extents:
            if extent.zero:
                piece = place.now.read_bytes()[extent.offset : extent.offset + extent.length]
                assert not any(piece)
        source.verify()
    place.ended("finished_success")


def test_a_host_that_is_this_one_is_read_by_its_unix_socket(tmp_path: Path) -> None:
    with placed(tmp_path, local=True) as place:
        with place.source() as source:
            assert read(source) == place.now.read_bytes()
            source.verify()
        assert "[local" in place.engine.daemon.log()
        place.ended("finished_success")


def test_a_host_that_knows_no_zeros(place: Place, tmp_path: Path) -> None:
    place.engine.flat = True
    target = tmp_path / "disk.img"
    result = importer.run(importer.Request(source="imageio", location=place.location(), target=str(target)))
    assert result.plan.route is importer.Route.STREAM
    processes.run("cmp", target, place.now)
    assert target.stat().st_blocks * 512 < SIZE
    place.ended("finished_success")


@pytest.mark.parametrize(
    ("options", "longest"), [(fetch.Options(), 4 * MIB), (fetch.Options(chunk=MIB), MIB)], ids=["4M", "1M"]
)
def test_no_request_is_longer_than_a_chunk(
    place: Place, tmp_path: Path, options: fetch.Options, longest: int
) -> None:
    """A connection that ends costs no more than that, be the run of data ever so long."""
    place.engine.flat = True
    target, before = tmp_path / "disk.img", len(place.engine.daemon.log())
    importer.run(
        importer.Request(source="imageio", location=place.location(), target=str(target), fetch=options)
    )
    said = place.engine.daemon.log()[before:]
    assert max(int(size) for size in re.findall(r"READ size=(\d+)", said)) == longest
    processes.run("cmp", target, place.now)


def test_a_disk_that_does_not_fit_is_let_go(place: Place, tmp_path: Path) -> None:
    wanted = importer.Request(
        source="imageio", location=place.location(), target=str(tmp_path / "disk.img"), image_size=MIB
    )
    with pytest.raises(errors.TooLarge):
        importer.run(wanted)
    place.ended("finished_cleanup")
    importer.inspect(dataclasses.replace(wanted, image_size=None))
    place.ended("finished_cleanup", "finished_cleanup")


def test_the_disk_at_a_snapshot(place: Place) -> None:
    with place.source("disk-0") as source:
        assert source.identity is not None
        assert read(source) == place.before.read_bytes()
        source.verify()
        source.verify()
    source.close()
    place.ended("finished_success")
    assert place.engine.last.form == "raw"


def test_the_active_disk_as_a_checkpoint(place: Place) -> None:
    with place.source("disk-1", "disk-0") as source:
        assert (source.format, source.identity) == ("qcow2", None)
        assert source.head.startswith(b"QFI\xfb")
        assert read(source) == place.engine.chains["disk"].active.path.read_bytes()
        assert source.extents() is None
        source.verify()
    place.ended("finished_success")
    assert place.engine.last.form == "cow"


def test_what_is_not_verified_is_cancelled(place: Place) -> None:
    with place.source() as source:
        source.close()
    with pytest.raises(ZeroDivisionError), place.source():
        1 / 0  # noqa: B018
    place.ended("finished_cleanup", "finished_cleanup")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"disk_id": "none"}, "disk none: the engine has no such thing"),
        ({"current": "none"}, "the disk has no snapshot none"),
        ({"access": base.Access(user="x", password="secret", insecure=True)}, "check user, password"),
        ({"access": base.Access(user="x", password="secret")}, "certificate"),
    ],
)
def test_what_cannot_be(place: Place, changes: dict[str, object], words: str) -> None:
    location = dataclasses.replace(place.location(), **changes)  # type: ignore[arg-type]
    with pytest.raises(errors.Unreachable, match=words) as caught:
        imageio.ImageioSource(location, threading.Event()).__enter__()
    assert "secret" not in str(caught.value)
    place.ended()


def test_a_disk_has_to_be_named() -> None:
    with pytest.raises(errors.RequestError, match="IMPORTER_DISK_ID"):
        imageio.source(base.Location("https://x/"), threading.Event())


def test_no_certificates_are_asked_for_when_insecure(place: Place) -> None:
    access = dataclasses.replace(place.location().access, ca_files=(), insecure=True)
    location = dataclasses.replace(place.location(), access=access)
    with imageio.ImageioSource(location, threading.Event(), QUICK) as source:
        assert read(source) == place.now.read_bytes()


# -- an engine that takes its time, or part of it away ---------------------------------------------


def test_slow_to_initialize(place: Place) -> None:
    place.engine.slow = 1.0
    with place.source() as source:
        assert read(source) == place.now.read_bytes()


def test_never_ready(place: Place) -> None:
    place.engine.slow = 60.0
    with pytest.raises(errors.Unreachable, match=r"not ready \(phase initializing\)"):
        place.source(patience=dataclasses.replace(QUICK, ready=0.5)).__enter__()
    place.ended("finished_cleanup")


def test_paused_before_it_is_ready(place: Place) -> None:
    place.engine.slow = 0.5

    def pause() -> None:
        processes.wait_for(lambda: place.engine.transfers, "a transfer")
        place.engine.enter(place.engine.last, "paused_system")

    threading.Thread(target=pause).start()
    with place.source() as source:
        assert read(source) == place.now.read_bytes()
    assert "resuming" in place.engine.last.log


def test_a_host_out_of_reach(place: Place) -> None:
    place.engine.host = False
    with place.source() as source:
        assert read(source) == place.now.read_bytes()


def test_a_locked_disk_is_waited_for(place: Place) -> None:
    place.engine.locked.add("disk")
    threading.Timer(1.0, place.engine.locked.discard, ["disk"]).start()
    with place.source() as source:
        assert read(source) == place.now.read_bytes()


def test_a_disk_that_stays_locked(place: Place) -> None:
    place.engine.locked.add("disk")
    try:
        with pytest.raises(errors.Unreachable, match="Disk is locked"):
            place.source(patience=dataclasses.replace(QUICK, locked=0)).__enter__()
    finally:
        place.engine.locked.clear()
    place.ended()


def test_waiting_ends_with_the_worker(place: Place) -> None:
    place.engine.slow = 60.0
    cancel = threading.Event()
    threading.Timer(0.5, cancel.set).start()
    with pytest.raises(errors.Cancelled):
        imageio.ImageioSource(place.location(), cancel, QUICK).__enter__()
    place.ended("finished_cleanup")


def test_an_engine_that_does_not_answer(place: Place) -> None:
    place.engine.mute = True
    cancel = threading.Event()
    threading.Timer(0.5, cancel.set).start()
    started = time.monotonic()
    with pytest.raises(errors.Cancelled):
        imageio.ImageioSource(place.location(), cancel, QUICK).__enter__()
    assert time.monotonic() - started < 5
    place.engine.mute = False


def test_an_engine_that_is_starting(place: Place) -> None:
    place.engine.broken = 2
    with pytest.raises(errors.Transient, match=r"503|makes no sense|content type"):
        place.source().__enter__()
    target = place.before.parent / "target"
    importer.run(importer.Request(source="imageio", location=place.location(), target=str(target)))
    processes.run("cmp", target, place.now)


def test_a_ticket_in_use_is_kept_and_one_without_use_renewed(place: Place) -> None:
    place.engine.inactivity = 4  # the daemon counts in whole seconds
    with place.source() as source:
        time.sleep(5.5)
        assert place.engine.last.phase == "transferring"
        assert read(source) == place.now.read_bytes()


def test_an_engine_that_goes_away_at_the_end(place: Place) -> None:
    with place.source() as source:
        place.engine.stop()
        threading.Timer(1.0, place.engine.start).start()
        source.verify()
    place.ended("finished_success")


# -- in the middle of it -----------------------------------------------------------------------------


class Then(progress.NullProgress):
    """Does something when some data has come; zeros do not count, for they are not read.

    Meanwhile nobody else goes on: on a busy machine everything might have come before it is done.
    """

    def __init__(self, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act
        self._left = MIB
        self._lock = threading.Lock()

    def read(self, count: int) -> None:
        with self._lock:
            self._left -= count
            if self._left < 0 and self._act is not None:
                act, self._act = self._act, None
                act()


def run(place: Place, act: Callable[[], object], current: str = "", connections: int = 2) -> Path:
    """Import with ``act`` happening half-way; return the target."""
    target = place.before.parent / "target"
    wanted = importer.Request(
        source="imageio",
        location=place.location(current),
        target=str(target),
        fetch=importer.FetchOptions(connections=connections, chunk=256 << 10, no_progress=15),
    )
    importer.run(wanted, Then(act))
    return target


def test_a_ticket_that_expires_is_extended(place: Place) -> None:
    target = run(place, lambda: place.engine.expire(place.engine.last))
    processes.run("cmp", target, place.now)
    place.ended("finished_success")


def test_a_ticket_that_expires_is_extended_once_for_all_connections(place: Place) -> None:
    target = run(place, lambda: place.engine.expire(place.engine.last), connections=6)
    processes.run("cmp", target, place.now)
    place.ended("finished_success")
    assert sum(call.endswith("/extend") for call in place.engine.calls) == 1


def test_a_ticket_that_cannot_be_extended_of_a_snapshot(place: Place) -> None:
    place.engine.extends = False
    target = run(place, lambda: place.engine.expire(place.engine.last), "disk-0")
    processes.run("cmp", target, place.before)
    place.ended("finished_cleanup", "finished_success")


def test_a_ticket_that_cannot_be_extended_of_a_disk_in_use(place: Place) -> None:
    place.engine.extends = False
    with pytest.raises(errors.TransferFailed, match=r"ticket of image transfer transfer-.* is gone"):
        run(place, lambda: place.engine.expire(place.engine.last))
    place.ended("finished_cleanup")


def test_a_pause_of_the_engine(place: Place) -> None:
    target = run(place, lambda: place.engine.enter(place.engine.last, "paused_system"))
    processes.run("cmp", target, place.now)
    assert place.engine.last.log.count("resuming") == 1
    place.ended("finished_success")


def test_a_pause_of_an_administrator(place: Place) -> None:
    def pause() -> None:
        transfer = place.engine.last
        place.engine.enter(transfer, "paused_user")
        threading.Timer(1.0, place.engine.enter, [transfer, "resuming"]).start()

    target = run(place, pause)
    processes.run("cmp", target, place.now)
    assert place.engine.last.log.count("resuming") == 1
    place.ended("finished_success")


def test_cancelled_by_an_administrator(place: Place) -> None:
    with pytest.raises(errors.TransferFailed, match="was cancelled in the engine"):
        run(place, lambda: place.engine.enter(place.engine.last, "cancelled_user"), "disk-0")
    place.ended("finished_cleanup")


def test_given_up_by_the_engine(place: Place) -> None:
    target = run(place, lambda: place.engine.enter(place.engine.last, "cancelled_system"), "disk-0")
    processes.run("cmp", target, place.before)
    place.ended("finished_failure", "finished_success")


def test_a_restart_of_engine_and_host(place: Place) -> None:
    def restart() -> None:
        place.engine.stop()
        place.engine.expire(place.engine.last)
        threading.Timer(1.0, place.engine.start).start()

    target = run(place, restart)
    processes.run("cmp", target, place.now)
    place.ended("finished_success")


def test_an_end_in_the_middle(place: Place) -> None:
    cancel = threading.Event()
    wanted = importer.Request(
        source="imageio", location=place.location(), target=str(place.before.parent / "target"),
        fetch=importer.FetchOptions(connections=2, chunk=256 << 10),
    )  # fmt: skip
    started = time.monotonic()
    with pytest.raises(errors.Cancelled):
        importer.run(wanted, Then(cancel.set), cancel)
    assert time.monotonic() - started < 10
    place.ended("finished_cleanup")
    with contextlib.suppress(FileNotFoundError):
        (place.before.parent / "target").unlink()
