"""Imports to qcow2 files: the guest's bytes of every format, kills, and what does not fit together."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("nbd")

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.targets import file_format
from tests.support import (
    devices,
    disks,
    gcs_objects,
    kills,
    misbehave,
    oracle,
    pairs,
    processes,
    servers,
    worker,
)

MIB = 1 << 20
DATA, SIZE = kills.DATA, kills.SIZE
FORMATS = ("raw", "qcow2", "qcow2-zlib", "vmdk", "vdi", "vhd", "vhdx", "vhdx-log")
OPTIONS = (
    ("qcow2",),
    ("qcow2,cluster_size=4k",),
    ("qcow2,cluster_size=2M",),
    ("qcow2,preallocation=metadata",),
)


def request(url: str, target: Path, **changes: object) -> cdi_worker.Request:
    return kills.request(url, target, **{"format": "qcow2", "existing": "refuse", **changes})


def check(target: Path, expected: Path) -> None:
    """Compare the guest's bytes; the file is without errors, and alone."""
    compare(target, expected)
    assert files(target) == [target.name]


def files(target: Path) -> list[str]:
    """Return the names of the target, and of what a run has beside it."""
    return sorted(each.name for each in target.parent.glob(f"{target.name}*"))


def compare(target: Path, expected: Path) -> None:
    """Compare the guest's bytes; the file is without errors."""
    processes.run("qemu-img", "check", "-q", "-f", "qcow2", target)
    guest = target.with_name("guest")
    processes.run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", target, guest)
    oracle.same(guest, expected)
    guest.unlink()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "volume").mkdir()
    return tmp_path / "volume" / "disk.qcow2"


@pytest.fixture
def expected(tmp_path: Path) -> Path:
    (tmp_path / "expected").write_bytes(DATA)
    return tmp_path / "expected"


# -- bytes


@pytest.mark.parametrize(("variant", "options"), pairs.dealt(FORMATS, OPTIONS))
def test_every_format_is_written_as_qcow2(
    web: servers.Web, disks: disks.Disks, target: Path, variant: str, options: tuple[str, ...]
) -> None:
    done = worker.call("import", web.url(disks.image(variant)), target, "--format", *options)
    assert done.status == 0, done.errors
    check(target, disks.expected(variant))


def test_stream_of_unknown_size(web: servers.Web, disks: disks.Disks, target: Path) -> None:
    done = worker.call("import", web.url(disks.wrapped("raw", "gz")), target, "-O", "qcow2")
    assert done.status == 0, done.errors
    check(target, disks.expected("raw"))
    with target.open("rb") as file:
        head = file.read(32)
    assert int.from_bytes(head[24:], "big") == disks.expected("raw").stat().st_size


def test_disk_larger_than_the_file_system(server: misbehave.Server, target: Path, expected: Path) -> None:
    url = server.serve("/disk", misbehave.Page(DATA))
    cdi_worker.run(request(url, target, image_size=1 << 44))
    with expected.open("r+b") as file:
        file.truncate(SIZE + MIB)
    processes.run("qemu-img", "check", "-q", "-f", "qcow2", target)
    guest = target.with_name("guest")
    processes.run(
        "qemu-img", "dd", "-f", "qcow2", "-O", "raw", "bs=1M", "count=13", f"if={target}", f"of={guest}"
    )
    oracle.same(guest, expected)


def test_two_files_do_not_differ_where_clusters_are_preallocated(
    server: misbehave.Server, target: Path
) -> None:
    """Otherwise QEMU allocates clusters in the order in which they arrive."""
    url = server.serve("/disk", misbehave.Page(DATA))
    made = []
    for number in range(2):
        path = target.with_name(f"{number}.qcow2")
        cdi_worker.run(request(url, path, format="qcow2,preallocation=metadata"))
        made.append(path.read_bytes())
    assert made[0] == made[1]


def test_sha256_is_that_of_the_disk(target: Path, expected: Path) -> None:
    done = worker.call("import", "--verify", "-q", str(expected), target, "-O", "qcow2")
    assert done.output.split()[0] == disks.digest(expected, "sha256")


def test_verify_compares_with_the_guest(web: servers.Web, disks: disks.Disks, target: Path) -> None:
    url = web.url(disks.image("vhdx-log"))
    assert worker.call("import", url, target, "-O", "qcow2").status == 0
    done = worker.call("verify", url, target, "--scratch", str(target.parent))
    assert done.status == 0, done.errors
    processes.run("qemu-io", "-f", "qcow2", "-c", "write -P 7 1M 512", target)
    done = worker.call("verify", url, target, "--scratch", str(target.parent))
    assert done.status == errors.Differs.status, done.errors
    assert "1048576" in done.output
    done = worker.call("verify", url, target, "--format", "raw", "--scratch", str(target.parent))
    assert done.status == errors.Differs.status, done.errors


def test_finished_disk_is_read_in_the_format_that_is_named(tmp_path: Path, expected: Path) -> None:
    """The options of its import may be repeated. Another format is not compared as a raw disk."""
    target = tmp_path / "vm.img"
    assert worker.call("import", str(expected), target, "-O", "qcow2,cluster_size=4k").status == 0
    done = worker.call("verify", str(expected), target, "--format=qcow2,cluster_size=4k")
    assert done.status == 0, done.errors
    done = worker.call("verify", str(expected), target, "--format=qcow")
    assert (done.status, "did you mean 'qcow2'" in done.errors) == (2, True), done.errors


def test_overlay_is_not_read(target: Path, expected: Path) -> None:
    """A file that refers to another may be somebody's trap."""
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-b", expected, "-F", "raw", target)
    done = worker.call("verify", str(expected), target)
    assert (done.status, "is an overlay; flatten it" in done.errors) == (4, True), done.errors


# -- what a user may type


def test_name_without_a_format_names_both_ways(server: misbehave.Server, target: Path) -> None:
    url = server.serve("/disk", misbehave.Page(DATA))
    for name in ("disk.qcow2", "DISK.QCOW2"):
        done = worker.call("import", url, target.with_name(name))
        assert done.status == 2
        assert "--format qcow2" in done.errors
        assert "--format raw" in done.errors
    done = worker.call("import", url, target, "--format", "raw")
    assert done.status == 0
    assert target.read_bytes() == DATA


def test_what_does_not_fit_together(tmp_path: Path) -> None:
    disk = str(tmp_path / "disk.img")
    for where, options, reason in (
        (disk, ("qcow",), "did you mean 'qcow2'"),
        (disk, ("qcow2,size=3",), "qcow2 has no option 'size'"),
        (disk, ("qcow2,cluster_size=3k",), "not a power of two"),
        (disk, ("qcow2,cluster_size=",), "cluster_size=: not a power of two"),
        (disk, ("qcow2,compression_type=zstd",), "qcow2 has no option 'compression_type'"),
        (disk, ("qcow2,preallocation=xyz",), "supported: off, metadata, falloc, full"),
        (disk, ("raw,cluster_size=4k",), "a raw disk has no options"),
        (disk, ("qcow2", "--update"), "updated in place; replace it"),
        (disk, ("qcow2", "--preallocate"), "preallocation=falloc"),
        (disk, ("qcow2", "--content-type", "archive"), "for a whole disk"),
        ("-", ("qcow2",), "--format qcow2 writes a file"),
        ("nbd://127.0.0.1:1/", ("qcow2",), "--format qcow2 writes a file"),
    ):
        done = worker.call("import", "http://127.0.0.1:1/", where, "-O", *options)
        assert (done.status, reason in done.errors) == (2, True), (options, done.errors)


def test_disk_larger_than_the_format_is_refused_at_once(server: misbehave.Server, target: Path) -> None:
    url = server.serve("/disk", misbehave.Page(DATA))
    blank = target.with_name("blank.qcow2")
    for argv in (("blank", blank, "200Gi"), ("import", url, target, "--size=200Gi")):
        done = worker.call(*argv, "-O", "qcow2,cluster_size=512")
        assert (done.status, "hold at most 128.0 GiB" in done.errors) == (4, True), done.errors
        assert server.sent("/disk") < MIB
        done = worker.call(*argv, "-O", "qcow2,cluster_size=1k")
        assert done.status == 0, done.errors


def test_what_is_added_is_preallocated_as_the_rest(target: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(MIB))
    done = worker.call("import", str(source), target, "-O", "qcow2,preallocation=falloc", "--size=8Mi")
    assert done.status == 0, done.errors
    assert target.stat().st_blocks * 512 >= 8 * MIB


def test_dry_run_says_the_format(server: misbehave.Server, target: Path) -> None:
    url = server.serve("/disk", misbehave.Page(DATA))
    done = worker.call("import", url, target, "-O", "qcow2,cluster_size=4k", "--dry-run")
    assert done.status == 0
    assert "target format  qcow2,cluster_size=4k" in done.output
    assert not list(target.parent.iterdir())


def test_existing_file_is_replaced_only_on_request(
    server: misbehave.Server, target: Path, expected: Path
) -> None:
    url = server.serve("/disk", misbehave.Page(DATA))
    target.write_bytes(b"mine")
    with pytest.raises(errors.TargetExists):
        cdi_worker.run(request(url, target))
    assert target.read_bytes() == b"mine"
    cdi_worker.run(request(url, target, existing="replace"))
    check(target, expected)


@pytest.mark.parametrize("size", [SIZE, 8 * MIB - 4096])
def test_full_file_system_is_an_error(tmp_path: Path, expected: Path, size: int) -> None:
    """Of the shorter disk only the data has enough space, not the tables of qcow2: QEMU meets the end."""
    os.truncate(expected, size)
    with devices.filesystem("tmpfs", tmp_path, 8 * MIB) as point:
        done = worker.call("import", str(expected), point / "vm.qcow2", "-O", "qcow2")
        assert done.status == 8, done.errors
        if size < SIZE:
            assert "no space left on device" in done.error_message
        assert list(point.iterdir()) == []


# -- interruptions


def test_killed_import_is_resumed(server: misbehave.Server, target: Path, expected: Path) -> None:
    url = server.url("/disk")
    kills.late(server, misbehave.Page(DATA), request(url, target))
    assert not target.exists()
    done = cdi_worker.run(request(url, target))
    assert done.resumed > kills.KEPT
    check(target, expected)


def test_import_in_another_format_leaves_nothing_of_a_killed_one(
    server: misbehave.Server, target: Path
) -> None:
    url = server.url("/disk")
    kills.late(server, misbehave.Page(DATA), request(url, target))
    assert len(list(target.parent.iterdir())) == 3
    cdi_worker.run(request(url, target, format="raw"))
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("left", ["backing file", "garbage", "other size"])
def test_left_over_that_is_not_ours_is_not_resumed(
    server: misbehave.Server, target: Path, expected: Path, left: str
) -> None:
    url = server.url("/disk")
    kills.late(server, misbehave.Page(DATA), request(url, target))
    part = target.with_name("disk.qcow2.part")
    if left == "garbage":
        part.write_bytes(devices.DIRT * MIB)
    else:
        part.unlink()
        more = ("-b", str(expected), "-F", "raw") if left == "backing file" else ()
        size = "12M" if left == "backing file" else "11M"
        processes.run("qemu-img", "create", "-q", "-f", "qcow2", *more, part, size)
    assert cdi_worker.run(request(url, target)).resumed == 0
    check(target, expected)
    assert "backing" not in processes.run("qemu-img", "info", target).stdout


def test_disk_that_was_wrong_leaves_nothing(server: misbehave.Server, target: Path, expected: Path) -> None:
    """Nor its journal, whose digests are those of the wrong bytes."""
    url = gcs_objects.serve(
        server, gcs_objects.media(DATA, damage=lambda _first, data: bytes(len(data))), data=DATA
    )
    asked = dataclasses.replace(
        request("", target), source="gcs", location=gcs_objects.locations.Gcs(endpoint=url)
    )
    with pytest.raises(errors.ChecksumMismatch):
        cdi_worker.run(asked)
    assert not list(target.parent.iterdir())
    gcs_objects.serve(server, gcs_objects.media(DATA), data=DATA)
    assert cdi_worker.run(asked).resumed == 0
    check(target, expected)


def test_kill_after_the_file_has_its_name(server: misbehave.Server, target: Path, expected: Path) -> None:
    """It leaves its lock and its journal, which notes the whole disk. The next run does not use that."""
    killing = f"""
import os, signal
from cdi_worker.images.targets import file
remove = file.remove
def killed(path):
    os.kill(os.getpid(), signal.SIGKILL if os.path.exists({str(target)!r}) else 0)
    remove(path)
file.remove = killed
"""
    server.serve("/disk", misbehave.Page(DATA))
    asked = request(server.url("/disk"), target, existing="replace")
    with kills.started(asked, before=killing) as killed:
        assert killed.wait(processes.PATIENCE) == -signal.SIGKILL
    compare(target, expected)
    assert files(target) == ["disk.qcow2", "disk.qcow2.journal.part", "disk.qcow2.lock"]
    assert cdi_worker.run(asked).resumed == 0
    check(target, expected)


@pytest.mark.timeout(1800)
def test_kills_at_random_moments(
    server: misbehave.Server, target: Path, expected: Path, pytestconfig: pytest.Config
) -> None:
    """The file has its name only when it is complete. The next run removes what else a kill leaves."""
    for moment in kills.moments(pytestconfig):
        target.unlink(missing_ok=True)
        url = server.serve("/disk", dataclasses.replace(misbehave.Page(DATA), **kills.SLOW))
        kills.after(moment, request(url, target))
        if target.exists():
            compare(target, expected)
        if files(target) != [target.name]:
            server.serve("/disk", misbehave.Page(DATA))
            cdi_worker.run(request(url, target, existing="replace"))
        check(target, expected)


# -- the options


def test_layout() -> None:
    assert file_format.parse("") is None
    assert file_format.parse("raw") is None
    found = file_format.parse("qcow2,cluster_size=2M,preallocation=off")
    assert found == file_format.Qcow2Format(("cluster_size=2M", "preallocation=off"), 2 << 20)
    assert found.preallocation == "off"
