"""Imports to qcow2 files: the guest's bytes of every format, kills, and what does not fit together."""

from __future__ import annotations

import dataclasses
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbd")

import cdi_worker
from cdi_worker import errors
from cdi_worker.formats import bmap
from cdi_worker.images.engine import fetch
from cdi_worker.images.targets import layout
from tests.support import devices, disks, forked, misbehave, oracle, pairs, processes, servers, worker

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
    ("qcow2,compression_type=zstd", "--compress"),
    ("qcow2,cluster_size=32k", "--compress"),
)

WORKER = """
import sys, cdi_worker
from cdi_worker.images.engine import fetch
cdi_worker.run(cdi_worker.Request(
    source="http", location=cdi_worker.Location(sys.argv[1]), target=sys.argv[2], journal_interval=0.05,
    format="qcow2", fetch=fetch.Options(connections=2, chunk=1 << 20),
))
"""


def request(url: str, target: Path, **changes: object) -> cdi_worker.Request:
    made = cdi_worker.Request(
        source="http",
        location=cdi_worker.Location(url),
        target=str(target),
        format="qcow2",
        journal_interval=0.05,
        fetch=fetch.Options(connections=2, chunk=MIB, no_progress=20),
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


@pytest.mark.parametrize("backing", [False, True])
@pytest.mark.parametrize("size", [512, 65536 + 512, 3 * MIB - 512])
def test_compressed_disk_that_ends_within_a_cluster(
    server: misbehave.Server, target: Path, tmp_path: Path, size: int, backing: bool
) -> None:
    (tmp_path / "expected").write_bytes(DATA[:size])
    url = server.serve("/odd", misbehave.Page(DATA[:size]))
    old = ()
    if backing:
        # Longer, with other data behind the end of the disk.
        (tmp_path / "old.raw").write_bytes(b"\xff" * 4 * MIB)
        processes.run("qemu-img", "convert", "-O", "qcow2", tmp_path / "old.raw", tmp_path / "old.qcow2")
        old = ("--backing", tmp_path / "old.qcow2")
    done = worker.run("import", url, target, "--format=qcow2", "--compress", *old)
    assert done.status == 0, done.errors
    check(target, tmp_path / "expected")


@pytest.mark.parametrize("options", [(), ("--compress",)])
def test_stream_of_unknown_size(
    web: servers.Web, disks: disks.Disks, target: Path, options: tuple[str, ...]
) -> None:
    done = worker.run("import", web.url(disks.wrapped("raw", "gz")), target, "-O", "qcow2", *options)
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


@pytest.mark.parametrize("options", [(), ("--compress",)])
@pytest.mark.parametrize("form", ["raw", "qcow2"])
def test_overlay_holds_only_what_differs(
    target: Path, tmp_path: Path, options: tuple[str, ...], form: str
) -> None:
    base, changed = tmp_path / f"base.{form}", tmp_path / "changed"
    (tmp_path / "raw").write_bytes(DATA)
    processes.run("qemu-img", "convert", "-f", "raw", "-O", form, tmp_path / "raw", base)
    data = bytearray(DATA)
    data[5 * MIB : 5 * MIB + 10] = b"0123456789"
    data[7 * MIB : 9 * MIB] = bytes(2 * MIB)
    data[-1] ^= 1
    changed.write_bytes(data)
    done = worker.run("import", str(changed), target, "-O", "qcow2", "--backing", str(base), *options)
    assert done.status == 0, done.errors
    assert target.stat().st_size < 2 * MIB
    check(target, changed)
    info = processes.run("qemu-img", "info", target).stdout
    assert f"backing file: {base}" in info
    assert f"backing file format: {form}" in info


@pytest.mark.parametrize("how", ["written", "removed"])
def test_base_that_changes_meanwhile_makes_no_overlay(
    server: misbehave.Server, target: Path, tmp_path: Path, how: str
) -> None:
    base = tmp_path / "base"
    base.write_bytes(DATA)

    class Meanwhile(cdi_worker.NullProgress):
        def phase(self, name: str, total: int | None) -> None:
            if name == "sync" and how == "removed":
                base.unlink()
            elif name == "sync":
                with base.open("r+b") as file:
                    file.write(b"another")

    url = server.serve("/disk", misbehave.Page(DATA))
    with pytest.raises(errors.TargetError, match=r"changed while it was read|open the backing file"):
        cdi_worker.run(request(url, target, backing=str(base)), progress=Meanwhile())
    assert not list(target.parent.iterdir())


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
        (("--backing=/etc/passwd",), 2, "need --format qcow2"),
        (("--format=raw", "--backing=/etc/passwd"), 2, "need --format qcow2"),
    ],
)
def test_finished_disk_is_read_in_the_format_that_is_named(
    tmp_path: Path, expected: Path, options: tuple[str, ...], status: int, reason: str
) -> None:
    """The options of its import may be repeated. Another format is not compared as a raw disk."""
    target = tmp_path / "vm.img"
    assert worker.run("import", str(expected), target, "-O", "qcow2,cluster_size=4k").status == 0
    for argv in (("verify", str(expected), target), ("map", target, "-o", str(tmp_path / "map"))):
        done = worker.run(*argv, *options)
        assert (done.status, reason in done.errors) == (status, True), done.errors
    if not status:
        assert bmap.parse((tmp_path / "map").read_bytes()).size == expected.stat().st_size


def test_verify_of_an_overlay_needs_its_base(target: Path, tmp_path: Path, expected: Path) -> None:
    """A file that refers to another may be somebody's trap."""
    base = tmp_path / "base"
    base.write_bytes(DATA[: 20 * MIB])
    options = ("-O", "qcow2", "--backing", str(base))
    assert worker.run("import", str(expected), target, *options).status == 0
    for argv in (("verify", str(expected), target), ("map", target)):
        done = worker.run(*argv)
        assert (done.status, "name its backing file with --backing" in done.errors) == (4, True), done.errors
    done = worker.run("verify", str(expected), target, "--backing", str(base))
    assert done.status == 0, done.errors
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "base").write_bytes(base.read_bytes())
    done = worker.run("verify", str(expected), target, "--backing", str(tmp_path / "other" / "base"))
    assert done.status == 4, done.errors


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
        (("-O", "qcow2,compression_type=lzma"), "supported: zlib, zstd"),
        (("-O", "qcow2,preallocation=full", "--compress"), "preallocation excludes --compress"),
        (("-O", "qcow2,cluster_size=1M", "--compress"), "at most 64k"),
        (("-O", "raw,cluster_size=4k"), "a raw disk has no options"),
        (("--compress",), "need --format qcow2"),
        (("-O", "qcow2", "--update"), "write an overlay of it with --backing"),
        (("-O", "qcow2", "--preallocate"), "preallocation=falloc"),
        (("-O", "qcow2", "--content-type", "archive"), "for a whole disk"),
    ],
)
def test_what_does_not_fit_together(tmp_path: Path, options: tuple[str, ...], reason: str) -> None:
    done = worker.run("import", "http://127.0.0.1:1/", str(tmp_path / "disk.img"), *options)
    assert done.status == 2
    assert reason in done.errors


@pytest.mark.parametrize("name", ["{0}", "folder/../{0}", "link"])
def test_target_is_not_its_own_base(target: Path, expected: Path, name: str) -> None:
    """Whatever it is called: an overlay of itself would have replaced the base."""
    (target.parent / "folder").mkdir()
    (target.parent / "link").symlink_to(target)
    target.write_bytes(expected.read_bytes())
    base = f"{target.parent}/{name.format(target.name)}"
    for path in (target, target.parent / "link"):
        done = worker.run("import", str(expected), path, "-O", "qcow2", "--backing", base, "--force")
        assert (done.status, "its own backing file" in done.errors) == (2, True), done.errors
    assert target.read_bytes() == expected.read_bytes()


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


@pytest.mark.parametrize("base", [b"\x4b\x44\x4d" + bytes(4096), None])
def test_base_must_be_safe(tmp_path: Path, target: Path, expected: Path, base: bytes | None) -> None:
    """A base that is another format, or refers to a file of somebody else."""
    path = tmp_path / "base"
    if base is None:
        processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-b", expected, "-F", "raw", path)
    else:
        processes.run("qemu-img", "create", "-q", "-f", "vmdk", path, "24M")
    done = worker.run("import", str(expected), target, "-O", "qcow2", "--backing", str(path))
    assert done.status in {2, 4}, done.errors
    assert not list(target.parent.iterdir())


@pytest.mark.parametrize("options", [(), ("--compress",)])
def test_full_file_system_is_an_error(tmp_path: Path, expected: Path, options: tuple[str, ...]) -> None:
    """With ``--compress`` it is not known before how much space is needed: QEMU meets the end."""
    with devices.filesystem("tmpfs", tmp_path, 8 * MIB) as point:
        done = worker.run("import", str(expected), point / "vm.qcow2", "-O", "qcow2", *options)
        assert done.status == 8, done.errors
        if options:
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


def test_killed_overlay_is_resumed(
    server: misbehave.Server, target: Path, tmp_path: Path, expected: Path
) -> None:
    base = tmp_path / "base"
    base.write_bytes(bytes(SIZE))
    url = server.serve("/disk", dataclasses.replace(misbehave.Page(DATA), **SLOW))
    script = WORKER.replace('format="qcow2"', f'format="qcow2", backing={str(base)!r}')
    with forked.Popen[str]([sys.executable, "-c", script, url, target], env=forked.ENVIRONMENT) as running:
        processes.wait_for(lambda: server.sent("/disk") > 17 * MIB, "a good part of the disk")
        running.kill()
    server.serve("/disk", misbehave.Page(DATA))
    assert cdi_worker.run(request(url, target, backing=str(base))).resumed > 8 * MIB
    check(target, expected)


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


@pytest.mark.parametrize("more", [{"format": "raw"}, {"compress": True}])
def test_import_in_another_format_leaves_nothing_of_a_killed_one(
    server: misbehave.Server, target: Path, more: dict[str, object]
) -> None:
    url = server.serve("/disk", dataclasses.replace(misbehave.Page(DATA), **SLOW))
    kill_midway(server, url, target, signal.SIGKILL)
    assert len(list(target.parent.iterdir())) == 3
    server.serve("/disk", misbehave.Page(DATA))
    cdi_worker.run(request(url, target, **more))
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


# -- the options


def test_layout() -> None:
    assert layout.parse("") is None
    assert layout.parse("raw") is None
    found = layout.parse("qcow2,cluster_size=2M,preallocation=off", backing="/base")
    assert found == layout.Qcow2(("cluster_size=2M", "preallocation=off"), 2 << 20, backing="/base")
    assert not found.is_preallocated
