"""Imports to qcow2 files: the guest's bytes of every format, kills, and what does not fit together."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbd")

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import fetch
from cdi_worker.images.targets import file_format
from tests.support import (
    devices,
    disks,
    forked,
    gcs_objects,
    misbehave,
    oracle,
    pairs,
    processes,
    servers,
    worker,
)

MIB = 1 << 20
SIZE = 24 * MIB
DATA = random.Random(7).randbytes(SIZE)
SLOW = {"drip": (256 << 10, 0.03)}
FORMATS = ("raw", "qcow2", "qcow2-4k", "qcow2-zlib", "vmdk", "vmdk-stream", "vdi", "vhd", "vhdx", "vhdx-log")
OPTIONS = (
    ("qcow2",),
    ("qcow2,cluster_size=4k",),
    ("qcow2,cluster_size=2M",),
    ("qcow2,preallocation=metadata",),
)

WORKER = """
import sys, cdi_worker
from cdi_worker.images.engine import fetch
cdi_worker.run(cdi_worker.Request(
    source="http", location=cdi_worker.Location(sys.argv[1]), target=sys.argv[2], journal_interval=0.05,
    format="qcow2", fetch=fetch.FetchOptions(connections=2, chunk=1 << 20),
))
"""


def request(url: str, target: Path, **changes: object) -> cdi_worker.Request:
    made = cdi_worker.Request(
        source="http",
        location=cdi_worker.Location(url),
        target=str(target),
        format="qcow2",
        journal_interval=0.05,
        fetch=fetch.FetchOptions(connections=2, chunk=MIB, no_progress=20),
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def check(target: Path, expected: Path) -> None:
    """Compare the guest's bytes; the file is without errors, and alone."""
    processes.run("qemu-img", "check", "-q", "-f", "qcow2", target)
    guest = target.with_name("guest")
    processes.run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", target, guest)
    oracle.same(guest, expected)
    guest.unlink()
    assert [each.name for each in target.parent.glob(f"{target.name}*")] == [target.name]


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
    done = worker.run("import", web.url(disks.image(variant)), target, "--format", *options)
    assert done.status == 0, done.errors
    check(target, disks.expected(variant))


def test_stream_of_unknown_size(web: servers.Web, disks: disks.Disks, target: Path) -> None:
    done = worker.run("import", web.url(disks.wrapped("raw", "gz")), target, "-O", "qcow2")
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
        "qemu-img", "dd", "-f", "qcow2", "-O", "raw", "bs=1M", "count=25", f"if={target}", f"of={guest}"
    )
    oracle.same(guest, expected)


@pytest.mark.parametrize("how", ["metadata", "falloc", "full"])
def test_two_files_do_not_differ_where_clusters_are_preallocated(
    server: misbehave.Server, target: Path, tmp_path: Path, how: str
) -> None:
    """Otherwise QEMU allocates clusters in the order in which they arrive."""
    url = server.serve("/disk", misbehave.Page(DATA))
    made = []
    for number in range(2):
        path = target.with_name(f"{number}.qcow2")
        cdi_worker.run(request(url, path, format=f"qcow2,preallocation={how}"))
        made.append(path.read_bytes())
    assert made[0] == made[1]


def test_sha256_is_that_of_the_disk(target: Path, expected: Path) -> None:
    done = worker.run("import", "--verify", "-q", str(expected), target, "-O", "qcow2")
    assert done.output.split()[0] == disks.digest(expected, "sha256")


@pytest.mark.parametrize("variant", ["qcow2", "vhdx-log"])
def test_verify_compares_with_the_guest(
    web: servers.Web, disks: disks.Disks, target: Path, variant: str
) -> None:
    url = web.url(disks.image(variant))
    assert worker.run("import", url, target, "-O", "qcow2").status == 0
    done = worker.run("verify", url, target, "--scratch", str(target.parent))
    assert done.status == 0, done.errors
    processes.run("qemu-io", "-f", "qcow2", "-c", "write -P 7 1M 512", target)
    done = worker.run("verify", url, target, "--scratch", str(target.parent))
    assert done.status == errors.Differs.status, done.errors
    assert "1048576" in done.output
    done = worker.run("verify", url, target, "--format", "raw", "--scratch", str(target.parent))
    assert done.status == errors.Differs.status, done.errors


@pytest.mark.parametrize(
    ("options", "status", "reason"),
    [
        (("--format=qcow2,cluster_size=4k",), 0, ""),
        (("--format=qcow",), 2, "did you mean 'qcow2'"),
    ],
)
def test_finished_disk_is_read_in_the_format_that_is_named(
    tmp_path: Path, expected: Path, options: tuple[str, ...], status: int, reason: str
) -> None:
    """The options of its import may be repeated. Another format is not compared as a raw disk."""
    target = tmp_path / "vm.img"
    assert worker.run("import", str(expected), target, "-O", "qcow2,cluster_size=4k").status == 0
    done = worker.run("verify", str(expected), target, *options)
    assert (done.status, reason in done.errors) == (status, True), done.errors


def test_overlay_is_not_read(target: Path, expected: Path) -> None:
    """A file that refers to another may be somebody's trap."""
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-b", expected, "-F", "raw", target)
    done = worker.run("verify", str(expected), target)
    assert (done.status, "is an overlay; flatten it" in done.errors) == (4, True), done.errors


# -- what a user may type


@pytest.mark.parametrize("name", ["disk.qcow2", "DISK.QCOW2"])
def test_name_without_a_format_names_both_ways(server: misbehave.Server, target: Path, name: str) -> None:
    target = target.with_name(name)
    url = server.serve("/disk", misbehave.Page(DATA))
    done = worker.run("import", url, target)
    assert done.status == 2
    assert "--format qcow2" in done.errors
    assert "--format raw" in done.errors
    done = worker.run("import", url, target, "--format", "raw")
    assert done.status == 0
    assert target.read_bytes() == DATA


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("-O", "qcow"), "did you mean 'qcow2'"),
        (("-O", "qcow2,size=3"), "qcow2 has no option 'size'"),
        (("-O", "qcow2,cluster_size=3k"), "not a power of two"),
        (("-O", "qcow2,cluster_size="), "cluster_size=: not a power of two"),
        (("-O", "qcow2,compression_type=zstd"), "qcow2 has no option 'compression_type'"),
        (("-O", "qcow2,preallocation=xyz"), "supported: off, metadata, falloc, full"),
        (("-O", "raw,cluster_size=4k"), "a raw disk has no options"),
        (("-O", "qcow2", "--update"), "updated in place; replace it"),
        (("-O", "qcow2", "--preallocate"), "preallocation=falloc"),
        (("-O", "qcow2", "--content-type", "archive"), "for a whole disk"),
    ],
)
def test_what_does_not_fit_together(tmp_path: Path, options: tuple[str, ...], reason: str) -> None:
    done = worker.run("import", "http://127.0.0.1:1/", str(tmp_path / "disk.img"), *options)
    assert done.status == 2
    assert reason in done.errors


@pytest.mark.parametrize("where", ["-", "nbd://127.0.0.1:1/"])
def test_only_a_file_is_qcow2(where: str) -> None:
    done = worker.run("import", "http://127.0.0.1:1/", where, "-O", "qcow2")
    assert done.status == 2
    assert "--format qcow2 writes a file" in done.errors


@pytest.mark.parametrize("command", ["import", "blank"])
def test_disk_larger_than_the_format_is_refused_at_once(
    server: misbehave.Server, target: Path, command: str
) -> None:
    url = server.serve("/disk", misbehave.Page(DATA))
    argv = ("blank", target, "200Gi") if command == "blank" else ("import", url, target, "--size=200Gi")
    done = worker.run(*argv, "-O", "qcow2,cluster_size=512")
    assert (done.status, "hold at most 128.0 GiB" in done.errors) == (4, True), done.errors
    assert server.sent("/disk") < MIB
    done = worker.run(*argv, "-O", "qcow2,cluster_size=1k")
    assert done.status == 0, done.errors


def test_what_is_added_is_preallocated_as_the_rest(target: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(MIB))
    done = worker.run("import", str(source), target, "-O", "qcow2,preallocation=falloc", "--size=8Mi")
    assert done.status == 0, done.errors
    assert target.stat().st_blocks * 512 >= 8 * MIB


def test_dry_run_says_the_format(server: misbehave.Server, target: Path) -> None:
    url = server.serve("/disk", misbehave.Page(DATA))
    done = worker.run("import", url, target, "-O", "qcow2,cluster_size=4k", "--dry-run")
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
        done = worker.run("import", str(expected), point / "vm.qcow2", "-O", "qcow2")
        assert done.status == 8, done.errors
        if size < SIZE:
            assert "no space left on device" in done.error_message
        assert list(point.iterdir()) == []


# -- interruptions


def kill_midway(server: misbehave.Server, url: str, target: Path, number: int) -> None:
    argv = [sys.executable, "-c", WORKER, url, target]
    with forked.Popen[str](argv, env=forked.ENVIRONMENT) as running:
        processes.wait_for(lambda: server.sent("/disk") > 17 * MIB, "a good part of the disk")
        running.send_signal(number)
    assert running.returncode
    processes.wait_for(server.is_quiet, "the connections of the killed")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_import_is_resumed(
    server: misbehave.Server, target: Path, expected: Path, number: int
) -> None:
    url = server.serve("/disk", dataclasses.replace(misbehave.Page(DATA), **SLOW))
    kill_midway(server, url, target, number)
    assert not target.exists()
    server.serve("/disk", misbehave.Page(DATA))
    done = cdi_worker.run(request(url, target))
    assert done.resumed > 8 * MIB
    check(target, expected)


@pytest.mark.parametrize("form", ["raw", "qcow2,cluster_size=4k"])
def test_import_in_another_format_leaves_nothing_of_a_killed_one(
    server: misbehave.Server, target: Path, form: str
) -> None:
    url = server.serve("/disk", dataclasses.replace(misbehave.Page(DATA), **SLOW))
    kill_midway(server, url, target, signal.SIGKILL)
    assert len(list(target.parent.iterdir())) == 3
    server.serve("/disk", misbehave.Page(DATA))
    cdi_worker.run(request(url, target, format=form))
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("left", ["backing file", "garbage", "other size"])
def test_left_over_that_is_not_ours_is_not_resumed(
    server: misbehave.Server, target: Path, expected: Path, left: str
) -> None:
    url = server.serve("/disk", dataclasses.replace(misbehave.Page(DATA), **SLOW))
    kill_midway(server, url, target, signal.SIGKILL)
    part = target.with_name("disk.qcow2.part")
    if left == "garbage":
        part.write_bytes(devices.DIRT * MIB)
    else:
        part.unlink()
        more = ("-b", str(expected), "-F", "raw") if left == "backing file" else ()
        size = "24M" if left == "backing file" else "23M"
        processes.run("qemu-img", "create", "-q", "-f", "qcow2", *more, part, size)
    server.serve("/disk", misbehave.Page(DATA))
    assert cdi_worker.run(request(url, target)).resumed == 0
    check(target, expected)
    assert "backing" not in processes.run("qemu-img", "info", target).stdout


def test_disk_that_was_wrong_leaves_nothing(server: misbehave.Server, target: Path, expected: Path) -> None:
    """Nor its journal, whose digests are those of the wrong bytes."""
    url = gcs_objects.serve(
        server, gcs_objects.media(DATA, damage=lambda _first, data: bytes(len(data))), data=DATA
    )
    asked = request("", target, source="gcs", location=gcs_objects.locations.Gcs(endpoint=url))
    with pytest.raises(errors.ChecksumMismatch):
        cdi_worker.run(asked)
    assert not list(target.parent.iterdir())
    gcs_objects.serve(server, gcs_objects.media(DATA), data=DATA)
    assert cdi_worker.run(asked).resumed == 0
    check(target, expected)


@pytest.mark.timeout(1800)
def test_kills_at_random_moments(
    server: misbehave.Server, target: Path, expected: Path, pytestconfig: pytest.Config
) -> None:
    """With ``--whole`` 50 (make prove). The file has its name only when it is complete."""
    seed = random.randrange(1 << 32)
    print(f"moments of seed {seed}")
    dice = random.Random(seed)
    for _ in range(50 if pytestconfig.getoption("--whole") else 2):
        target.unlink(missing_ok=True)
        url = server.serve("/disk", dataclasses.replace(misbehave.Page(DATA), **SLOW))
        argv = [sys.executable, "-c", WORKER, url, target]
        with forked.Popen[str](argv, env=forked.ENVIRONMENT) as running:
            try:
                running.wait(dice.uniform(0.1, 3))
            except subprocess.TimeoutExpired:
                running.kill()
        if not target.exists():
            server.serve("/disk", misbehave.Page(DATA))
            cdi_worker.run(request(url, target))
        check(target, expected)


def test_server_of_qemu_that_is_killed(server: misbehave.Server, target: Path, expected: Path) -> None:
    url = server.serve("/disk", dataclasses.replace(misbehave.Page(DATA), **SLOW))
    with worker.started("import", url, target, "-O", "qcow2") as running:
        processes.wait_for(lambda: server.sent("/disk") > 8 * MIB, "a part of the disk")
        (pid,) = processes.run("pgrep", "-x", "qemu-nbd", "-P", str(running.pid)).stdout.split()
        processes.run("kill", "-KILL", pid)
        _, messages = running.communicate(timeout=60)
    assert running.returncode == 6, messages
    assert "qemu-nbd" in messages
    assert not target.exists()
    server.serve("/disk", misbehave.Page(DATA))
    cdi_worker.run(request(url, target))
    check(target, expected)


def test_server_of_qemu_that_hangs(server: misbehave.Server, target: Path) -> None:
    page = misbehave.Page(DATA, **SLOW)  # type: ignore[arg-type]
    arguments = ("import", "--format=qcow2", "--stall-timeout=3", server.serve("/disk.raw", page), target)
    with worker.started(*arguments) as running:
        processes.wait_for(lambda: server.sent("/disk.raw") > MIB, "the import")
        (pid,) = processes.run("pgrep", "-x", "qemu-nbd", "-P", str(running.pid)).stdout.split()
        os.kill(int(pid), signal.SIGSTOP)
        # Also the time until a stopped program is killed.
        _, messages = running.communicate(timeout=60)
    assert running.returncode == 6, messages
    assert "qemu-nbd" in messages


# -- the options


def test_layout() -> None:
    assert file_format.parse("") is None
    assert file_format.parse("raw") is None
    found = file_format.parse("qcow2,cluster_size=2M,preallocation=off")
    assert found == file_format.Qcow2Format(("cluster_size=2M", "preallocation=off"), 2 << 20)
    assert found.preallocation == "off"
