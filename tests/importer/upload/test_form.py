"""Uploads by browsers: a file within a form."""

from __future__ import annotations

import hashlib
import random
import re
from pathlib import Path

import pytest

from cdi_worker.importer import contract
from cdi_worker.importer.upload import form as upload_form
from tests.support import clones, oracle, upload_wire, uploads

MIB = uploads.MIB
DATA = uploads.DATA
server = uploads.server


def test_file_in_a_form_is_uploaded(server: uploads.Server, disk: Path) -> None:
    body = b"".join(
        [part("note", b"hello"), part("file", DATA, name="disk.img"), part("more", b"x" * 100_000), END]
    )
    assert server.ask("POST", "/v1beta1/upload-form", body, FORM).status == 200
    assert server.result().status == 0
    assert disk.read_bytes() == DATA


BOUNDARY = "------------------------d74496d66958873e"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
END = f"--{BOUNDARY}--\r\n".encode()


def part(field: str, data: bytes, name: str | None = None) -> bytes:
    file = f'; filename="{name}"' if name else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{field}"{file}\r\n\r\n'
    return head.encode() + data + b"\r\n"


@pytest.mark.parametrize("mode", ["block", "filesystem"])
def test_clone_in_a_form_is_received(
    server: uploads.Server, paths: contract.Paths, folder: Path, mode: str
) -> None:
    """The clone header overrides the path, as in CDI."""
    body = part("file", clones.body(folder, mode, ours=False)) + END
    kind = {"block": "blockdevice-clone", "filesystem": "filesystem-clone"}[mode]
    headers = {**FORM, "x-cdi-content-type": kind}
    assert server.ask("POST", "/v1beta1/upload-form", body, headers).status == 200
    assert server.result().message == (clones.FOLDER_DONE if mode == "filesystem" else clones.DONE)
    oracle.same(Path(paths.data, "disk.img"), folder / "disk.img")


# -- split and unusual forms: nothing is written, the server returns the digest of what it read

WRONG = {"x-cdi-checksum": f"sha256:{'0' * 64}"}


def digest(server: uploads.Server, body: bytes, kind: str = FORM["Content-Type"]) -> str:
    answer = server.ask("POST", "/v1beta1/upload-form", body, {**WRONG, "Content-Type": kind})
    found = re.search(r"calculated sha256:([0-9a-f]{64})", answer.text)
    assert found, answer.text
    return found[1]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


LURE = f"\r\n--{BOUNDARY[:-1]}\r\n-\r\r\n--".encode()


def test_form_may_be_split_anywhere(server: uploads.Server) -> None:
    """Around the boundaries, in TLS records and chunks of their own."""
    file = b"ab" + LURE
    form = part("x", b"y") + part("file", file) + part("z", b"") + END
    head = f"POST /v1beta1/upload-form HTTP/1.1\r\nHost: x\r\n{upload_wire.WRONG_CHECKSUM}"
    head += f"Content-Type: {FORM['Content-Type']}\r\n"
    with upload_wire.connected(server) as wire:
        for at in range(1, len(form), 5):
            chunks = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (at, form[:at], len(form) - at, form[at:])
            assert wire.digest(f"{head}Transfer-Encoding: chunked\r\n\r\n", chunks) == sha(file)


def test_boundary_between_two_pieces_is_found(server: uploads.Server) -> None:
    for size in range(upload_form.PIECE - 140, upload_form.PIECE, 7):
        file = random.Random(size).randbytes(size)
        assert digest(server, part("file", file) + part("z", b"z") + END) == sha(file), size


NESTED = b'--inner\r\nContent-Disposition: form-data; name="file"\r\n\r\nno\r\n--inner--\r\n'
FORMS = {
    "first": part("file", b"disk") + part("x", b"y") + END,
    "last": part("x", b"y") + part("file", b"disk") + END,
    "twice": part("file", b"disk") + part("file", b"another") + END,
    "a preamble": b"This is a form.\r\n" + part("file", b"disk") + END,
    "an empty line before": b"\r\n" + part("file", b"disk") + END,
    "an epilogue": part("file", b"disk") + END + b"That was a form." * 50_000,
    "another form behind": part("file", b"disk") + END + part("file", b"no") + END,
    "many parts": part("x", b"y") * 5000 + part("file", b"disk") + part("x", b"y") * 5000 + END,
    "a large part": part("x", bytes(1 << 20)) + part("file", b"disk") + END,
    "a form in a part": part("x", NESTED) + part("file", b"disk") + END,
    "its name as another's": part("files", b"no") + part("FILE", b"no") + part("file", b"disk") + END,
    "more headers": part("file", b"disk").replace(b"\r\n\r\n", b"\r\nContent-Type: x/y\r\n\r\n", 1) + END,
}


def test_unusual_form_is_read(server: uploads.Server) -> None:
    for name, form in FORMS.items():
        assert digest(server, form) == sha(b"disk"), name
    assert digest(server, part("file", NESTED) + END) == sha(NESTED)
    quoted = (part("file", b"disk") + END).replace(BOUNDARY.encode(), b"a b")
    for kind in (
        'multipart/form-data; boundary="a b"',
        'Multipart/Form-Data; charset=utf-8; Boundary="a b"; x=y',
    ):
        assert digest(server, quoted, kind) == sha(b"disk"), kind


HEAD_OF_A_PART = b'Content-Disposition: form-data; name="file"'
#: Each is followed by the last boundary.
MALFORMED = {
    "no file": part("other", DATA),
    "a header of 1 MiB": part("file", b"disk").replace(b"\r\n\r\n", b"\r\nX: " + b"y" * MIB + b"\r\n\r\n"),
    "a header without end": f"--{BOUNDARY}\r\nX: ".encode() + b"y" * MIB,
    "1000 headers": part("file", b"disk").replace(b"\r\n\r\n", b"\r\n" + b"X: y\r\n" * 1000 + b"\r\n", 1),
    "no name": part("file", b"disk").replace(b'; name="file"', b""),
    "no disposition": part("file", b"disk").replace(HEAD_OF_A_PART, b"X: y"),
    "another kind of part": part("file", b"disk").replace(b"form-data;", b"attachment;"),
    "more behind a boundary": part("file", b"disk") + f"--{BOUNDARY}x".encode() + END,
    "lone LFs": (part("file", b"disk") + END).replace(b"\r", b""),
}


CUT = {
    "within the file": part("file", DATA)[:-5000],
    "before the last boundary": part("file", DATA),
    "no boundary": DATA,
    "empty": b"",
}


def test_malformed_form_is_refused(server: uploads.Server, disk: Path) -> None:
    for fault, form in {**{name: form + END for name, form in MALFORMED.items()}, **CUT}.items():
        answer = server.ask("POST", "/v1beta1/upload-form", form, FORM)
        assert answer.status in ({400, 500} if fault in CUT else {400}), (fault, answer.text)
        assert answer.text.startswith("Saving stream failed: ")
        assert len(answer.text) < 500
        oracle.unusable(disk)
        assert digest(server, part("file", b"disk") + END) == sha(b"disk")
    assert server.ask("POST", uploads.SYNC, DATA).status == 200


def test_other_content_type_is_refused(server: uploads.Server) -> None:
    for kind in ("", "text/plain", "multipart/form-data", "multipart/mixed; boundary=x"):
        answer = server.ask("POST", "/v1beta1/upload-form", END, {"Content-Type": kind})
        assert (answer.status, "multipart/form-data" in answer.text) == (400, True), kind
