"""Uploads as browsers make them: a file within a form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from importer import contract
from tests import oracle, uploads

MIB = uploads.MIB
SYNC = uploads.SYNC
DATA = uploads.DATA
DONE = uploads.DONE


@pytest.fixture
def server(certificates: uploads.Certificates, paths: contract.Paths) -> Iterator[uploads.Server]:
    with uploads.Server(certificates, {}, paths) as running:
        yield running


@pytest.mark.parametrize("suffix", ["", "-async"])
def test_form(server: uploads.Server, disk: Path, suffix: str) -> None:
    body = b"".join(
        [part("note", b"hello"), part("file", DATA, name="disk.img"), part("more", b"x" * 100_000), END]
    )
    assert server.ask("POST", f"/v1beta1/upload-form{suffix}", body, FORM).status == 200
    assert server.result().status == 0
    assert disk.read_bytes() == DATA


BOUNDARY = "------------------------d74496d66958873e"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
END = f"--{BOUNDARY}--\r\n".encode()


def part(field: str, data: bytes, name: str | None = None) -> bytes:
    file = f'; filename="{name}"' if name else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{field}"{file}\r\n\r\n'
    return head.encode() + data + b"\r\n"


BAD_FORMS = {
    "no file": part("other", DATA) + END,
    "cut short": part("file", DATA)[:-5000],
    "no end": part("file", DATA),
    "no boundary": DATA,
    "empty": b"",
}


@pytest.mark.parametrize("fault", BAD_FORMS)
def test_a_bad_form_leaves_the_server_ready(server: uploads.Server, disk: Path, fault: str) -> None:
    answer = server.ask("POST", "/v1beta1/upload-form", BAD_FORMS[fault], FORM)
    assert answer.status in {400, 500}
    assert answer.text.startswith("Saving stream failed")
    oracle.unusable(disk)
    assert server.ask("POST", "/v1beta1/upload-form", b"no form", {}).status == 400
    assert server.ask("POST", SYNC, DATA).status == 200
