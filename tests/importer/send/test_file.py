"""The upload command, and how long it waits for an answer."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import email.message
import hashlib
import http.server
import itertools
import logging
import os
import random
import signal
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
from tests.support import (
    clones,
    devices,
    misbehave,
    oracle,
    processes,
    proxy,
    tls,
    upload_relay,
    uploads,
    worker,
)

MIB = uploads.MIB
PLACE = uploads.RESUMABLE
DATA = random.Random(9).randbytes(3 * MIB) + bytes(2 * MIB) + random.Random(8).randbytes(MIB)
TUS = uploads.TUS
MORE = uploads.PATCH_HEADERS
server = uploads.server
receiver = clones.receiver


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (tmp_path / "image").write_bytes(DATA)
    return tmp_path / "image"


def upload_request(
    server: uploads.Server, image: Path, *, patience: float = 20.0, **more: object
) -> file.Settings:
    made = server.certificates
    found = {
        "path": str(image),
        "url": f"https://localhost:{server.port}",
        "access": base.Access(ca_files=(str(made.authority.certificate),), patience=patience),
        "certificate": str(made.client.certificate),
        "key": str(made.client.key),
        **more,
    }
    return file.Settings(**found)


def send(settings: file.Settings) -> None:
    file.send(settings, progress.NullProgress(), cancelling.Cancel())


def test_command_uploads_a_file(server: uploads.Server, image: Path, disk: Path) -> None:
    made = server.certificates
    argv = ["upload", image, server.url(""), "--progress", "lines"]
    argv += ["--ca-file", made.authority.certificate, "--cert", made.client.certificate]
    argv += ["--key", made.client.key, "--checksum", f"sha256:{hashlib.sha256(DATA).hexdigest()}"]
    done = worker.run(*argv)
    assert done.status == 0, done.errors
    assert "100.0% done" in done.errors
    assert disk.read_bytes() == DATA
    rows = dict(line.strip().split("  ", 1) for line in done.output.splitlines())
    assert rows["uploaded"].startswith(f"{image} -> https://localhost:{server.port}/")
    assert rows["size"] == f"{len(DATA)} bytes (6.0 MiB)"
    assert rows["time"].endswith(" s")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("image", "https://127.0.0.1:1/v1beta1/upload: connection refused; check host and port, and that "),
        ("missing", "missing: no such file or directory; check the path\n"),
        ("", "is a directory; name the file of the disk\n"),
    ],
)
def test_message_says_what_to_do(image: Path, name: str, message: str) -> None:
    done = worker.call("upload", image.parent / name, "https://127.0.0.1:1", "--stall-timeout=1")
    assert (done.status, message in done.errors) == (3, True), done.errors


def test_refusal_has_its_status_once() -> None:
    answer = client.Answer(503, email.message.Message(), "503: another upload is running")
    assert answer.reason() == "503 Service Unavailable: another upload is running"


def test_command_needs_a_url_and_a_token_only(server: uploads.Server, image: Path, tmp_path: Path) -> None:
    """As documented for CDI's upload proxy: neither certificate nor key is given."""
    (tmp_path / "token").write_text("t0ken")
    ca = ("--ca-file", server.certificates.authority.certificate)
    done = worker.call("upload", image, server.url(""), "--token-file", tmp_path / "token", *ca)
    assert (done.status, "401" in done.error_message) == (3, True), done.errors
    assert "t0ken" not in done.errors


def test_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """Nothing has opened it for writing, and opening it would wait for that."""
    os.mkfifo(tmp_path / "pipe")
    done = worker.run("upload", tmp_path / "pipe", "https://127.0.0.1:1", timeout=processes.PATIENCE)
    assert done.status == errors.Unreachable.status
    assert done.error_message.startswith(f"{tmp_path / 'pipe'}: is a pipe")


def test_message_of_the_server_is_reported(server: uploads.Server, image: Path) -> None:
    with pytest.raises(errors.UploadFailed, match="checksum mismatch"):
        send(upload_request(server, image, checksum="md5:" + "0" * 32))
    with pytest.raises(errors.UploadFailed, match="401"):
        send(upload_request(server, image, certificate="", key=""))
    with pytest.raises(errors.Unreachable, match="certificate"):
        send(upload_request(server, image, access=base.Access()))


def test_server_without_resumable_uploads_is_supported(image: Path) -> None:
    """Such a server is CDI's upload proxy, which requires a token."""
    with uploads.MinimalServer.serving() as port:
        send(file.Settings(str(image), f"http://127.0.0.1:{port}", token="secret"))
    received = uploads.MinimalServer.requests
    assert [(method, path) for method, path, _, _ in received] == [
        ("HEAD", PLACE),
        ("POST", PLACE),
        ("POST", "/v1beta1/upload"),
    ]
    assert {headers["Authorization"] for _, _, headers, _ in received} == {"Bearer secret"}
    assert received[-1][3] == DATA


def test_upload_goes_through_the_proxy(server: uploads.Server, image: Path, disk: Path) -> None:
    made = server.certificates
    with proxy.Proxy(password="me:secret") as through:
        argv = ["upload", image, f"https://{tls.FAR}:{server.port}", "--insecure"]
        argv += ["--cert", made.client.certificate, "--key", made.client.key]
        # A process of its own: http.client leaves the refused connection to the garbage collector.
        refused = worker.run(*argv, env={"HTTPS_PROXY": through.url.replace("secret", "wrong")})
        done = worker.call(*argv, env={"HTTPS_PROXY": through.url})
    assert refused.status == 3
    assert "the proxy answers 407" in refused.error_message
    assert "wrong" not in refused.errors
    assert done.status == 0, done.errors
    assert {each.target for each in through.requests} == {f"{tls.FAR}:{server.port}"}
    assert disk.read_bytes() == DATA


def test_plain_upload_goes_through_the_proxy(image: Path) -> None:
    uploads.MinimalServer.requests.clear()
    with uploads.MinimalServer.serving() as port, proxy.Proxy() as through:
        done = worker.call("upload", image, f"http://{tls.FAR}:{port}", env={"http_proxy": through.url})
    assert done.status == 0, done.errors
    assert through.requests[-1].target == f"http://{tls.FAR}:{port}/v1beta1/upload"
    assert uploads.MinimalServer.requests[-1][3] == DATA


def test_path_with_two_slashes_is_no_other_host(image: Path) -> None:
    with uploads.MinimalServer.serving() as port, proxy.Proxy() as through:
        url = f"http://{tls.FAR}:{port}//127.0.0.1:1/upload"
        done = worker.call("upload", image, url, env={"http_proxy": through.url})
    assert done.status == 3
    assert "404 Not Found" in done.error_message
    assert {request.target.removesuffix("-resumable") for request in through.requests} == {url}


class _Leaving(uploads.MinimalServer):
    """Answers its first requests as a server that ends, or a proxy whose server is not there yet."""

    left = 1

    def answer(self) -> None:
        if not self.left:
            super().answer()
            return
        type(self).left -= 1
        self.send_response(503)
        self.send_header("Retry-After", "1")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_POST = answer  # noqa: N815  (http.server calls these)


def test_upload_waits_for_the_next_server(image: Path) -> None:
    """From the first request on."""
    with type("Server", (_Leaving,), {}).serving() as port:
        send(file.Settings(str(image), f"http://127.0.0.1:{port}"))
    assert uploads.MinimalServer.requests[-1][3] == DATA


class _Redirecting(http.server.BaseHTTPRequestHandler):
    to = ""

    def do_HEAD(self) -> None:
        self.send_response(307)
        self.send_header("Location", self.to)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_upload_follows_a_redirect_without_its_token(image: Path) -> None:
    uploads.MinimalServer.requests.clear()
    handler = type("Handler", (_Redirecting,), {})
    with (
        uploads.MinimalServer.serving() as port,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as redirecting,
    ):
        handler.to = f"http://127.0.0.1:{port}/v1beta1/upload-resumable"
        threading.Thread(target=redirecting.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{redirecting.server_port}"
        send(file.Settings(str(image), url, token="secret"))
        handler.to = f"{url}/v1beta1/upload-resumable"
        with pytest.raises(errors.UploadFailed, match="more than 10 redirects"):
            send(file.Settings(str(image), url))
        redirecting.shutdown()
    received = uploads.MinimalServer.requests
    assert received[-1][3] == DATA
    assert {headers.get("Authorization") for _, _, headers, _ in received} == {None}


class Slow(progress.NullProgress):
    """Makes an upload last longer than ``STALL``, which is more than the waits before two retries."""

    STALL = 1.0

    def read(self, _count: int) -> None:
        time.sleep(self.STALL / 2)


def test_patience_begins_when_a_connection_breaks(server: uploads.Server, image: Path, disk: Path) -> None:
    """However long the connection lasted before."""
    with upload_relay.Relay(server.port, None, None, 4 * MIB, 1, 1) as relay:
        request = upload_request(server, image, url=f"https://localhost:{relay.port}", patience=Slow.STALL)
        file.send(request, Slow(), cancelling.Cancel())
    assert server.result().message == uploads.DONE
    assert disk.read_bytes() == DATA


def test_cancel_ends_waiting_for_a_silent_handshake(image: Path) -> None:
    cancel, began = cancelling.Cancel(), time.monotonic()
    threading.Timer(0.3, cancel.set).start()
    with silent() as port:
        settings = file.Settings(str(image), f"https://127.0.0.1:{port}", access=base.Access(insecure=True))
        with pytest.raises(errors.Cancelled):
            file.send(settings, progress.NullProgress(), cancel)
    assert time.monotonic() - began < processes.PATIENCE


def test_checksum_is_verified_for_servers_without_checksums(image: Path) -> None:
    """The end of the upload is withheld from a server without checksums unless the checksum matches."""
    right = f"SHA256:{hashlib.sha256(DATA).hexdigest()}"
    with uploads.MinimalServer.serving() as port:
        made = file.Settings(str(image), f"http://127.0.0.1:{port}", checksum=f"md5:{'0' * 32}")
        with pytest.raises(errors.ChecksumMismatch):
            send(made)
        send(dataclasses.replace(made, checksum=right))
        with pytest.raises(errors.RequestError):
            send(dataclasses.replace(made, checksum="md5:0"))
    bodies = [
        body
        for method, path, _, body in uploads.MinimalServer.requests
        if (method, path) == ("POST", uploads.SYNC)
    ]
    assert DATA in bodies
    assert all(body == DATA or len(body) < len(DATA) for body in bodies)


@pytest.mark.parametrize("tells", [False, True])
def test_upload_resumes_after_cuts(server: uploads.Server, image: Path, disk: Path, tells: bool) -> None:
    """It continues even if a proxy returns the server's response to a request that was cut."""
    with upload_relay.Relay(server.port, None, None, 2 * MIB, 2000, MIB, 1, relays_response=tells) as relay:
        meter = progress.Meter()
        url = f"https://localhost:{relay.port}"
        file.send(upload_request(server, image, url=url), meter, cancelling.Cancel())
        assert relay.sent < len(DATA) + 4 * relay.RECORD + 10 * relay.REQUEST
    assert (meter.finished, meter.count) == (True, len(DATA))
    assert disk.read_bytes() == DATA


def interrupt(server: uploads.Server, image: Path) -> None:
    """Cancel an upload after its first bytes have arrived."""
    cancel = cancelling.Cancel()

    class Stop(progress.NullProgress):
        def advance(self, count: int) -> None:
            processes.wait_for(lambda: server.received > 100_000, "the first bytes")
            cancel.set()

    with pytest.raises(errors.Cancelled):
        file.send(upload_request(server, image), Stop(), cancel)


def test_second_run_resumes_the_upload(server: uploads.Server, image: Path, disk: Path) -> None:
    interrupt(server, image)
    begun = server.offset()
    assert begun > 0
    with upload_relay.Relay(server.port) as relay:
        url = f"https://localhost:{relay.port}"
        send(upload_request(server, image, url=url))
        assert relay.sent < len(DATA) - begun + 100_000
    assert disk.read_bytes() == DATA


def test_changed_file_is_uploaded_from_its_start(server: uploads.Server, image: Path, disk: Path) -> None:
    """It has the same size, and its modification time was set back."""
    interrupt(server, image)
    assert server.offset() > 0
    times = image.stat()
    other = bytes(byte ^ 0xFF for byte in DATA)
    image.write_bytes(other)
    os.utime(image, ns=(times.st_atime_ns, times.st_mtime_ns))
    send(upload_request(server, image))
    assert disk.read_bytes() == other


@pytest.mark.parametrize("resumable", [True, False])
def test_file_changed_during_the_upload_is_no_disk(
    server: uploads.Server, image: Path, disk: Path, resumable: bool
) -> None:
    """The last piece is withheld, so that the server does not make a disk of two versions."""

    class Change(progress.NullProgress):
        def advance(self, count: int) -> None:
            with image.open("r+b") as stream:
                stream.write(b"changed")

    os.utime(image, (0, 0))  # the clock of a file system ticks only every few milliseconds
    with contextlib.ExitStack() as stack:
        made = upload_request(server, image)
        if not resumable:
            port = stack.enter_context(uploads.MinimalServer.serving())
            made = file.Settings(str(image), f"http://127.0.0.1:{port}")
        with pytest.raises(errors.SourceChanged):
            file.send(made, Change(), cancelling.Cancel())
    assert not disk.exists()
    assert resumable or all(len(body) < len(DATA) for *_, body in uploads.MinimalServer.requests)


class Forgetful(uploads.MinimalServer):
    """A server that loses what it said to have: it states one of ``offsets`` after the other."""

    offsets: Iterator[str]

    def do_POST(self) -> None:  # noqa: N802  (http.server calls it)
        """Create the upload."""
        self._answer(201, "0")

    def do_HEAD(self) -> None:  # noqa: N802  (http.server calls it)
        """Return another offset each time."""
        self._answer(200, next(self.offsets))

    def do_PATCH(self) -> None:  # noqa: N802  (http.server calls it)
        """Refuse the offset."""
        self._read(self.headers["Content-Length"])
        self._answer(409, "0")

    def _answer(self, status: int, offset: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("Upload-Offset", offset)
        self.end_headers()


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (["7", "0"], "transfer failed"),
        # More digits than Python converts.
        (["9" * 5000], "lost the upload"),
    ],
)
def test_server_that_forgets_again_and_again_is_given_up(
    image: Path, offsets: list[str], message: str
) -> None:
    with type("Server", (Forgetful,), {"offsets": itertools.cycle(offsets)}).serving() as port:
        url = f"http://127.0.0.1:{port}"
        with pytest.raises((errors.TransferFailed, errors.UploadFailed), match=message):
            send(file.Settings(str(image), url, access=base.Access(patience=0.5)))


def test_second_run_with_checksum_starts_over(server: uploads.Server, image: Path, disk: Path) -> None:
    """An upload started without a checksum is not resumed by one that must be verified."""
    interrupt(server, image)
    assert server.ask("HEAD", PLACE).status == 200
    with pytest.raises(errors.UploadFailed, match="checksum mismatch"):
        send(upload_request(server, image, checksum="md5:" + "0" * 32))
    oracle.unusable(disk)


def test_restarted_server_gets_the_upload_again(receiver: clones.Receiver, tmp_path: Path) -> None:
    image, meter = tmp_path / "noise", progress.Meter()
    image.write_bytes(random.Random(2).randbytes(24 * MIB))
    with (
        devices.slow(tmp_path, 24 * MIB, bytes_per_second=16 * MIB) as target,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        first, second = receiver.replaced({"DESTINATION": str(target)})
        with clones.target(first, receiver.paths, tmp_path / "log") as pod:
            sending = pool.submit(file.send, upload_request(first, image), meter, cancelling.Cancel())
            processes.wait_for(lambda: meter.count > 12 * MIB, "half of the disk")
            pod.send_signal(signal.SIGKILL)
        with second:
            sending.result(processes.PATIENCE)
            assert second.result().status == 0
        oracle.same(target, image)


# -- how long the client waits for an answer


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
def test_answer_that_needs_no_work_comes_in_time(image: Path, trickle: bytes) -> None:
    began = time.monotonic()
    with silent(trickle) as port:
        asked = file.Settings(str(image), f"http://127.0.0.1:{port}", access=base.Access(patience=1))
        with pytest.raises(errors.Transient, match="timed out"):
            send(asked)
    assert time.monotonic() - began < processes.PATIENCE


@pytest.mark.parametrize("host", ["a..b", f"{'x' * 64}.example", "h:0", "h:99999", "[::1"])
def test_malformed_address_is_refused_at_once(image: Path, host: str) -> None:
    with pytest.raises(errors.RequestError, match="malformed upload URL"):
        send(file.Settings(str(image), f"https://{host}/", access=base.Access(insecure=True)))


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


def test_log_of_level_4_shows_each_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with misbehave.Server() as server:
        url = server.serve("/v1beta1/upload", misbehave.Page(b"no", status=401))
        asked = client.Client(f"{url}?token=hunter2-token", ssl.create_default_context(), cancelling.Cancel())
        assert asked.ask("GET", asked.path).status == 401
    (line,) = [each.getMessage() for each in caplog.records if "GET" in each.getMessage()]
    assert line.startswith(f"GET {url}: 401")
