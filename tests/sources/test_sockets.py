"""Receiving a body with few calls: every byte, whatever the peer's pace."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cdi_worker.sources import sockets
from tests.support import processes, tls

MIB = 1 << 20
DATA = os.urandom(4 * MIB)
#: Seconds.
TIMEOUT = 1.0
#: The header of a record with data, and its length (RFC 8446, 5.1).
RECORD_LENGTH = 16 << 10
RECORD = b"\x17\x03\x03" + RECORD_LENGTH.to_bytes(2)

Send = Callable[[Any], object]


@contextlib.contextmanager
def receiving(send: Send, pair: tls.KeyPair | None = None) -> Iterator[socket.socket]:
    """Yield the socket of a client whose peer runs ``send`` and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            taken: socket.socket = listener.accept()[0]
            if pair is not None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(pair.certificate, pair.key)
                taken = context.wrap_socket(taken, server_side=True)
            with taken, contextlib.suppress(OSError):
                send(taken)

        thread = threading.Thread(target=serve)
        thread.start()
        client = socket.create_connection(listener.getsockname(), timeout=TIMEOUT)
        if pair is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            client = context.wrap_socket(client)
        try:
            yield client
        finally:
            client.close()
            thread.join(processes.PATIENCE)


def read(client: socket.socket, into: memoryview) -> list[int]:
    """Fill ``into`` as an HTTP client does, the last byte by itself; return the lengths of the reads."""
    receiver, counts = sockets.Receiver(client), []
    done = 0
    while done < len(into) - 1:
        counts.append(receiver.readinto(into[done : min(done + MIB, len(into) - 1)]))
        if not counts[-1]:
            return counts
        done += counts[-1]
    receiver.reset()
    client.recv_into(into[done:])
    return counts


def in_pieces(size: int, pause: float) -> Send:
    def send(peer: socket.socket) -> None:
        for start in range(0, len(DATA), size):
            peer.sendall(DATA[start : start + size])
            time.sleep(pause)

    return send


@pytest.mark.parametrize("is_secure", [False, True])
def test_body_arrives_with_few_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_secure: bool
) -> None:
    # However busy this machine is.
    monkeypatch.setattr(sockets, "_SOON", processes.PATIENCE)
    pair = tls.Authority(tmp_path).issue() if is_secure else None
    into = memoryview(bytearray(len(DATA)))
    with receiving(in_pieces(16 << 10, 0.001), pair) as client:
        before = time.thread_time()
        counts = read(client, into)
        print("seconds of CPU", time.thread_time() - before)
    assert into == DATA
    # TLS has 256 records.
    assert len(counts) < (32 if is_secure else 16)


@pytest.mark.parametrize("is_secure", [False, True])
def test_slow_peer_is_no_silent_one(tmp_path: Path, is_secure: bool) -> None:
    """A few bytes within the time-out are progress."""
    pair = tls.Authority(tmp_path).issue() if is_secure else None
    sent = DATA[: 60 << 10]

    def send(peer: socket.socket) -> None:
        for start in range(0, len(sent), 10 << 10):
            peer.sendall(sent[start : start + (10 << 10)])
            time.sleep(TIMEOUT / 4)

    into = memoryview(bytearray(len(sent)))
    with receiving(send, pair) as client:
        read(client, into)
    assert into == sent


@pytest.mark.parametrize(
    ("count", "is_secure"), [(0, False), (1, True), (300 << 10, False), (300 << 10, True)]
)
def test_silent_peer_is_a_timeout(tmp_path: Path, count: int, is_secure: bool) -> None:
    pair = tls.Authority(tmp_path).issue() if is_secure else None
    over = threading.Event()

    def send(peer: socket.socket) -> None:
        peer.sendall(DATA[:count])
        over.wait(processes.PATIENCE)

    with receiving(send, pair) as client:
        receiver, into = sockets.Receiver(client), memoryview(bytearray(MIB))
        done = 0
        while done < count:
            # A busy machine may take longer to send.
            with contextlib.suppress(TimeoutError):
                done += receiver.readinto(into[done:])
        with pytest.raises(TimeoutError):
            receiver.readinto(into[done:])
        over.set()
    assert done == count
    assert into[:done] == DATA[:done]


@pytest.mark.parametrize(("end", "is_secure"), [("closed", True), ("reset", False), ("reset", True)])
def test_bytes_before_the_end_are_returned_at_once(tmp_path: Path, end: str, is_secure: bool) -> None:
    pair = tls.Authority(tmp_path).issue() if is_secure else None

    def send(peer: socket.socket) -> None:
        peer.sendall(DATA[: 200 << 10])
        # Both ends wake a thread that waits for more than they leave.
        time.sleep(TIMEOUT / 2)
        if end == "reset":
            sockets.shut(peer)

    into = memoryview(bytearray(MIB))
    with receiving(send, pair) as client:
        client.settimeout(processes.PATIENCE)
        receiver, done, began = sockets.Receiver(client), 0, time.monotonic()
        # OpenSSL 3.5 tells the peer that TLS was cut off; a peer that is gone breaks the pipe.
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while count := receiver.readinto(into[done:]):
                done += count
    assert time.monotonic() - began < processes.PATIENCE / 2
    assert done == (200 << 10)
    assert into[:done] == DATA[:done]


def test_record_that_never_ends_is_a_timeout(tmp_path: Path) -> None:
    """Each of its bytes is no progress: none of it is decrypted before it is whole."""
    over = threading.Event()

    def send(peer: ssl.SSLSocket) -> None:
        socket.socket.send(peer, RECORD)
        for _ in range(40):
            over.wait(TIMEOUT / 4)
            socket.socket.send(peer, b"x")

    with receiving(send, tls.Authority(tmp_path).issue()) as client:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            sockets.Receiver(client).readinto(memoryview(bytearray(1)))
        over.set()
        assert TIMEOUT <= time.monotonic() - began < processes.PATIENCE / 2


def test_records_without_data_are_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as updates of the key without end (RFC 8446, 4.6.3). A mock: Python's TLS cannot send them."""
    over = threading.Event()
    began = time.monotonic()

    def none(*_: object) -> int:
        assert time.monotonic() - began < 10 * TIMEOUT
        raise ssl.SSLWantReadError

    def send(peer: ssl.SSLSocket) -> None:
        peer.sendall(DATA[:RECORD_LENGTH])
        over.wait(processes.PATIENCE)

    monkeypatch.setattr(sockets.Receiver, "_receive_ready", none)
    with receiving(send, tls.Authority(tmp_path).issue()) as client:
        # What lies there is tried once more after the wait for many bytes.
        with pytest.raises(TimeoutError):
            sockets.Receiver(client).readinto(memoryview(bytearray(MIB)))
        over.set()


def test_rest_of_a_record_is_not_waited_for(tmp_path: Path) -> None:
    over = threading.Event()

    def send(peer: ssl.SSLSocket) -> None:
        peer.sendall(DATA[:RECORD_LENGTH])
        over.wait(processes.PATIENCE)

    into = memoryview(bytearray(RECORD_LENGTH))
    with receiving(send, tls.Authority(tmp_path).issue()) as client:
        receiver = sockets.Receiver(client)
        assert receiver.readinto(into[:1]) == 1
        began = time.monotonic()
        assert receiver.readinto(into[1:]) == RECORD_LENGTH - 1
        assert time.monotonic() - began < TIMEOUT / 2
        over.set()
    assert into == DATA[:RECORD_LENGTH]


@pytest.mark.parametrize("is_read_on", [False, True])
def test_failure_of_tls_is_not_lost_behind_bytes(tmp_path: Path, is_read_on: bool) -> None:
    def send(peer: ssl.SSLSocket) -> None:
        peer.sendall(DATA[: 100 << 10])
        socket.socket.sendall(peer, RECORD + bytes(RECORD_LENGTH))
        time.sleep(TIMEOUT / 2)

    into = memoryview(bytearray(MIB))
    with receiving(send, tls.Authority(tmp_path).issue()) as client:
        client.settimeout(processes.PATIENCE)
        # Bytes and failure arrive together.
        time.sleep(TIMEOUT / 4)
        receiver = sockets.Receiver(client)
        assert receiver.readinto(into) == 100 << 10
        if is_read_on:
            # The words of OpenSSL 3.0 and of 3.5.
            with pytest.raises(ssl.SSLError, match=r"(?i)bad record mac|record layer failure"):
                receiver.readinto(into[100 << 10 :])
        # Its traceback would keep buffers and connections until the next collection.
        kept = weakref.ref(receiver)
        del receiver
        assert kept() is None
    assert into[: 100 << 10] == DATA[: 100 << 10]


def test_end_of_tls_is_not_lost_behind_bytes(tmp_path: Path) -> None:
    """A server may say that it ends, and wait for our answer with the connection open."""
    over = threading.Event()

    def send(peer: ssl.SSLSocket) -> None:
        peer.sendall(DATA[:RECORD_LENGTH])
        peer.settimeout(processes.PATIENCE)
        with contextlib.suppress(OSError):
            peer.unwrap()
        over.wait(processes.PATIENCE)

    into = memoryview(bytearray(MIB))
    with receiving(send, tls.Authority(tmp_path).issue()) as client:
        # Bytes and end arrive together.
        time.sleep(TIMEOUT / 4)
        receiver = sockets.Receiver(client)
        assert receiver.readinto(into) == RECORD_LENGTH
        for _ in range(2):
            began = time.monotonic()
            assert not receiver.readinto(into[RECORD_LENGTH:])
            assert time.monotonic() - began < TIMEOUT / 2
        over.set()
    assert into[:RECORD_LENGTH] == DATA[:RECORD_LENGTH]


@pytest.mark.parametrize("is_secure", [False, True])
def test_what_is_there_is_not_held_back(tmp_path: Path, is_secure: bool) -> None:
    """Of TLS also what is decrypted already."""
    pair = tls.Authority(tmp_path).issue() if is_secure else None
    over = threading.Event()

    def send(peer: socket.socket) -> None:
        peer.sendall(DATA[:RECORD_LENGTH])
        over.wait(processes.PATIENCE)

    into = memoryview(bytearray(MIB))
    with receiving(send, pair) as client:
        receiver, began = sockets.Receiver(client), time.monotonic()
        assert receiver.readinto(into[:1000]) == 1000
        assert receiver.readinto(into[1000:]) == RECORD_LENGTH - 1000
        assert time.monotonic() - began < TIMEOUT / 2
        over.set()
    assert into[:RECORD_LENGTH] == DATA[:RECORD_LENGTH]


@pytest.mark.parametrize("is_secure", [False, True])
def test_shut_ends_a_wait_for_many_bytes(tmp_path: Path, is_secure: bool) -> None:
    pair = tls.Authority(tmp_path).issue() if is_secure else None
    over = threading.Event()
    with receiving(lambda _: over.wait(processes.PATIENCE), pair) as client:
        client.settimeout(processes.PATIENCE)
        threading.Timer(TIMEOUT / 2, sockets.shut, [client]).start()
        began = time.monotonic()
        # As above: OpenSSL 3.5 cannot write either.
        with contextlib.suppress(BrokenPipeError):
            assert not sockets.Receiver(client).readinto(memoryview(bytearray(MIB)))
        assert time.monotonic() - began < processes.PATIENCE / 2
        over.set()
