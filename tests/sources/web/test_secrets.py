"""Secrets are not shown in representations and in logs of requests."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker.importer.send import file
from cdi_worker.sources import base
from cdi_worker.sources.objects import locations as objects
from cdi_worker.sources.ovirt import locations as ovirt
from cdi_worker.sources.registry import locations as registry
from cdi_worker.sources.vmware import locations as vmware
from cdi_worker.sources.web import locations as web
from tests.support import misbehave, worker

SIGNATURE = "3f1c0ffee0ddba11deadbeef5eed5a17"
ACCESS = base.Access(user="me", password="pass/wörd+hunter2", headers=(("X-Key", "the-header-value"),))
#: Part of each secret.
SECRETS = ("hunter2", "the-header-value", SIGNATURE)


def check_hidden(*texts: object) -> None:
    for text in texts:
        for secret in SECRETS:
            assert secret not in str(text), text


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
        done = worker.call("-v=5", *pod.arguments, env={"IMPORTER_SOURCE": "http", "IMPORTER_ENDPOINT": url})
    assert done.status == 1
    check_hidden(done.errors, done.output, pod.message)
    assert "Failed to parse headers" not in done.errors


def test_log_of_level_4_shows_each_request_without_secrets(server: misbehave.Server, tmp_path: Path) -> None:
    """The address that a redirect leads to may be signed, too."""
    page = misbehave.Page(random.Random(1).randbytes(6 << 20), password="me:hunter2hunter2")
    there = server.serve(f"/there?X-Amz-Signature={SIGNATURE}", page)
    url = server.serve(f"/disk?sig={SIGNATURE}", misbehave.Page(to=(there,), status=302))
    url = url.replace("//", "//me:hunter2hunter2@")
    done = worker.call("-v=4", "import", url, tmp_path / "disk.img")
    assert done.status == 0, done.errors
    shown = re.findall(r"\] (GET) http://[^/]+(/\w+)\?…: (\d+)(.*)", done.errors)
    assert len(shown) == len(server.requests)
    assert shown[0][1:3] == ("/disk", "302")
    assert shown[1][1:3] == ("/there", "206")
    assert "range='bytes=0-327679' content-range='bytes 0-327679/" in shown[1][3]
    assert SIGNATURE not in done.errors
    assert "hunter2" not in done.errors
