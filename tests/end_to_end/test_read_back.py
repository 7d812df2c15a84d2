"""What an earlier attempt wrote is read back before it is trusted, and its source is compared."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import fetch
from tests.support import devices, forked, misbehave, processes, vhdx_images

MIB = 1 << 20
SIZE = 24 * MIB
#: Noise with a hole of 4 MiB, which an import zeroes.
DATA = random.Random(7).randbytes(8 * MIB) + bytes(4 * MIB) + random.Random(8).randbytes(12 * MIB)
SLOW = {"drip": (64 << 10, 0.015)}

WORKER = """
import sys, cdi_worker
from cdi_worker.images.engine import fetch
cdi_worker.run(cdi_worker.Request(
    existing="replace",
    source="http", location=cdi_worker.Location(sys.argv[1]), target=sys.argv[2], scratch=sys.argv[3] or None,
    journal_interval=float(sys.argv[4]), fetch=fetch.FetchOptions(connections=2, chunk=1 << 20),
))
"""


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    with devices.loop(tmp_path, 32 * MIB) as path:
        yield path


target = devices.targets("file", "block", size=32 * MIB)


def run(url: str, target: Path) -> cdi_worker.Result:
    return cdi_worker.run(
        cdi_worker.Request(
            existing="replace",
            source="http",
            location=cdi_worker.Location(url),
            target=str(target),
            journal_interval=0.05,
            fetch=fetch.FetchOptions(connections=2, chunk=MIB, no_progress=20),
        )
    )


def kill(
    url: str, target: Path, is_time: Callable[[], bool], interval: float = 0.05, scratch: Path | None = None
) -> None:
    """Start a worker and kill it when ``is_time``."""
    argv = [sys.executable, "-c", WORKER, url, target, scratch or "", str(interval)]
    with forked.Popen[str](argv, env=forked.ENVIRONMENT) as worker:
        processes.wait_for(is_time, "enough of the disk")
        worker.send_signal(signal.SIGKILL)
    assert worker.returncode == -signal.SIGKILL


def kill_late(server: misbehave.Server, page: misbehave.Page, target: Path) -> str:
    """Kill a worker after most of the page was sent; return the URL, which then serves it at full speed."""
    url = server.serve("/disk", dataclasses.replace(page, **SLOW))
    kill(url, target, lambda: server.sent("/disk") > len(page.body) * 3 // 4)
    processes.wait_for(server.is_quiet, "the connections of the killed")
    server.serve("/disk", page)
    return url


def qcow2(tmp_path: Path) -> bytes:
    (tmp_path / "raw").write_bytes(DATA)
    processes.run("qemu-img", "convert", "-O", "qcow2", tmp_path / "raw", tmp_path / "qcow2")
    return (tmp_path / "qcow2").read_bytes()


def written(target: Path) -> Path:
    return target if target.is_block_device() else target.with_name(f"{target.name}.part")


def _fill(device: Path) -> None:
    subprocess.run(["dd", "if=/dev/zero", f"of={device}", "bs=1M", "seek=1", "conv=notrunc"], check=False)


def _swap(device: Path) -> None:
    processes.run("mkswap", device)


def _ext4(device: Path) -> None:
    processes.run("mkfs.ext4", "-q", "-F", "-E", "nodiscard", device)


def _filled(device: Path) -> None:
    _ext4(device)
    with device.open("r+b") as stream:
        stream.seek(4 * MIB)
        stream.write(b"\xff" * (16 * MIB))


@pytest.mark.parametrize("reuse", [_fill, _swap, _ext4, _filled])
def test_device_reused_after_a_kill_gives_the_right_disk(
    server: misbehave.Server, device: Path, reuse: Callable[[Path], None]
) -> None:
    """Its journal survives, in the part of the head that the other user does not write."""
    url = kill_late(server, misbehave.Page(DATA), device)
    start, end = 256 << 10, MIB
    with device.open("r+b") as stream:
        stream.seek(start)
        kept = stream.read(end - start)
        reuse(device)
        stream.seek(start)
        stream.write(kept)
        os.fsync(stream.fileno())
    processes.run("wipefs", "--all", "--quiet", device)
    result = run(url, device)
    assert device.read_bytes()[:SIZE] == DATA
    # mkswap writes only the head, which is never resumed.
    assert (result.refetched > 0) is (reuse is not _swap)


@pytest.mark.parametrize("form", ["raw", "qcow2"])
@pytest.mark.parametrize("change", ["sector", "hole", "all"])
def test_range_that_differs_is_fetched_again(
    server: misbehave.Server, target: Path, tmp_path: Path, form: str, change: str
) -> None:
    page = misbehave.Page(DATA if form == "raw" else qcow2(tmp_path))
    url = kill_late(server, page, target)
    start, length = {"sector": (3 * MIB + 512, 512), "hole": (10 * MIB, 512), "all": (MIB, SIZE - MIB)}[
        change
    ]
    with written(target).open("r+b") as stream:
        stream.seek(start)
        stream.write(bytes(512) if change == "sector" else b"x" * length)
        os.fsync(stream.fileno())
    sent = server.sent("/disk")
    result = run(url, target)
    assert target.read_bytes()[:SIZE] == DATA
    assert result.refetched >= (64 << 10 if change != "all" else 8 * MIB)
    if change != "all":
        assert result.refetched <= MIB
        assert server.sent("/disk") - sent < SIZE // 2


def test_read_back_passes_the_page_cache(server: misbehave.Server, tmp_path: Path) -> None:
    """The bytes of the loop device's file are changed behind the device's page cache."""
    with devices.loop(tmp_path, 32 * MIB) as device:
        url = kill_late(server, misbehave.Page(DATA), device)
        (backing,) = [path for path in tmp_path.iterdir() if path.stat().st_size == 32 * MIB]
        device.read_bytes()  # fills its page cache
        with backing.open("r+b") as stream:
            stream.seek(5 * MIB)
            stream.write(b"lost write")
            os.fsync(stream.fileno())
        result = run(url, device)
        assert result.refetched > 0
        processes.run("blockdev", "--flushbufs", device)
        assert device.read_bytes()[:SIZE] == DATA


def test_spool_is_read_back(server: misbehave.Server, tmp_path: Path) -> None:
    """The download into scratch follows the same rule."""
    (tmp_path / "raw").write_bytes(DATA)
    page = misbehave.Page(vhdx_images.logged(DATA))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    url = server.serve("/disk", dataclasses.replace(page, **SLOW))
    wanted = cdi_worker.Request(
        existing="replace",
        source="http",
        location=cdi_worker.Location(url),
        target=str(tmp_path / "disk.img"),
        scratch=str(scratch),
        checksum=f"sha256:{hashlib.sha256(page.body).hexdigest()}",
        journal_interval=0.05,
        fetch=fetch.FetchOptions(connections=2, chunk=MIB),
    )
    cancel = threading.Event()

    def stop() -> None:
        processes.wait_for(lambda: server.sent("/disk") > len(page.body) * 3 // 4, "most of the image")
        cancel.set()

    threading.Thread(target=stop).start()
    with pytest.raises(errors.Cancelled):
        cdi_worker.run(wanted, cancel=cancel)
    (part,) = scratch.rglob("*.part")
    with part.open("r+b") as stream:
        stream.seek(4 * MIB)
        stream.write(b"changed")
    server.serve("/disk", page)
    result = cdi_worker.run(wanted)
    assert result.refetched > 0
    assert (tmp_path / "disk.img").read_bytes() == DATA


def _changed(body: bytes) -> bytes:
    """Return another disk of the same size, with the same first MiB."""
    other = random.Random(9).randbytes(len(body))
    return body[:MIB] + other[MIB:]


WEAK = {"etag": 'W/"1"'}
UNTAGGED: dict[str, str | None] = {"etag": None}


@pytest.mark.parametrize("identity", [WEAK, UNTAGGED])
@pytest.mark.parametrize("form", ["raw", "qcow2"])
def test_object_replaced_under_a_weak_identity_starts_over(
    server: misbehave.Server, target: Path, tmp_path: Path, form: str, identity: dict[str, str]
) -> None:
    """It has the same size, and was replaced within the second of its modification time."""
    page = misbehave.Page(DATA if form == "raw" else qcow2(tmp_path), **identity)
    url = kill_late(server, page, target)
    disk = _changed(DATA)
    body = disk
    if form == "qcow2":
        (tmp_path / "raw").write_bytes(disk[: 8 * MIB] + bytes(4 * MIB) + disk[12 * MIB :])
        disk = (tmp_path / "raw").read_bytes()
        processes.run("qemu-img", "convert", "-O", "qcow2", tmp_path / "raw", tmp_path / "qcow2")
        body = (tmp_path / "qcow2").read_bytes()
        assert len(body) == len(page.body)
    server.serve("/disk", dataclasses.replace(page, body=body))
    result = run(url, target)
    assert target.read_bytes()[:SIZE] == disk
    assert result.resumed == 0


@pytest.mark.parametrize("identity", [WEAK, UNTAGGED])
@pytest.mark.parametrize("form", ["raw", "qcow2"])
def test_unchanged_object_under_a_weak_identity_resumes(
    server: misbehave.Server, target: Path, tmp_path: Path, form: str, identity: dict[str, str]
) -> None:
    page = misbehave.Page(DATA if form == "raw" else qcow2(tmp_path), **identity)
    url = kill_late(server, page, target)
    result = run(url, target)
    assert target.read_bytes()[:SIZE] == DATA
    assert result.resumed > 4 * MIB


def test_changed_weak_etag_starts_over(server: misbehave.Server, target: Path) -> None:
    page = misbehave.Page(DATA, **WEAK)
    url = kill_late(server, page, target)
    server.serve("/disk", dataclasses.replace(page, etag='W/"2"'))
    assert run(url, target).resumed == 0
    assert target.read_bytes()[:SIZE] == DATA


def test_same_strong_etag_with_another_date_resumes(server: misbehave.Server, target: Path) -> None:
    """Replicas and CDN edges have their own Last-Modified for the same object."""
    page = misbehave.Page(DATA)
    url = kill_late(server, page, target)
    server.serve("/disk", dataclasses.replace(page, modified="Wed, 01 Jan 2020 00:00:00 GMT"))
    assert run(url, target).resumed > 4 * MIB
    assert target.read_bytes()[:SIZE] == DATA


def test_same_strong_etag_with_another_date_is_the_same_object(
    server: misbehave.Server, tmp_path: Path
) -> None:
    page = misbehave.Page(DATA)
    edge = dataclasses.replace(page, modified="Wed, 01 Jan 2020 00:00:00 GMT")
    url = server.serve("/disk", (page, 2), (edge, 2), (page, 2), edge)
    target = tmp_path / "disk.img"
    run(url, target)
    assert target.read_bytes() == DATA


def test_early_kill_keeps_what_arrived(server: misbehave.Server, target: Path) -> None:
    """With the default interval, three seconds after the first bytes.

    How much is kept depends on the storage: the slower a sync, the longer the interval.
    """
    url = server.serve("/disk", dataclasses.replace(misbehave.Page(DATA), drip=(64 << 10, 0.04)))
    begun: list[float] = []

    def is_time() -> bool:
        if not begun and server.sent("/disk") > MIB:
            begun.append(time.monotonic())
        return bool(begun) and time.monotonic() > begun[0] + 3

    kill(url, target, is_time, interval=10.0)
    assert server.sent("/disk") < SIZE, "the server was too fast for this test"
    processes.wait_for(server.is_quiet, "the connections of the killed")
    server.serve("/disk", misbehave.Page(DATA))
    result = run(url, target)
    assert target.read_bytes()[:SIZE] == DATA
    assert result.resumed > 0


def test_journal_of_another_job_is_ignored(server: misbehave.Server, tmp_path: Path) -> None:
    """Another user of the storage knows the format and the source, but not the UID of the job."""
    target, theirs = tmp_path / "disk.img", tmp_path / "theirs.img"
    url = kill_late(server, misbehave.Page(random.Random(3).randbytes(SIZE)), theirs)
    shutil.copyfile(written(theirs), written(target))
    server.serve("/disk", misbehave.Page(DATA))
    assert run(url, target).resumed == 0
    assert target.read_bytes() == DATA
