"""An upload server in a thread of the test, behind real TLS, and clients for it."""

from __future__ import annotations

import contextlib
import dataclasses
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

from cdi_worker import contract, errors, report
from cdi_worker.upload import role, settings
from tests.support import processes, threaded, tls

CLIENT = "client.upload-server.cdi.kubevirt.io"
MIB = 1 << 20
#: Where uploads go, at once and in several requests.
SYNC, RESUMABLE = "/v1beta1/upload", "/v1beta1/upload-resumable"
DATA = random.Random(3).randbytes(3 * MIB) + bytes(5 * MIB) + random.Random(4).randbytes(512)
DONE = '{"preallocationApplied":false,"message":"Upload Complete"}'
TUS = {"Tus-Resumable": "1.0.0"}
MORE = {**TUS, "Content-Type": "application/offset+octet-stream"}


@dataclasses.dataclass(frozen=True)
class Certificates:
    """What both ends are given."""

    authority: tls.Authority
    server: tls.KeyPair
    client: tls.KeyPair

    def context(self, client: tls.KeyPair | None) -> ssl.SSLContext:
        """Return a client's context; None: without a certificate."""
        made = ssl.create_default_context(cafile=str(self.authority.certificate))
        # The authority of the tests is too plain for the strict check of Python 3.13.
        made.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if client is not None:
            made.load_cert_chain(client.certificate, client.key)
        return made


def certificates(directory: Path) -> Certificates:
    """Make an authority, a server of this host and the client that may upload."""
    authority = tls.Authority(directory)
    return Certificates(authority, authority.issue(), authority.issue(common_name=CLIENT, client=True))


def soon(condition: Callable[[], bool]) -> None:
    processes.wait_for(condition, "the condition")


class Answer:
    """A response that was read to its end."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.text = response.read().decode()


class Server:
    """A running server; ``result`` waits for how it ended."""

    def __init__(self, made: Certificates, env: Mapping[str, str], paths: contract.Paths) -> None:
        self.certificates = made
        self.port = processes.free_port()
        self.env = {
            "LISTEN_ADDRESS": "127.0.0.1",
            "LISTEN_PORT": str(self.port),
            "TLS_CERT_FILE": str(made.server.certificate),
            "TLS_KEY_FILE": str(made.server.key),
            "CLIENT_CERT_FILE": str(made.authority.certificate),
            "CLIENT_NAME": CLIENT,
            **env,
        }
        self.cancel = threading.Event()
        self.settings = settings.read(self.env, paths)
        self._outcome: report.Report | errors.Error | None = None
        self._thread = threading.Thread(target=self._run, name="upload-server")

    def _run(self) -> None:
        try:
            self._outcome = self._serve()
        except errors.Error as err:
            self._outcome = err

    def impatient(self, seconds: float = 0.5) -> Server:
        """Let a silent client go after so many seconds, one without a request after four times as many."""
        fetch = dataclasses.replace(self.settings.wanted.fetch, no_progress=seconds)
        wanted = dataclasses.replace(self.settings.wanted, fetch=fetch)
        self.settings = dataclasses.replace(self.settings, wanted=wanted, idle=4 * seconds)
        return self

    def _serve(self) -> report.Report:
        self._face = role.make(self.settings, self.cancel)
        return role.serve(self._face)

    def wait_until_busy(self) -> None:
        """Wait for an upload to begin; asking the server could be taken for one."""
        processes.wait_for(lambda: not self._face.is_idle, "the upload to begin")

    @property
    def received(self) -> int:
        """Bytes of the upload under way."""
        running = self._face.running
        return 0 if running is None else running.body.received

    def __enter__(self) -> Server:
        self._thread.start()
        processes.wait_for(
            lambda: not self._thread.is_alive() or processes.answers(self.port), "the upload server"
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel.set()
        self._thread.join(processes.PATIENCE)
        assert not self._thread.is_alive()

    def result(self) -> report.Report:
        """Wait for the end and return the report, or raise what ended the server."""
        self._thread.join(processes.PATIENCE)
        assert self._outcome is not None, "the server still runs"
        if isinstance(self._outcome, errors.Error):
            raise self._outcome
        return self._outcome

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def url(self, path: str) -> str:
        return f"https://localhost:{self.port}{path}"

    @contextlib.contextmanager
    def connect(self, client: tls.KeyPair | str | None = "right") -> Iterator[http.client.HTTPSConnection]:
        """Yield a connection; by default with the right certificate."""
        pair = self.certificates.client if isinstance(client, str) else client
        context = self.certificates.context(pair)
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
    ) -> Answer:
        """Make one request on a connection of its own; a body in pieces is sent chunked."""
        with self.connect(client) as connection:
            connection.request(method, path, body, dict(headers or {}))
            return Answer(connection.getresponse())

    def offset(self, where: str = RESUMABLE) -> int:
        """Return how much of an upload in several requests the server says to have."""
        answer = self.ask("HEAD", where, None, TUS)
        assert answer.status == 200
        assert answer.headers["Cache-Control"] == "no-store"
        return int(answer.headers["Upload-Offset"])

    def begin(self, connection: http.client.HTTPSConnection, path: str, length: int) -> None:
        """Send the head of a POST whose body the test sends itself."""
        connection.putrequest("POST", path)
        connection.putheader("Content-Length", str(length))
        connection.endheaders()


@pytest.fixture
def server(certificates: Certificates, paths: contract.Paths) -> Iterator[Server]:
    """Run a server: a file of tests that says ``server = uploads.server`` means this one."""
    with Server(certificates, {}, paths) as running:
        yield running


@pytest.fixture
def with_scratch(paths: contract.Paths, scratch: Path) -> contract.Paths:
    """Add scratch to the places of a pod, for a file of tests that says ``paths = uploads.with_scratch``."""
    return dataclasses.replace(paths, scratch=str(scratch))


class OneRequest(http.server.BaseHTTPRequestHandler):
    """Takes a POST to the usual path, and knows nothing else but the probe of a clone source."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[tuple[str, str, Message, bytes]]] = []

    @classmethod
    @contextlib.contextmanager
    def serving(cls) -> Iterator[int]:
        """Yield the port of such a server, without TLS."""
        cls.seen.clear()
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
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        body = b"".join(self._chunks()) if chunked else self._read(self.headers.get("Content-Length", "0"))
        self.seen.append((self.command, self.path, self.headers, body))
        known = {("POST", "/v1beta1/upload"), ("HEAD", "/v1beta1/upload-async")}
        self.send_response(200 if (self.command, self.path) in known else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_POST = answer  # noqa: N815  (http.server calls these)

    def log_message(self, *_: object) -> None: ...
