"""Answers of an engine that are not what the SDK expects: it trusts their shape, and keeps them whole."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import zlib
from collections.abc import Callable, Iterator

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.ovirt import engine as ovirt_engine
from cdi_worker.sources.ovirt import locations
from tests.support import pairs, threaded

pytest.importorskip("ovirtsdk4")

LOGIN = b'{"access_token": "token-of-the-session", "scope": "ovirt-app-api", "exp": "9"}'
TICKET = b"<transfer_url>https://host/images/5f1c-ticket</transfer_url>"
XML, JSON = "application/xml", "application/json"


@dataclasses.dataclass
class Served:
    """Bodies of the login and of everything else; None: one without end."""

    login: bytes | None = LOGIN
    body: bytes | None = b""
    coding: str = ""
    sent: int = 0


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture
def engine(served: Served) -> Iterator[ovirt_engine.Engine]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            is_login = self.path.endswith("/token")
            self.answer(served.login if is_login else served.body, JSON if is_login else XML)

        def do_GET(self) -> None:
            self.answer(served.body, XML)

        def answer(self, body: bytes | None, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            if served.coding:
                self.send_header("Content-Encoding", served.coding)
            self.end_headers()
            with contextlib.suppress(OSError):
                while body is None and served.sent < 200 << 20:
                    self.wfile.write(b" " * (1 << 20))
                    served.sent += 1 << 20
                self.wfile.write(body or b"")

        def log_message(self, *_: object) -> None:
            pass

    class Threads(http.server.ThreadingHTTPServer):
        daemon_threads = True

    with threaded.Threaded(Threads(("127.0.0.1", 0), Handler)) as running:
        url = f"http://127.0.0.1:{running.port}/ovirt-engine/api"
        location = locations.Imageio(
            url, base.Access(user="user", password="password", insecure=True), disk_id="disk"
        )
        made = ovirt_engine.Engine(location, "", cancelling.NEVER)
        yield made
        made.close()


def disk(engine: ovirt_engine.Engine) -> None:
    engine.log_in()
    engine.disk("disk")


def snapshot(engine: ovirt_engine.Engine) -> None:
    found = ovirt_engine.sdk.Disk(id="disk", storage_domains=[ovirt_engine.sdk.StorageDomain(id="domain")])
    engine.snapshot(found, "one")


def transfer(engine: ovirt_engine.Engine) -> None:
    engine.transfer(ovirt_engine.sdk.Disk(id="disk"), None, "raw")


def look(engine: ovirt_engine.Engine) -> None:
    service = engine._connection.system_service().image_transfers_service()
    ovirt_engine.Transfer(engine, "one", service.image_transfer_service("one")).look()


@pytest.mark.parametrize("login", [b"[" * 100_000, b"[]", b"5", b"\xff", b"{"])
def test_malformed_login_is_an_error(engine: ovirt_engine.Engine, served: Served, login: bytes) -> None:
    served.login = login
    with pytest.raises(errors.Transient, match="login: invalid response"):
        engine.log_in()


CALLS = (disk, snapshot, transfer, look)
BODIES = (
    b"<action/>",
    b"<vms><vm/></vms>",
    b"\0",
    b"<disk>",
    b"<image_transfer>" + TICKET + b"<a></b>",
    b"<disk>" + b"<a>" * 100_000,
    b"<disk>" + b"<vm><disks><disk>" * 10_000,
    b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><disk><name>&b;</name></disk>',
)


@pytest.mark.parametrize(
    ("body", "call"), [*((b"<vm/>", call) for call in CALLS), *pairs.dealt(BODIES, CALLS)]
)
def test_malformed_answers_are_errors(
    engine: ovirt_engine.Engine,
    served: Served,
    body: bytes,
    call: Callable[[ovirt_engine.Engine], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    served.body = body
    with pytest.raises(errors.Transient, match="invalid response"):
        call(engine)
    # libxml2 prints the line, past all masking.
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("which", ["login", "body", "compressed"])
def test_endless_answers_are_refused(engine: ovirt_engine.Engine, served: Served, which: str) -> None:
    if which == "login":
        served.login = None
    elif which == "body":
        served.body = None
    else:
        packer = zlib.compressobj(wbits=31)
        parts = [packer.compress(bytes(1 << 20)) for _ in range(64)]
        served.coding, served.body = "gzip", b"".join((*parts, packer.flush()))
    with pytest.raises(errors.Unreachable, match="the answer is too long; check the URL"):
        disk(engine)
    assert served.sent < 100 << 20
