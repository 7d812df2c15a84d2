"""OVAs: the wanted disk is imported, by ranges or as the archive passes, and verified by the manifest."""

from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.importer.request import Room
from tests.support import devices, misbehave, objectservers, oracle, ovas, ways, worker
from tests.support import disks as disks_module
from tests.support.ovas import Disk

MiB = 1 << 20
#: Variants of images as programs put them into OVAs.
VARIANTS = ("vmdk-stream", "vmdk-tables-last", "vmdk", "qcow2", "raw", "vhd")


@pytest.fixture
def importer(server: misbehave.Server, tmp_path: Path) -> ways.Importer:
    return ways.Importer(server, tmp_path, "vm.ova")


@pytest.mark.parametrize("listed", ["first", "last", "none"])
@pytest.mark.parametrize("kind", ["file", "block"])
@pytest.mark.parametrize("way", ways.WAYS)
def test_only_disk_is_imported(
    importer: ways.Importer, disks: disks_module.Disks, way: str, kind: str, listed: str, tmp_path: Path
) -> None:
    data = ovas.ova(Disk(disks.image("vmdk-stream").read_bytes()), listed=listed)
    with devices.target(kind, tmp_path, 9 * MiB) as target:
        importer.run(data, way, target=str(target))
        oracle.same(target, disks.expected("vmdk-stream"), beyond=devices.beyond(target))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("way", ways.WAYS)
def test_all_formats_are_imported(
    importer: ways.Importer, disks: disks_module.Disks, way: str, variant: str
) -> None:
    importer.run(ovas.ova(Disk(disks.image(variant).read_bytes(), "disk.bin")), way)
    oracle.same(importer.target, disks.expected(variant))


@pytest.mark.parametrize("algorithm", ["sha1", "sha256", "sha512"])
@pytest.mark.parametrize("listed", ["first", "last"])
@pytest.mark.parametrize("way", ["ranges", "stream"])
def test_compressed_disk_is_verified_as_packed(
    importer: ways.Importer, disks: disks_module.Disks, way: str, listed: str, algorithm: str
) -> None:
    packed = gzip.compress(disks.image("qcow2").read_bytes(), 1, mtime=0)
    disk = Disk(packed, "disk.qcow2.gz", file={"compression": "gzip"})
    importer.run(ovas.ova(disk, listed=listed, algorithm=algorithm), way)
    oracle.same(importer.target, disks.expected("qcow2"))


@pytest.mark.parametrize("choice", ["data.vmdk", "vmdisk2", "2"])
@pytest.mark.parametrize("way", ways.WAYS)
def test_disk_is_chosen(importer: ways.Importer, disks: disks_module.Disks, way: str, choice: str) -> None:
    first = Disk(disks.image("vmdk-stream", "dense").read_bytes())
    second = Disk(disks.image("vmdk-stream").read_bytes(), "data.vmdk")
    importer.run(ovas.ova(first, second), way, disk=choice)
    oracle.same(importer.target, disks.expected("vmdk-stream"))


def test_only_the_wanted_disk_moves(importer: ways.Importer, disks: disks_module.Disks) -> None:
    other = Disk(os.urandom(40 * MiB), "other.vmdk")
    wanted = Disk(disks.image("vmdk-stream").read_bytes())
    importer.run(ovas.ova(other, wanted, listed="last"), "ranges", disk="2")
    oracle.same(importer.target, disks.expected("vmdk-stream"))
    assert importer.server.sent("/vm.ova") < len(wanted.data) + 2 * MiB


@pytest.mark.parametrize("choice", ["", "3", "nothing.vmdk"])
@pytest.mark.parametrize("way", ways.WAYS)
def test_ambiguous_choice_lists_the_disks(
    importer: ways.Importer, disks: disks_module.Disks, way: str, choice: str
) -> None:
    data = disks.image("vmdk-stream").read_bytes()
    error = importer.refused(ovas.ova(Disk(data), Disk(data, "data.vmdk")), way, disk=choice)
    assert "1 vm-disk1.vmdk (vmdisk1, 8388608 bytes), 2 data.vmdk (vmdisk2, 8388608 bytes)" in str(error)
    assert "; choose one (--disk)" in error.at_terminal()


def test_inspect_lists_the_disks(importer: ways.Importer, disks: disks_module.Disks) -> None:
    data = disks.image("vmdk-stream").read_bytes()
    found = cdi_worker.inspect(
        importer.request(ovas.ova(Disk(data), Disk(data, "data.vmdk")), "ranges", target="")
    )
    assert "2 disks" in str(found.obstacle)
    assert [disk["file"] for disk in found.details["disks"]] == ["vm-disk1.vmdk", "data.vmdk"]


@pytest.mark.parametrize("kind", ["file", "block"])
@pytest.mark.parametrize("listed", ["first", "last"])
@pytest.mark.parametrize("way", ways.WAYS)
def test_wrong_disk_is_never_usable(
    importer: ways.Importer, disks: disks_module.Disks, way: str, listed: str, kind: str, tmp_path: Path
) -> None:
    right = disks.image("raw").read_bytes()
    data = ovas.ova(Disk(right), listed=listed)
    at = data.index(right) + 5 * MiB + 17
    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    with devices.target(kind, tmp_path, 9 * MiB) as target:
        error = importer.refused(data, way, target=str(target))
    assert isinstance(error, errors.ChecksumMismatch)


@pytest.mark.parametrize("way", ["ranges", "stream", "pipe"])
def test_checksum_of_the_request_is_of_the_whole_ova(
    importer: ways.Importer, disks: disks_module.Disks, way: str
) -> None:
    data = ovas.ova(Disk(disks.image("vmdk-stream").read_bytes()), listed="none")
    importer.run(data, way, checksum=f"sha256:{hashlib.sha256(data).hexdigest()}")
    oracle.same(importer.target, disks.expected("vmdk-stream"))
    importer.target.unlink()
    error = importer.refused(data + bytes(512), way, checksum=f"sha256:{hashlib.sha256(data).hexdigest()}")
    assert isinstance(error, errors.ChecksumMismatch)


def test_interrupted_stream_is_read_on(importer: ways.Importer, disks: disks_module.Disks) -> None:
    data = ovas.ova(Disk(disks.image("raw").read_bytes()), listed="last")
    wanted = importer.request(data, "stream")
    cut = misbehave.Page(data, ranges=False, cut_at=3 * MiB)
    importer.server.serve("/vm.ova", (cut, 1), misbehave.Page(data, ranges=False))
    cdi_worker.run(wanted)
    oracle.same(importer.target, disks.raw())


def test_wrong_ranges_are_given_up(importer: ways.Importer, disks: disks_module.Disks) -> None:
    data = ovas.ova(Disk(disks.image("raw").read_bytes()), listed="last")
    wanted = importer.request(data, "ranges")
    importer.server.serve("/vm.ova", misbehave.Page(data, lie=lambda first, _: first + (first > 0)))
    cdi_worker.run(wanted)
    oracle.same(importer.target, disks.raw())


@pytest.mark.parametrize("way", ways.WAYS)
def test_pass_that_ends_early_fails_with_its_cause(importer: ways.Importer, way: str) -> None:
    """Such as a disk that is too large, found when the server has sent only a part of the OVA."""
    data = ovas.ova(Disk(os.urandom(40 * MiB), "disk.raw"))
    checksum = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if way != "pipe":
        assert (
            cdi_worker.inspect(importer.request(data, way, checksum=checksum)).survey.virtual_size == 40 * MiB
        )
    error = importer.refused(data, way, checksum=checksum, room=Room(size=MiB))
    assert isinstance(error, errors.TooLarge)


@pytest.mark.parametrize("kind", ["seaweed", "emulator"])
def test_objects_are_read_by_ranges(
    kind: str, disks: disks_module.Disks, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = request.getfixturevalue(kind)
    store.put("vm.ova", ovas.ova(Disk(disks.image("vmdk-stream").read_bytes()), listed="last"))
    access = cdi_worker.Access()
    if kind == "seaweed":
        access = cdi_worker.Access(user=objectservers.ACCESS_KEY, password=objectservers.SECRET_KEY)
    target = tmp_path / "disk.img"
    source = "s3" if kind == "seaweed" else "gcs"
    location = cdi_worker.Location(store.url("vm.ova"), access)
    cdi_worker.run(cdi_worker.Request(source=source, location=location, target=str(target)))
    oracle.same(target, disks.expected("vmdk-stream"))


def test_missing_manifest_is_a_warning(
    importer: ways.Importer, disks: disks_module.Disks, caplog: pytest.LogCaptureFixture
) -> None:
    importer.run(ovas.ova(Disk(disks.image("vmdk-stream").read_bytes()), listed="none"), "stream")
    assert "no manifest" in caplog.text


def test_command_chooses_and_lists(
    importer: ways.Importer, disks: disks_module.Disks, tmp_path: Path
) -> None:
    first = Disk(disks.image("vmdk-stream", "dense").read_bytes())
    path = tmp_path / "vm.ova"
    path.write_bytes(ovas.ova(first, Disk(disks.image("vmdk-stream").read_bytes(), "data.vmdk")))
    shown = worker.run("inspect", path)
    assert (shown.status, "index=2, file=data.vmdk" in shown.output) == (4, True)
    assert "holds 2 disks" in shown.output
    assert worker.run("inspect", path, "--disk=data.vmdk").status == 0
    done = worker.run("import", path, importer.target, env={"CDI_WORKER_DISK": "2"})
    assert done.status == 0, done.errors
    oracle.same(importer.target, disks.expected("vmdk-stream"))


def test_disk_of_another_source_cannot_be_chosen(importer: ways.Importer, disks: disks_module.Disks) -> None:
    assert "neither an OVA nor" in str(importer.refused(disks.raw().read_bytes(), "ranges", disk="1"))
