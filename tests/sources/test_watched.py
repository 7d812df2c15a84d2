"""Digests by which callers watch whether a disk has changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import misbehave, tls, worker

SHA256 = "5e" * 32


def digest(*arguments: str | Path, **env: str) -> worker.Completed:
    return worker.call("digest", *arguments, env=env)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (misbehave.Page(bytes(512), etag='"5f-6"'), 'etag:"5f-6"'),
        (misbehave.Page(bytes(512), etag='"5f-6"', ranges=False), 'etag:"5f-6"'),
        (misbehave.Page(bytes(512), headers={"x-amz-version-id": "3HL4kqtJ"}), "version:3HL4kqtJ"),
    ],
)
def test_web_server_is_watched_by_what_is_strong(
    server: misbehave.Server, page: misbehave.Page, expected: str
) -> None:
    url = server.serve("/disk", page)
    done = digest(url)
    assert (done.status, done.output) == (0, f"{expected}\n"), done.errors
    assert json.loads(digest("--json", url).output)["digest"] == expected


@pytest.mark.parametrize("etag", ['W/"5f-6"', None])
def test_weak_identity_is_not_a_digest(server: misbehave.Server, etag: str | None) -> None:
    done = digest(server.serve("/disk", misbehave.Page(bytes(512), etag=etag)))
    assert (done.status, "--checksum-file" in done.error_message) == (3, True)


def test_checksum_file_is_asked_instead_of_the_disk(server: misbehave.Server, tmp_path: Path) -> None:
    text = f"{SHA256}  disk 1.qcow2\n"
    sums = server.serve("/SHA256SUMS", misbehave.Page(text.encode()))
    (tmp_path / "SHA256SUMS").write_text(text)
    path = tmp_path / "SHA256SUMS"
    for file in (sums, path, f"file://{path}"):
        done = digest(f"--checksum-file={file}", server.url("/disk%201.qcow2"))
        assert (done.status, done.output) == (0, f"sha256:{SHA256}\n"), done.errors
    assert not server.gets("/disk%201.qcow2")


@pytest.mark.parametrize(
    ("page", "status", "message"),
    [
        (misbehave.Page(b"nothing"), 3, "no line with a checksum of 'disk'"),
        (misbehave.Page(status=404), 3, "404"),
        (misbehave.Page(bytes(9 << 20)), 3, "larger than 8 MiB"),
    ],
)
def test_useless_checksum_file_is_reported(
    server: misbehave.Server, page: misbehave.Page, status: int, message: str
) -> None:
    sums = server.serve("/SHA256SUMS", page)
    done = digest(f"--checksum-file={sums}", server.url("/disk"))
    assert (done.status, message in done.error_message) == (status, True), done.errors
    assert "/SHA256SUMS" in done.error_message


def test_credentials_stay_with_the_server_of_the_disk(server: misbehave.Server, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret-password")
    login = ["--user=me", f"--password-file={tmp_path / 'password'}", "--header=X-Token: hush"]
    own = server.serve(
        "/SHA256SUMS", misbehave.Page(f"{SHA256}  disk\n".encode(), password="me:secret-password")
    )
    assert digest(*login, f"--checksum-file={own}", server.url("/disk")).status == 0
    with misbehave.Server() as other:
        sums = other.serve("/SHA256SUMS", misbehave.Page(f"{SHA256}  disk\n".encode()))
        assert digest(*login, f"--checksum-file={sums}", server.url("/disk")).status == 0
        (seen,) = other.gets("/SHA256SUMS")
        assert not {"authorization", "x-token"} & set(seen.headers)


def test_certificates_apply_to_both(tmp_path: Path) -> None:
    authority = tls.Authority(tmp_path / "tls")
    with misbehave.Server(authority.issue()) as secure:
        url = secure.serve("/disk", misbehave.Page(bytes(512)))
        sums = secure.serve("/SHA256SUMS", misbehave.Page(f"{SHA256}  disk\n".encode()))
        trust = f"--ca-file={authority.certificate}"
        assert digest(trust, url).output == 'etag:"one"\n'
        assert digest(trust, f"--checksum-file={sums}", url).output == f"sha256:{SHA256}\n"


def test_missing_checksum_file_is_reported() -> None:
    done = digest("--checksum-file=/nowhere/SHA256SUMS", "http://h/disk")
    assert (done.status, "/nowhere/SHA256SUMS: no such file" in done.error_message) == (3, True), done.errors


def test_request_that_cannot_work_is_refused() -> None:
    for arguments, message in (
        (["--source=imageio", "--disk-id=1", "https://e.invalid/api"], "no such option"),
        (["http://[::1"], "malformed"),
        (["--checksum-file=ftp://h/SHA256SUMS", "http://h/disk"], "unsupported url scheme"),
        (["--checksum-file=http://h/SHA256SUMS", "docker://h/disk"], "no file name to look up"),
    ):
        done = digest(*arguments)
        assert (done.status, message in done.errors.lower() or message in done.errors) == (2, True), (
            done.errors
        )
