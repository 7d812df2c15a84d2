"""Ranges that end within an import: one stream replaces them, and what they have written is kept."""

from __future__ import annotations

import dataclasses
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import cdi_worker
from tests.support import devices, disks, kills, misbehave, oracle, processes

KIB, MIB = 1 << 10, 1 << 20
SIZE = 24 * MIB
SLOW = (256 * KIB, 0.03)
#: Answers of at most 1 MiB before the ranges end, with those of the survey.
RANGES = 20
SHORT = {"short_range": MIB}


target = devices.targets("file", size=32 * MIB)


def noise(tmp_path: Path) -> Path:
    """Write a disk without holes, except one of 2 MiB, and a part of zeros that is no hole."""
    disk = tmp_path / "disk.raw"
    data = bytearray(random.Random(11).randbytes(SIZE))
    data[10 * MIB : 12 * MIB] = bytes(2 * MIB)
    disk.write_bytes(data)
    return disk


def image(tmp_path: Path, form: str) -> bytes:
    raw = noise(tmp_path)
    if form == "raw":
        return raw.read_bytes()
    disks.convert(raw, tmp_path / "image", disks.FORMATS[form])
    return (tmp_path / "image").read_bytes()


def expected(tmp_path: Path, form: str, body: bytes) -> Path:
    """Return the disk as qemu-img reads it from what is served."""
    (tmp_path / "served").write_bytes(body)
    made = tmp_path / "expected.raw"
    disks.to_raw(tmp_path / "served", disks.FORMATS[form].driver, made)
    return made


def run(url: str, target: Path, scratch: Path, **options: object) -> cdi_worker.Result:
    return cdi_worker.run(kills.request(url, target, scratch=scratch, **options))


def kill_when(reached: Callable[[], bool], url: str, target: Path, scratch: Path) -> None:
    assert kills.kill(kills.request(url, target, scratch=scratch), reached) == -signal.SIGKILL


def streamed(server: misbehave.Server) -> int:
    """Return how many bytes of whole objects were sent."""
    return sum(request.sent for request in server.gets("/disk") if request.status == 200)


def ranged(server: misbehave.Server) -> int:
    """Return how many bytes of ranges were sent."""
    return sum(request.sent for request in server.gets("/disk") if request.status == 206)


@pytest.mark.parametrize(("form", "target"), [("raw", "file"), ("qcow2", "block")], indirect=["target"])
def test_stream_instead_of_ranges_keeps_what_they_have_written(
    server: misbehave.Server, target: Path, scratch: Path, tmp_path: Path, form: str
) -> None:
    """The run that was killed within the stream had a part of the disk, which the next one has, too."""
    good = misbehave.Page(image(tmp_path, form))
    vanished = dataclasses.replace(good, ranges=False, drip=SLOW)
    url = server.serve("/disk", (dataclasses.replace(good, **SHORT), RANGES), vanished)
    kill_when(lambda: streamed(server) > 4 * MIB, url, target, scratch)
    processes.wait_for(server.is_quiet, "the connections of the killed")
    by_ranges = ranged(server)
    server.serve("/disk", dataclasses.replace(good, ranges=False))
    done = run(url, target, scratch=scratch)
    assert done.written <= SIZE - (done.resumed if form == "raw" else by_ranges / 2)
    assert done.resumed > by_ranges / 2 > 3 * MIB
    oracle.same(target, expected(tmp_path, form, good.body), beyond=devices.beyond(target))


def test_nothing_is_kept_of_a_stream_whose_tables_may_come_last(
    server: misbehave.Server, target: Path, scratch: Path, tmp_path: Path
) -> None:
    """Also if what ranges have written cannot be continued: another name was made for it."""
    good = misbehave.Page(image(tmp_path, "qcow2"))
    slow = dataclasses.replace(good, drip=SLOW)
    url = server.serve("/disk", slow)
    kill_when(lambda: ranged(server) > 6 * MIB, url, target, scratch)
    (tmp_path / "link").hardlink_to(tmp_path / "disk.img.part")
    processes.wait_for(server.is_quiet, "the connections of the killed")
    server.serve("/disk", dataclasses.replace(good, ranges=False, cut_at=16 * MIB))
    with pytest.raises(cdi_worker.errors.TransferFailed):
        run(
            url,
            target,
            scratch=scratch,
            fetch=cdi_worker.FetchOptions(connections=2, chunk=MIB, no_progress=2),
        )
    server.serve("/disk", good)
    assert run(url, target, scratch=scratch).read > 20 * MIB
    oracle.same(target, expected(tmp_path, "qcow2", good.body))


@pytest.mark.parametrize("form", ["vhdx", "vhdx-log"])
def test_stream_completes_what_ranges_began(
    server: misbehave.Server, target: Path, scratch: Path, tmp_path: Path, form: str
) -> None:
    good = misbehave.Page(image(tmp_path, form))
    url = server.serve(
        "/disk", (dataclasses.replace(good, **SHORT), RANGES), dataclasses.replace(good, ranges=False)
    )
    done = run(url, target, scratch=scratch)
    assert not done.plan.random
    if form != "vhdx-log":  # converted with random reads
        # Half of it: tables, and what two connections had received but not written when the ranges ended.
        assert done.resumed > ranged(server) / 2 > 3 * MIB
    oracle.same(target, expected(tmp_path, form, good.body), beyond=devices.beyond(target))


@pytest.mark.parametrize("form", ["raw", "qcow2"])
def test_stream_replaces_wrong_bytes_of_ranges_that_nothing_showed(
    server: misbehave.Server, target: Path, scratch: Path, tmp_path: Path, form: str
) -> None:
    """Within a range, whose ends are right."""
    good = misbehave.Page(image(tmp_path, form))
    wrong = bytearray(good.body)
    for at in range(2 * MIB + 300 * KIB, 22 * MIB, MIB):
        wrong[at : at + 9] = b"wrong    "
    lying = dataclasses.replace(good, body=bytes(wrong), **SHORT)
    url = server.serve("/disk", (lying, RANGES), dataclasses.replace(good, ranges=False))
    assert not run(url, target, scratch=scratch).plan.random
    oracle.same(target, expected(tmp_path, form, good.body), beyond=devices.beyond(target))


@devices.on("block")
def test_nothing_is_kept_of_ranges_that_differ(
    server: misbehave.Server, target: Path, scratch: Path, tmp_path: Path
) -> None:
    good = misbehave.Page(image(tmp_path, "raw"))
    lied: list[int] = []

    def lie(first: int, number: int) -> int:
        # In the zeros of the disk, all is the same 64 KiB later.
        if number < 14 or first > 8 * MIB or lied:
            return first
        lied.append(number)
        return first + 64 * KIB

    # All answers are of this page, so that the ranges beside the wrong one arrive, too.
    url = server.serve("/disk", dataclasses.replace(good, lie=lie, drip=SLOW, **SHORT))
    kill_when(lambda: streamed(server) > 4 * MIB, url, target, scratch)
    processes.wait_for(server.is_quiet, "the connections of the killed")
    server.serve("/disk", good)
    done = run(url, target, scratch=scratch)
    # But of the stream.
    assert 0 < done.resumed < streamed(server) < ranged(server) - 4 * MIB
    oracle.same(target, expected(tmp_path, "raw", good.body), beyond=devices.beyond(target))


def test_nothing_is_kept_under_a_weak_identity(
    server: misbehave.Server, target: Path, scratch: Path, tmp_path: Path
) -> None:
    good = misbehave.Page(image(tmp_path, "raw"), etag=None)
    url = server.serve(
        "/disk", (dataclasses.replace(good, **SHORT), RANGES), dataclasses.replace(good, ranges=False)
    )
    done = run(url, target, scratch=scratch)
    assert not done.plan.random
    assert not done.resumed
    oracle.same(target, expected(tmp_path, "raw", good.body), beyond=devices.beyond(target))
