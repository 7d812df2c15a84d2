"""Secrets are not shown, even if a server repeats them: in messages, logs and representations."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import random
import re
import socket
import ssl
import threading
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors, masking
from cdi_worker.images.engine import cancelling
from cdi_worker.importer.send import client, file
from cdi_worker.sources import base
from cdi_worker.sources.objects import locations as objects
from cdi_worker.sources.ovirt import locations as ovirt
from cdi_worker.sources.registry import locations as registry
from cdi_worker.sources.vmware import locations as vmware
from cdi_worker.sources.web import locations as web
from tests.support import gcs_objects, http_disk, misbehave, pulled, s3_objects, worker

PASSWORD = "pass/w\u00f6rd+hunter2"
SIGNATURE = "3f1c0ffee0ddba11deadbeef5eed5a17"
ACCESS = base.Access(user="me", password=PASSWORD, headers=(("X-Key", "the-header-value"),))
#: What is sent for the password, in every form.
SECRETS = (
    PASSWORD,
    "hunter2",
    "the-header-value",
    SIGNATURE,
    base64.b64encode(f"me:{PASSWORD}".encode()).decode(),
)


class Echo:
    """A server that repeats the whole request in the reason, the ETag and the body of its responses."""

    def __init__(self, status: int, body: str = "{}") -> None:
        self._status = status
        self._body = body
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Echo:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                request = connection.recv(65536).decode("latin-1")
                basic = request.partition("Basic ")[2].partition("\r\n")[0]
                password = base64.b64decode(basic).decode("latin-1") if basic else ""
                token = re.search(r"(?i)x-amz-security-token: (\S+)", request)
                password += f" {token[1]}" if token else ""
                shown = f"{password} " + " ".join(request.split())[-900:]
                body = self._body.replace(
                    "{}", json.dumps(shown)[1:-1] if self._body != "{}" else shown
                ).encode("latin-1")
                head = (
                    f'HTTP/1.1 {self._status} {shown}\r\nETag: "{shown}"\r\nContent-Length: {len(body)}\r\n'
                )
                connection.sendall(f"{head}Connection: close\r\n\r\n".encode("latin-1") + body)


def check_hidden(*texts: object) -> None:
    for text in texts:
        for secret in SECRETS:
            assert secret not in str(text), text
            assert secret.encode().decode("latin-1") not in str(text), text


@pytest.mark.parametrize("status", [200, 401, 403, 404, 500, 503])
def test_repeated_secrets_are_hidden(status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with Echo(status) as echo:
        url = f"http://127.0.0.1:{echo.port}/disk?X-Amz-Signature={SIGNATURE}"
        try:
            with http_disk.opened(url, ACCESS) as image:
                # Only shown masked: masked in the journal, two objects could have one identity.
                check_hidden(masking.mask(image.facts.identity or ""))
        except errors.Error as err:
            check_hidden(err, err.fields)
    check_hidden(caplog.text)


def test_repeated_secrets_are_hidden_by_object_stores() -> None:
    keys = base.Access(
        user="AKID", password="the-secret-key", session_token="hunter2-token", headers=ACCESS.headers
    )
    for body in ("<Error><Code>Odd</Code><Message>{}</Message></Error>", "<Error><Code>{}</Code></Error>"):
        with Echo(403, body) as echo, pytest.raises(errors.Unreachable) as caught:
            s3_objects.source(f"http://127.0.0.1:{echo.port}/b/k", keys).open(base.Opening())
        check_hidden(caught.value)
    with Echo(403, '{"error": {"message": "{}"}}') as echo, pytest.raises(errors.Unreachable) as caught:
        gcs_objects.source(f"http://127.0.0.1:{echo.port}/b/o", ACCESS).open(base.Opening())
    check_hidden(caught.value)


def test_repeated_secrets_are_hidden_by_registries(server: misbehave.Server) -> None:
    with Echo(403) as echo:
        challenge = {"WWW-Authenticate": f'Bearer realm="http://127.0.0.1:{echo.port}/token"'}
        server.serve("/v2/r/manifests/latest", misbehave.Page(status=401, headers=challenge))
        access = base.Access(user="me", password=PASSWORD, insecure=True)
        with pytest.raises(errors.Unreachable, match="403") as caught:
            pulled.source(registry.Registry(f"docker://127.0.0.1:{server.port}/r", access)).open(
                base.Opening()
            )
    check_hidden(caught.value)


def test_repeated_token_is_hidden_by_the_upload_client() -> None:
    with Echo(400) as echo:
        headers = {"Authorization": "Bearer hunter2-token"}
        made = client.Client(
            f"http://127.0.0.1:{echo.port}/", ssl.create_default_context(), cancelling.Cancel(), headers
        )
        check_hidden(made.ask("HEAD", "/").reason(), made.ask("POST", "/").reason())


URL = f"https://me:hunter2@host.example/a/b?X-Amz-Signature={SIGNATURE}"


@pytest.mark.parametrize(
    "location",
    [
        cdi_worker.Location(URL, ACCESS),
        web.Http(URL, ACCESS),
        objects.S3(endpoint=URL, access=ACCESS),
        objects.Gcs(endpoint=URL, access=ACCESS),
        registry.Registry(URL, ACCESS),
        ovirt.Imageio(URL, ACCESS),
        vmware.Vddk(URL, ACCESS),
    ],
    ids=lambda location: type(location).__name__,
)
def test_representations_hide_passwords_and_signatures(location: base.Location) -> None:
    request = cdi_worker.Request(existing="replace", source="http", location=location, target="disk.img")
    check_hidden(repr(location), str(location), repr(request), repr(location.access))


def test_representation_of_an_upload_hides_its_token() -> None:
    check_hidden(repr(file.Settings("disk.img", URL, token="hunter2-token")))


def test_signature_is_not_logged_with_malformed_headers(tmp_path: Path) -> None:
    """urllib3 warns about them with the whole URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            head = b"HTTP/1.1 404 Not Found\r\nbroken header\r\nContent-Length: 0\r\n\r\n"
            # A second connection may not come.
            with contextlib.suppress(OSError):
                for _ in range(2):
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(head)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/disk?X-Amz-Signature={SIGNATURE}"
        pod = worker.Pod(tmp_path)
        done = worker.run("-v=5", *pod.arguments, env={"IMPORTER_SOURCE": "http", "IMPORTER_ENDPOINT": url})
    assert done.status == 1
    check_hidden(done.errors, done.output, pod.message)


def test_log_of_level_4_shows_each_request_without_secrets(server: misbehave.Server, tmp_path: Path) -> None:
    """The address that a redirect leads to may be signed, too."""
    page = misbehave.Page(random.Random(1).randbytes(6 << 20), password="me:hunter2hunter2")
    there = server.serve(f"/there?X-Amz-Signature={SIGNATURE}", page)
    url = server.serve(f"/disk?sig={SIGNATURE}", misbehave.Page(to=(there,), status=302))
    url = url.replace("//", "//me:hunter2hunter2@")
    done = worker.run("-v=4", "import", url, tmp_path / "disk.img")
    assert done.status == 0, done.errors
    shown = re.findall(r"\] (GET) http://[^/]+(/\w+)\?…: (\d+)(.*)", done.errors)
    assert len(shown) == len(server.requests)
    assert shown[0][1:3] == ("/disk", "302")
    assert shown[1][1:3] == ("/there", "206")
    assert "range='bytes=0-327679' content-range='bytes 0-327679/" in shown[1][3]
    assert SIGNATURE not in done.errors
    assert "hunter2" not in done.errors
