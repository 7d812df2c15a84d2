"""A raw disk with a checksum resumes after a kill; bytes that are kept are hashed, too."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
import random
import re
import signal
import sys
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import fetch
from cdi_worker.images.targets import file
from tests.support import devices, forked, misbehave, ovas, processes, vhd_images

MIB = 1 << 20
SIZE = 24 * MIB
#: Noise with a hole, which an import zeroes. It does not end with a sector.
DATA = random.Random(7).randbytes(8 * MIB) + bytes(2 * MIB) + random.Random(8).randbytes(14 * MIB - 300)
SLOW = {"drip": (64 << 10, 0.015)}
KEPT = 3 * MIB

WORKER = """
import signal, sys, threading, cdi_worker
from cdi_worker.images.engine import fetch
cancel = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: cancel.set())
cdi_worker.run(cdi_worker.Request(
    existing="replace",
    source="http", location=cdi_worker.Location(sys.argv[1]), target=sys.argv[2], journal_interval=0.05,
    checksum=sys.argv[3] or None, fetch=fetch.FetchOptions(connections=2, chunk=1 << 20),
), cancel=cancel)
"""

target = devices.targets("file", "block", size=32 * MIB)


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


RIGHT, WRONG = sha256(DATA), sha256(b"other")


def import_request(url: str, target: Path, checksum: str | None) -> cdi_worker.Request:
    return cdi_worker.Request(
        existing="replace",
        source="http",
        location=cdi_worker.Location(url),
        target=str(target),
        checksum=checksum,
        journal_interval=0.05,
        fetch=fetch.FetchOptions(connections=2, chunk=MIB, no_progress=20),
    )


def run(url: str, target: Path, checksum: str | None) -> cdi_worker.Result:
    return cdi_worker.run(import_request(url, target, checksum))


def kill_late(
    server: misbehave.Server, page: misbehave.Page, target: Path, checksum: str | None = RIGHT
) -> str:
    """Kill an import after most of the page was sent; return the URL, which then serves it at full speed."""
    url = server.serve("/disk", dataclasses.replace(page, **SLOW))
    sent = server.sent("/disk")
    argv = [sys.executable, "-c", WORKER, url, target, checksum or ""]
    with forked.Popen[str](argv, env=forked.ENVIRONMENT) as worker:
        processes.wait_for(lambda: server.sent("/disk") - sent > 18 * MIB, "a good part of the disk")
        worker.send_signal(signal.SIGKILL)
    assert worker.returncode == -signal.SIGKILL
    processes.wait_for(server.is_quiet, "the connections of the killed")
    server.serve("/disk", page)
    return url


def part(target: Path) -> Path:
    return target if target.is_block_device() else target.with_name(f"{target.name}.part")


def is_kept(target: Path) -> bool:
    """Return whether a file has a left-over, or a device a journal."""
    if target.is_block_device():
        with target.open("rb") as stream:
            return b"cdi-worker journal" in stream.read(MIB)
    return part(target).exists()


def test_killed_import_with_a_checksum_resumes(server: misbehave.Server, target: Path) -> None:
    page = misbehave.Page(DATA)
    url = kill_late(server, page, target)
    sent = server.sent("/disk")
    result = run(url, target, RIGHT)
    assert result.resumed >= KEPT
    assert server.sent("/disk") - sent <= SIZE - KEPT
    assert result.verified == {"file": RIGHT}
    assert target.read_bytes()[: len(DATA)] == DATA


def test_disk_of_an_ova_resumes_with_the_checksum_of_its_manifest(
    server: misbehave.Server, target: Path
) -> None:
    url = kill_late(server, misbehave.Page(ovas.ova(ovas.Disk(DATA, "disk.raw"))), target, None)
    result = run(url, target, None)
    assert result.resumed >= KEPT
    assert result.verified == {"file": RIGHT}
    assert target.read_bytes()[: len(DATA)] == DATA


@pytest.mark.parametrize(("before", "after"), [(RIGHT, None), (None, RIGHT), (WRONG, RIGHT)])
def test_checksum_may_change_between_two_runs(
    server: misbehave.Server, target: Path, before: str | None, after: str | None
) -> None:
    url = kill_late(server, misbehave.Page(DATA), target, before)
    result = run(url, target, after)
    assert result.resumed >= KEPT
    assert target.read_bytes()[: len(DATA)] == DATA


@pytest.mark.parametrize("wrong", [WRONG, sha256(DATA[: 16 * MIB])])
def test_wrong_checksum_discards_what_was_kept(server: misbehave.Server, target: Path, wrong: str) -> None:
    url = kill_late(server, misbehave.Page(DATA), target)
    with pytest.raises(errors.ChecksumMismatch):
        run(url, target, wrong)
    assert not is_kept(target)
    result = run(url, target, RIGHT)
    assert result.resumed == 0
    assert target.read_bytes()[: len(DATA)] == DATA


def test_import_starts_over_once(
    server: misbehave.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if what was resumed cannot be removed."""
    target, calls = tmp_path / "disk.img", itertools.count(1)

    def stays(_target: file.FileTarget) -> None:
        assert next(calls) <= 2

    url = kill_late(server, misbehave.Page(DATA), target)
    monkeypatch.setattr(file.FileTarget, "_abandon", stays)
    with pytest.raises(errors.ChecksumMismatch):
        run(url, target, WRONG)


def test_kept_bytes_of_another_version_are_not_a_mismatch(
    server: misbehave.Server, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It had the same strong ETag. Controllers take a mismatch for final."""
    other = DATA[:MIB] + random.Random(9).randbytes(2 * MIB) + DATA[3 * MIB :]
    url = kill_late(server, misbehave.Page(other), target, None)
    server.serve("/disk", misbehave.Page(DATA))
    result = run(url, target, RIGHT)
    assert "starting over: what was resumed does not have the checksum" in caplog.text
    assert result.resumed == 0
    assert target.read_bytes()[: len(DATA)] == DATA


def test_partial_import_of_another_source_that_is_discarded_is_reported(
    server: misbehave.Server, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kill_late(server, misbehave.Page(DATA), target)
    other = DATA[: 4 * MIB]
    run(server.serve("/other", misbehave.Page(other)), target, None)
    size = "a part" if target.is_block_device() else r"\d+\.\d MiB"
    words = rf"starting over: {target} holds {size} of another source, version or request"
    assert re.search(words, caplog.text)
    caplog.clear()
    run(server.url("/other"), target, None)
    assert "starting over" not in caplog.text


@pytest.mark.parametrize("is_killed", [False, True])
def test_import_that_kept_nothing_is_not_of_another_source(
    server: misbehave.Server, block: Path, caplog: pytest.LogCaptureFixture, *, is_killed: bool
) -> None:
    """It ended while the head was fetched that is not written before the end."""
    page = misbehave.Page(DATA)
    url = server.serve("/disk", dataclasses.replace(page, drip=(8 << 10, 0.02)))
    argv = [sys.executable, "-c", WORKER, url, block, ""]
    with forked.Popen[str](argv, env=forked.ENVIRONMENT) as worker:
        processes.wait_for(lambda: is_kept(block) or worker.poll() is not None, "a journal")
        worker.send_signal(signal.SIGKILL if is_killed else signal.SIGTERM)
    processes.wait_for(server.is_quiet, "the connections of the killed")
    server.serve("/disk", page)
    result = run(url, block, None)
    assert result.resumed == 0
    assert "starting over" not in caplog.text


@pytest.mark.parametrize("packed", [False, True])
def test_checksum_that_costs_ranges_is_reported(
    server: misbehave.Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, packed: bool
) -> None:
    path, target = tmp_path / "disk.qcow2", tmp_path / "disk.img"
    processes.run("qemu-img", "create", "-f", "qcow2", path, "64M")
    body = ovas.ova(ovas.Disk(DATA, "disk.raw"), listed="none") if packed else path.read_bytes()
    url = server.serve("/disk", misbehave.Page(body))
    words = "an interrupted import starts over"
    run(url, target, None)
    assert words not in caplog.text
    run(url, target, sha256(body))
    assert caplog.text.count(words) == 1
    caplog.clear()
    # Neither is resumed without a checksum.
    request = import_request(url, target, sha256(body))
    assert cdi_worker.verify(request).is_equal
    cdi_worker.run(dataclasses.replace(request, existing="update"))
    assert words not in caplog.text


def test_range_that_storage_has_lost_is_fetched_again(server: misbehave.Server, target: Path) -> None:
    url = kill_late(server, misbehave.Page(DATA), target)
    with part(target).open("r+b") as stream:
        stream.seek(2 * MIB + 700)
        stream.write(b"damaged")
        os.fsync(stream.fileno())
    result = run(url, target, RIGHT)
    assert result.refetched > 0
    assert result.verified == {"file": RIGHT}
    assert target.read_bytes()[: len(DATA)] == DATA


def test_footer_of_a_fixed_vhd_is_hashed(server: misbehave.Server, target: Path) -> None:
    disk = DATA + bytes(300)
    page = misbehave.Page(vhd_images.fixed(disk, b"win "))
    url = kill_late(server, page, target, sha256(page.body))
    with pytest.raises(errors.ChecksumMismatch):
        run(url, target, sha256(disk))
    url = kill_late(server, page, target, sha256(page.body))
    result = run(url, target, sha256(page.body))
    assert result.resumed >= KEPT
    assert target.read_bytes()[: len(disk)] == disk


def test_second_kill_keeps_both_parts(server: misbehave.Server, target: Path) -> None:
    page = misbehave.Page(DATA)
    url = server.serve("/disk", dataclasses.replace(page, **SLOW))
    for limit in (10 * MIB, 10 * MIB):
        sent = server.sent("/disk")
        argv = [sys.executable, "-c", WORKER, url, target, RIGHT]
        with forked.Popen[str](argv, env=forked.ENVIRONMENT) as worker:
            reached = functools.partial(lambda most: server.sent("/disk") > most, sent + limit)
            processes.wait_for(reached, "a part of the disk")
            worker.send_signal(signal.SIGKILL)
        processes.wait_for(server.is_quiet, "the connections of the killed")
    sent = server.sent("/disk")
    server.serve("/disk", page)
    result = run(url, target, RIGHT)
    assert result.resumed >= KEPT
    assert server.sent("/disk") - sent <= SIZE - result.resumed + MIB
    assert target.read_bytes()[: len(DATA)] == DATA


@pytest.mark.parametrize("changed", [False, True])
def test_weak_identity_is_sampled_first(server: misbehave.Server, target: Path, *, changed: bool) -> None:
    page = misbehave.Page(DATA, etag=None)
    url = kill_late(server, page, target)
    now = random.Random(10).randbytes(len(DATA) - MIB) + DATA[-MIB:] if changed else DATA
    body = DATA[:MIB] + now[MIB:]
    server.serve("/disk", dataclasses.replace(page, body=body))
    result = run(url, target, sha256(body))
    assert bool(result.resumed) != changed
    assert target.read_bytes()[: len(body)] == body
