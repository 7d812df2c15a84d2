"""Broken NBD clients harm nobody."""

from __future__ import annotations

import contextlib
import errno
import struct
from collections.abc import Iterator

import pytest

from cdi_worker.images.export import server
from tests.support import nbd_wire


@pytest.fixture
def export() -> Iterator[server.Export]:
    with nbd_wire.from_memory(nbd_wire.SERVED) as served:
        yield served


@pytest.fixture
def client(export: server.Export) -> Iterator[nbd_wire.Client]:
    with nbd_wire.Client(export) as connected:
        yield connected


def still_serves(export: server.Export) -> None:
    with nbd_wire.Client(export) as other:
        other.go()
        other.request(nbd_wire.READ, nbd_wire.SIZE - 5, 5)
        assert other.reply(5) == (0, 7, nbd_wire.CONTENT[-5:])


def test_the_old_way_into_transmission(client: nbd_wire.Client) -> None:
    client.greet(flags=1)
    client.option(1)
    assert client.receive(10 + 124) == struct.pack(">QH", nbd_wire.SIZE, 0x103) + bytes(124)
    client.request(nbd_wire.READ, 0, 10)
    assert client.reply(10) == (0, 7, nbd_wire.CONTENT[:10])


@pytest.mark.parametrize("flags", [4, 1 << 31])
def test_unknown_client_flags(flags: int, export: server.Export, client: nbd_wire.Client) -> None:
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
def test_odd_options_are_answered(number: int, data: bytes, kind: int, client: nbd_wire.Client) -> None:
    client.greet()
    client.option(number, data)
    assert client.option_reply() == (number, kind, b"")
    client.option(2)
    assert client.option_reply() == (2, 1, b"")
    assert client.hung_up()


def test_too_long_an_option_is_not_read(export: server.Export, client: nbd_wire.Client) -> None:
    client.greet()
    client.option(7, length=0xFFFFFFFF)
    assert client.hung_up()
    still_serves(export)


def test_options_without_end(export: server.Export, client: nbd_wire.Client) -> None:
    client.greet()
    with contextlib.suppress(ConnectionError, struct.error):
        for _ in range(1000):
            client.option(99)
            client.option_reply()
    still_serves(export)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 100])
def test_a_stranger(said: bytes, export: server.Export, client: nbd_wire.Client) -> None:
    client.socket.sendall(said)
    assert client.receive(18).startswith(b"NBDMAGIC")
    assert client.hung_up()
    still_serves(export)


@pytest.mark.parametrize(
    ("kind", "offset", "length", "error"),
    [
        (nbd_wire.READ, 0, 0, errno.EINVAL),
        (nbd_wire.READ, nbd_wire.SIZE, 1, errno.EINVAL),
        (nbd_wire.READ, nbd_wire.SIZE - 1, 2, errno.EINVAL),
        (nbd_wire.READ, (1 << 64) - 1, 2, errno.EINVAL),
        (nbd_wire.READ, 0, 32 * nbd_wire.MiB + 1, errno.EINVAL),
        (nbd_wire.READ, 0, 0xFFFFFFFF, errno.EINVAL),
        (nbd_wire.TRIM, 0, 512, errno.EPERM),
        (nbd_wire.WRITE_ZEROES, 0, 512, errno.EPERM),
        (nbd_wire.FLUSH, 0, 0, errno.EINVAL),
        (nbd_wire.BLOCK_STATUS, 0, 512, errno.EINVAL),
        (99, 0, 512, errno.EINVAL),
    ],
)
def test_odd_requests_are_errors_and_no_more(
    kind: int, offset: int, length: int, error: int, client: nbd_wire.Client
) -> None:
    client.go()
    client.request(kind, offset, length)
    assert client.reply(0) == (error, 7, b"")
    client.request(nbd_wire.READ, 1, 3, cookie=9)
    assert client.reply(3) == (0, 9, nbd_wire.CONTENT[1:4])


def test_flags_of_a_read_are_refused(client: nbd_wire.Client) -> None:
    client.go()
    client.request(nbd_wire.READ, 0, 512, flags=4)
    assert client.reply(0) == (errno.EINVAL, 7, b"")


def test_a_write_is_taken_in_and_refused(client: nbd_wire.Client) -> None:
    client.go()
    client.request(nbd_wire.WRITE, 0, 100_000)
    client.socket.sendall(b"w" * 100_000)
    assert client.reply(0) == (errno.EPERM, 7, b"")
    client.request(nbd_wire.READ, 0, 1)
    assert client.reply(1) == (0, 7, nbd_wire.CONTENT[:1])


def test_too_long_a_write_is_not_taken_in(export: server.Export, client: nbd_wire.Client) -> None:
    client.go()
    client.request(nbd_wire.WRITE, 0, 0xFFFFFFFF)
    assert client.hung_up()
    still_serves(export)


def test_a_wrong_magic_ends_the_connection(export: server.Export, client: nbd_wire.Client) -> None:
    client.go()
    client.socket.sendall(b"\0" * 28)
    assert client.hung_up()
    still_serves(export)


@pytest.mark.parametrize("sent", [1, 4, 17, 27])
def test_a_request_cut_short(sent: int, export: server.Export, client: nbd_wire.Client) -> None:
    client.go()
    client.socket.sendall(struct.pack(">IHHQQI", nbd_wire.REQUEST_MAGIC, 0, nbd_wire.READ, 1, 0, 512)[:sent])
    client.close()
    still_serves(export)


def test_one_that_asks_and_never_reads(export: server.Export, client: nbd_wire.Client) -> None:
    client.go()
    for _ in range(3):
        # Not of the bytes that another wants: who shares a read with it may wait for it.
        client.request(nbd_wire.READ, 0, nbd_wire.MiB)
    still_serves(export)


def test_too_many_connections_are_turned_away(export: server.Export) -> None:
    clients = [nbd_wire.Client(export) for _ in range(20)]
    greeted = sum(client.receive(18) != b"" for client in clients)
    assert greeted == 16
    for client in clients:
        client.close()


def test_disconnect_is_an_orderly_end(export: server.Export, client: nbd_wire.Client) -> None:
    client.go()
    client.request(nbd_wire.DISCONNECT, 0, 0)
    assert client.hung_up()
