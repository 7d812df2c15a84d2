"""What a command finds at its target is not lost by mistake."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from cdi_worker import units
from tests.support import devices, misbehave, processes, worker

MIB = 1 << 20
DATA = (bytes(510) + b"\x55\xaa" + bytes(range(256)) * 2) * 4096
WRONG = "--checksum=md5:" + 32 * "0"
BUSY = 6


@pytest.fixture
def url(server: misbehave.Server) -> str:
    return server.serve("/disk", misbehave.Page(DATA))


def test_existing_file_is_replaced_only_by_force(url: str, server: misbehave.Server, tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    path.write_bytes(b"of yesterday")
    done = worker.call("import", url, path)
    assert (done.status, done.error_message) == (BUSY, f"{path}: exists; to replace it, use --force")
    assert server.requests == []
    assert worker.call("blank", path, "1Mi").status == BUSY
    assert path.read_bytes() == b"of yesterday"
    assert worker.call("import", url, path, "--force").status == 0
    assert path.read_bytes() == DATA
    assert os.listdir(tmp_path) == ["disk.img"]


def test_failed_import_keeps_the_old_file(url: str, tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    path.write_bytes(b"of yesterday")
    assert worker.call("import", url, path, "--force", WRONG).status == 5
    assert path.read_bytes() == b"of yesterday"
    assert os.listdir(tmp_path) == ["disk.img"]


@pytest.mark.parametrize("exists", [True, False])
def test_link_is_followed(url: str, tmp_path: Path, exists: bool) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "link").symlink_to("images/disk.img")
    if exists:
        (tmp_path / "images/disk.img").write_bytes(b"of yesterday")
        assert worker.call("import", url, tmp_path / "link").status == BUSY
        assert (tmp_path / "images/disk.img").read_bytes() == b"of yesterday"
    assert worker.call("import", url, tmp_path / "link", "--force").status == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "images/disk.img").read_bytes() == DATA


SAME = "source and target are the same disk"


def test_incomplete_disk_is_not_the_source_of_its_own_completion(tmp_path: Path) -> None:
    """Browsers call a download that is not complete like an incomplete disk; a run removes that."""
    for suffix in ("part", "journal.part", "changing"):
        source = tmp_path / f"disk.img.{suffix}"
        source.write_bytes(DATA)
        done = worker.call("import", source, tmp_path / "disk.img", "--force")
        assert (done.status, SAME in done.errors) == (2, True)
        assert source.read_bytes() == DATA
        source.unlink()


def test_disk_behind_a_link_is_not_completed_from_itself(tmp_path: Path) -> None:
    """The incomplete disk is beside the file that the link leads to."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to("../disk.img")
    for suffix in ("part", "changing"):
        source = tmp_path / f"disk.img.{suffix}"
        source.write_bytes(DATA)
        done = worker.call("import", source, tmp_path / "folder" / "link")
        assert (done.status, SAME in done.errors) == (2, True), done.errors
        assert source.read_bytes() == DATA
        source.unlink()


def test_disk_does_not_replace_a_file_that_is_read(tmp_path: Path) -> None:
    source, other = tmp_path / "disk.raw", tmp_path / "disk.img.part"
    source.write_bytes(DATA)
    other.write_bytes(DATA)
    done = worker.call("import", source, tmp_path / "disk.img", "--checksum-file", other)
    assert (done.status, "would replace a file that is read" in done.errors) == (2, True), done.errors
    assert other.read_bytes() == DATA


def test_device_is_not_copied_to_itself(tmp_path: Path) -> None:
    with devices.loop(tmp_path, 2 * MIB) as device:
        os.mknod(tmp_path / "again", 0o600 | stat.S_IFBLK, device.stat().st_rdev)
        for source in (device, f"file://localhost{device}", f"file://{device}?x", tmp_path / "again"):
            done = worker.call("import", source, device, "--force")
            assert (done.status, SAME in done.errors) == (2, True), source
        assert device.read_bytes() == devices.DIRT * 2 * MIB


def test_link_to_itself_is_an_error(url: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link")
    for arguments in (["import", url], ["import", url, "--content-type=archive"]):
        done = worker.call(*arguments, tmp_path / "link")
        assert (done.status, "too many levels of symbolic links" in done.error_message) == (6, True)


def test_mode_honours_the_umask(url: str, tmp_path: Path) -> None:
    shell = ("sh", "-c", 'umask 027; exec "$@"', "sh")
    assert worker.run("import", url, tmp_path / "disk.img", prefix=shell).status == 0
    assert stat.S_IMODE((tmp_path / "disk.img").stat().st_mode) == 0o640


def lvm(device: Path) -> None:
    """Write the label of a physical volume, as pvcreate does."""
    rest = struct.pack("<I8s32s", 32, b"LVM2 001", b"u" * 32).ljust(512 - 20, b"\0")
    checksum = zlib.crc32(rest, 0xF597A6CF ^ 0xFFFFFFFF) ^ 0xFFFFFFFF
    with device.open("r+b") as file:
        file.seek(512)
        file.write(struct.pack("<8sQI", b"LABELONE", 1, checksum) + rest)


def swap(device: Path) -> None:
    processes.run("mkswap", device)


def dry_run(done: worker.Completed, url: str, target: Path, *options: str) -> str:
    """Check that --dry-run finds what has stopped an import, and says it twice; return what it prints."""
    dry = worker.call("import", "--dry-run", url, target, *options)
    assert (dry.status, dry.error_message) == (done.status, done.error_message)
    assert dry.output.splitlines()[-1] == f"      obstacle  {done.error_message}"
    return dry.output


def table(label: str) -> Callable[[Path], object]:
    script = f"printf 'label: {label}\\nsize=1MiB\\nsize=1MiB\\n' | sfdisk --quiet --no-reread \"$1\""
    return lambda device: processes.run("sh", "-c", script, "sh", device)


def boot_sector(device: Path) -> None:
    """Write a boot sector with code where a partition table would be."""
    devices.change(device, 440, bytes(range(70)) + b"\x55\xaa")


@pytest.mark.parametrize(
    ("block", "make", "found"),
    [
        (512, swap, "swap"),
        (4096, lvm, "LVM2_member"),
        (
            512,
            lambda device: processes.run("mkfs.ext4", "-q", "-F", "-L", "of yesterday", device),
            "ext4 'of yesterday'",
        ),
        (
            4096,
            lambda device: processes.run("mkfs.ext4", "-q", "-F", "-L", "caf\udce9", device),
            "ext4 'caf\ufffd'",
        ),
        (512, table("dos"), "MBR, 2 partitions"),
        (4096, table("gpt"), "GPT, 2 partitions"),
        (512, boot_sector, "boot sector"),
    ],
    indirect=["block"],
)
def test_device_that_holds_something_is_refused_without_force(
    url: str, block: Path, make: Callable[[Path], object], found: str
) -> None:
    make(block)
    before = block.read_bytes()
    size = units.format_size(len(before))
    done = worker.call("import", url, block)
    assert (done.status, done.error_message) == (BUSY, f"{block}: holds {found}; to replace it, use --force")
    assert f"        target  {block}: {size}, {found}, needs --force\n" in dry_run(done, url, block)
    assert worker.call("blank", block, "1Mi").error_message == done.error_message
    assert block.read_bytes() == before
    dry = worker.call("import", "--dry-run", "--force", url, block)
    assert (dry.status, f"{block}: {size}, {found}, is replaced\n" in dry.output) == (0, True), dry
    assert worker.call("import", url, block, "--force").status == 0
    assert block.read_bytes().startswith(DATA)


@pytest.mark.parametrize("block", [4096], indirect=True)
def test_left_over_device_is_continued_without_force(url: str, block: Path) -> None:
    """Also with the second GPT of the disk that was there, at the end of the device."""
    table("gpt")(block)
    assert worker.call("import", url, block, "--force", WRONG).status == 5
    dry = worker.call("import", "--dry-run", url, block)
    assert (dry.status, f"target  {block}: 32.0 MiB\n" in dry.output) == (0, True), dry
    assert worker.call("import", url, block).status == 0


@pytest.mark.parametrize("block", [512], indirect=True)
def test_update_changes_a_disk_and_pods_ask_nothing(url: str, block: Path, tmp_path: Path) -> None:
    table("gpt")(block)
    assert worker.call("import", url, block, "--update").status == 0
    processes.run("mkswap", block)
    done = worker.call("import", url, block, "--update")
    assert (done.status, "holds swap; to replace it, use --force" in done.errors) == (BUSY, True), done
    pod = worker.Pod(tmp_path / "pod", block=block)
    assert pod.call(IMPORTER_SOURCE="http", IMPORTER_ENDPOINT=url).status == 0
    assert block.read_bytes().startswith(DATA)


def test_dry_run_names_a_file_a_folder_and_standard_output(url: str, tmp_path: Path) -> None:
    (tmp_path / "old.img").write_bytes(DATA)
    for target, shown in (
        (tmp_path / "new.img", r"new\.img: [0-9.]+ .iB free"),
        (tmp_path / "old.img", r"old\.img: 4\.0 MiB, needs --force"),
        (tmp_path, r"/disk\.img: [0-9.]+ .iB free"),
        ("-", "standard output"),
    ):
        dry = worker.call("import", "--dry-run", url, target)
        assert re.search(rf"^ +target  .*{shown}$", dry.output, re.MULTILINE), dry
    dry = worker.call("import", "--json", "--dry-run", url, tmp_path / "old.img")
    found = json.loads(dry.output)["target"]
    assert (found["path"], found["size"], found["holds"]) == (f"{tmp_path}/old.img", len(DATA), [])


def test_mounted_device_is_never_written(url: str, tmp_path: Path) -> None:
    with devices.loop(tmp_path, 16 * MIB) as device, devices.mounted("ext4", device, tmp_path / "point"):
        for force in ((), ("--force",)):
            done = worker.run("import", url, device, *force)
            dry_run(done, url, device, *force)
            assert done.status == BUSY
            assert "busy: it is mounted" in done.error_message


def test_read_only_file_system_is_noticed_before_anything_is_read(url: str, tmp_path: Path) -> None:
    point = tmp_path / "point"
    with devices.loop(tmp_path, 16 * MIB) as device, devices.mounted("ext4", device, point):
        processes.run("mount", "-o", "remount,ro", point)
        done = worker.call("import", url, point / "disk.img")
        dry_run(done, url, point / "disk.img")
    assert (done.status, done.error_message) == (BUSY, f"{point}/disk.img: open: read-only file system")


def test_dry_run_finds_a_target_that_is_none(url: str, tmp_path: Path) -> None:
    for target in ("/dev/full", "/dev/disk.img", "disk.img.part"):
        dry = worker.call("import", "--dry-run", url, tmp_path / target)
        done = worker.call("import", url, tmp_path / target)
        assert dry.status == done.status == BUSY
        assert dry.errors or done.error_message in dry.output


def test_read_only_device_is_named_as_one(url: str, device: Path) -> None:
    processes.run("blockdev", "--setro", device)
    try:
        done = worker.call("import", url, device)
        assert (done.status, "is read-only" in done.error_message) == (BUSY, True), done.errors
        dry_run(done, url, device)
    finally:
        processes.run("blockdev", "--setrw", device)


# -- a device that is larger than the image ------------------------------------------------------------


@pytest.mark.parametrize("how", ["new", "update", "unchanged", "verified", "blank"])
def test_size_is_that_of_the_disk_on_a_device(tmp_path: Path, how: str) -> None:
    """What somebody else has left between the end of the image and the size is not part of the disk."""
    source, size = tmp_path / "disk.raw", 20 * MIB
    source.write_bytes(DATA)
    image = b"" if how == "blank" else DATA
    with devices.target("block", tmp_path, 24 * MIB) as device:
        more: list[str | Path] = []
        if how in {"update", "unchanged"}:
            more = ["--update"]
            with device.open("r+b") as disk:
                disk.write(DATA if how == "unchanged" else b"")
        if how == "verified":
            more = ["--verify"]
        argv: list[str | Path] = ["import", source, device, "--size=20Mi"]
        done = worker.call(*(["blank", device, "20Mi"] if how == "blank" else argv), *more)
        assert done.status == 0, done.errors
        found = device.read_bytes()
    assert found[:size] == image.ljust(size, b"\0")
    assert found[size:] == devices.DIRT * 4 * MIB
    if how == "verified":
        assert hashlib.sha256(found[:size]).hexdigest() in done.output
