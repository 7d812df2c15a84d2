"""Imports to NBD exports: real servers, full of 0xFF, that are killed, refuse, or are too small."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
import subprocess
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import pytest

pytest.importorskip("nbd")

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import destination
from cdi_worker.importer.plan import Route
from cdi_worker.sources.nbd import handshake, locations, writer
from tests.support import (
    devices,
    disks,
    gcs_objects,
    kills,
    misbehave,
    nbd_exports,
    nbd_targets,
    oracle,
    pairs,
    processes,
    servers,
    tls,
    worker,
)

MIB = 1 << 20
DATA, SIZE = kills.DATA, kills.SIZE
#: Larger than the disk; what is behind its end is not changed.
EXPORT = SIZE + MIB
FORMATS = ("raw", "qcow2", "qcow2-zlib", "vmdk", "vmdk-stream", "vdi", "vhd", "vhdx", "vhdx-log")
#: A disk that takes seconds, also over many connections.
SLOWER = {"drip": (64 << 10, 0.05)}

request = functools.partial(kills.request, existing="refuse")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[nbd_targets.Served]:
    with nbd_targets.running("nbdkit file", tmp_path, EXPORT) as running:
        yield running


def check(served: nbd_targets.Served, expected: Path, beyond: bytes = devices.DIRT) -> None:
    guest = served.guest(served.path.with_name("guest"))
    oracle.same(guest, expected, beyond=beyond)


# -- bytes


@pytest.mark.parametrize(("kind", "variant"), pairs.dealt(nbd_targets.KINDS, FORMATS))
def test_dirty_export_of_every_server_gets_every_format(
    web: servers.Web, disks: disks.Disks, tmp_path: Path, kind: str, variant: str
) -> None:
    expected = disks.expected(variant)
    size = -(-expected.stat().st_size // MIB) * MIB + MIB
    with nbd_targets.running(kind, tmp_path, size) as served:
        done = worker.call("import", web.url(disks.image(variant)), served.url)
        assert done.status == 0, done.errors
        check(served, expected)


def test_stream_of_unknown_size(web: servers.Web, disks: disks.Disks, served: nbd_targets.Served) -> None:
    """A compressed disk, whose size is known only at its end."""
    packed = disks.wrapped("raw", "gz")
    done = worker.call("import", web.url(packed), served.url)
    assert done.status == 0, done.errors
    check(served, disks.expected("raw"))


def test_preallocation_makes_no_holes(served: nbd_targets.Served) -> None:
    blank = worker.call("blank", served.url, "12Mi")
    assert blank.status == 0, blank.errors
    assert served.path.stat().st_blocks * 512 < 5 * MIB
    done = worker.call("blank", served.url, "12Mi", "--preallocate")
    assert done.status == 0, done.errors
    assert served.path.stat().st_blocks * 512 > 10 * MIB
    guest = served.guest(served.path.with_name("guest"))
    assert guest.read_bytes() == bytes(SIZE) + devices.DIRT * MIB


def test_update_writes_only_what_differs(
    server: misbehave.Server, served: nbd_targets.Served, tmp_path: Path
) -> None:
    url = server.serve("/disk", misbehave.Page(DATA))
    cdi_worker.run(request(url, served.url))
    changed = bytearray(DATA)
    changed[5 * MIB : 5 * MIB + 4096] = bytes(4096)
    changed[0] ^= 1
    url = server.serve("/changed", misbehave.Page(bytes(changed)))
    done = cdi_worker.run(dataclasses.replace(request(url, served.url), existing="update"))
    assert done.changes is not None
    assert done.changes.differed == 8192
    (tmp_path / "expected").write_bytes(changed)
    check(served, tmp_path / "expected")


def test_parts_of_blocks_keep_what_is_beside_them(tmp_path: Path) -> None:
    """Also where two threads write two parts of one block."""
    dice = random.Random(3)
    expected = bytearray(devices.DIRT * EXPORT)
    with nbd_targets.running("nbdkit 65536", tmp_path, EXPORT) as served:
        device = writer.connect(locations.Nbd(served.url), cancelling.NEVER, served.url)
        cuts = sorted({0, 3 * MIB, *(dice.randrange(3 * MIB) for _ in range(200))})
        parts = list(itertools.pairwise(cuts))
        for start, end in parts:
            expected[start:end] = dice.randbytes(end - start)
        dice.shuffle(parts)
        with futures.ThreadPoolExecutor(8) as threads:
            done = [threads.submit(device.write, a, memoryview(bytes(expected[a:b]))) for a, b in parts]
        assert [each.result() for each in done] == [None] * len(done)
        device.flush()
        assert device.read(100, 3 * MIB) == expected[100 : 3 * MIB + 100]
        device.close()
        assert served.guest(tmp_path / "guest").read_bytes() == expected


# -- refusals, before a byte is written


def test_export_smaller_than_the_disk(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk", misbehave.Page(DATA))
    with nbd_targets.running("nbdkit file", tmp_path, SIZE - MIB) as served:
        for more in ((), ("--dry-run",)):
            done = worker.call("import", url, served.url, *more)
            assert done.status == 8, done.errors
            assert str(SIZE - MIB) in done.errors + done.output
        assert served.path.read_bytes() == devices.DIRT * (SIZE - MIB)


PLUGIN = f"""
API_VERSION = 2
def open(readonly): return 1
def get_size(h): return {EXPORT}
def pread(h, buf, offset, flags): pass
def pwrite(h, buf, offset, flags): pass
def can_flush(h): return False
"""


@pytest.mark.parametrize(
    ("options", "reason"),
    [(("-r", "memory", str(EXPORT)), "read-only"), (("python", "plugin.py"), "cannot flush")],
)
def test_export_that_cannot_be_written_safely(
    server: misbehave.Server, tmp_path: Path, options: tuple[str, ...], reason: str
) -> None:
    url = server.serve("/disk", misbehave.Page(DATA))
    (tmp_path / "plugin.py").write_text(PLUGIN)
    given = [str(tmp_path / each) if each == "plugin.py" else each for each in options]
    argv: list[str | Path] = ["nbdkit", "-f", f"--unix={tmp_path / 'socket'}", *given]
    with nbd_targets.serving(argv, tmp_path) as served:
        done = worker.call("import", url, served.url)
    assert done.status == 6, done.errors
    assert reason in done.error_message


def test_no_server(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk", misbehave.Page(DATA))
    done = worker.call("import", url, f"nbd+unix:///?socket={tmp_path / 'nothing'}")
    assert done.status == 6, done.errors
    assert "connect: no such file or directory" in done.error_message


def test_member_of_a_volume_group_is_not_overwritten(
    server: misbehave.Server, served: nbd_targets.Served
) -> None:
    with served.path.open("r+b") as file:
        file.write(bytes(MIB))
        file.seek(4096 - 10)
        file.write(b"SWAPSPACE2")
        file.seek(1024)
        file.write(b"\1\0\0\0\xff\0\0\0")
    before = served.path.read_bytes()
    url = server.serve("/disk", misbehave.Page(DATA))
    with pytest.raises(errors.TargetExists, match="swap"):
        cdi_worker.run(request(url, served.url))
    assert served.path.read_bytes() == before
    cdi_worker.run(dataclasses.replace(request(url, served.url), existing="replace"))


def test_what_does_not_fit_together() -> None:
    for arguments, reason in (
        (("--content-type", "archive"), "an archive cannot be written to an NBD export"),
        (("--current-checkpoint", "one"), "a stage with checkpoints"),
    ):
        done = worker.call("import", "nbd://127.0.0.1:1/a", "nbd://127.0.0.1:1/b", *arguments)
        assert (done.status, reason in done.errors) == (2, True), arguments


def test_export_is_not_copied_to_itself(served: nbd_targets.Served, tmp_path: Path) -> None:
    served.fill(EXPORT)
    address, _, socket = served.url.partition("socket=")
    (tmp_path / "again").symlink_to(socket)
    for source in (served.url, f"{address}socket={tmp_path}/again"):
        done = worker.call("import", source, served.url)
        assert (done.status, "source and target are the same disk" in done.errors) == (2, True), done.errors
    assert served.path.read_bytes() == devices.DIRT * EXPORT


def test_addresses_of_one_export() -> None:
    for source, target, is_same in (
        ("nbd://HOST/a", "nbds://host:10809/a", True),
        ("nbd://host/a", "nbd://host/b", False),
        ("nbd://host/a", "nbd://host:1/a", False),
        ("nbd://host/a", "nbd+unix:///a?socket=host", False),
        ("nbd://host/a", "/disk.img", False),
    ):
        assert locations.Nbd(source).reads(target) == is_same, (source, target)


# -- interruptions


def test_killed_import_starts_over(
    server: misbehave.Server, served: nbd_targets.Served, tmp_path: Path
) -> None:
    page = misbehave.Page(DATA)
    url = server.serve("/disk", dataclasses.replace(page, **kills.SLOW))
    kills.midway(server, request(url, served.url))
    head = served.path.read_bytes()[:MIB]
    assert head.startswith(oracle.RECORD)
    assert not any(head[512:])
    before = server.sent("/disk")
    server.serve("/disk", page)
    assert cdi_worker.run(request(url, served.url)).resumed == 0
    assert server.sent("/disk") - before >= SIZE
    (tmp_path / "expected").write_bytes(DATA)
    check(served, tmp_path / "expected")


def test_disk_that_was_wrong_is_not_continued(
    server: misbehave.Server, served: nbd_targets.Served, tmp_path: Path
) -> None:

    def damaged(first: int, data: bytes) -> bytes:
        at = 7 * MIB - first
        return data[:at] + b"wrong" + data[at + 5 :] if 0 <= at < len(data) - 5 else data

    url = gcs_objects.serve(server, gcs_objects.media(DATA, damage=damaged), data=DATA)
    asked = dataclasses.replace(
        request("", served.url), source="gcs", location=gcs_objects.locations.Gcs(endpoint=url)
    )
    with pytest.raises(errors.ChecksumMismatch):
        cdi_worker.run(asked)
    head = served.path.read_bytes()[:MIB]
    assert head.startswith(oracle.RECORD)
    assert not any(head[512:])
    gcs_objects.serve(server, gcs_objects.media(DATA), data=DATA)
    assert cdi_worker.run(asked).resumed == 0
    (tmp_path / "expected").write_bytes(DATA)
    check(served, tmp_path / "expected")


@pytest.mark.timeout(1800)
def test_kills_at_random_moments(
    server: misbehave.Server, served: nbd_targets.Served, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """The export is no disk before, and is the disk after a second run."""
    (tmp_path / "expected").write_bytes(DATA)
    for moment in kills.moments(pytestconfig):
        url = server.serve("/disk", dataclasses.replace(misbehave.Page(DATA), **kills.SLOW))
        before = served.path.read_bytes()[:MIB]
        kills.after(moment, request(url, served.url))
        found = served.path.read_bytes()
        if found[:MIB] == DATA[:MIB] != before:
            assert found[:SIZE] == DATA  # killed after the end
        else:
            assert found.startswith(oracle.RECORD) or found[:MIB] in {before, bytes(MIB)}
        server.serve("/disk", misbehave.Page(DATA))
        cdi_worker.run(request(url, served.url))
        check(served, tmp_path / "expected")


def test_second_run_takes_over_and_the_first_stops(
    server: misbehave.Server, served: nbd_targets.Served, tmp_path: Path
) -> None:
    """NBD has no locks: the record in the first sector shows it."""
    url = server.serve("/disk", misbehave.Page(DATA, drip=(64 << 10, 0.025)))
    failure: list[BaseException] = []

    def first() -> None:
        try:
            cdi_worker.run(request(url, served.url))
        except errors.Error as err:
            failure.append(err)

    running = threading.Thread(target=first)
    running.start()
    processes.wait_for(lambda: served.path.read_bytes()[:19] == oracle.RECORD, "the first run's record")
    other = bytes(reversed(DATA))
    cdi_worker.run(request(server.serve("/other", misbehave.Page(other)), served.url))
    running.join(60)
    assert [type(each) for each in failure] == [errors.TargetLost]
    # It has stopped too late to change nothing, which is why the loser says so; the winner runs again.
    cdi_worker.run(request(server.url("/other"), served.url))
    (tmp_path / "expected").write_bytes(other)
    check(served, tmp_path / "expected")


def test_server_with_another_client_is_named_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """qemu-nbd serves one client, and lets the others wait."""
    (tmp_path / "source").write_bytes(DATA[:MIB])
    connect = handshake.connect
    with nbd_targets.running("qemu-nbd raw", tmp_path, MIB) as served:
        first = destination.connect(request("http://127.0.0.1:1/", served.url), cancelling.NEVER)
        with contextlib.closing(first(served.url)), monkeypatch.context() as patched:
            patched.setattr(handshake, "connect", lambda *given: connect(*given[:2], 1.0))
            done = worker.call("verify", tmp_path / "source", served.url)
    assert (done.status, "may be serving another client" in done.errors) == (6, True), done.errors


def test_server_without_room(server: misbehave.Server, tmp_path: Path) -> None:
    page = misbehave.Page(DATA)
    (tmp_path / "served").write_bytes(devices.DIRT * EXPORT)
    argv: list[str | Path] = ["nbdkit", "-f", f"--unix={tmp_path / 'socket'}", "--filter=error", "file"]
    argv += [tmp_path / "served", "error-pwrite=ENOSPC", "error-pwrite-rate=1"]
    argv += [f"error-file={tmp_path / 'inject'}"]
    with nbd_targets.serving(argv, tmp_path) as served:
        slow = server.serve("/disk", dataclasses.replace(page, **SLOWER))
        with worker.started("import", slow, served.url) as running:
            processes.wait_for(lambda: server.sent("/disk") > 2 * MIB, "a part of the disk")
            (tmp_path / "inject").touch()
            _, messages = running.communicate(timeout=60)
        assert (running.returncode, "no space left" in messages) == (8, True), messages
        assert served.path.read_bytes().startswith(oracle.RECORD)
        (tmp_path / "inject").unlink()
        cdi_worker.run(request(server.serve("/disk", page), served.url))
        (tmp_path / "expected").write_bytes(DATA)
        check(served, tmp_path / "expected")


def test_server_that_is_killed(server: misbehave.Server, tmp_path: Path) -> None:
    """What it had not flushed is lost: the run fails, and the next one starts over."""
    slow = server.serve("/disk", dataclasses.replace(misbehave.Page(DATA), **kills.SLOW))
    (tmp_path / "served").write_bytes(devices.DIRT * EXPORT)
    argv: list[str | Path] = ["nbdkit", "-f", f"--unix={tmp_path / 'socket'}", "file", tmp_path / "served"]
    with (
        nbd_targets.serving(argv, tmp_path) as served,
        kills.started(request(slow, served.url), stderr=subprocess.PIPE) as run,
    ):
        processes.wait_for(lambda: server.sent("/disk") > SIZE // 2, "a part of the disk")
        served.kill()
        _, messages = run.communicate(timeout=60)
        assert run.returncode
        assert "TargetError" in messages
        assert served.url.partition("?")[0] in messages
    server.serve("/disk", misbehave.Page(DATA))
    with nbd_targets.serving(argv, tmp_path) as served:
        assert cdi_worker.run(request(slow, served.url)).resumed == 0
        (tmp_path / "expected").write_bytes(DATA)
        check(served, tmp_path / "expected")


def test_server_that_is_restarted_between_two_requests(tmp_path: Path) -> None:
    """A new server does not have what the old one had not flushed: no flush may succeed after it."""
    argv: list[str | Path] = ["nbdkit", "-f", f"--unix={tmp_path / 'socket'}", "memory", str(EXPORT)]
    with nbd_targets.serving(argv, tmp_path) as served:
        device = writer.connect(locations.Nbd(served.url), cancelling.NEVER, served.url)
        device.write(0, memoryview(b"a" * 4096))
        served.kill()
    with nbd_targets.serving(argv, tmp_path):
        for call in (device.flush, lambda: device.write(0, memoryview(b"b" * 512))):
            with pytest.raises(errors.TargetError):
                call()
    device.close()


# -- TLS


def test_export_over_tls(server: misbehave.Server, tmp_path: Path) -> None:
    authority = tls.Authority(tmp_path / "tls")
    pair = authority.issue(common_name="worker", client=True)
    folder = nbd_exports.credentials(tmp_path / "pki", authority, authority.issue("localhost"))
    (tmp_path / "served").write_bytes(devices.DIRT * EXPORT)
    options = ("--tls=require", f"--tls-certificates={folder}", "--tls-verify-peer")
    url = server.serve("/disk", misbehave.Page(DATA))
    with nbd_exports.nbdkit(tmp_path, *options, "file", tmp_path / "served") as port:
        target = f"nbds://localhost:{port}/"
        login = ("--ca-file", authority.certificate, "--cert", pair.certificate, "--key", pair.key)
        done = worker.call("import", url, target)
        assert done.status == 6, done.errors
        done = worker.call("import", url, target, *map(str, login))
        assert done.status == 0, done.errors
    assert (tmp_path / "served").read_bytes() == DATA + devices.DIRT * MIB


# -- routes


def test_what_qemu_must_read_needs_no_scratch(web: servers.Web, disks: disks.Disks, tmp_path: Path) -> None:
    expected = disks.expected("vhdx-log")
    size = -(-expected.stat().st_size // MIB) * MIB + MIB
    with nbd_targets.running("nbdkit file", tmp_path, size) as served:
        done = cdi_worker.run(request(web.url(disks.image("vhdx-log")), served.url))
        assert done.plan.route is Route.CONVERT
        check(served, expected)


def test_export_is_compared_without_write_access(tmp_path: Path) -> None:
    image, socket = tmp_path / "image", tmp_path / "socket"
    raw = tmp_path / "raw"
    raw.write_bytes(DATA[: 2 * MIB] + bytes(2 * MIB) + DATA[:MIB])
    processes.run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, image)
    command = [*nbd_targets.qemu_nbd(image, "qcow2", socket), "--read-only"]
    with nbd_targets.serving(command, tmp_path) as served:
        url = served.url
        source = dataclasses.replace(request(str(raw), url), source="local")
        found = cdi_worker.verify(source)
        assert (found.is_equal, found.disk_size, found.disk_read) == (True, 5 * MIB, 3 * MIB)
        with raw.open("r+b") as file:
            file.seek(3 * MIB)
            file.write(b"other")
        found = cdi_worker.verify(source)
        assert (found.first, found.confirmed, found.differences[0].zero) == (3 * MIB, True, "disk")
        done = worker.call("verify", "--quiet", raw, url)
        assert done.status == 9
