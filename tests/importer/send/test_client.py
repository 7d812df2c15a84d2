"""How long the client of an upload server waits for an answer."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import progress
from cdi_worker.importer.send import client, file
from cdi_worker.sources import base
from tests.support import misbehave, processes


@contextlib.contextmanager
def silent(trickle: bytes = b"") -> Iterator[int]:
    """Yield the port of a server that sends ``trickle``, slowly, and never an answer."""
    over = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            for byte in trickle:
                connection.sendall(bytes([byte]))
                over.wait(0.2)
            while connection.recv(4096):
                pass

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


@pytest.mark.slow
@pytest.mark.parametrize("trickle", [b"", b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 1000])
def test_answer_that_needs_no_work_comes_in_time(tmp_path: Path, trickle: bytes) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"x" * 512)
    began = time.monotonic()
    with silent(trickle) as port:
        asked = file.Settings(str(image), f"http://127.0.0.1:{port}", access=base.Access(patience=1))
        with pytest.raises(errors.Transient, match="timed out"):
            file.send(asked, progress.NullProgress(), cancelling.Cancel())
    assert time.monotonic() - began < processes.PATIENCE


@pytest.mark.parametrize("host", ["a..b", f"{'x' * 64}.example", "h:0", "h:99999", "[::1"])
def test_malformed_address_is_refused_at_once(tmp_path: Path, host: str) -> None:
    (tmp_path / "image").write_bytes(bytes(512))
    settings = file.Settings(str(tmp_path / "image"), f"https://{host}/", access=base.Access(insecure=True))
    with pytest.raises(errors.RequestError, match="malformed upload URL"):
        file.send(settings, progress.NullProgress(), cancelling.Cancel())


class Reminding(client.Client):
    reminder = 0.2


@pytest.mark.slow
def test_last_answer_is_waited_for_with_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    cancel = cancelling.Cancel()
    caplog.set_level(logging.WARNING, "cdi_worker")
    with silent() as port:
        asking = Reminding(f"http://127.0.0.1:{port}/x", ssl.create_default_context(), cancel, stall=0.5)
        stopping = threading.Timer(1.5, cancel.set)
        stopping.start()
        with pytest.raises(errors.Cancelled):
            asking.ask("PATCH", "/x", {}, client.Body([b"all"], progress.NullProgress().read, 3))
        stopping.join()
    assert len(caplog.messages) >= 2
    said = f"http://127.0.0.1:{port}/x: has everything; waiting until the disk is on storage there"
    assert all(each.startswith(said) for each in caplog.messages)


def test_log_of_level_4_shows_each_request(
    server: misbehave.Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = server.serve("/v1beta1/upload", misbehave.Page(b"no", status=401))
    asked = client.Client(f"{url}?token=hunter2-token", ssl.create_default_context(), cancelling.Cancel())
    assert asked.ask("GET", asked.path).status == 401
    (line,) = [each.getMessage() for each in caplog.records if "GET" in each.getMessage()]
    assert line.startswith(f"GET {url}: 401")
