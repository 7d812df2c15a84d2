"""An upload server in a thread of this process, with real TLS, and clients for it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.client
import http.server
import random
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from email.message import Message
from pathlib import Path
from typing import ClassVar

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract, report
from cdi_worker.importer.upload import running as upload_running
from cdi_worker.importer.upload import server as upload_server
from cdi_worker.importer.upload import settings
from tests.support import processes, threaded, tls

CLIENT = "client.upload-server.cdi.kubevirt.io"
MIB = 1 << 20
#: The upload paths: in one request, and resumable.
SYNC, RESUMABLE = "/v1beta1/upload", "/v1beta1/upload-resumable"
DATA = random.Random(3).randbytes(3 * MIB) + bytes(5 * MIB) + random.Random(4).randbytes(512)
DONE = '{"preallocationApplied":false,"message":"Upload Complete"}'
TUS = {"Tus-Resumable": "1.0.0"}
PATCH_HEADERS = {**TUS, "Content-Type": "application/offset+octet-stream"}


@dataclasses.dataclass(frozen=True)
class Certificates:
    """The certificates of server and client, and the authority that issued both."""

    authority: tls.Authority
    server: tls.KeyPair
    client: tls.KeyPair

    def context(self, client: tls.KeyPair | None) -> ssl.SSLContext:
        """Return a client's TLS context; None: without a client certificate."""
        certificates = ssl.create_default_context(cafile=str(self.authority.certificate))
        if client is not None:
            certificates.load_cert_chain(client.certificate, client.key)
        return certificates

    @functools.cache  # noqa: B019 - there are as many as processes
    def shared(self, client: tls.KeyPair | None) -> ssl.SSLContext:
        """Return the context of all who do not change it."""
        return self.context(client)


def certificates(directory: Path) -> Certificates:
    """Create an authority, a server certificate for this host, and one for the authorized client."""
    authority = tls.Authority(directory)
    return Certificates(authority, authority.issue(), authority.issue(common_name=CLIENT, client=True))


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds; fail after ``processes.PATIENCE`` seconds."""
    processes.wait_for(condition, "the condition")


class Response:
    """A response, read to its end."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.text = response.read().decode()


class Server:
    """An upload server that runs for the duration of a ``with`` block."""

    def __init__(self, certificates: Certificates, env: Mapping[str, str], paths: contract.Paths) -> None:
        self.certificates = certificates
        self.port = processes.free_port()
        self.env = {
            "LISTEN_ADDRESS": "127.0.0.1",
            "LISTEN_PORT": str(self.port),
            "TLS_CERT_FILE": str(certificates.server.certificate),
            "TLS_KEY_FILE": str(certificates.server.key),
            "CLIENT_CERT_FILE": str(certificates.authority.certificate),
            "CLIENT_NAME": CLIENT,
            **env,
        }
        self.cancel = cancelling.Cancel()
        self.settings = settings.read(self.env, paths)
        self._outcome: report.Report | errors.Error | None = None
        self._thread = threading.Thread(target=self._run, name="upload-server")

    def _run(self) -> None:
        try:
            self._outcome = self._serve()
        except errors.Error as err:
            self._outcome = err

    def with_short_timeouts(self, seconds: float = 0.5) -> Server:
        """Set the timeout of a silent client in seconds, and four times as much for an idle server."""
        fetch = dataclasses.replace(self.settings.request.fetch, no_progress=seconds)
        request = dataclasses.replace(self.settings.request, fetch=fetch)
        self.settings = dataclasses.replace(self.settings, request=request, idle=4 * seconds)
        return self

    def _serve(self) -> report.Report:
        self._face = upload_server.Server(self.settings, self.cancel)
        return self._face.serve()

    def wait_until_busy(self) -> None:
        """Wait for an upload to begin, without sending a request, which would be activity."""
        processes.wait_for(lambda: not self._face.is_idle, "the upload to begin")

    @property
    def running_upload(self) -> upload_running.Running | None:
        """Return the current upload."""
        return self._face.running

    @property
    def received(self) -> int:
        """Return the bytes received of the current upload, 0 without one."""
        running = self._face.running
        return 0 if running is None else running.body.received

    def __enter__(self) -> Server:
        self._thread.start()
        processes.wait_for(
            lambda: not self._thread.is_alive() or processes.is_listening(self.port), "the upload server"
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel.set()
        self._thread.join(processes.PATIENCE)
        assert not self._thread.is_alive()

    def result(self) -> report.Report:
        """Wait for the end and return the report, or raise the error that ended the server."""
        self._thread.join(processes.PATIENCE)
        assert self._outcome is not None, "the server still runs"
        if isinstance(self._outcome, errors.Error):
            raise self._outcome
        return self._outcome

    @property
    def running(self) -> bool:
        """Report whether the server is still running."""
        return self._thread.is_alive()

    def url(self, path: str) -> str:
        """Return the URL of a path."""
        return f"https://localhost:{self.port}{path}"

    @contextlib.contextmanager
    def connect(self, client: tls.KeyPair | str | None = "right") -> Iterator[http.client.HTTPSConnection]:
        """Yield a connection; by default with the client's valid certificate."""
        pair = self.certificates.client if isinstance(client, str) else client
        context = self.certificates.shared(pair)
        connection = http.client.HTTPSConnection("localhost", self.port, context=context, timeout=20)
        with contextlib.closing(connection):
            yield connection

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        client: tls.KeyPair | str | None = "right",
    ) -> Response:
        """Send one request on a connection of its own; an iterable body is sent chunked."""
        with self.connect(client) as connection:
            connection.request(method, path, body, dict(headers or {}))
            return Response(connection.getresponse())

    def offset(self, where: str = RESUMABLE) -> int:
        """Return the offset that the server reports for a resumable upload."""
        answer = self.ask("HEAD", where, None, TUS)
        assert answer.status == 200
        assert answer.headers["Cache-Control"] == "no-store"
        return int(answer.headers["Upload-Offset"])

    def begin(self, connection: http.client.HTTPSConnection, path: str, length: int) -> None:
        """Send the head of a POST; the test sends the body."""
        connection.putrequest("POST", path)
        connection.putheader("Content-Length", str(length))
        connection.endheaders()


@pytest.fixture
def server(certificates: Certificates, paths: contract.Paths) -> Iterator[Server]:
    """Run an upload server; a test module uses it with ``server = uploads.server``."""
    with Server(certificates, {}, paths) as running:
        yield running


@pytest.fixture
def with_scratch(paths: contract.Paths, scratch: Path) -> contract.Paths:
    """Add scratch to the paths of a pod; a test module uses it with ``paths = uploads.with_scratch``."""
    return paths._replace(scratch=str(scratch))


class MinimalServer(http.server.BaseHTTPRequestHandler):
    """Accept a POST to the usual path and the probe of a clone source, as CDI's own server does."""

    protocol_version = "HTTP/1.1"
    requests: ClassVar[list[tuple[str, str, Message, bytes]]] = []

    @classmethod
    @contextlib.contextmanager
    def serving(cls) -> Iterator[int]:
        """Serve without TLS and yield the port."""
        cls.requests.clear()
        with threaded.Threaded(http.server.ThreadingHTTPServer(("127.0.0.1", 0), cls)) as server:
            yield server.port

    def _read(self, length: str) -> bytes:
        return self.rfile.read(int(length))

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            assert self.rfile.read(2) == b"\r\n"
        assert self.rfile.readline() == b"\r\n"

    def answer(self) -> None:
        """Record the request and respond."""
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        body = b"".join(self._chunks()) if chunked else self._read(self.headers.get("Content-Length", "0"))
        self.requests.append((self.command, self.path, self.headers, body))
        supported = {("POST", "/v1beta1/upload"), ("HEAD", "/v1beta1/upload-async")}
        self.send_response(200 if (self.command, self.path) in supported else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_POST = answer  # noqa: N815  (http.server calls these)

    def log_message(self, *_: object) -> None:
        """Log nothing."""
