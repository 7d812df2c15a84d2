"""Block maps: written by an import on every route, made of a disk, and the measure of a verification."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.formats import bmap
from cdi_worker.images.engine import cancelling
from cdi_worker.images.sinks import mapping, verified
from cdi_worker.importer import sampling
from cdi_worker.sources import trust
from tests.support import (
    bmaps,
    bmaptool,
    chains,
    devices,
    disks,
    mapped_disks,
    misbehave,
    nbd_targets,
    ovas,
    processes,
    signers,
    worker,
)

MIB = 1 << 20
SIZE = 11 * MIB + 3 * 512
DATA = (
    random.Random(8).randbytes(4 * MIB + 70_000)
    + bytes(5 * MIB - 70_000)
    + random.Random(9).randbytes(2 * MIB + 3 * 512)
)
FEW = cdi_worker.FetchOptions(connections=3, chunk=512 << 10, no_progress=3)


def request(url: str, target: object, written: Path, **options: Any) -> cdi_worker.Request:
    values = {"fetch": FEW, "existing": "replace", **options}
    location = cdi_worker.Location(url, access=cdi_worker.Access(patience=3.0))
    return cdi_worker.Request(
        source="http", location=location, target=str(target), write_map=str(written), **values
    )


def served(server: misbehave.Server, form: str, tmp_path: Path) -> str:
    """Serve the disk in a form; return its URL."""
    return server.serve("/disk", mapped_disks.page(DATA, form, tmp_path))


def check(written: Path, data: bytes = DATA) -> None:
    assert bmap.parse(written.read_bytes()) == bmaps.expected(data)


# -- import --write-map


@pytest.mark.parametrize("kind", ["file", "block"])
@pytest.mark.parametrize(
    "form", ["raw", "stream", "raw.gz", "qcow2", "qcow2-zlib", "vmdk-stream", "vmdk-odd", "vhdx"]
)
def test_every_route_writes_the_map(server: misbehave.Server, tmp_path: Path, form: str, kind: str) -> None:
    url, written = served(server, form, tmp_path), tmp_path / "disk.bmap"
    with devices.target(kind, tmp_path, 16 * MIB) as target:
        done = cdi_worker.run(request(url, target, written))
        assert target.read_bytes()[:SIZE] == DATA
    check(written)
    assert done.map is not None
    assert not list(tmp_path.glob("*.bmap.*"))


@pytest.mark.parametrize("form", ["raw", "qcow2", "vmdk-odd"])
@pytest.mark.parametrize("compress", [False, True])
def test_map_of_a_qcow2_file_is_that_of_the_guest(
    server: misbehave.Server, tmp_path: Path, form: str, compress: bool
) -> None:
    url, written = served(server, form, tmp_path), tmp_path / "disk.bmap"
    cdi_worker.run(request(url, tmp_path / "disk.qcow2", written, format="qcow2", compress=compress))
    check(written)


@pytest.mark.parametrize("form", ["raw", "qcow2", "vmdk-odd"])
def test_map_of_an_export(server: misbehave.Server, tmp_path: Path, form: str) -> None:
    url, written = served(server, form, tmp_path), tmp_path / "disk.bmap"
    with nbd_targets.running("nbdkit file", tmp_path, 16 * MIB) as export:
        cdi_worker.run(request(url, export.url, written))
    check(written)


def test_standard_output_has_a_map(server: misbehave.Server, tmp_path: Path) -> None:
    url, written = served(server, "stream", tmp_path), tmp_path / "disk.bmap"
    done = subprocess.run(
        [*worker.COMMAND, "import", url, "-", "--write-map", str(written)], capture_output=True, check=True
    )
    assert done.stdout == DATA
    check(written)


def test_map_has_the_size_of_the_disk(server: misbehave.Server, tmp_path: Path) -> None:
    """The end of the last sector, and what the disk is grown by, are zeros."""
    url, written = server.serve("/odd", misbehave.Page(DATA[:1000])), tmp_path / "disk.bmap"
    cdi_worker.run(request(url, tmp_path / "disk.img", written))
    check(written, DATA[:1000] + bytes(24))
    cdi_worker.run(request(url, tmp_path / "disk.img", written, image_size=3 * MIB))
    check(written, DATA[:1000] + bytes(3 * MIB - 1000))


@pytest.mark.parametrize("kind", ["file", "block"])
def test_resumed_parts_are_in_the_map(server: misbehave.Server, tmp_path: Path, kind: str) -> None:
    url, written = server.serve("/disk", misbehave.Page(DATA, stall_at=9 * MIB + 5)), tmp_path / "disk.bmap"
    with devices.target(kind, tmp_path, 16 * MIB) as target:
        asked = request(url, target, written, journal_interval=0.05)
        with pytest.raises(errors.Error):
            cdi_worker.run(asked)
        assert not written.exists()
        server.serve("/disk", misbehave.Page(DATA))
        assert cdi_worker.run(asked).resumed > 0
    check(written)


def test_updated_disk_has_a_map(server: misbehave.Server, tmp_path: Path) -> None:
    url, target, written = served(server, "raw", tmp_path), tmp_path / "disk.img", tmp_path / "disk.bmap"
    target.write_bytes(DATA[: 6 * MIB] + b"\xff" * (SIZE - 6 * MIB))
    cdi_worker.run(request(url, target, written, existing="update"))
    assert target.read_bytes() == DATA
    check(written)


def test_chain_has_a_map(server: misbehave.Server, tmp_path: Path) -> None:
    made = chains.Chain(tmp_path)
    base = made.base(8 * MIB, "write -P 1 1M 2M")
    top = made.overlay("write -P 2 2M 1M", "write -z 1M 64k")
    disk = made.disk().read_bytes()
    made.unnamed(top)
    first, second = (server.serve(f"/{file.name}", misbehave.Page(file.read_bytes())) for file in (base, top))
    written = tmp_path / "disk.bmap"
    layers = (cdi_worker.Location(second),)
    cdi_worker.run(request(first, tmp_path / "disk.img", written, layers=layers))
    check(written, disk)


def test_failed_import_writes_no_map(server: misbehave.Server, tmp_path: Path) -> None:
    url, written = served(server, "raw", tmp_path), tmp_path / "disk.bmap"
    with pytest.raises(errors.ChecksumMismatch):
        cdi_worker.run(request(url, tmp_path / "disk.img", written, checksum="sha256:" + "0" * 64))
    assert not written.exists()
    written.symlink_to(tmp_path / "other")
    with pytest.raises(errors.RequestError, match="symbolic link"):
        cdi_worker.run(request(url, tmp_path / "disk.img", written))
    assert not (tmp_path / "other").exists()
    assert not (tmp_path / "disk.img").exists()


def test_command_writes_a_map(server: misbehave.Server, tmp_path: Path) -> None:
    url, written = served(server, "qcow2", tmp_path), tmp_path / "disk.bmap"
    dry = worker.run("import", url, tmp_path / "disk.img", "--write-map", written, "--dry-run")
    assert (dry.status, written.exists()) == (0, False)
    assert "--write-map: no map is written" in dry.errors
    done = worker.run("import", url, tmp_path / "disk.img", "--write-map", written, "--json")
    expected = bmaps.expected(DATA)
    assert json.loads(done.output)["map"] == {"ranges": len(expected.ranges), "bytes": expected.mapped}
    done = worker.run("import", url, tmp_path / "other.img", "--write-map=-")
    assert bmap.parse(done.output.encode()) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--content-type=archive",), "an archive has no map"),
        (("--all",), "--write-map cannot be used with --all"),
        (("--report=-",), "standard output gets one of them"),
    ],
)
def test_what_has_no_map_is_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    package = tmp_path / "vm.ova"
    package.write_bytes(ovas.ova(ovas.Disk(b"disk")))
    done = worker.run("import", package, tmp_path, "--write-map=-", *options)
    assert done.status == 2
    assert message in done.error_message


@pytest.mark.parametrize("seed", range(3))
def test_bmaptool_copies_an_imported_disk_to_a_device(
    server: misbehave.Server, tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    data = bytearray(8 * MIB + 512 * dice.randrange(8))
    for _ in range(20):
        start = dice.randrange(len(data) // 512) * 512
        data[start : start + dice.choice([512, 4096, 300_000])] = b""
        data[start:start] = dice.randbytes(min(dice.choice([512, 4096, 300_000]), 8 * MIB))
    del data[-(len(data) % 512) or len(data) :]
    url = server.serve("/disk", misbehave.Page(bytes(data)))
    target, written = tmp_path / "disk.img", tmp_path / "disk.bmap"
    cdi_worker.run(request(url, target, written))
    expected = bmap.parse(written.read_bytes())
    with devices.target("block", tmp_path, 64 * MIB) as device:
        bmaptool.copy(target, written.read_bytes(), device)
        copied = device.read_bytes()
    at = 0
    for start, end, _ in expected.ranges:
        assert copied[at:start] == devices.DIRT * (start - at)
        assert copied[start:end] == data[start:end]
        assert not any(data[at:start])
        at = end


# -- map


def disk_of(kind: str, tmp_path: Path, data: bytes = DATA) -> contextlib.AbstractContextManager[str]:
    """Return a disk with data of this kind: its path or address."""

    @contextlib.contextmanager
    def made() -> Iterator[str]:
        raw = tmp_path / "made.img"
        raw.write_bytes(data)
        if kind == "file":
            yield str(raw)
        elif kind == "sparse":
            disks.to_raw(raw, "raw", tmp_path / "sparse.img")
            yield str(tmp_path / "sparse.img")
        elif kind == "qcow2":
            disks.convert(raw, tmp_path / "made.qcow2", disks.FORMATS["qcow2"])
            yield str(tmp_path / "made.qcow2")
        elif kind == "block":
            with devices.loop(tmp_path, SIZE, dirt=b"\0") as device:
                device.write_bytes(data)
                yield str(device)
        else:
            with nbd_targets.running("nbdkit file", tmp_path, len(data)) as export:
                assert worker.run("import", raw, export.url).status == 0
                yield export.url

    return made()


KINDS = ["file", "sparse", "qcow2", "block", "export"]


def asked(path: str, **options: Any) -> cdi_worker.Request:
    location = cdi_worker.Location("")
    return cdi_worker.Request(source="none", location=location, target=path, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_map_of_a_disk(tmp_path: Path, kind: str) -> None:
    written = tmp_path / "disk.bmap"
    with disk_of(kind, tmp_path) as disk:
        done = worker.run("map", disk, "-o", written, "--json")
        assert done.status == 0, done.errors
        check(written)
        assert json.loads(done.output)["bytes"] == bmaps.expected(DATA).mapped
        done = worker.run("map", disk)
        assert bmap.parse(done.output.encode()) == bmaps.expected(DATA)


def test_map_of_what_is_no_disk(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert "is empty" in worker.run("map", tmp_path / "empty").error_message
    assert worker.run("map", tmp_path / "missing").status == 6
    done = worker.run("map", tmp_path / "empty", "-o", tmp_path / "empty")
    assert "is the target; name another file" in done.error_message


def test_map_does_not_replace_the_base_of_the_disk(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.write_bytes(DATA)
    overlay = tmp_path / "vm.qcow2"
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", base, overlay)
    (tmp_path / "folder").mkdir()
    named = tmp_path / "folder" / ".." / "base"
    done = worker.run("map", overlay, "--backing", base, "-o", named)
    assert (done.status, "would replace a file that is read" in done.errors) == (2, True), done.errors
    assert base.read_bytes() == DATA


class Changing(cdi_worker.NullProgress):
    """Changes the disk while it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def phase(self, _name: str, _total: int | None) -> None:
        devices.change(self.path, 0, b"changed")


def test_disk_that_changes_has_no_map(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    path.write_bytes(DATA)
    with pytest.raises(errors.TargetError, match="changed while it was read"):
        cdi_worker.create_map(asked(str(path)), Changing(path))


def test_holes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"data")
    found = cdi_worker.create_map(asked(str(path)))
    assert found.ranges == ((1 << 39, (1 << 39) + 4096, sha256(b"data".ljust(4096, b"\0")).digest()),)


# -- verify by a map


def by(blocks: bmap.Map, folder: Path) -> trust.Demand:
    """Write a map; return what demands it."""
    path = folder / "by.bmap"
    path.write_bytes(bmap.write(blocks))
    return trust.Demand(map=str(path))


def verdict(
    path: object, blocks: bmap.Map, folder: Path, progress: cdi_worker.Progress | None = None
) -> cdi_worker.Verification:
    return cdi_worker.verify_map(asked(str(path), demand=by(blocks, folder)), progress)


@pytest.mark.parametrize("kind", KINDS)
def test_disk_is_that_of_its_map(tmp_path: Path, kind: str) -> None:
    with disk_of(kind, tmp_path) as disk:
        found = verdict(disk, bmaps.expected(DATA), tmp_path)
        assert (found.is_equal, found.compared, found.size) == (True, SIZE, SIZE)
        other = bytearray(DATA)
        other[3 * MIB + 5] ^= 1
        other[6 * MIB] = 1
        found = verdict(disk, bmaps.expected(bytes(other)), tmp_path)
        assert (found.is_equal, found.confirmed, found.first) == (False, True, 3 * MIB)
        # In the map there is a block where the disk has zeros.
        assert [dataclasses.astuple(each) for each in found.differences] == [
            (3 * MIB, MIB, ""),
            (6 * MIB, 4096, "disk"),
        ]


@pytest.mark.parametrize("seed", range(8))
def test_maps_of_bmaptool_are_verified(tmp_path: Path, seed: int) -> None:
    """Whatever differs is seen, and nothing else."""
    dice = random.Random(seed)
    path = tmp_path / "disk.img"
    with path.open("wb") as file:
        for _ in range(8):
            file.seek(dice.randrange(2000) * 4096)
            file.write(dice.randbytes(dice.randrange(1, 100) * 4096))
        file.truncate(9 * MIB + 512 * seed)
    data, blocks = path.read_bytes(), bmap.parse(bmaptool.create(path))
    assert verdict(path, blocks, tmp_path).is_equal
    size = len(data)
    mapped_bits = [dice.randrange(start, end) for start, end, _ in dice.sample(blocks.ranges, 2)]
    for at in (0, size - 1, *mapped_bits, dice.randrange(size)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :])
        found = verdict(path, blocks, tmp_path)
        assert not found.is_equal
        assert any(each.offset <= at < each.offset + each.length for each in found.differences)
        assert len(found.differences) == 1
        around = [each for each in blocks.ranges if each[0] <= at < each[1]]
        if around:
            # All of the range, which has one checksum.
            assert (found.first, found.differed) == (around[0][0], around[0][1] - around[0][0])
        else:
            assert (found.first, found.differences[0].zero) == (at, "source")


def test_end_of_the_disk(tmp_path: Path) -> None:
    path, blocks = tmp_path / "disk.img", bmaps.expected(DATA)
    path.write_bytes(DATA[: 10 * MIB])
    found = verdict(path, blocks, tmp_path)
    assert (found.is_equal, found.differences[-1].zero) == (False, "missing")
    assert "it has 10485760 bytes, the image" in found.difference()
    path.write_bytes(DATA + bytes(MIB))
    found = verdict(path, blocks, tmp_path)
    assert (found.is_equal, found.rest) == (True, "compared")
    devices.change(path, SIZE + 5000, b"x")
    found = verdict(path, blocks, tmp_path)
    assert (found.is_equal, found.first) == (False, SIZE + 5000)
    with devices.loop(tmp_path, 16 * MIB) as device:
        with device.open("r+b") as file:
            file.write(DATA)
        found = verdict(device, blocks, tmp_path)
        assert (found.is_equal, found.rest) == (True, "ignored")


def test_range_that_a_disk_does_not_have_is_not_hashed(tmp_path: Path) -> None:
    """A map may state any size."""
    path, large = tmp_path / "disk.img", 10**17 // 4096 * 4096
    path.write_bytes(DATA)
    for start, end in ((0, 64 * MIB), (0, large), (64 * MIB, large)):
        found = verdict(path, bmap.Map(end, 4096, ((start, end, bytes(32)),)), tmp_path)
        assert (found.is_equal, found.differences[-1].zero) == (False, "missing")
        assert start or found.disk_read == 0


def test_hashing_of_a_hole_is_cancelled(tmp_path: Path) -> None:
    path, cancel, size = tmp_path / "disk.img", threading.Event(), 1 << 36
    with path.open("wb") as file:
        file.truncate(size)
    request = asked(str(path), demand=by(bmap.Map(size, 4096, ((0, size, bytes(32)),)), tmp_path))
    timer = threading.Timer(1, cancel.set)
    timer.start()
    began = time.monotonic()
    with pytest.raises(errors.Cancelled):
        cdi_worker.verify_map(request, cancel=cancel)
    timer.join()
    # A SHA-256 of 64 GiB takes longer.
    assert time.monotonic() - began < processes.PATIENCE


def test_disk_that_ends_in_zeros_of_the_map_is_too_small(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    path.write_bytes(DATA[: 8 * MIB])
    blocks = bmaps.expected(DATA[: 8 * MIB] + bytes(MIB))
    assert not verdict(path, blocks, tmp_path).is_equal


def test_disk_that_changes_has_no_verdict(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    path.write_bytes(DATA)
    with pytest.raises(errors.TargetError, match="changed while it was read"):
        verdict(path, bmaps.expected(DATA), tmp_path, Changing(path))


class Flaky(bmaps.Disk):
    """Storage that returns other bytes each time."""

    path = "disk"

    def read(self, offset: int, length: int) -> bytes:
        if offset + length == len(self.data):
            self.data[-1] ^= 1
        return super().read(offset, length)


@pytest.mark.parametrize("is_mapped", [True, False])
def test_difference_is_read_twice(is_mapped: bool) -> None:
    stored: Any = Flaky(MIB)
    stored.data[:] = b"\xfe" * MIB
    blocks = bmap.Map(MIB, 4096, ((0, MIB, sha256(b"other").digest()),) if is_mapped else ())
    with pytest.raises(errors.TargetError, match="changed while it was read"):
        verified.ByMap(stored, MIB, None, cancelling.NEVER).compare(blocks, lambda _count: None)


def test_command_verifies_by_a_map(server: misbehave.Server, tmp_path: Path) -> None:
    path, written = tmp_path / "disk.img", tmp_path / "disk.bmap"
    path.write_bytes(DATA)
    assert worker.run("map", path, "-o", written).status == 0
    done = worker.run("verify", "--map", written, path)
    assert (done.status, "equal" in done.output) == (0, True)
    url = server.serve("/disk.bmap", misbehave.Page(written.read_bytes()))
    assert worker.run("verify", "--map", url, tmp_path).status == 0
    devices.change(path, 5 * MIB, b"x")
    done = worker.run("verify", "--map", url, path, "--json")
    found = json.loads(done.output)
    assert (done.status, found["equal"], found["first"], found["confirmed"]) == (9, False, 5 * MIB, True)
    assert found["differences"] == [{"offset": 5 * MIB, "length": 4096, "zero": "source"}]
    path.write_bytes(DATA[: 10 * MIB - 512])
    done = worker.run("verify", "--map", url, path)
    assert f"{SIZE - 9 * MIB} bytes at {9 * MIB}, the disk ends at {10 * MIB - 512}" in done.output


def test_map_that_is_not_one_gives_no_verdict(tmp_path: Path) -> None:
    path, written = tmp_path / "disk.img", tmp_path / "disk.bmap"
    path.write_bytes(DATA)
    written.write_bytes(bmap.write(bmaps.expected(DATA)).replace(b"chksum", b"chkSum", 1))
    assert worker.run("verify", "--map", written, path).status == 4
    assert worker.run("verify", "--map", tmp_path / "missing", path).status == 3
    assert worker.run("verify", path).status == 2
    done = worker.run("verify", "--map", written, path, "--disk=1")
    assert (done.status, "--disk needs a SOURCE" in done.error_message) == (2, True)


@pytest.mark.parametrize("kind", ["sparse", "block", "export"])
def test_sample_compares_ranges_of_the_map_whole(tmp_path: Path, kind: str) -> None:
    """Those of which a piece is selected, and zeros that are."""
    sample, blocks = sampling.Sample.parse("1Mi", 3), bmaps.expected(DATA)
    places = sample.places(SIZE, DATA)
    whole = [each for each in blocks.ranges if places.missing(*each[:2]) != [each[:2]]]
    assert 0 < len(whole) < len(blocks.ranges)
    with disk_of(kind, tmp_path) as disk:

        def compared(other: bytes) -> cdi_worker.Verification:
            return cdi_worker.verify_map(
                asked(disk, sample=sample, demand=by(bmaps.expected(other), tmp_path))
            )

        found = compared(DATA)
        assert found.is_equal
        assert sum(end - start for start, end, _ in whole) <= found.compared < SIZE
        for start, end, _ in blocks.ranges:
            other = DATA[: end - 1] + bytes([DATA[end - 1] ^ 1]) + DATA[end:]
            is_seen = (start, end) in [each[:2] for each in whole]
            assert compared(other).is_equal is not is_seen
        done = worker.run("verify", "--map", tmp_path / "by.bmap", disk, "--sample=1Mi", "--seed=3", "--json")
        assert json.loads(done.output)["sample"]["seed"] == 3


def test_map_of_an_image_is_that_of_its_disk(tmp_path: Path) -> None:
    """``map`` does not take the bytes of an image for a disk, and its advice gives the right map."""
    raw, written = tmp_path / "made.img", tmp_path / "disk.bmap"
    raw.write_bytes(DATA)
    for name in ("vmdk", "vdi", "xz", "gz", "zst"):
        image = tmp_path / f"disk.raw.{name}"
        if name in disks.FORMATS:
            disks.convert(raw, image, disks.FORMATS[name])
        else:
            image.write_bytes(mapped_disks.packed(mapped_disks.Made(raw, b""), name))
        done = worker.run("map", image, "-o", written)
        advice = f"cdi-worker import {image} DISK --write-map FILE"
        assert (done.status, advice in done.error_message, written.exists()) == (6, True, False), done.errors
        command = advice.replace("FILE", str(written)).replace("DISK", str(tmp_path / f"{name}.img"))
        subprocess.run([*worker.COMMAND, *command.split()[1:]], stdout=subprocess.DEVNULL, check=True)
        check(written)
        written.unlink()
    assert worker.run("map", image, "--format", "raw", "-o", written).status == 0
    check(written, image.read_bytes())
    qcow2 = tmp_path / "volume"
    disks.convert(raw, qcow2, disks.FORMATS["qcow2"])
    assert "--format qcow2" in worker.run("map", qcow2).error_message
    assert worker.run("map", qcow2, "--format", "qcow2", "-o", written).status == 0
    check(written)


def test_signature_of_a_map_is_demanded(tmp_path: Path) -> None:
    path, written, signer = tmp_path / "disk.img", tmp_path / "disk.bmap", signers.Minisign(tmp_path)
    path.write_bytes(DATA)
    (tmp_path / "key.pub").write_bytes(signer.public)
    written.write_bytes(bmap.write(bmaps.expected(DATA)))
    command = ("verify", "--map", written, "--signed-by", tmp_path / "key.pub", path, "--json")
    assert worker.run(*command).status == 7
    (tmp_path / "disk.bmap.minisig").write_bytes(signer.sign(written.read_bytes()))
    assert worker.run(*command).status == 0
    written.write_bytes(bmap.write(bmaps.expected(bytes(SIZE))))
    assert worker.run(*command).status == 7


@pytest.mark.parametrize("options", [(), ("--update",)])
def test_import_by_a_map_writes_its_own(
    server: misbehave.Server, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """A range that is delivered again, because its checksum was wrong, is mapped as it is on the disk."""
    url = server.serve("/disk", misbehave.Page(DATA))
    given, path = tmp_path / "given.bmap", tmp_path / "disk.img"
    given.write_bytes(bmap.write(bmaps.expected(DATA)))
    path.write_bytes(b"\xff" * SIZE)
    force = options or ("--force",)
    done = worker.run("import", url, path, "--map", given, "--write-map", tmp_path / "new.bmap", *force)
    assert done.status == 0, done.errors
    check(tmp_path / "new.bmap")


def test_pieces_longer_than_what_threads_read_are_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind 4 TiB: what comes too early is not kept, and is read again."""
    monkeypatch.setattr(bmap, "longest", lambda _: 64 << 20)
    monkeypatch.setattr(mapping, "_MOST", 0)
    disk = tmp_path / "disk.img"
    data = random.Random(3).randbytes(40 << 20)
    disk.write_bytes(data)
    location = cdi_worker.Location("")
    found = cdi_worker.create_map(cdi_worker.Request(source="none", location=location, target=str(disk)))
    assert found.ranges == ((0, len(data), sha256(data).digest()),)
