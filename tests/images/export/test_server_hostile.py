"""Misbehaving NBD clients do not affect others."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

import pytest

from cdi_worker.images.export import server
from tests.support import nbd_wire


@pytest.fixture
def export() -> Iterator[server.NbdServer]:
    with nbd_wire.from_memory(nbd_wire.SERVED) as exported:
        yield exported


@pytest.fixture
def client(export: server.NbdServer) -> Iterator[nbd_wire.Client]:
    with nbd_wire.Client(export) as connected:
        yield connected


def check_serves_others(export: server.NbdServer) -> None:
    with nbd_wire.Client(export) as other:
        other.go()
        other.request(nbd_wire.READ, nbd_wire.SIZE - 5, 5)
        assert other.reply(5) == (0, 7, nbd_wire.CONTENT[-5:])


@pytest.mark.parametrize("flags", [4, 1 << 31])
def test_unknown_client_flags_close_the_connection(
    flags: int, export: server.NbdServer, client: nbd_wire.Client
) -> None:
    client.greet(flags)
    assert client.hung_up()
    check_serves_others(export)


@pytest.mark.parametrize(
    ("number", "data", "kind"),
    [
        (7, b"", 0x80000003),
        (7, struct.pack(">I", 0xFFFFFFFF) + b"abc", 0x80000003),
        (7, struct.pack(">IH", 0, 9), 0x80000003),
        (7, struct.pack(">I", 5) + b"other" + bytes(2), 0x80000003),
        (1, b"", 0x80000001),
        (5, b"", 0x80000001),
        (8, b"", 0x80000001),
        (10, bytes(100), 0x80000001),
        (0xFFFFFFFF, bytes(8000), 0x80000001),
    ],
)
def test_invalid_option_gets_error_reply(
    number: int, data: bytes, kind: int, client: nbd_wire.Client
) -> None:
    client.greet()
    client.option(number, data)
    assert client.option_reply() == (number, kind, b"")
    client.option(2)
    assert client.hung_up()


def test_overlong_option_closes_the_connection(export: server.NbdServer, client: nbd_wire.Client) -> None:
    client.greet()
    client.option(7, length=0xFFFFFFFF)
    assert client.hung_up()
    check_serves_others(export)


def test_endless_options_do_not_block_others(export: server.NbdServer, client: nbd_wire.Client) -> None:
    client.greet()
    with contextlib.suppress(ConnectionError, struct.error):
        for _ in range(1000):
            client.option(99)
            client.option_reply()
    check_serves_others(export)


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 100])
def test_client_of_another_protocol_is_disconnected(
    greeting: bytes, export: server.NbdServer, client: nbd_wire.Client
) -> None:
    client.socket.sendall(greeting)
    assert client.receive(18).startswith(b"NBDMAGIC")
    assert client.hung_up()
    check_serves_others(export)


@pytest.mark.parametrize(
    ("kind", "offset", "length"),
    [
        (nbd_wire.READ, 0, 0),
        (nbd_wire.READ, nbd_wire.SIZE, 1),
        (nbd_wire.READ, nbd_wire.SIZE - 1, 2),
        (nbd_wire.READ, (1 << 64) - 1, 2),
        (nbd_wire.READ, 0, 32 * nbd_wire.MiB + 1),
        (nbd_wire.READ, 0, 0xFFFFFFFF),
        (nbd_wire.WRITE, 0, 0xFFFFFFFF),
        (nbd_wire.TRIM, 0, 512),
        (nbd_wire.WRITE_ZEROES, 0, 512),
        (nbd_wire.FLUSH, 0, 0),
        (nbd_wire.BLOCK_STATUS, 0, 512),
        (nbd_wire.DISCONNECT, 0, 0),
        (99, 0, 512),
    ],
)
def test_request_that_is_not_a_read_closes_the_connection(
    kind: int, offset: int, length: int, export: server.NbdServer, client: nbd_wire.Client
) -> None:
    client.go()
    client.request(kind, offset, length)
    assert client.hung_up()
    check_serves_others(export)


def test_read_with_flags_closes_the_connection(client: nbd_wire.Client) -> None:
    client.go()
    client.request(nbd_wire.READ, 0, 512, flags=4)
    assert client.hung_up()


def test_wrong_magic_closes_the_connection(export: server.NbdServer, client: nbd_wire.Client) -> None:
    client.go()
    client.socket.sendall(b"\0" * 28)
    assert client.hung_up()
    check_serves_others(export)


@pytest.mark.parametrize("sent", [1, 4, 17, 27])
def test_incomplete_request_is_dropped(sent: int, export: server.NbdServer, client: nbd_wire.Client) -> None:
    client.go()
    client.socket.sendall(struct.pack(">IHHQQI", nbd_wire.REQUEST_MAGIC, 0, nbd_wire.READ, 1, 0, 512)[:sent])
    client.close()
    check_serves_others(export)


def test_client_that_never_reads_does_not_block_others(
    export: server.NbdServer, client: nbd_wire.Client
) -> None:
    client.go()
    for _ in range(3):
        # Not the bytes of the other client: a shared read would make that one wait.
        client.request(nbd_wire.READ, 0, nbd_wire.MiB)
    check_serves_others(export)


def test_too_many_connections_are_refused(export: server.NbdServer) -> None:
    clients = [nbd_wire.Client(export) for _ in range(20)]
    greeted = sum(client.receive(18) != b"" for client in clients)
    assert greeted == 16
    for client in clients:
        client.close()
