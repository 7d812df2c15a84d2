"""All disks of an OVA are imported, in one pass of a stream; none is usable before all are verified."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.importer import execute, together
from tests.support import devices, misbehave, oracle, ovas, worker
from tests.support import disks as disks_module
from tests.support.ovas import Disk

VARIANTS = ("vmdk-stream", "raw", "qcow2", "vdi")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "disks"
    made.mkdir()
    return made


def packed(disks: disks_module.Disks, listed: str = "last") -> bytes:
    """Return an OVA of a disk in each of VARIANTS."""
    each = [Disk(disks.image(variant).read_bytes(), f"{variant}.bin") for variant in VARIANTS]
    return ovas.ova(*each, listed=listed)


def request(
    server: misbehave.Server, data: bytes, folder: Path, *, ranges: bool, **options: object
) -> cdi_worker.Request:
    url = server.serve("/vm.ova", misbehave.Page(data, ranges=ranges))
    values = {"scratch": str(folder.parent), **options}
    return cdi_worker.Request(source="http", location=cdi_worker.Location(url), target=str(folder), **values)


@pytest.mark.parametrize(("listed", "ranges"), [("first", False), ("last", True), ("none", False)])
def test_all_disks_are_imported(
    server: misbehave.Server, disks: disks_module.Disks, folder: Path, listed: str, *, ranges: bool
) -> None:
    data = packed(disks, listed)
    results = together.run_all(request(server, data, folder, ranges=ranges))
    assert sorted(os.listdir(folder)) == sorted(f"{variant}.img" for variant in VARIANTS)
    assert len(results) == len(VARIANTS)
    for variant in VARIANTS:
        oracle.same(folder / f"{variant}.img", disks.expected(variant))
    assert ranges or server.sent("/vm.ova") == len(data), "the stream was read once"


@pytest.mark.parametrize(("listed", "which"), [("first", 3), ("last", 0)])
def test_no_disk_of_a_stream_is_usable_if_one_is_wrong(
    server: misbehave.Server, disks: disks_module.Disks, folder: Path, listed: str, which: int
) -> None:
    data = packed(disks, listed)
    disk = disks.image(VARIANTS[which]).read_bytes()
    at = data.index(disk) + len(disk) - 1
    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    with pytest.raises(errors.ImageError):
        together.run_all(request(server, data, folder, ranges=False))
    assert os.listdir(folder) == []


def test_checksum_is_of_the_whole(
    server: misbehave.Server,
    disks: disks_module.Disks,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = packed(disks)
    wrong = request(server, data, folder, ranges=True, checksum=f"sha1:{'0' * 40}")
    with pytest.raises(errors.ChecksumMismatch):
        together.run_all(wrong)
    assert os.listdir(folder) == []
    right = f"sha1:{hashlib.sha1(data, usedforsecurity=False).hexdigest()}"
    caplog.clear()
    together.run_all(request(server, data, folder, ranges=True, checksum=right))
    assert caplog.text.count(execute.HASHED) == 1
    assert len(os.listdir(folder)) == len(VARIANTS)


def test_existing_file_is_refused_before_anything_is_read(
    server: misbehave.Server, disks: disks_module.Disks, folder: Path
) -> None:
    (folder / "vdi.img").write_bytes(b"old")
    with pytest.raises(errors.TargetExists):
        together.run_all(request(server, packed(disks), folder, ranges=False))
    assert os.listdir(folder) == ["vdi.img"]


def test_command_reads_a_pipe_once(disks: disks_module.Disks, folder: Path) -> None:
    pipe = folder.parent / "pipe"
    os.mkfifo(pipe)
    data = packed(disks)
    writing = threading.Thread(target=pipe.write_bytes, args=(data,))
    writing.start()
    done = worker.call("import", "--all", "--json", pipe, folder, "--scratch", folder.parent)
    writing.join()
    assert done.status == 0, done.errors
    printed = [json.loads(line) for line in done.output.splitlines()]
    assert {Path(line["target"]).name for line in printed} == {f"{variant}.img" for variant in VARIANTS}
    for variant in VARIANTS:
        oracle.same(folder / f"{variant}.img", disks.expected(variant))


def test_options_of_one_disk_are_refused(disks: disks_module.Disks, folder: Path) -> None:
    path = folder.parent / "vm.ova"
    path.write_bytes(packed(disks))
    for option in ("--disk=1", "--size=1Gi", "--layer=next.qcow2", "--dry-run"):
        done = worker.call("import", "--all", path, folder, option)
        name = option.partition("=")[0]
        assert (done.status, done.error_message) == (2, f"{name} cannot be used with --all")


@pytest.mark.parametrize(
    ("name", "option", "reason"),
    [
        ("raw.img", "--force", "source and target are the same disk"),
        ("raw.img.part", "--update", "source and target are the same disk"),
        ("raw.img.changing", "--force", "it holds no complete disk"),
    ],
)
def test_no_disk_replaces_the_ova(
    disks: disks_module.Disks, folder: Path, name: str, option: str, reason: str
) -> None:
    path, data = folder / name, packed(disks)
    path.write_bytes(data)
    done = worker.call("import", "--all", path, folder, option, "--scratch", folder.parent)
    assert (done.status in {2, 4}, reason in done.errors) == (True, True), done.errors
    assert path.read_bytes() == data
    assert os.listdir(folder) == [name]


def test_disk_that_is_a_link_to_another_one_is_refused(disks: disks_module.Disks, folder: Path) -> None:
    path = folder.parent / "vm.ova"
    path.write_bytes(packed(disks))
    (folder / "raw.img").symlink_to("vdi.img")
    done = worker.call("import", "--all", path, folder, "--scratch", folder.parent)
    assert (done.status, "two disks would be" in done.errors) == (2, True), done.errors


def test_names_that_differ_in_their_ending_only_are_refused(
    server: misbehave.Server, disks: disks_module.Disks, folder: Path
) -> None:
    image = disks.image("vmdk-stream").read_bytes()
    data = ovas.ova(Disk(image, "a.vmdk"), Disk(image, "a.raw.gz"), Disk(image, "b/a.qcow2"))
    for ranges in (True, False):
        with pytest.raises(errors.RequestError, match=r"two disks would be .*a\.img"):
            together.run_all(request(server, data, folder, ranges=ranges))


def test_disk_alone_has_no_others(server: misbehave.Server, disks: disks_module.Disks, folder: Path) -> None:
    with pytest.raises(errors.RequestError, match="not an OVA"):
        together.run_all(request(server, disks.raw().read_bytes(), folder, ranges=True))


@pytest.mark.parametrize(
    ("wrong", "message", "ranges"),
    [
        ({"disk": {"parentRef": "vmdisk1"}}, "only the changes to another disk", True),
        ({"file": {"compression": "secret"}}, "unknown compression", False),
        ({"file": {"chunkSize": "1000"}}, "split into chunks", False),
    ],
)
def test_disk_that_cannot_be_imported_is_refused_before_any_other(
    server: misbehave.Server,
    disks: disks_module.Disks,
    folder: Path,
    wrong: dict[str, dict[str, str | None]],
    message: str,
    *,
    ranges: bool,
) -> None:
    image = disks.image("vmdk-stream").read_bytes()
    data = ovas.ova(Disk(image, "a.vmdk"), Disk(image, "b.vmdk", **wrong))
    with pytest.raises(errors.Unsupported, match=message):
        together.run_all(request(server, data, folder, ranges=ranges))
    assert os.listdir(folder) == []


def test_one_file_is_not_two_disks(server: misbehave.Server, disks: disks_module.Disks, folder: Path) -> None:
    image = disks.image("vmdk-stream").read_bytes()
    names = ("a b.vmdk", "a%20b.vmdk")
    found = ovas.descriptor(Disk(image, name) for name in names)
    data = ovas.packed(("vm.ovf", found), (names[0], image))
    with pytest.raises(errors.Refused, match="two disks have the same file"):
        together.run_all(request(server, data, folder, ranges=True))
    assert os.listdir(folder) == []


# -- verify --all


def test_all_disks_are_compared(server: misbehave.Server, disks: disks_module.Disks, folder: Path) -> None:
    asked = request(server, packed(disks), folder, ranges=True)
    together.run_all(asked)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    found = together.verify_all(asked)
    assert [Path(each.target).name for each in found] == [f"{variant}.img" for variant in VARIANTS]
    assert all(each.is_equal and each.compared == each.size for each in found)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    changed = "qcow2"
    devices.change(folder / f"{changed}.img", 5, b"x")
    assert [each.is_equal for each in together.verify_all(asked)] == [each != changed for each in VARIANTS]


def test_command_has_a_verdict_for_each_disk(
    server: misbehave.Server, disks: disks_module.Disks, folder: Path
) -> None:
    path = folder.parent / "vm.ova"
    path.write_bytes(packed(disks))
    assert worker.call("import", "--all", path, folder, "--scratch", folder.parent).status == 0
    command = ("verify", "--all", "--json", path, folder, "--scratch", folder.parent)
    done = worker.call(*command)
    assert done.status == 0, done.errors
    assert [json.loads(line)["equal"] for line in done.output.splitlines()] == [True] * len(VARIANTS)
    devices.change(folder / "raw.img", 0, b"x")
    done = worker.call(*command)
    assert done.status == 9
    assert [json.loads(line)["equal"] for line in done.output.splitlines()].count(False) == 1
    done = worker.call(*command, "--checksum", f"sha1:{'0' * 40}")
    assert (done.status, "checksum mismatch" in done.errors) == (5, True), done.errors
    (folder / "qcow2.img").unlink()
    assert worker.call(*command).status == 6
    done = worker.call(*command, "--disk=1")
    assert (done.status, "--disk cannot be used with --all" in done.errors) == (2, True), done.errors
    url = server.serve("/vm.ova", misbehave.Page(path.read_bytes(), ranges=False))
    assert "compare each disk (--disk)" in worker.call("verify", "--all", url, folder).errors
    done = worker.call("verify", "--all", folder / "raw.img", folder)
    assert (done.status, "not an OVA" in done.errors) == (2, True), done.errors
