"""The nbd source, with the real qemu-nbd, qemu-storage-daemon and nbdkit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbd")

from cdi_worker import errors
from cdi_worker.images.engine import cancelling, fetch
from cdi_worker.importer import execute, plan, request
from cdi_worker.importer.result import Result
from cdi_worker.sources import base
from cdi_worker.sources.nbd import locations, source
from tests.support import devices, nbd_exports, oracle, processes, tls, worker

MIB = 1 << 20
SIZE = 48 * MIB + 512
ANYONE = base.Access()


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A disk with data, holes and zeros."""
    path = tmp_path_factory.mktemp("disk") / "disk.raw"
    dice = random.Random(17)
    with path.open("wb") as file:
        file.truncate(SIZE)
        for start, length in ((0, 5 * MIB), (9 * MIB, 70_000), (20 * MIB, 9 * MIB), (SIZE - 512, 512)):
            file.seek(start)
            file.write(dice.randbytes(length))
        file.seek(10 * MIB)
        file.write(bytes(MIB))
    return path


@pytest.fixture(scope="module")
def qcow2(raw: Path) -> Path:
    path = raw.with_name("disk.qcow2")
    processes.run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, path)
    return path


target = devices.targets("file", "block512", "block4096", size=SIZE + MIB - 512)


def import_(url: str, target: Path, access: base.Access = ANYONE, **changes: Any) -> Result:
    """Import a disk; ``changes`` are fields of the request, or of the location."""
    names = {field.name for field in dataclasses.fields(locations.Nbd)}
    given = {name: changes.pop(name) for name in names & set(changes)}
    wanted = request.Request(
        source="nbd",
        location=locations.Nbd(url, access, **given),
        target=str(target),
        connect_patience=1.0,
        existing="replace",
    )
    return execute.run(dataclasses.replace(wanted, **changes))


def opened(
    url: str, access: base.Access = ANYONE, **fields: Any
) -> contextlib.AbstractContextManager[base.Image]:
    return base.open_image(source.NbdSource(locations.Nbd(url, access, **fields), cancelling.NEVER))


# -- servers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "target"),
    [
        ("qemu-nbd raw", "file"),
        ("qemu-nbd qcow2", "block512"),
        ("storage daemon", "block4096"),
        ("nbdkit", "block512"),
    ],
    indirect=["target"],
)
def test_disk_of_every_server_is_copied(
    tmp_path: Path, raw: Path, qcow2: Path, target: Path, server: str
) -> None:
    serving = {
        "qemu-nbd raw": lambda: nbd_exports.qemu_nbd(tmp_path, raw, "--export-name=disk"),
        "qemu-nbd qcow2": lambda: nbd_exports.qemu_nbd(tmp_path, qcow2, "-x", "disk", form="qcow2"),
        "storage daemon": lambda: nbd_exports.storage_daemon(tmp_path, qcow2, "disk"),
        "nbdkit": lambda: nbd_exports.nbdkit(tmp_path, "-r", "file", raw),
    }[server]
    with serving() as port:
        done = import_(f"nbd://127.0.0.1:{port}/disk", target)
    oracle.same(target, raw, beyond=devices.beyond(target))
    assert done.plan.route is plan.Route.EXTENTS
    assert done.read < 17 * MIB


def test_server_for_one_client_that_ends_with_it(tmp_path: Path, raw: Path) -> None:
    """qemu-nbd without options: extents and data must come over the same connection."""
    with nbd_exports.plain_qemu_nbd(tmp_path, raw) as socket:
        done = import_(f"nbd+unix:///?socket={socket}", tmp_path / "disk.img")
    oracle.same(tmp_path / "disk.img", raw)
    assert done.read < 17 * MIB


def test_several_connections_only_where_the_server_allows_them(tmp_path: Path, raw: Path) -> None:
    for options, most in ((("--shared=8",), 6), (("--shared=1",), 1)):
        with (
            nbd_exports.qemu_nbd(tmp_path, raw, *options) as port,
            opened(f"nbd://127.0.0.1:{port}") as found,
        ):
            assert found.source.describe()["connections"] == most


def test_reads_use_all_connections(tmp_path: Path, raw: Path) -> None:
    log = tmp_path / "requests.log"
    filters = ("--filter=log", "--filter=noextents", "--filter=delay")
    settings = (f"logfile={log}", "delay-read=20ms")
    with nbd_exports.nbdkit(tmp_path, "-r", *filters, "file", raw, *settings) as port:
        import_(f"nbd://127.0.0.1:{port}", tmp_path / "disk.img", fetch=fetch.FetchOptions(chunk=MIB))
    oracle.same(tmp_path / "disk.img", raw)
    assert len(set(re.findall(r"connection=(\d+) Read ", log.read_text()))) == 6


def test_server_with_fewer_places_than_it_promises(tmp_path: Path, raw: Path) -> None:
    """qemu-nbd leaves the third client waiting for the end of the first."""
    with nbd_exports.qemu_nbd(tmp_path, raw, "--shared=2") as port:
        import_(f"nbd://127.0.0.1:{port}", tmp_path / "disk.img")
    oracle.same(tmp_path / "disk.img", raw)


@pytest.mark.parametrize("target", ["block4096"], indirect=True)
def test_server_without_extents_is_read_completely(tmp_path: Path, raw: Path, target: Path) -> None:
    with nbd_exports.nbdkit(tmp_path, "-r", "--no-sr", "file", raw) as port:
        done = import_(f"nbd://127.0.0.1:{port}", target)
    oracle.same(target, raw, beyond=devices.beyond(target))
    assert (done.plan.route, done.read) == (plan.Route.STREAM, SIZE)


@pytest.mark.parametrize("options", [("minimum=512", "maximum=64K"), ("minimum=4K", "maximum=1M")])
def test_block_sizes_of_the_server_are_respected(tmp_path: Path, raw: Path, options: tuple[str, ...]) -> None:
    copy = tmp_path / "whole.raw"
    copy.write_bytes(raw.read_bytes() + bytes(-SIZE % 4096))
    policy = [f"blocksize-{option}" for option in options]
    policy += ["blocksize-preferred=4K", "blocksize-error-policy=error"]
    with nbd_exports.nbdkit(tmp_path, "-r", "--filter=blocksize-policy", "file", copy, *policy) as port:
        import_(f"nbd://127.0.0.1:{port}", tmp_path / "disk.img")
        with opened(f"nbd://127.0.0.1:{port}") as found:
            into = memoryview(bytearray(1000))
            ranges = found.source.ranges
            assert ranges is not None
            assert ranges.read_range(5000, into) == 1000
            assert into == copy.read_bytes()[5000:6000]
    oracle.same(tmp_path / "disk.img", copy)


@pytest.mark.parametrize("policy", ["error", "allow"])
def test_end_that_cannot_be_read_is_known_at_connect(tmp_path: Path, raw: Path, policy: str) -> None:
    """The size is no multiple of the smallest block: some servers read the rest, others refuse it."""
    odd = tmp_path / "odd.raw"
    odd.write_bytes(raw.read_bytes()[: 10 * MIB + 1000])
    filters = [
        "--filter=blocksize-policy",
        "file",
        odd,
        "blocksize-minimum=4K",
        f"blocksize-error-policy={policy}",
    ]
    with nbd_exports.nbdkit(tmp_path, "-r", *filters) as port:
        if policy == "allow":
            import_(f"nbd://127.0.0.1:{port}", tmp_path / "disk.img")
            oracle.same(tmp_path / "disk.img", odd)
            return
        with pytest.raises(errors.SourceError) as caught:
            import_(f"nbd://127.0.0.1:{port}", tmp_path / "disk.img", access=base.Access(patience=20))
        with pytest.raises(errors.SourceError, match="smallest block"), opened(f"nbd://127.0.0.1:{port}"):
            pass
    assert "has 10486760 bytes, no multiple of the server's smallest block of 4096" in str(caught.value)
    assert not (tmp_path / "disk.img").exists()


def test_guest_cannot_choose_the_format(
    tmp_path: Path, qcow2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A guest can write a qcow2 header with a backing file to its disk."""
    with nbd_exports.nbdkit(tmp_path, "-r", "file", qcow2) as port:
        done = import_(f"nbd://127.0.0.1:{port}", tmp_path / "disk.img")
    assert done.format == "raw"
    oracle.same(tmp_path / "disk.img", qcow2)
    assert "begins like a qcow2 image" in caplog.text


# -- TLS -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tls.Authority:
    return tls.Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def strict(authority: tls.Authority, raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server that requires a client certificate."""
    own = tmp_path_factory.mktemp("strict")
    folder = nbd_exports.credentials(own / "server", authority, authority.issue())
    options = ("--tls=require", "--tls-verify-peer", f"--tls-certificates={folder}")
    with nbd_exports.nbdkit(own, "-r", *options, "file", raw) as port:
        yield port


def test_disk_is_copied_with_a_client_certificate(
    strict: int, authority: tls.Authority, raw: Path, tmp_path: Path
) -> None:
    pair = authority.issue(common_name="worker", client=True)
    access = base.Access(ca_files=(str(authority.certificate),))
    given = {"certificate": str(pair.certificate), "key": str(pair.key)}
    for host in ("127.0.0.1", "localhost"):
        import_(f"nbds://{host}:{strict}/", tmp_path / "disk.img", access, **given)
        oracle.same(tmp_path / "disk.img", raw)


def test_qemu_with_client_certificates(tmp_path: Path, raw: Path, authority: tls.Authority) -> None:
    folder = nbd_exports.credentials(tmp_path / "server", authority, authority.issue())
    secret = f"tls-creds-x509,id=tls0,endpoint=server,dir={folder},verify-peer=yes"
    pair = authority.issue(common_name="worker", client=True)
    both = tmp_path / "client.pem"
    both.write_bytes(pair.certificate.read_bytes() + pair.key.read_bytes())
    with nbd_exports.qemu_nbd(tmp_path, raw, f"--object={secret}", "--tls-creds=tls0", "-e", "8") as port:
        access = base.Access(ca_files=(str(authority.certificate),))
        import_(f"nbds://127.0.0.1:{port}/", tmp_path / "disk.img", access, certificate=str(both))
    oracle.same(tmp_path / "disk.img", raw)


def test_untrusted_and_missing_certificates_are_reported(
    strict: int, authority: tls.Authority, tmp_path: Path
) -> None:
    pair = authority.issue(common_name="worker", client=True)
    client = {"certificate": str(pair.certificate), "key": str(pair.key)}
    trusted = base.Access(ca_files=(str(authority.certificate),))
    stranger = tls.Authority(tmp_path / "other").issue(common_name="worker", client=True)
    for access, given, message in (
        (base.Access(), client, "certificate verification.*add the CA"),
        (trusted, {}, "TLS handshake failed.*client certificate"),
        (trusted, {"certificate": str(stranger.certificate), "key": str(stranger.key)}, "TLS handshake"),
    ):
        with pytest.raises(errors.Unreachable, match=message):
            import_(f"nbds://127.0.0.1:{strict}/", tmp_path / "disk.img", access, **given)
    insecure = dataclasses.replace(base.Access(), insecure=True)
    import_(f"nbds://127.0.0.1:{strict}/", tmp_path / "disk.img", insecure, **client)


def test_certificate_for_another_host_is_refused(tmp_path: Path, raw: Path, authority: tls.Authority) -> None:
    folder = nbd_exports.credentials(tmp_path / "server", authority, authority.issue("other.example.org"))
    options = ("--tls=require", f"--tls-certificates={folder}")
    access = base.Access(ca_files=(str(authority.certificate),))
    with (
        nbd_exports.nbdkit(tmp_path, "-r", *options, "file", raw) as port,
        pytest.raises(errors.Unreachable, match="certificate verification"),
    ):
        import_(f"nbds://127.0.0.1:{port}/", tmp_path / "disk.img", access)


def test_tls_must_be_that_of_the_address(strict: int, tmp_path: Path, raw: Path) -> None:
    with pytest.raises(errors.Unreachable, match="requires TLS; use nbds://"):
        import_(f"nbd://127.0.0.1:{strict}/", tmp_path / "disk.img")
    for serving in (nbd_exports.nbdkit(tmp_path, "-r", "file", raw), nbd_exports.qemu_nbd(tmp_path, raw)):
        with serving as port, pytest.raises(errors.Unreachable, match=r"has no TLS.*nbd://"):
            import_(f"nbds://127.0.0.1:{port}/", tmp_path / "disk.img")


# -- addresses and messages ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["backup/vda", "/vda", "Größe 1?"])
def test_names_of_exports_are_exact(tmp_path: Path, raw: Path, name: str) -> None:
    address = locations.Address("127.0.0.1", export=name)
    with nbd_exports.qemu_nbd(tmp_path, raw, f"--export-name={name}") as port:
        url = dataclasses.replace(address, port=port).name
        assert locations.parse(url).export == name
        import_(url, tmp_path / "disk.img")
    oracle.same(tmp_path / "disk.img", raw)


def test_unknown_export_lists_those_of_the_server(tmp_path: Path, raw: Path) -> None:
    with (
        nbd_exports.qemu_nbd(tmp_path, raw, "--export-name=vda") as port,
        pytest.raises(errors.Unreachable, match=r"no export 'vdb'; the server has 'vda'"),
    ):
        import_(f"nbd://127.0.0.1:{port}/vdb", tmp_path / "disk.img")


def test_server_that_cannot_be_reached(tmp_path: Path) -> None:
    for url, message in (
        (f"nbd://127.0.0.1:{processes.free_port()}/x", "connect: connection refused"),
        ("nbd://nohost.invalid/x", "unknown host"),
        (f"nbd+unix:///?socket={tmp_path}/nothing", "connect: no such file"),
    ):
        with pytest.raises(errors.Unreachable, match=message) as caught:
            import_(url, tmp_path / "disk.img")
        assert str(caught.value).startswith(locations.parse(url).name)


def test_commands_use_their_exit_statuses(tmp_path: Path, raw: Path) -> None:
    with nbd_exports.qemu_nbd(tmp_path, raw, "--export-name=vda", "--shared=8") as port:
        url = f"nbd://127.0.0.1:{port}/vda"
        assert " extents  yes\n" in worker.call("inspect", url).output
        done = worker.call("inspect", "--json", url)
        assert done.status == 0, done.errors
        found = json.loads(done.output)
        assert (found["format"], found["virtualSize"]) == ("raw", SIZE)
        done = worker.call("import", "--dry-run", url, tmp_path / "disk.img")
        assert (done.status, "only data is copied" in done.output) == (0, True)
        assert not (tmp_path / "disk.img").exists()
        assert worker.call("import", url, tmp_path / "disk.img").status == 0
        assert worker.call("import", f"{url}b", tmp_path / "other.img").status == 3
        assert worker.call("import", "--size", "1Mi", url, tmp_path / "other.img").status == 8
    oracle.same(tmp_path / "disk.img", raw)


def test_pod_reads_the_mounted_client_certificate(
    strict: int, authority: tls.Authority, raw: Path, tmp_path: Path
) -> None:
    pair = authority.issue(common_name="worker", client=True)
    pod = worker.Pod(tmp_path / "pod")
    env = {"IMPORTER_SOURCE": "nbd", "IMPORTER_ENDPOINT": f"nbds://127.0.0.1:{strict}/"}
    env |= {"IMPORTER_IMAGE_SIZE": str(64 * MIB), "IMPORTER_CERT_DIR": str(tmp_path / "ca")}
    (tmp_path / "ca").mkdir()
    (tmp_path / "ca/ca.crt").write_bytes(authority.certificate.read_bytes())
    done = worker.call(*pod.arguments, f"--cert={pair.certificate}", f"--key={pair.key}", env=env)
    assert done.status == 0, done.errors
    oracle.same(pod.disk, raw)


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["block512"], indirect=True)
def test_errors_of_some_reads_are_retried(tmp_path: Path, raw: Path, target: Path) -> None:
    options = ("--filter=error", "file", raw, "error-pread=EIO", "error-pread-rate=20%")
    with nbd_exports.nbdkit(tmp_path, "-r", *options) as port:
        import_(f"nbd://127.0.0.1:{port}/", target, connect_patience=20.0)
    oracle.same(target, raw, beyond=devices.beyond(target))


def test_bad_sector_is_an_error_with_its_place(tmp_path: Path) -> None:
    code = 'if [ "$4" -ge 8388608 ]; then echo EIO Bad sector >&2; exit 1; fi; head -c "$3" /dev/zero'
    with (
        nbd_exports.nbdkit(tmp_path, "-r", "eval", "get_size=echo 16M", f"pread={code}") as port,
        pytest.raises(errors.TransferFailed, match=r"reading at byte \d+: input/output error; no data"),
    ):
        import_(f"nbd://127.0.0.1:{port}/", tmp_path / "disk.img", fetch=fetch.FetchOptions(no_progress=1.0))
    oracle.unusable(tmp_path / "disk.img")


# -- resuming --------------------------------------------------------------------------------------


def interrupt(url: str, target: Path, **fields: Any) -> None:
    """Import a part of the disk of ``slow``, then cancel."""
    cancel, part = cancelling.Cancel(), target.with_name(f"{target.name}.part")

    def stop() -> None:
        processes.wait_for(lambda: part.exists() and part.stat().st_blocks * 512 > 8 * MIB, "some data")
        cancel.set()

    wanted = request.Request(
        source="nbd", location=locations.Nbd(url, **fields), target=str(target), journal_interval=0.1
    )
    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(errors.Cancelled):
        execute.run(wanted, cancel=cancel)
    thread.join()
    target.with_name("rate").write_text("1G")


@contextlib.contextmanager
def slow(tmp_path: Path, disk: Path) -> Iterator[int]:
    """Serve the disk at 5 MB/s until ``interrupt`` has ended."""
    rate = tmp_path / "rate"
    rate.write_text("40M")
    with nbd_exports.nbdkit(tmp_path, "-r", "--filter=rate", "file", disk, f"rate-file={rate}") as port:
        yield port


def test_named_moment_is_resumed(tmp_path: Path, raw: Path) -> None:
    target = tmp_path / "disk.img"
    with slow(tmp_path, raw) as port:
        url = f"nbd://127.0.0.1:{port}/"
        interrupt(url, target, current="monday")
        done = import_(url, target, current="monday")
    oracle.same(target, raw)
    assert done.resumed > 4 * MIB


def test_nothing_is_resumed_without_a_named_moment(tmp_path: Path, raw: Path) -> None:
    """NBD has no identity: the export may be another disk since then."""
    target = tmp_path / "disk.img"
    with slow(tmp_path, raw) as port:
        interrupt(f"nbd://127.0.0.1:{port}/", target)
        done = import_(f"nbd://127.0.0.1:{port}/", target)
    oracle.same(target, raw)
    assert done.resumed == 0


def test_changed_disk_with_the_same_name_starts_over(tmp_path: Path, raw: Path) -> None:
    target, disk = tmp_path / "disk.img", tmp_path / "changing.raw"
    processes.run("cp", "--sparse=always", raw, disk)
    with slow(tmp_path, disk) as port:
        url = f"nbd://127.0.0.1:{port}/"
        interrupt(url, target, current="monday")
        with disk.open("r+b") as file:
            file.seek(512 << 10)
            file.write(random.Random(1).randbytes(28 * MIB))
        done = import_(url, target, current="monday")
    oracle.same(target, disk)
    assert done.resumed == 0


# -- changes since a dirty bitmap ------------------------------------------------------------------


@pytest.mark.parametrize("target", ["file", "block4096"], indirect=True)
def test_changes_since_a_bitmap_are_applied(tmp_path: Path, target: Path) -> None:
    disk, expected = tmp_path / "disk.qcow2", tmp_path / "expected.raw"
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", disk, str(SIZE))
    nbd_exports.write(disk, "write -P 0x11 0 8M", "write -P 0x12 30M 4M")
    nbd_exports.bitmap(disk, "first")
    with nbd_exports.storage_daemon(tmp_path, disk, "vda", "first") as port:
        import_(f"nbd://127.0.0.1:{port}/vda", target, current="first")
    changes = ("write -P 0x21 1M 64k", "write -z 2M 1M", "discard 31M 1M", "write -P 0x22 40M 3M")
    nbd_exports.write(disk, *changes)
    nbd_exports.bitmap(disk, "second")
    nbd_exports.write(disk, f"write -P 0x23 {SIZE - 512} 512")
    processes.run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", disk, expected)
    with nbd_exports.storage_daemon(tmp_path, disk, "vda", "first", "second") as port:
        url = f"nbd://127.0.0.1:{port}/vda"
        for _ in range(2):  # and again, as after a kill
            done = import_(url, target, previous="first", current="second")
            oracle.same(target, expected, beyond=b"\0")
    assert done.plan.route is plan.Route.UPDATE
    assert 3 * MIB < done.read < 4 * MIB


@pytest.mark.parametrize(
    ("target", "preallocation"),
    [("file", False), ("file", True), ("block512", False), ("block4096", True)],
    indirect=["target"],
)
def test_disk_that_becomes_smaller_and_larger_again_has_no_old_bytes(
    tmp_path: Path, target: Path, preallocation: bool
) -> None:
    """An export does not say how large it was: what is behind the end of a smaller one reads as zeros."""
    disks = [tmp_path / f"disk-{number}.qcow2" for number in range(3)]
    expected = tmp_path / "expected.raw"
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", disks[0], str(SIZE))
    nbd_exports.write(disks[0], f"write -P 0x11 0 {SIZE}")
    nbd_exports.bitmap(disks[0], "first")
    for before, disk, size, change in (
        (disks[0], disks[1], 12 * MIB + 512, "write -P 0x21 1M 64k"),
        (disks[1], disks[2], SIZE, "write -P 0x22 30M 64k"),
    ):
        processes.run("qemu-img", "convert", "-O", "qcow2", before, disk)
        processes.run("qemu-img", "resize", "-q", "--shrink", disk, str(size))
        nbd_exports.bitmap(disk, "since")
        nbd_exports.write(disk, change)
    processes.run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", disks[2], expected)
    stages = ("", "first"), ("first", "second"), ("second", "third")
    for disk, (previous, current) in zip(disks, stages, strict=True):
        bitmap = "since" if previous else "first"
        with nbd_exports.storage_daemon(tmp_path, disk, "vda", bitmap) as port:
            given = {"bitmap": bitmap} if previous else {}
            url = f"nbd://127.0.0.1:{port}/vda"
            import_(url, target, previous=previous, current=current, **given, preallocation=preallocation)
    oracle.same(target, expected, beyond=b"\0")


def test_bitmap_may_have_another_name_than_the_checkpoint(tmp_path: Path) -> None:
    """Libvirt calls the bitmap of a pull-mode backup backup-vda, whatever the checkpoint."""
    disk, target = tmp_path / "disk.qcow2", tmp_path / "disk.img"
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", disk, str(SIZE))
    nbd_exports.write(disk, "write -P 0x11 0 8M")
    nbd_exports.bitmap(disk, "backup-vda")
    with nbd_exports.qemu_nbd(tmp_path, disk, "-B", "backup-vda", form="qcow2") as port:
        import_(f"nbd://127.0.0.1:{port}/", target, current="monday")
    nbd_exports.write(disk, "write -P 0x21 1M 64k")
    expected = tmp_path / "expected.raw"
    processes.run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", disk, expected)
    with nbd_exports.qemu_nbd(tmp_path, disk, "-B", "backup-vda", form="qcow2") as port:
        url, given = f"nbd://127.0.0.1:{port}/", {"current": "tuesday", "bitmap": "backup-vda"}
        with pytest.raises(errors.TargetError, match="holds the disk at checkpoint monday"):
            import_(url, target, previous="sunday", **given)
        done = import_(url, target, previous="monday", **given)
    oracle.same(target, expected)
    assert done.read == 64 << 10


def test_missing_bitmap_lists_those_of_the_server(tmp_path: Path, raw: Path, qcow2: Path) -> None:
    target = tmp_path / "disk.img"
    disk = tmp_path / "disk.qcow2"
    processes.run("cp", qcow2, disk)
    nbd_exports.bitmap(disk, "monday")
    devices.fill(target, SIZE)
    with nbd_exports.storage_daemon(tmp_path, disk, "vda", "monday") as port:
        with opened(f"nbd://127.0.0.1:{port}/vda") as found:
            assert found.source.describe()["bitmaps"] == ["monday"]
        with pytest.raises(errors.SourceError, match=r"no dirty bitmap 'x' \(the server lists: 'monday'\)"):
            import_(f"nbd://127.0.0.1:{port}/vda", target, previous="x", current="y")
    with (
        nbd_exports.nbdkit(tmp_path, "-r", "file", raw) as port,
        pytest.raises(errors.SourceError, match=r"\(the server lists: none\)"),
    ):
        import_(f"nbd://127.0.0.1:{port}/vda", target, previous="x", current="y")


# -- locations -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("nbd://", "needs a host"),
        ("nbd:///x", "needs a host"),
        ("nbd://h:99999/", "malformed NBD address"),
        ("nbd://me:secret@h/", "must not have a user name"),
        ("nbd://h/x?tls-psk-file=y", "unsupported part of an NBD address: tls-psk-file"),
        ("nbd+unix:///x", "nbd+unix:///EXPORT?socket=PATH"),
        ("nbd+unix://h/x?socket=/s", "nbd+unix:///EXPORT?socket=PATH"),
        ("nbd://h/%ff", "malformed NBD address"),
        ("nbd://h/%00", "no NUL"),
        ("nbd://h/" + "x" * 4097, "at most 4096 bytes"),
        ("http://h/", "begins with nbd://"),
    ],
)
def test_invalid_address_is_a_fault(url: str, fault: str) -> None:
    found = list(locations.Nbd(url).faults())
    assert len(found) == 1
    assert fault in found[0]
    assert "secret" not in found[0]


def test_fields_that_do_not_fit_are_faults() -> None:
    found = list(locations.Nbd("nbd://h/", bitmap="b", key="k").faults())
    assert len(found) == 2
    found = list(locations.Nbd("nbd://h/", certificate="c").faults())
    assert found == ["nbd://h/: a client certificate is only sent over TLS; use nbds://"]
    assert list(locations.Nbd("nbd://[::1]:10810/a%20b").faults()) == []
    assert locations.parse("nbd://[::1]:10810/a%20b").name == "nbd://[::1]:10810/a%20b"
