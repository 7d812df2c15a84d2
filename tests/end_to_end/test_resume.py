"""A killed worker resumes; a changed source or another job starts over."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import signal
import sys
import threading
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import fetch
from tests.support import devices, disks, forked, misbehave, processes

MIB = 1 << 20
SIZE = 24 * MIB
#: A disk full of noise: nothing compresses, and there are no holes.
DATA = random.Random(7).randbytes(SIZE)
OPTIONS = fetch.FetchOptions(connections=2, chunk=MIB, no_progress=20)

WORKER = """
import sys, cdi_worker
from cdi_worker.images.engine import fetch
cdi_worker.run(cdi_worker.Request(
    existing="replace",
    source="http", location=cdi_worker.Location(sys.argv[1]), target=sys.argv[2], journal_interval=0.05,
    scratch=sys.argv[3] or None, fetch=fetch.FetchOptions(connections=2, chunk=1 << 20),
))
"""


target = devices.targets("file", "block4096", size=32 * MIB)


def image(tmp_path: Path, form: str) -> bytes:
    if form == "raw":
        return DATA
    (tmp_path / "disk.raw").write_bytes(DATA)
    disks.convert(tmp_path / "disk.raw", tmp_path / "image", disks.FORMATS[form])
    return (tmp_path / "image").read_bytes()


def import_request(url: str, target: Path, scratch: Path | None = None) -> cdi_worker.Request:
    return cdi_worker.Request(
        existing="replace",
        source="http",
        location=cdi_worker.Location(url),
        target=str(target),
        scratch=str(scratch) if scratch else None,
        journal_interval=0.05,
        fetch=OPTIONS,
    )


def kill_midway(server: misbehave.Server, url: str, target: Path, scratch: Path | None, number: int) -> None:
    """Start a worker on a slow server, and send it signal ``number`` after half of the disk.

    Each connection is then at its second range: if two ranges end together, the journal may have only one.
    """
    argv = [sys.executable, "-c", WORKER, url, target, scratch or ""]
    path = url.rpartition("/")[2]
    with forked.Popen[str](argv, env=forked.ENVIRONMENT) as worker:
        processes.wait_for(lambda: server.sent(f"/{path}") > 17 * MIB, "a good part of the disk")
        worker.send_signal(number)
    assert worker.returncode
    processes.wait_for(server.is_quiet, "the connections of the killed")


def set_midway(server: misbehave.Server) -> threading.Event:
    """Return a cancel that is set when a large part of ``/disk`` has been sent."""
    cancel = threading.Event()

    def watch() -> None:
        processes.wait_for(lambda: server.sent("/disk") > 8 * MIB, "a good part of the disk")
        cancel.set()

    threading.Thread(target=watch).start()
    return cancel


def start(target: Path) -> bytes:
    with target.open("rb") as stream:
        return stream.read(4096)


SLOW = {"drip": (256 << 10, 0.03)}


@pytest.mark.parametrize("form", ["raw", "qcow2", "vmdk", "vdi", "vhd", "vhdx"])
def test_killed_worker_resumes(server: misbehave.Server, target: Path, tmp_path: Path, form: str) -> None:
    page = misbehave.Page(image(tmp_path, form))
    url = server.serve("/disk", dataclasses.replace(page, **SLOW))
    kill_midway(server, url, target, None, signal.SIGKILL)
    if target.is_block_device():
        assert start(target)[510:512] != DATA[510:512]
    else:
        assert not target.exists()
    sent = server.sent("/disk")
    server.serve("/disk", page)
    result = cdi_worker.run(import_request(url, target))
    assert result.resumed >= 3 * MIB
    assert server.sent("/disk") - sent <= len(page.body) - 3 * MIB
    assert target.read_bytes()[:SIZE] == DATA
    if not target.is_block_device():
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("disk.img")] == ["disk.img"]


def test_killed_worker_resumes_in_scratch(server: misbehave.Server, tmp_path: Path) -> None:
    page = misbehave.Page(image(tmp_path, "vhdx-log"))
    checksum = f"sha256:{hashlib.sha256(page.body).hexdigest()}"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    target = tmp_path / "disk.img"
    url = server.serve("/disk", dataclasses.replace(page, **SLOW))
    request = dataclasses.replace(import_request(url, target, scratch), checksum=checksum)
    cancel = set_midway(server)
    with pytest.raises(errors.Cancelled):
        cdi_worker.run(request, cancel=cancel)
    assert not target.exists()
    server.serve("/disk", page)
    result = cdi_worker.run(request)
    assert result.resumed > 0
    assert result.plan.route is cdi_worker.Route.SPOOL
    assert target.read_bytes() == DATA
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_changed_source_starts_over(
    server: misbehave.Server, target: Path, tmp_path: Path, number: int
) -> None:
    page = misbehave.Page(DATA)
    url = server.serve("/disk", dataclasses.replace(page, **SLOW))
    kill_midway(server, url, target, None, number)
    other = random.Random(8).randbytes(SIZE)
    server.serve("/disk", misbehave.Page(other, etag='"two"'))
    result = cdi_worker.run(import_request(url, target))
    assert result.resumed == 0
    assert target.read_bytes()[:SIZE] == other


def test_source_without_identity_starts_over(server: misbehave.Server, target: Path) -> None:
    page = misbehave.Page(DATA, etag=None, modified=None)
    url = server.serve("/disk", dataclasses.replace(page, **SLOW))
    kill_midway(server, url, target, None, signal.SIGKILL)
    server.serve("/disk", page)
    assert cdi_worker.run(import_request(url, target)).resumed == 0
    assert target.read_bytes()[:SIZE] == DATA


def test_cancelled_import_is_resumed(server: misbehave.Server, target: Path) -> None:
    page = misbehave.Page(DATA)
    url = server.serve("/disk", dataclasses.replace(page, **SLOW))
    cancel = set_midway(server)
    with pytest.raises(errors.Cancelled):
        cdi_worker.run(import_request(url, target), cancel=cancel)
    assert server.sent("/disk") < SIZE
    assert target.is_block_device() or not target.exists()
    server.serve("/disk", page)
    assert cdi_worker.run(import_request(url, target)).resumed > 0
    assert target.read_bytes()[:SIZE] == DATA


def test_permanent_error_leaves_nothing(server: misbehave.Server, tmp_path: Path) -> None:
    page = misbehave.Page(DATA)
    url = server.serve("/disk", (page, 2), dataclasses.replace(page, status=403))
    target = tmp_path / "disk.img"
    with pytest.raises(errors.Withdrawn, match="403"):
        cdi_worker.run(import_request(url, target))
    assert not list(tmp_path.glob("disk.img*"))


@pytest.mark.parametrize("every", [2048, 64 << 10, MIB - 1, MIB, MIB + 1])
def test_resets_at_every_offset_are_survived(server: misbehave.Server, tmp_path: Path, every: int) -> None:
    """Each request is cut after ``every`` bytes, for a raw disk by ranges and for an ordered stream."""
    body = DATA[: 40_000 if every == 2048 else 3 * MIB]
    body += bytes(-len(body) % 512)
    page = misbehave.Page(body, cut=every)
    url = server.serve("/disk", page)
    target = tmp_path / "disk.img"
    cdi_worker.run(import_request(url, target))
    assert target.read_bytes() == body
