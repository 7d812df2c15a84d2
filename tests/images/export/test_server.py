"""Real NBD clients read an export; errors of its source end the block."""

from __future__ import annotations

import errno
import json
import random
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.images.export import server
from cdi_worker.images.tools import qemu_img, qemu_nbd
from tests.support import devices, hostile, nbd_wire, oracle, processes
from tests.support import disks as disks_module

KiB, MiB = 1 << 10, 1 << 20


def from_file(path: Path) -> server.NbdServer:
    return nbd_wire.from_memory(path.read_bytes())


@pytest.fixture
def export() -> Iterator[server.NbdServer]:
    with nbd_wire.from_memory(nbd_wire.SERVED) as running:
        yield running


def uri(export: server.NbdServer) -> str:
    return f"nbd+unix:///?socket={export.socket}"


# -- real clients ----------------------------------------------------------------------------


def test_nbdinfo_reports_a_read_only_disk(export: server.NbdServer) -> None:
    processes.need("nbdinfo")
    info = json.loads(processes.run("nbdinfo", "--no-content", "--json", uri(export)).stdout)
    assert info["protocol"] == "newstyle-fixed"
    (disk,) = info["exports"]
    assert disk["export-size"] == nbd_wire.SIZE
    assert disk["is_read_only"]
    assert disk["can_multi_conn"]
    assert disk["block_size_maximum"] == 32 * MiB


@pytest.mark.parametrize("options", [[], ["--synchronous"], ["--request-size=8192", "--connections=4"]])
def test_nbdcopy_copies_every_byte(options: list[str], export: server.NbdServer, tmp_path: Path) -> None:
    processes.need("nbdcopy")
    copy = tmp_path / "copy"
    processes.run("nbdcopy", *options, uri(export), copy)
    assert copy.read_bytes() == nbd_wire.CONTENT


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("qcow2-zstd", "qcow2"),
        ("vmdk-stream", "vmdk"),
        ("vdi", "vdi"),
        ("vhd-fixed", "vhd"),
        ("vhdx", "vhdx"),
    ],
)
def test_qemu_img_converts_an_export(
    variant: str, kind: str, disks: disks_module.Disks, tmp_path: Path
) -> None:
    target = devices.fill(tmp_path / "target", 8 * MiB)
    with from_file(disks.image(variant)) as running:
        node = qemu_img.text(qemu_img.exported(running.socket, kind))
        processes.run("qemu-img", "convert", "-O", "raw", node, target)
    oracle.same(target, disks.expected(variant))


def test_qemu_img_reads_an_image_that_ends_within_a_sector(disks: disks_module.Disks, tmp_path: Path) -> None:
    """QEMU counts in sectors, and would wait forever for the part of the last one missing in a reply."""
    image = hostile.image(disks, "vmdk-truncated")
    assert image.stat().st_size % 512
    target, expected = devices.fill(tmp_path / "target", 8 * MiB), tmp_path / "expected"
    disks_module.to_raw(image, "vmdk", expected)
    with from_file(image) as running:
        node = qemu_img.text(qemu_img.exported(running.socket, "vmdk"))
        processes.run("qemu-img", "convert", "-O", "raw", node, target, timeout=10)
    oracle.same(target, expected)


def test_libnbd_has_many_reads_in_flight(export: server.NbdServer) -> None:
    libnbd = pytest.importorskip("nbd")
    client = libnbd.NBD()
    client.connect_unix(export.socket)
    dice = random.Random(9)
    expected, commands = [], []
    for _ in range(60):
        offset = dice.randrange(nbd_wire.SIZE)
        length = min(dice.randrange(1, 300_000), nbd_wire.SIZE - offset)
        buffer = libnbd.Buffer(length)
        expected.append((buffer, nbd_wire.CONTENT[offset : offset + length]))
        commands.append(client.aio_pread(buffer, offset))
    while commands := [each for each in commands if not client.aio_command_completed(each)]:
        client.poll(-1)
    for buffer, content in expected:
        assert buffer.to_bytearray() == content
    client.shutdown()


def test_slow_read_does_not_delay_others() -> None:
    gate = threading.Event()

    def read(offset: int, into: memoryview) -> None:
        if offset < MiB:
            assert gate.wait(20)
        into[:] = bytes(len(into))

    with server.NbdServer(read, 8 * MiB, cancelling.Cancel()) as running, nbd_wire.Client(running) as client:
        client.go()
        client.request(nbd_wire.READ, 0, 512, cookie=1)
        client.request(nbd_wire.READ, 4 * MiB, 512, cookie=2)
        assert client.reply(512) == (0, 2, bytes(512))
        gate.set()
        assert client.reply(512) == (0, 1, bytes(512))


# -- errors ------------------------------------------------------------------------------------


def failing() -> server.NbdServer:
    def read(offset: int, into: memoryview) -> None:
        raise errors.SourceChanged(url="http://x/disk", what="ETag", before="a", now="b")

    return server.NbdServer(read, MiB, cancelling.Cancel())


def test_block_raises_the_source_error() -> None:
    with (
        pytest.raises(errors.SourceChanged) as caught,
        failing() as running,
        qemu_nbd.serve(qemu_img.exported(running.socket, "qcow2")),
    ):
        pass
    assert isinstance(caught.value.__cause__, errors.ToolFailed)


def test_failed_read_is_raised_even_if_the_client_ignores_it() -> None:
    failed = pytest.raises(errors.SourceChanged)
    with failed, failing() as running, nbd_wire.Client(running) as client:
        client.go()
        client.request(nbd_wire.READ, 0, 512, cookie=3)
        assert client.reply(0) == (errno.EIO, 3, b"")


def test_error_of_the_block_takes_precedence() -> None:
    cancelled = pytest.raises(errors.Cancelled)
    with cancelled, failing() as running, nbd_wire.Client(running) as client:
        client.go()
        client.request(nbd_wire.READ, 0, 512)
        client.reply(0)
        raise errors.Cancelled


def test_export_closes_while_reads_are_blocked() -> None:
    scope = cancelling.Cancel()

    def read(offset: int, into: memoryview) -> None:
        assert scope.wait(20)

    before = set(threading.enumerate())
    with server.NbdServer(read, 64 * MiB, scope) as running:
        clients = [nbd_wire.Client(running) for _ in range(3)]
        for client in clients:
            client.go()
            for offset in range(0, 64 * MiB, 4 * MiB):
                client.request(nbd_wire.READ, offset, 4 * MiB)
    for client in clients:
        client.close()
    assert set(threading.enumerate()) <= before


def test_socket_is_private_and_removed(export: server.NbdServer) -> None:
    directory = Path(export.socket).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    with nbd_wire.from_memory(b"x") as other:
        path = Path(other.socket)
        assert path.exists()
    assert not path.parent.exists()
