"""What waits for a server ends when it is told to, also before an answer has begun."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import importer
from importer import errors
from sources import base, http
from tests import misbehave, tls

DATA = bytes(range(256)) * 4096
#: Seconds. Time-outs are longer by far.
SOON = 5.0


@contextlib.contextmanager
def deaf(pair: tls.KeyPair | None = None) -> Iterator[int]:
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
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for taken in held:
                taken.close()


def check_cancel(wanted: importer.Request) -> None:
    """Import, cancel soon; that has to end it soon."""
    cancel, began = threading.Event(), time.monotonic()
    threading.Timer(0.5, cancel.set).start()
    with pytest.raises(errors.Cancelled):
        importer.run(wanted, cancel=cancel)
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize("kind", ["http", "https", "s3", "gcs", "registry", "proxy"])
def test_a_silent_server_keeps_no_cancel_waiting(kind: str, tmp_path: Path) -> None:
    pair = tls.Authority(tmp_path).issue() if kind in {"https", "registry"} else None
    with deaf(pair) as port:
        url = f"{'https' if kind == 'https' else 'http'}://127.0.0.1:{port}/b/o"
        access = base.Access(insecure=True)
        if kind == "registry":
            url = f"docker://127.0.0.1:{port}/b/o:latest"
        elif kind == "proxy":
            url, access = "http://far.invalid/o", base.Access(http_proxy=f"http://127.0.0.1:{port}")
        source = kind if kind in {"s3", "gcs", "registry"} else "http"
        wanted = importer.Request(
            source=source, location=importer.Location(url, access), target=str(tmp_path / "disk.img")
        )
        check_cancel(wanted)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_server_that_falls_silent_keeps_no_cancel_waiting(ranges: bool, tmp_path: Path) -> None:
    page = misbehave.Page(DATA, ranges=ranges, cut=500_000)
    with deaf() as port, misbehave.Server() as server:
        silent = misbehave.Page(to=(f"http://127.0.0.1:{port}/",))
        location = importer.Location(server.serve("/disk", (page, 1), silent))
        wanted = importer.Request(source="http", location=location, target=str(tmp_path / "disk.img"))
        check_cancel(wanted)


def test_after_an_interrupt_reads_work_again() -> None:
    with (
        misbehave.Server() as server,
        http.HttpSource(server.serve("/d", misbehave.Page(DATA)), base.Access()) as source,
    ):
        source.interrupt()
        into = bytearray(1000)
        assert source.read_range(5, memoryview(into)) == 1000
        assert into == DATA[5:1005]
