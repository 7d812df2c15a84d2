"""Real NBD clients read what is exported; broken ones harm nobody."""

from __future__ import annotations

import contextlib
import errno
import json
import random
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from images import nbd, process, qemu_img
from importer import errors
from tests import devices, hostile, oracle, processes
from tests import disks as disks_module

KiB, MiB = 1 << 10, 1 << 20
SERVED = random.Random(8).randbytes(5 * MiB + 333)
CONTENT = SERVED + bytes(179)  # to the end of a sector
SIZE = len(CONTENT)

REQUEST_MAGIC, REPLY_MAGIC = 0x25609513, 0x67446698
READ, WRITE, DISCONNECT, FLUSH, TRIM, WRITE_ZEROES, BLOCK_STATUS = 0, 1, 2, 3, 4, 6, 7


def from_memory(content: bytes) -> nbd.Export:
    def read(offset: int, into: memoryview, stop: threading.Event) -> None:
        into[:] = content[offset : offset + len(into)]

    return nbd.Export(read, len(content))


def from_file(path: Path) -> nbd.Export:
    return from_memory(path.read_bytes())


@pytest.fixture
def export() -> Iterator[nbd.Export]:
    with from_memory(SERVED) as served:
        yield served


def uri(export: nbd.Export) -> str:
    return f"nbd+unix:///?socket={export.socket}"


# -- real clients ----------------------------------------------------------------------------


def test_nbdinfo_sees_a_read_only_disk(export: nbd.Export) -> None:
    processes.need("nbdinfo")
    info = json.loads(processes.run("nbdinfo", "--no-content", "--json", uri(export)).stdout)
    assert info["protocol"] == "newstyle-fixed"
    (disk,) = info["exports"]
    assert disk["export-size"] == SIZE
    assert disk["is_read_only"]
    assert disk["can_multi_conn"]
    assert disk["block_size_maximum"] == 32 * MiB
    listed = json.loads(processes.run("nbdinfo", "--no-content", "--list", "--json", uri(export)).stdout)
    assert [each["export-name"] for each in listed["exports"]] == [""]


@pytest.mark.parametrize("options", [[], ["--synchronous"], ["--request-size=8192", "--connections=4"]])
def test_nbdcopy_gets_every_byte(options: list[str], export: nbd.Export, tmp_path: Path) -> None:
    processes.need("nbdcopy")
    copy = tmp_path / "copy"
    processes.run("nbdcopy", *options, uri(export), copy)
    assert copy.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("qcow2", "qcow2"),
        ("qcow2-zstd", "qcow2"),
        ("qcow2-512", "qcow2"),
        ("vmdk", "vmdk"),
        ("vmdk-stream", "vmdk"),
        ("vdi", "vdi"),
        ("vhd", "vhd"),
        ("vhd-fixed", "vhd"),
        ("vhdx", "vhdx"),
    ],
)
def test_qemu_img_converts(variant: str, kind: str, disks: disks_module.Disks, tmp_path: Path) -> None:
    target = devices.fill(tmp_path / "target", 8 * MiB)
    with from_file(disks.image(variant)) as served:
        source = qemu_img.exported(served.socket, kind)
        size = qemu_img.virtual_size(source)
        qemu_img.convert(source, target, size)
    oracle.same(target, disks.expected(variant))


def test_qemu_img_reads_an_image_that_ends_within_a_sector(disks: disks_module.Disks, tmp_path: Path) -> None:
    """Its client counts in sectors and would wait for ever for what a reply lacks of the last."""
    image = hostile.image(disks, "vmdk-truncated")
    assert image.stat().st_size % 512
    target, expected = devices.fill(tmp_path / "target", 8 * MiB), tmp_path / "expected"
    disks_module.to_raw(image, "vmdk", expected)
    with from_file(image) as served:
        follow = qemu_img.Follow(watch=process.Watch("qemu-img", 10))
        qemu_img.convert(qemu_img.exported(served.socket, "vmdk"), target, 8 * MiB, follow=follow)
    oracle.same(target, expected)


def test_libnbd_has_many_reads_in_flight(export: nbd.Export) -> None:
    libnbd = pytest.importorskip("nbd")
    client = libnbd.NBD()
    client.connect_unix(export.socket)
    dice = random.Random(9)
    expected, commands = [], []
    for _ in range(60):
        offset = dice.randrange(SIZE)
        length = min(dice.randrange(1, 300_000), SIZE - offset)
        buffer = libnbd.Buffer(length)
        expected.append((buffer, CONTENT[offset : offset + length]))
        commands.append(client.aio_pread(buffer, offset))
    while commands := [each for each in commands if not client.aio_command_completed(each)]:
        client.poll(-1)
    for buffer, content in expected:
        assert buffer.to_bytearray() == content
    client.shutdown()


def test_a_slow_read_does_not_hold_up_others() -> None:
    gate = threading.Event()

    def read(offset: int, into: memoryview, stop: threading.Event) -> None:
        if offset < MiB:
            assert gate.wait(20)
        into[:] = bytes(len(into))

    with nbd.Export(read, 8 * MiB) as served, Client(served) as client:
        client.go()
        client.request(READ, 0, 512, cookie=1)
        client.request(READ, 4 * MiB, 512, cookie=2)
        assert client.reply(512) == (0, 2, bytes(512))
        gate.set()
        assert client.reply(512) == (0, 1, bytes(512))


# -- errors ------------------------------------------------------------------------------------


def failing(offset: int, into: memoryview, stop: threading.Event) -> None:
    raise errors.SourceChanged(url="http://x/disk", what="ETag", before="a", now="b")


def test_the_true_cause_leaves_the_block(tmp_path: Path) -> None:
    with pytest.raises(errors.SourceChanged) as caught, nbd.Export(failing, MiB) as served:
        qemu_img.virtual_size(qemu_img.exported(served.socket, "qcow2"))
    assert isinstance(caught.value.__cause__, errors.Unsupported)


def test_a_failed_read_is_an_error_also_when_the_client_does_not_mind() -> None:
    failed = pytest.raises(errors.SourceChanged)
    with failed, nbd.Export(failing, MiB) as served, Client(served) as client:
        client.go()
        client.request(READ, 0, 512, cookie=3)
        assert client.reply(0) == (errno.EIO, 3, b"")


def test_other_errors_of_the_block_stay() -> None:
    cancelled = pytest.raises(errors.Cancelled)
    with cancelled, nbd.Export(failing, MiB) as served, Client(served) as client:
        client.go()
        client.request(READ, 0, 512)
        client.reply(0)
        raise errors.Cancelled


@pytest.mark.parametrize("notices", ["the event", "the interruption"])
def test_it_closes_while_reads_hang_and_clients_wait(notices: str) -> None:
    interrupted = threading.Event()

    def read(offset: int, into: memoryview, stop: threading.Event) -> None:
        assert (stop if notices == "the event" else interrupted).wait(20)

    before = threading.active_count()
    with nbd.Export(read, 64 * MiB, interrupt=interrupted.set) as served:
        clients = [Client(served) for _ in range(3)]
        for client in clients:
            client.go()
            for offset in range(0, 64 * MiB, 4 * MiB):
                client.request(READ, offset, 4 * MiB)
    for client in clients:
        client.close()
    assert threading.active_count() == before


def test_nobody_else_can_reach_it_and_nothing_stays(export: nbd.Export) -> None:
    directory = Path(export.socket).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    with from_memory(b"x") as other:
        path = Path(other.socket)
        assert path.exists()
    assert not path.parent.exists()


# -- hostile clients ---------------------------------------------------------------------------


class Client:
    """The client's half of the protocol, to be misused."""

    def __init__(self, export: nbd.Export) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        self.socket.connect(export.socket)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def receive(self, length: int) -> bytes:
        data = b""
        while len(data) < length and (more := self.socket.recv(length - len(data))):
            data += more
        return data

    def hung_up(self) -> bool:
        with contextlib.suppress(ConnectionError):
            return self.socket.recv(1) == b""
        return True

    def greet(self, flags: int = 3) -> None:
        assert self.receive(18) == b"NBDMAGICIHAVEOPT\x00\x03"
        self.socket.sendall(struct.pack(">I", flags))

    def option(self, number: int, data: bytes = b"", length: int | None = None) -> None:
        length = len(data) if length is None else length
        self.socket.sendall(b"IHAVEOPT" + struct.pack(">II", number, length) + data)

    def option_reply(self) -> tuple[int, int, bytes]:
        magic, option, kind, length = struct.unpack(">QIII", self.receive(20))
        assert magic == 0x3E889045565A9
        return option, kind, self.receive(length)

    def go(self) -> None:
        self.greet()
        self.option(7, struct.pack(">IH", 0, 0))
        kinds = [self.option_reply()[1] for _ in range(3)]
        assert kinds == [3, 3, 1]

    def request(self, kind: int, offset: int, length: int, cookie: int = 7, flags: int = 0) -> None:
        self.socket.sendall(struct.pack(">IHHQQI", REQUEST_MAGIC, flags, kind, cookie, offset, length))

    def reply(self, length: int) -> tuple[int, int, bytes]:
        magic, error, cookie = struct.unpack(">IIQ", self.receive(16))
        assert magic == REPLY_MAGIC
        return error, cookie, self.receive(length)


@pytest.fixture
def client(export: nbd.Export) -> Iterator[Client]:
    with Client(export) as connected:
        yield connected


def still_serves(export: nbd.Export) -> None:
    with Client(export) as other:
        other.go()
        other.request(READ, SIZE - 5, 5)
        assert other.reply(5) == (0, 7, CONTENT[-5:])


def test_the_old_way_into_transmission(client: Client) -> None:
    client.greet(flags=1)
    client.option(1)
    assert client.receive(10 + 124) == struct.pack(">QH", SIZE, 0x103) + bytes(124)
    client.request(READ, 0, 10)
    assert client.reply(10) == (0, 7, CONTENT[:10])


@pytest.mark.parametrize("flags", [4, 1 << 31])
def test_unknown_client_flags(flags: int, export: nbd.Export, client: Client) -> None:
    client.greet(flags)
    assert client.hung_up()
    still_serves(export)


@pytest.mark.parametrize(
    ("number", "data", "kind"),
    [
        (7, b"", 0x80000003),
        (7, struct.pack(">I", 0xFFFFFFFF) + b"abc", 0x80000003),
        (6, struct.pack(">IH", 0, 9), 0x80000003),
        (7, struct.pack(">I", 5) + b"other" + bytes(2), 0x80000006),
        (3, b"x", 0x80000003),
        (5, b"", 0x80000001),
        (8, b"", 0x80000001),
        (10, bytes(100), 0x80000001),
        (0xFFFFFFFF, bytes(8000), 0x80000001),
    ],
)
def test_odd_options_are_answered(number: int, data: bytes, kind: int, client: Client) -> None:
    client.greet()
    client.option(number, data)
    assert client.option_reply() == (number, kind, b"")
    client.option(2)
    assert client.option_reply() == (2, 1, b"")
    assert client.hung_up()


def test_too_long_an_option_is_not_read(export: nbd.Export, client: Client) -> None:
    client.greet()
    client.option(7, length=0xFFFFFFFF)
    assert client.hung_up()
    still_serves(export)


def test_options_without_end(export: nbd.Export, client: Client) -> None:
    client.greet()
    with contextlib.suppress(ConnectionError, struct.error):
        for _ in range(1000):
            client.option(99)
            client.option_reply()
    still_serves(export)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 100])
def test_a_stranger(said: bytes, export: nbd.Export, client: Client) -> None:
    client.socket.sendall(said)
    assert client.receive(18).startswith(b"NBDMAGIC")
    assert client.hung_up()
    still_serves(export)


@pytest.mark.parametrize(
    ("kind", "offset", "length", "error"),
    [
        (READ, 0, 0, errno.EINVAL),
        (READ, SIZE, 1, errno.EINVAL),
        (READ, SIZE - 1, 2, errno.EINVAL),
        (READ, (1 << 64) - 1, 2, errno.EINVAL),
        (READ, 0, 32 * MiB + 1, errno.EINVAL),
        (READ, 0, 0xFFFFFFFF, errno.EINVAL),
        (TRIM, 0, 512, errno.EPERM),
        (WRITE_ZEROES, 0, 512, errno.EPERM),
        (FLUSH, 0, 0, errno.EINVAL),
        (BLOCK_STATUS, 0, 512, errno.EINVAL),
        (99, 0, 512, errno.EINVAL),
    ],
)
def test_odd_requests_are_errors_and_no_more(
    kind: int, offset: int, length: int, error: int, client: Client
) -> None:
    client.go()
    client.request(kind, offset, length)
    assert client.reply(0) == (error, 7, b"")
    client.request(READ, 1, 3, cookie=9)
    assert client.reply(3) == (0, 9, CONTENT[1:4])


def test_flags_of_a_read_are_refused(client: Client) -> None:
    client.go()
    client.request(READ, 0, 512, flags=4)
    assert client.reply(0) == (errno.EINVAL, 7, b"")


def test_a_write_is_taken_in_and_refused(client: Client) -> None:
    client.go()
    client.request(WRITE, 0, 100_000)
    client.socket.sendall(b"w" * 100_000)
    assert client.reply(0) == (errno.EPERM, 7, b"")
    client.request(READ, 0, 1)
    assert client.reply(1) == (0, 7, CONTENT[:1])


def test_too_long_a_write_is_not_taken_in(export: nbd.Export, client: Client) -> None:
    client.go()
    client.request(WRITE, 0, 0xFFFFFFFF)
    assert client.hung_up()
    still_serves(export)


def test_a_wrong_magic_ends_the_connection(export: nbd.Export, client: Client) -> None:
    client.go()
    client.socket.sendall(b"\0" * 28)
    assert client.hung_up()
    still_serves(export)


@pytest.mark.parametrize("sent", [1, 4, 17, 27])
def test_a_request_cut_short(sent: int, export: nbd.Export, client: Client) -> None:
    client.go()
    client.socket.sendall(struct.pack(">IHHQQI", REQUEST_MAGIC, 0, READ, 1, 0, 512)[:sent])
    client.close()
    still_serves(export)


def test_one_that_asks_and_never_reads(export: nbd.Export, client: Client) -> None:
    client.go()
    for _ in range(3):
        # Not of the bytes that another wants: who shares a read with it may wait for it.
        client.request(READ, 0, MiB)
    still_serves(export)


def test_too_many_connections_are_turned_away(export: nbd.Export) -> None:
    clients = [Client(export) for _ in range(20)]
    greeted = sum(client.receive(18) != b"" for client in clients)
    assert greeted == 16
    for client in clients:
        client.close()


def test_disconnect_is_an_orderly_end(export: nbd.Export, client: Client) -> None:
    client.go()
    client.request(DISCONNECT, 0, 0)
    assert client.hung_up()
