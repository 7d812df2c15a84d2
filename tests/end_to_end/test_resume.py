"""A killed worker resumes: what it wrote is read back before it is trusted, and its source is compared."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from tests.support import devices, disks, kills, misbehave, oracle, processes

MIB, SIZE = kills.MIB, kills.SIZE
#: Noise with a hole of 2 MiB, which an import zeroes.
DATA = kills.DATA[: 4 * MIB] + bytes(2 * MIB) + kills.DATA[6 * MIB :]
WEAK: dict[str, str | None] = {"etag": 'W/"1"'}
UNTAGGED: dict[str, str | None] = {"etag": None}
ELSEWHERE = "Wed, 01 Jan 2020 00:00:00 GMT"


target = devices.targets("file", size=16 * MIB)


#: With one connection, the first ``kills.KEPT`` bytes are those that are kept.
IN_ORDER = {"fetch": cdi_worker.FetchOptions(connections=1, chunk=MIB, no_progress=20)}


def image(tmp_path: Path, form: str, data: bytes = DATA) -> bytes:
    if form == "raw":
        return data
    (tmp_path / "raw").write_bytes(data)
    disks.convert(tmp_path / "raw", tmp_path / "image", disks.FORMATS[form])
    return (tmp_path / "image").read_bytes()


def kill_late(
    server: misbehave.Server, page: misbehave.Page, target: Path, **options: object
) -> cdi_worker.Request:
    """Kill an import of the page, which is then served at full speed; return the request."""
    wanted = kills.request(server.url("/disk"), target, **options)
    kills.late(server, page, wanted)
    return wanted


def written(target: Path) -> Path:
    return target if target.is_block_device() else target.with_name(f"{target.name}.part")


def change(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)
        os.fsync(stream.fileno())


# -- what is kept --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "target"),
    [
        ("raw", "file"),
        ("qcow2", "block4096"),
        ("vmdk", "file"),
        ("vdi", "block4096"),
        ("vhd", "file"),
        ("vhdx", "block4096"),
    ],
    indirect=["target"],
)
def test_killed_worker_resumes(server: misbehave.Server, target: Path, tmp_path: Path, form: str) -> None:
    page = misbehave.Page(image(tmp_path, form, kills.DATA))
    wanted = kills.request(server.serve("/disk", kills.slow(page)), target)
    kills.midway(server, wanted, kept=kills.KEPT)
    if target.is_block_device():
        assert target.read_bytes()[510:512] != kills.DATA[510:512]
    else:
        assert not target.exists()
    sent = server.sent("/disk")
    server.serve("/disk", page)
    result = cdi_worker.run(wanted)
    assert result.resumed >= kills.KEPT
    assert server.sent("/disk") - sent <= len(page.body) - kills.KEPT + MIB  # the head of a device
    assert target.read_bytes()[:SIZE] == kills.DATA
    if not target.is_block_device():
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("disk.img")] == ["disk.img"]


def test_killed_worker_resumes_in_scratch(server: misbehave.Server, target: Path, tmp_path: Path) -> None:
    """The download there is read back, too."""
    page = misbehave.Page(image(tmp_path, "vhdx-log"))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    checksum = f"sha256:{hashlib.sha256(page.body).hexdigest()}"
    wanted = kills.request(
        server.serve("/disk", kills.slow(page)), target, scratch=scratch, checksum=checksum
    )
    kills.midway(server, wanted, signal.SIGTERM, sent=len(page.body) * 3 // 4)
    assert not target.exists()
    (part,) = scratch.rglob("*.part")
    change(part, 2 * MIB, b"changed")
    server.serve("/disk", page)
    result = cdi_worker.run(wanted)
    assert result.resumed > 0
    assert result.refetched > 0
    assert result.plan.route is cdi_worker.Route.SPOOL
    assert target.read_bytes() == DATA
    assert not list(scratch.iterdir())


@devices.on("block4096")
def test_cancelled_import_is_resumed(server: misbehave.Server, target: Path) -> None:
    page = misbehave.Page(DATA)
    wanted = kills.request(server.serve("/disk", kills.slow(page)), target)
    kills.midway(server, wanted, signal.SIGTERM, kept=kills.KEPT)
    server.serve("/disk", page)
    assert cdi_worker.run(wanted).resumed >= kills.KEPT
    assert target.read_bytes()[:SIZE] == DATA


def test_early_kill_keeps_what_arrived(server: misbehave.Server, target: Path) -> None:
    """With the default interval, three seconds after the first bytes.

    How much is kept depends on the storage: the slower a sync, the longer the interval.
    """
    page = misbehave.Page(DATA)
    slow = dataclasses.replace(kills.slow(page), drip=(64 << 10, 0.04))
    wanted = kills.request(server.serve("/disk", slow), target, journal_interval=10.0)
    begun: list[float] = []

    def is_time() -> bool:
        if not begun and server.sent("/disk") > MIB:
            begun.append(time.monotonic())
        return bool(begun) and time.monotonic() > begun[0] + 3

    kills.kill(wanted, is_time)
    processes.wait_for(server.is_quiet, "the connections of the killed")
    server.serve("/disk", page)
    assert cdi_worker.run(wanted).resumed > 0
    assert target.read_bytes() == DATA


@devices.on("file", "block4096")
def test_kills_at_random_moments(server: misbehave.Server, target: Path, pytestconfig: pytest.Config) -> None:
    """The target is the disk or not usable, and the next run makes it the disk."""
    page, is_device = misbehave.Page(DATA), target.is_block_device()
    for moment in kills.moments(pytestconfig):
        if is_device:
            devices.fill(target, 16 * MIB)
        else:
            target.unlink(missing_ok=True)
        wanted = kills.request(server.serve("/disk", dataclasses.replace(page, **kills.SLOW)), target)
        kills.after(moment, wanted)
        if not target.exists() or target.read_bytes()[:SIZE] != DATA:
            oracle.unusable(target, disk=DATA)
        server.serve("/disk", page)
        cdi_worker.run(wanted)
        assert target.read_bytes() == DATA + devices.DIRT * (4 * MIB if is_device else 0)


def test_permanent_error_leaves_nothing(server: misbehave.Server, target: Path) -> None:
    page = misbehave.Page(DATA)
    url = server.serve("/disk", (page, 2), dataclasses.replace(page, status=403))
    with pytest.raises(errors.Withdrawn, match="403"):
        cdi_worker.run(kills.request(url, target))
    assert not list(target.parent.glob("disk.img*"))


@pytest.mark.parametrize("every", [2048, MIB - 1, MIB + 1])
def test_resets_at_every_offset_are_survived(server: misbehave.Server, target: Path, every: int) -> None:
    """Each request is cut after ``every`` bytes, for a raw disk by ranges and for an ordered stream."""
    body = kills.DATA[: 40_448 if every == 2048 else 3 * MIB]
    url = server.serve("/disk", misbehave.Page(body, cut=every))
    cdi_worker.run(kills.request(url, target))
    assert target.read_bytes() == body


# -- what is read back ---------------------------------------------------------------------------


def _zeros(device: Path) -> None:
    subprocess.run(["dd", "if=/dev/zero", f"of={device}", "bs=1M", "seek=1", "conv=notrunc"], check=False)


def _ext4(device: Path) -> None:
    processes.run("mkfs.ext4", "-q", "-F", "-E", "nodiscard", device)


def _filled(device: Path) -> None:
    _ext4(device)
    change(device, 2 * MIB, devices.DIRT * (9 * MIB))


@pytest.mark.parametrize("reuse", [_zeros, _ext4, _filled])
@devices.on("block")
def test_device_reused_after_a_kill_gives_the_right_disk(
    server: misbehave.Server, target: Path, reuse: Callable[[Path], None]
) -> None:
    """Its journal survives, in the part of the head that the other user does not write."""
    wanted = kill_late(server, misbehave.Page(DATA), target)
    start, end = 256 << 10, MIB
    kept = target.read_bytes()[start:end]
    reuse(target)
    change(target, start, kept)
    processes.run("wipefs", "--all", "--quiet", target)
    result = cdi_worker.run(wanted)
    assert target.read_bytes()[:SIZE] == DATA
    assert result.refetched > 0


@pytest.mark.parametrize(
    ("form", "part", "target"),
    [
        ("raw", "sector", "file"),
        ("raw", "hole", "block"),
        ("qcow2", "sector", "file"),
        ("qcow2", "all", "block"),
    ],
    indirect=["target"],
)
def test_range_that_differs_is_fetched_again(
    server: misbehave.Server, target: Path, tmp_path: Path, form: str, part: str
) -> None:
    wanted = kill_late(server, misbehave.Page(image(tmp_path, form)), target, **IN_ORDER)
    start, length = {"sector": (2 * MIB + 512, 512), "hole": (5 * MIB, 512), "all": (MIB, SIZE - MIB)}[part]
    change(written(target), start, bytes(512) if part == "sector" else b"x" * length)
    sent = server.sent("/disk")
    result = cdi_worker.run(wanted)
    assert target.read_bytes()[:SIZE] == DATA
    assert result.refetched >= (64 << 10 if part != "all" else kills.KEPT)
    if part != "all":
        assert result.refetched <= MIB
        assert server.sent("/disk") - sent < SIZE * 3 // 4


def test_read_back_passes_the_page_cache(server: misbehave.Server, tmp_path: Path) -> None:
    """The bytes of the loop device's file are changed behind the device's page cache."""
    backing = devices.fill(tmp_path / "backing", 16 * MIB)
    with devices.attached(backing) as device:
        wanted = kill_late(server, misbehave.Page(DATA), device, **IN_ORDER)
        device.read_bytes()  # fills its page cache
        change(backing, 3 * MIB, b"lost write")
        assert cdi_worker.run(wanted).refetched > 0
        processes.run("blockdev", "--flushbufs", device)
        assert device.read_bytes()[:SIZE] == DATA


def test_journal_of_another_job_is_ignored(server: misbehave.Server, target: Path) -> None:
    """Another user of the storage knows the format and the source, but not the UID of the job."""
    theirs = target.with_name("theirs.img")
    kill_late(server, misbehave.Page(random.Random(3).randbytes(SIZE)), theirs)
    shutil.copyfile(written(theirs), written(target))
    server.serve("/disk", misbehave.Page(DATA))
    assert cdi_worker.run(kills.request(server.url("/disk"), target)).resumed == 0
    assert target.read_bytes() == DATA


# -- whether the source is the same --------------------------------------------------------------


@devices.on("block4096")
def test_changed_source_starts_over(server: misbehave.Server, target: Path) -> None:
    wanted = kill_late(server, misbehave.Page(DATA), target)
    other = random.Random(8).randbytes(SIZE)
    server.serve("/disk", misbehave.Page(other, etag='"two"'))
    assert cdi_worker.run(wanted).resumed == 0
    assert target.read_bytes()[:SIZE] == other


def test_source_without_identity_starts_over(server: misbehave.Server, target: Path) -> None:
    page = misbehave.Page(DATA, etag=None, modified=None)
    wanted = kills.request(server.serve("/disk", kills.slow(page)), target)
    kills.midway(server, wanted)
    server.serve("/disk", page)
    assert cdi_worker.run(wanted).resumed == 0
    assert target.read_bytes()[:SIZE] == DATA


@pytest.mark.parametrize(
    ("form", "identity", "target"),
    [("raw", WEAK, "block"), ("qcow2", UNTAGGED, "file")],
    indirect=["target"],
)
def test_object_replaced_under_a_weak_identity_starts_over(
    server: misbehave.Server, target: Path, tmp_path: Path, form: str, identity: dict[str, str | None]
) -> None:
    """It has the same size and first MiB, and was replaced within the second of its modification time."""
    page = misbehave.Page(image(tmp_path, form), **identity)
    wanted = kill_late(server, page, target)
    other = random.Random(9).randbytes(SIZE)
    disk = DATA[:MIB] + other[MIB : 4 * MIB] + bytes(2 * MIB) + other[6 * MIB :]
    body = image(tmp_path, form, disk)
    assert len(body) == len(page.body)
    server.serve("/disk", dataclasses.replace(page, body=body))
    result = cdi_worker.run(wanted)
    assert target.read_bytes()[:SIZE] == disk
    assert result.resumed == 0


@pytest.mark.parametrize(("form", "identity"), [("raw", UNTAGGED), ("qcow2", WEAK)])
def test_unchanged_object_under_a_weak_identity_resumes(
    server: misbehave.Server, target: Path, tmp_path: Path, form: str, identity: dict[str, str | None]
) -> None:
    wanted = kill_late(server, misbehave.Page(image(tmp_path, form), **identity), target)
    assert cdi_worker.run(wanted).resumed >= kills.KEPT
    assert target.read_bytes() == DATA


def test_changed_weak_etag_starts_over(server: misbehave.Server, target: Path) -> None:
    page = misbehave.Page(DATA, **WEAK)
    wanted = kill_late(server, page, target)
    server.serve("/disk", dataclasses.replace(page, etag='W/"2"'))
    assert cdi_worker.run(wanted).resumed == 0
    assert target.read_bytes() == DATA


@devices.on("block")
def test_same_strong_etag_with_another_date_resumes(server: misbehave.Server, target: Path) -> None:
    """Replicas and CDN edges have their own Last-Modified for the same object."""
    page = misbehave.Page(DATA)
    wanted = kill_late(server, page, target)
    server.serve("/disk", dataclasses.replace(page, modified=ELSEWHERE))
    assert cdi_worker.run(wanted).resumed >= kills.KEPT
    assert target.read_bytes()[:SIZE] == DATA


def test_same_strong_etag_with_another_date_is_the_same_object(
    server: misbehave.Server, target: Path
) -> None:
    page = misbehave.Page(DATA)
    edge = dataclasses.replace(page, modified=ELSEWHERE)
    url = server.serve("/disk", (page, 2), (edge, 2), (page, 2), edge)
    cdi_worker.run(kills.request(url, target))
    assert target.read_bytes() == DATA
