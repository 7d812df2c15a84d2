"""``--update --have``: what the map of the old disk says is neither read nor written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.formats import bmap
from cdi_worker.images.engine import fetch
from tests.support import bmaps, bmaptool, devices, forked, misbehave, oracle, processes, worker
from tests.support.mapped_disks import DATA, MIB, SIZE, Made, asked, make, packed, page, same, serve, split
from tests.support.pages import Page

target = devices.targets("file", "block4096", size=32 * MIB)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("made") / "disk.raw")


# -- updates by two maps


def updated(made: Made, tmp_path: Path) -> Made:
    """Return the disk as it is later: data over data, over a hole and at the end, and zeros over data."""
    path = tmp_path / "later.raw"
    path.write_bytes(made.data)
    noise = random.Random(9)
    with path.open("r+b") as stream:
        for offset, length in ((3 * MIB, 8192), (10 * MIB, 70_000), (SIZE - 512, 512)):
            stream.seek(offset)
            stream.write(noise.randbytes(length))
        stream.seek(5 * MIB)
        stream.write(bytes(MIB))
    subprocess.run(["fallocate", "--dig-holes", path], check=True)
    return Made(path, bmaptool.create(path))


@pytest.mark.parametrize("form", ["ranges", "gz"])
def test_update_moves_only_ranges_that_differ(
    server: misbehave.Server, made: Made, target: Path, tmp_path: Path, form: str
) -> None:
    cdi_worker.run(asked(*serve(server, made), target))
    old, new = split(made), split(updated(made, tmp_path))
    have = server.serve("/old.bmap", Page(old.map))
    page = Page(new.data if form == "ranges" else packed(new, "gz"))
    server.requests.clear()
    url, map_ = serve(server, new, page)
    result = cdi_worker.run(asked(url, map_, target, existing="update", have=have))
    same(target, new)
    differing = [each for each in new.ranges if each not in old.ranges]
    moved = sum(end - start for start, end, _ in differing)
    assert 70_000 < moved < 2 * MIB
    assert result.changes is not None
    # Zeros over data are compared, too.
    assert moved <= result.changes.compared <= moved + 2 * MIB
    assert form == "gz" or result.read == moved
    # Nothing says that the disk has what was not read.
    assert "map" not in result.verified


def test_update_without_a_difference_moves_nothing(
    server: misbehave.Server, made: Made, target: Path
) -> None:
    cdi_worker.run(asked(*serve(server, made), target))
    url, map_ = serve(server, made)
    before = target.stat()
    server.requests.clear()
    result = cdi_worker.run(asked(url, map_, target, existing="update", have=map_))
    same(target, made)
    assert (result.read, result.changes and result.changes.compared) == (0, 0)
    assert target.is_block_device() or target.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("size", [SIZE - 3 * MIB, SIZE + 3 * MIB])
def test_update_to_another_size(
    server: misbehave.Server, made: Made, target: Path, tmp_path: Path, size: int
) -> None:
    cdi_worker.run(asked(*serve(server, made), target))
    new = make(tmp_path / "new.raw", tuple(each for each in DATA if sum(each) <= size), size)
    have = server.serve("/old.bmap", Page(made.map))
    cdi_worker.run(asked(*serve(server, new), target, existing="update", have=have))
    oracle.same(target, new.disk, beyond=None)
    assert target.is_block_device() or target.stat().st_size == size


def test_target_that_cannot_be_what_its_map_says_is_refused(
    server: misbehave.Server, made: Made, target: Path, tmp_path: Path
) -> None:
    new = updated(made, tmp_path)
    have = server.serve("/old.bmap", Page(made.map))
    request = asked(*serve(server, new), target, existing="update", have=have)
    if not target.is_block_device():
        for size in (None, SIZE - 512, SIZE + 512):
            if size is not None:
                devices.fill(target, size)
            with pytest.raises(errors.TargetError, match=r"the disk of its map 25165824"):
                cdi_worker.run(request)
        assert target.read_bytes() == devices.DIRT * (SIZE + 512)
    # An update that was interrupted has left neither the old nor the new disk.
    cdi_worker.run(asked(*serve(server, made), target))
    url, map_ = serve(server, new, Page(new.data, stall_at=20 * MIB + 4096))
    broken = dataclasses.replace(
        asked(url, map_, target, existing="update"),
        location=cdi_worker.Location(url, access=cdi_worker.Access(patience=1.5)),
        fetch=fetch.Options(connections=2, chunk=MIB, no_progress=1.5),
    )
    with pytest.raises(errors.TransferFailed):
        cdi_worker.run(broken)
    serve(server, new)
    assert cdi_worker.run(request).verified["map"]
    same(target, new)


# -- by the old map alone

WAYS = ["raw", "stream", "raw.gz", "qcow2", "vmdk-stream", "vhdx"]


def even(path: Path, data: bytes) -> Made:
    """Return a disk of whole sectors, and our own map of it."""
    path.write_bytes(data)
    return Made(path, bmap.write(bmaps.expected(data)))


def prepared(server: misbehave.Server, made: Made, target: Path, tmp_path: Path) -> tuple[Made, str]:
    """Make a target the old disk; return the new one, and the URL of the map of the old one."""
    old = even(tmp_path / "old", made.data)
    devices.restore(target, old.data)
    return even(tmp_path / "new", updated(made, tmp_path).data), server.serve("/old.bmap", Page(old.map))


@pytest.mark.parametrize("way", WAYS)
def test_old_map_is_compared_with_what_arrives(
    server: misbehave.Server, made: Made, target: Path, tmp_path: Path, way: str
) -> None:
    new, have = prepared(server, made, target, tmp_path)
    url = server.serve("/disk", page(new.data, way, tmp_path))
    request = dataclasses.replace(asked(url, "", target, existing="update", have=have), read_back=True)
    result = cdi_worker.run(request)
    same(target, new)
    assert result.changes is not None
    assert result.changes.compared >= SIZE
    assert result.changes.differed <= 8192 + 70_000 + 8192 + MIB + 4096
    assert "map" not in result.verified
    assert result.confirmed >= SIZE - MIB


@pytest.mark.parametrize("way", WAYS)
def test_what_the_old_map_says_is_not_read(
    server: misbehave.Server, made: Made, target: Path, tmp_path: Path, way: str
) -> None:
    """A byte that the map does not know stays, unless it is sampled: the map is trusted."""
    old = even(tmp_path / "old", made.data)
    devices.restore(target, old.data)
    have = server.serve("/old.bmap", Page(old.map))
    url = server.serve("/disk", page(old.data, way, tmp_path))
    before = target.stat().st_mtime_ns
    # Far behind the start of a hole, of which a sample is taken.
    with target.open("r+b") as stream:
        stream.seek(9 * MIB)
        stream.write(b"x")
    if not target.is_block_device():
        os.utime(target, ns=(before, before))
    request = asked(url, "", target, existing="update", have=have)
    result = cdi_worker.run(request)
    assert result.changes is not None
    assert (result.changes.written, result.changes.differed) == (0, 0)
    assert target.is_block_device() or target.stat().st_mtime_ns == before
    with pytest.raises(errors.TargetError, match=r"read back: .* bytes differ from those received"):
        cdi_worker.run(dataclasses.replace(request, read_back=True))
    assert cdi_worker.run(asked(url, "", target, existing="update")).changes.differed == 4096  # type: ignore[union-attr]
    same(target, old)


def test_sha256_of_the_source_is_not_that_of_the_disk(
    server: misbehave.Server, made: Made, tmp_path: Path
) -> None:
    target, checksum = tmp_path / "disk.img", f"sha256:{hashlib.sha256(made.data).hexdigest()}"
    url = server.serve("/disk", Page(made.data))
    assert cdi_worker.run(asked(url, "", target, checksum=checksum)).sha256
    have = server.serve("/old.bmap", Page(made.map))
    request = asked(url, "", target, existing="update", have=have, checksum=checksum)
    assert cdi_worker.run(request).sha256 == ""
    assert cdi_worker.run(dataclasses.replace(request, read_back=True)).sha256 in checksum


@pytest.mark.parametrize("by", ["one map", "two maps"])
def test_map_of_another_disk_is_refused(
    server: misbehave.Server, made: Made, target: Path, tmp_path: Path, by: str
) -> None:
    new = updated(made, tmp_path)
    devices.restore(target, made.data)
    with target.open("r+b") as stream:
        stream.write(b"the guest has written here")
    before = target.read_bytes()
    have = server.serve("/old.bmap", Page(made.map))
    url, map_ = serve(server, new)
    request = asked(url, map_ if by == "two maps" else "", target, existing="update", have=have)
    with pytest.raises(errors.TargetError, match=r"bytes 0 to .* are not what its map says \(--have\)"):
        cdi_worker.run(request)
    assert target.read_bytes() == before


@pytest.mark.parametrize("by", ["one map", "two maps"])
def test_old_map_is_not_trusted_after_wrong_ranges(
    server: misbehave.Server, made: Made, target: Path, tmp_path: Path, by: str
) -> None:
    """Ranges have written wrong bytes over what the map says, before the stream is read instead."""
    new, have = prepared(server, made, target, tmp_path)
    # From 20 MiB on, the ranges are those of another place.
    page = Page(new.data, lie=lambda first, _: first - 4096 if first >= 20 * MIB else first)
    url, map_ = serve(server, new, page)
    request = asked(url, map_ if by == "two maps" else "", target, existing="update", have=have)
    try:
        assert cdi_worker.run(request).plan.random is False
    except errors.MapMismatch:
        # Before another request has shown that the ranges are wrong.
        assert by == "two maps"
        serve(server, new)
        cdi_worker.run(request)
    same(target, new)


@pytest.mark.parametrize("by", ["one map", "two maps"])
def test_killed_update_continues_without_the_old_map(
    server: misbehave.Server, made: Made, target: Path, tmp_path: Path, by: str
) -> None:
    """Half of the disk is the new one, and wrong bytes are where the map says that nothing has changed."""
    new, have = prepared(server, made, target, tmp_path)
    url, map_ = serve(server, new, Page(new.data, stall_at=10 * MIB + 40_000))
    map_ = map_ if by == "two maps" else ""
    argv = [sys.executable, "-c", WORKER, url, map_, have, target]
    with forked.Popen[str](argv, env=forked.ENVIRONMENT) as killed:
        processes.wait_for(lambda: _is_changed(target), "the first change")
        killed.send_signal(signal.SIGKILL)
    oracle.unusable(target)
    place = target if target.is_block_device() else Path(f"{target}.changing")
    with place.open("r+b") as stream:
        stream.seek(21 * MIB)
        stream.write(b"half of a write")
    serve(server, new)
    meter = cdi_worker.Meter()
    result = cdi_worker.run(asked(url, map_, target, existing="update", have=have), meter)
    same(target, new)
    # Everything was compared with the disk: the new map says what it is.
    assert ("map" in result.verified) == (by == "two maps")


def _is_changed(target: Path) -> bool:
    if not target.is_block_device():
        return Path(f"{target}.changing").exists()
    with target.open("rb") as stream:
        head = stream.read(MIB // 4)
    # The old head is erased after the record is there.
    return head.startswith(b"cdi-worker") and not any(head[512:])


WORKER = """
import sys, cdi_worker
from cdi_worker.images.engine import fetch
from cdi_worker.sources import trust
cdi_worker.run(cdi_worker.Request(
    existing="update", source="http", location=cdi_worker.Location(sys.argv[1]), target=sys.argv[4],
    demand=trust.Demand(map=sys.argv[2] or None), have=sys.argv[3],
    fetch=fetch.Options(connections=2, chunk=1 << 20),
))
"""


@pytest.mark.parametrize("size", [SIZE - 3 * MIB, SIZE + 3 * MIB])
@pytest.mark.parametrize("way", ["raw", "raw.gz", "qcow2"])
def test_disk_of_another_size(
    server: misbehave.Server, made: Made, target: Path, tmp_path: Path, size: int, way: str
) -> None:
    devices.restore(target, made.data)
    new = make(tmp_path / "new.raw", tuple(each for each in DATA if sum(each) <= size), size)
    have = server.serve("/old.bmap", Page(made.map))
    url = server.serve("/disk", page(new.data, way, tmp_path))
    cdi_worker.run(asked(url, "", target, existing="update", have=have))
    oracle.same(target, new.disk, beyond=None)
    assert target.is_block_device() or target.stat().st_size == size


@pytest.mark.parametrize("is_had", [True, False])
def test_old_map_is_replaced_before_the_new_disk_is_usable(
    server: misbehave.Server, made: Made, target: Path, tmp_path: Path, is_had: bool
) -> None:
    """A kill after that must not leave a map that is trusted, and is of another disk. It is written once."""
    kept, new = tmp_path / "disk.bmap", updated(made, tmp_path).data
    kept.write_bytes(bmap.write(bmaps.expected(made.data)))
    devices.restore(target, made.data)
    before: list[tuple[bytes, int]] = []

    class Watching(cdi_worker.NullProgress):
        def phase(self, name: str, _total: int | None) -> None:
            if name == "sync":
                oracle.unusable(target)
                before.append((kept.read_bytes(), kept.stat().st_ino))

    url, have = server.serve("/disk", Page(new)), str(kept) if is_had else ""
    request = asked(url, "", target, existing="update", have=have, write_map=str(kept))
    cdi_worker.run(request, Watching())
    assert [bmap.parse(each) for each, _ in before] == [bmaps.expected(new)]
    assert (kept.read_bytes(), kept.stat().st_ino) == before[0]


def test_map_of_an_update_that_is_not_read_back_is_that_of_the_new_disk(
    server: misbehave.Server, made: Made, tmp_path: Path
) -> None:
    """The disk is complete then, and the next update would trust the old map."""
    target, kept, new = tmp_path / "disk.img", tmp_path / "disk.bmap", updated(made, tmp_path).data
    kept.write_bytes(bmap.write(bmaps.expected(made.data)))
    devices.restore(target, made.data)

    class Breaking(cdi_worker.NullProgress):
        def phase(self, name: str, _total: int | None) -> None:
            if name == "readback":
                with target.open("r+b") as stream:
                    stream.seek(3 * MIB)
                    stream.write(b"a fault of the storage")

    url = server.serve("/disk", Page(new))
    request = asked(url, "", target, existing="update", write_map=str(kept))
    with pytest.raises(errors.TargetError, match="bytes differ from those received"):
        cdi_worker.run(dataclasses.replace(request, read_back=True), Breaking())
    assert bmap.parse(kept.read_bytes()) == bmaps.expected(new)


def test_command_replaces_the_old_map_by_the_new_one(
    server: misbehave.Server, made: Made, tmp_path: Path
) -> None:
    """Again and again: the map of the last update is that of the disk."""
    target, kept = tmp_path / "disk.img", tmp_path / "disk.bmap"
    url = server.serve("/disk", Page(made.data))
    assert worker.run("import", url, target, "--write-map", kept).status == 0
    for seed in range(3):
        new = bytearray(made.data)
        new[seed * 7 * MIB : seed * 7 * MIB + 100] = random.Random(seed).randbytes(100)
        server.serve("/disk", Page(bytes(new)))
        done = worker.run("import", "--update", "--have", kept, "--write-map", kept, url, target, "--json")
        assert done.status == 0, done.errors
        assert json.loads(done.output)["update"]["written"] <= 8192
        assert target.read_bytes() == new
        assert bmap.parse(kept.read_bytes()) == bmaps.expected(bytes(new))
    before = kept.read_bytes()
    for options in (("--report", kept), ("--report", kept, "--write-map", kept)):
        done = worker.run("import", "--update", "--have", kept, *options, url, target)
        assert (done.status, "would replace a file that is read" in done.errors) == (2, True), done.errors
    assert kept.read_bytes() == before
