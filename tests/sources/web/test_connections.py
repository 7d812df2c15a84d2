"""Connections: waits can be ended, and requests to public hosts are not redirected into private networks."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

import cdi_worker
from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base, sockets
from cdi_worker.sources.ovirt import locations as ovirt
from cdi_worker.sources.vmware import locations as vmware
from cdi_worker.sources.web import connections, http
from tests.support import http_disk, misbehave, processes, proxy, reading, tls

DATA = bytes(range(256)) * 4096
#: Seconds. Timeouts are much longer.
SOON = processes.PATIENCE


class Unresponsive(NamedTuple):
    """A server that answers nothing: its port, and the connections that it has taken."""

    port: int
    held: list[socket.socket]


@contextlib.contextmanager
def unresponsive_server(pair: tls.KeyPair | None = None) -> Iterator[Unresponsive]:
    """Serve nothing: connections are taken (with TLS if there is a pair), requests never answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held: list[socket.socket] = []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if pair:
            context.load_cert_chain(pair.certificate, pair.key)

        def take() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken, _ = listener.accept()
                    held.append(context.wrap_socket(taken, server_side=True) if pair else taken)

        thread = threading.Thread(target=take)
        thread.start()
        try:
            yield Unresponsive(listener.getsockname()[1], held)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for taken in held:
                taken.close()


def check_cancel(server: Unresponsive, request: cdi_worker.Request) -> None:
    """Import, and cancel once the server has a connection; the import must end soon."""
    cancel, cancelled = cancelling.Cancel(), [0.0]

    def wait() -> None:
        processes.wait_for(lambda: server.held, "a connection")
        time.sleep(0.1)
        cancelled[0] = time.monotonic()
        cancel.set()

    thread = threading.Thread(target=wait)
    thread.start()
    with pytest.raises(errors.Cancelled):
        cdi_worker.run(request, cancel=cancel)
    thread.join()
    assert time.monotonic() - cancelled[0] < SOON


@pytest.mark.parametrize("kind", ["http", "https", "s3", "gcs", "registry", "proxy", "imageio", "vddk"])
def test_cancel_ends_waiting_for_a_silent_server(kind: str, tmp_path: Path) -> None:
    pair = tls.Authority(tmp_path).issue() if kind in {"https", "registry"} else None
    with unresponsive_server(pair) as server:
        port = server.port
        url = f"{'https' if kind == 'https' else 'http'}://127.0.0.1:{port}/b/o"
        access = base.Access(insecure=True)
        if kind == "registry":
            url = f"docker://127.0.0.1:{port}/b/o:latest"
        elif kind == "proxy":
            url, access = "http://far.invalid/o", base.Access(http_proxy=f"http://127.0.0.1:{port}")
        source = "http" if kind in {"https", "proxy"} else kind
        location = cdi_worker.Location(url, access)
        if kind == "imageio":
            location = ovirt.Imageio(url, access, disk_id="d")
        if kind == "vddk":
            location = vmware.Vddk(url, access, uuid="u", backing_file="f", vddk_libdir=str(tmp_path))
            (tmp_path / "lib64").mkdir()
            (tmp_path / "lib64/libvixDiskLib.so").touch()
        request = cdi_worker.Request(
            existing="replace", source=source, location=location, target=str(tmp_path / "disk.img")
        )
        check_cancel(server, request)


class Pausing(ssl.SSLContext):
    """Delays the TLS handshake."""

    def wrap_socket(self, sock: socket.socket, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        self.begun.set()
        self.go.wait(SOON)
        self.number = sock.fileno()
        return super().wrap_socket(sock, *args, **kwargs)


def test_abandoned_connect_keeps_its_socket() -> None:
    """If another thread closed the socket, TLS could start on a file that got its number."""
    context = Pausing(ssl.PROTOCOL_TLS_CLIENT)
    context.begun, context.go = threading.Event(), threading.Event()
    with unresponsive_server() as server, requests.Session() as session:
        cancel = cancelling.Cancel()
        session.mount("https://", connections.Adapter(lambda: context, 1, cancel))

        def wait() -> None:
            assert context.begun.wait(SOON)
            cancel.set()

        thread = threading.Thread(target=wait)
        thread.start()
        with pytest.raises(errors.Cancelled):
            session.get(f"https://127.0.0.1:{server.port}/", timeout=1)
        thread.join()
        context.go.set()
        processes.wait_for(lambda: "apart" not in {one.name for one in threading.enumerate()}, "its end")
    assert context.number > 0


@pytest.mark.parametrize("ranges", [True, False])
def test_cancel_ends_waiting_for_a_stalled_server(ranges: bool, tmp_path: Path) -> None:
    page = misbehave.Page(DATA, ranges=ranges, cut=500_000)
    with unresponsive_server() as stalled, misbehave.Server() as server:
        silent = misbehave.Page(to=(f"http://127.0.0.1:{stalled.port}/",))
        location = cdi_worker.Location(server.serve("/disk", (page, 1), silent))
        request = cdi_worker.Request(
            existing="replace", source="http", location=location, target=str(tmp_path / "disk.img")
        )
        check_cancel(stalled, request)


def test_after_a_failed_attempt_reads_work_again() -> None:
    reads = cancelling.Reads(cancelling.Cancel())
    with (
        misbehave.Server() as server,
        http_disk.opened(server.serve("/d", misbehave.Page(DATA)), cancel=reads) as image,
    ):
        with reads.scope() as scope:
            scope.set()
            with pytest.raises(errors.Cancelled):
                image.source.ranges.read_range(5, memoryview(bytearray(1000)))
        into = bytearray(1000)
        assert image.source.ranges.read_range(5, memoryview(into)) == 1000
        assert into == DATA[5:1005]


def test_server_notices_that_the_connection_is_closed() -> None:
    """Even while it waits with a full window, after all bytes in flight were read."""
    failed = threading.Event()

    def serve(listener: socket.socket) -> None:
        taken, _ = listener.accept()
        with taken:
            try:
                taken.sendall(bytes(64 << 20))
            except OSError:
                failed.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        with socket.create_connection(listener.getsockname()) as client:
            # Wait until the window is full: it is not visible, and not waiting only weakens the test.
            time.sleep(0.5)
            sockets.shut(client)
            while client.recv(1 << 20):
                pass
        assert failed.wait(SOON)
        thread.join()


INSIDE = (
    *("127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::"),
    *("169.254.169.254", "::ffff:169.254.169.254", "fe80::1%lo", "fd00:ec2::254", "100.100.100.200"),
)
OUTSIDE = (
    *("fd00::254", "10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1"),
    *("93.184.216.34", "2606:2800::1"),
)


def test_private_address_is_recognised() -> None:
    found = {address for address in INSIDE + OUTSIDE if connections.is_inside(address)}
    assert found == {*INSIDE}


def test_name_that_changes_to_a_private_address_is_refused() -> None:
    border = connections.Border()
    border.check("192.0.2.1")
    with pytest.raises(connections.InternalAddress, match=r"leads to 127\.0\.0\.1"):
        border.check("127.0.0.1")
    border.check("192.0.2.2")


#: A network namespace for a program: a host with a public address, one in a private network, and a cloud's
#: metadata service.
NETWORK = """
ip link set lo up
for address in 192.0.2.1 10.0.0.1 169.254.169.254; do ip address add $address/32 dev lo; done
exec "$@"
"""
REDIRECTED = """
import json, sys
from cdi_worker import errors
from tests.support import http_disk, misbehave
for here, there, name, _ in json.loads(sys.argv[1]):
    with misbehave.Server(host=here) as mirror, misbehave.Server(host=there) as led:
        led.serve("/disk", misbehave.Page(b"data"))
        start = mirror.serve("/start", misbehave.Page(to=(led.url("/disk", host=name),)))
        try:
            with http_disk.opened(start) as image:
                found = image.facts.head.decode()
        except errors.Unreachable as err:
            found = str(err)
        print(json.dumps([found, len(led.requests)]))
"""
#: The host of a redirect, the address it leads to, the name in the redirect, and whether it is followed.
REDIRECTS = (
    ("192.0.2.1", "169.254.169.254", "169.254.169.254", False),
    ("10.0.0.1", "169.254.169.254", "169.254.169.254", False),
    ("192.0.2.1", "127.0.0.1", "127.0.0.1", False),
    # The address counts, whatever name resolves to it.
    ("192.0.2.1", "127.0.0.1", "localhost", False),
    ("192.0.2.1", "127.0.0.1", "0.0.0.0", False),
    ("192.0.2.1", "10.0.0.1", "10.0.0.1", True),
    ("127.0.0.1", "127.0.0.1", "localhost", True),
)


def test_public_server_cannot_redirect_to_a_private_one() -> None:
    processes.need_root()
    processes.need("unshare", "ip")
    program = ("unshare", "--net", "sh", "-ec", NETWORK, "sh", sys.executable, "-c", REDIRECTED)
    lines = processes.run(*program, json.dumps(REDIRECTS)).stdout.splitlines()
    for row, line in zip(REDIRECTS, lines, strict=True):
        _, there, _, follows = row
        found, requests_there = json.loads(line)
        refusal = (
            f": leads to {there}, an internal address of this machine or its cloud; to import from there, "
            "give that URL directly"
        )
        assert (found == "data", found.endswith(refusal), requests_there) == (
            follows,
            not follows,
            follows,
        ), row


def test_private_server_receives_no_byte() -> None:
    """A host behind a proxy counts as public; and even the first bytes of TLS may do harm."""
    with (
        misbehave.Server() as server,
        proxy.Proxy() as between,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        to = f"https://localhost:{listener.getsockname()[1]}/"
        server.serve("/start", misbehave.Page(to=(to,)))
        with pytest.raises(errors.Unreachable, match=r"/start: leads to 127.0.0.1"):
            http_disk.refused(server.url("/start", host=tls.FAR), base.Access(http_proxy=between.url))
        taken, _ = listener.accept()
        with taken:
            assert taken.recv(1) == b""


@pytest.mark.parametrize("secure", [True, False])
def test_interrupted_read_returns_only_data(tmp_path: Path, secure: bool) -> None:
    authority = tls.Authority(tmp_path)
    data = DATA * 16
    access = base.Access(ca_files=(str(authority.certificate),), connections=1)
    reads = cancelling.Reads(cancelling.Cancel())
    with (
        misbehave.Server(authority.issue() if secure else None) as server,
        http_disk.opened(server.serve("/disk", misbehave.Page(data)), access, reads) as image,
    ):
        reader = image.source.ranges
        assert reader is not None
        reading.check_interrupted_reads(reader, reads, data)


@pytest.mark.parametrize("ranges", [True, False])
def test_incomplete_response_is_closed(ranges: bool) -> None:
    """Even if the reader keeps the response for a next read, which may never come."""
    before = processes.descriptors()
    with (
        misbehave.Server() as server,
        http_disk.opened(server.serve("/d", misbehave.Page(DATA, ranges=ranges))) as image,
    ):
        if ranges:
            reader = image.source.ranges.open_range(0, len(DATA))
            assert reader.readinto(memoryview(bytearray(1000))) == 1000
    processes.wait_for(lambda: processes.descriptors() <= before, "the connections are closed")


@pytest.mark.parametrize("ranges", [True, False])
def test_interrupted_response_is_not_complete(ranges: bool) -> None:
    page = misbehave.Page(DATA, ranges=ranges, framing="length" if ranges else "close")
    cancel = cancelling.Cancel()
    with (
        misbehave.Server() as server,
        http_disk.opened(server.serve("/d", page), cancel=cancel) as image,
    ):
        stream = image.source.stream()
        into = memoryview(bytearray(len(DATA)))
        assert readers.fill(stream, into[: http.HEAD_SIZE + 1]) == http.HEAD_SIZE + 1
        cancel.set()
        with pytest.raises(errors.Cancelled):
            stream.readinto(into)
