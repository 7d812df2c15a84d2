"""The upload server as its clients see it: paths, methods, status, bodies."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from cdi_worker.importer import contract
from tests.support import disks, oracle, processes, tls, uploads

MIB = uploads.MIB
SYNC = uploads.SYNC
DATA = uploads.DATA
server = uploads.server


def test_healthz_needs_no_certificate(server: uploads.Server) -> None:
    answer = server.ask("GET", "/healthz", client=None)
    assert (answer.status, answer.text) == (200, "OK")


@pytest.mark.parametrize("name", ["upload", "upload-async"])
def test_successful_upload_ends_the_server(server: uploads.Server, disk: Path, name: str) -> None:
    """The body has a length, or it is sent in chunks."""
    pieces = [DATA[start : start + 77_777] for start in range(0, len(DATA), 77_777)]
    assert server.ask("POST", f"/v1beta1/{name}", DATA if name == "upload" else pieces).status == 200
    ended = server.result()
    assert (ended.status, ended.message) == (0, uploads.DONE)
    assert disk.read_bytes() == DATA
    assert disk.stat().st_mode & 0o777 == 0o660


def test_head_probe_is_answered(server: uploads.Server) -> None:
    for version in ("v1beta1", "v1alpha1"):
        for kind in ("upload-async", "upload-form-async"):
            assert server.ask("HEAD", f"/{version}/{kind}", client=None).status == 200
        for kind in ("upload", "upload-form", "upload-archive"):
            assert server.ask("HEAD", f"/{version}/{kind}", client=None).status == 404


def test_other_methods_are_not_found(server: uploads.Server) -> None:
    for name in ("upload", "upload-form", "upload-form-async", "upload-archive"):
        for method in ("GET", "PUT", "DELETE"):
            assert server.ask(method, f"/v1beta1/{name}").status == 404, (method, name)


def test_client_certificate_is_required(
    server: uploads.Server, certificates: uploads.Certificates, tmp_path: Path
) -> None:
    other_name = certificates.authority.issue(common_name="somebody", client=True)
    for client in (None, other_name):
        assert server.ask("POST", SYNC, DATA, client=client).status == 401
    stranger = tls.Authority(tmp_path / "other").issue(common_name=uploads.CLIENT, client=True)
    expired = certificates.authority.issue(common_name=uploads.CLIENT, client=True, days=-1)
    for client in (stranger, expired):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            server.ask("POST", SYNC, b"x", client=client)
    assert server.ask("POST", SYNC, DATA).status == 200


def test_too_large_upload_is_refused(
    certificates: uploads.Certificates, paths: contract.Paths, disk: Path
) -> None:
    env = {"UPLOAD_IMAGE_SIZE": "4Mi"}
    with uploads.Server(certificates, env, paths) as server:
        for body in (DATA, [DATA[:MIB], DATA[MIB:]]):
            answer = server.ask("POST", SYNC, body)
            assert answer.status == 400
            assert answer.text.startswith(
                "Saving stream failed: effective image size is larger than the reported available storage"
            )
            assert "is larger than the reported available storage 4194304" in answer.text
            oracle.unusable(disk)
        assert server.ask("POST", SYNC, DATA[:MIB]).status == 200
    assert disk.stat().st_size == 4 * MIB


def test_unsafe_image_is_refused(server: uploads.Server, disk: Path, disks: disks.Disks) -> None:
    image = bytearray(disks.image("qcow2").read_bytes())
    image[8:20] = (512).to_bytes(8, "big") + (9).to_bytes(4, "big")
    answer = server.ask("POST", SYNC, bytes(image))
    assert answer.status == 400
    assert answer.text.startswith("Saving stream failed: qcow2 image refused")
    oracle.unusable(disk)
    assert server.ask("POST", SYNC, DATA).status == 200


def test_curl_waits_for_continue(server: uploads.Server, disk: Path, tmp_path: Path) -> None:
    processes.need("curl")
    (tmp_path / "image").write_bytes(DATA)
    made = server.certificates
    argv = ["curl", "-sS", "--fail-with-body", "--cacert", made.authority.certificate]
    argv += ["--cert", made.client.certificate, "--key", made.client.key, "-H", "Expect: 100-continue"]
    argv += ["--expect100-timeout", "15", "--data-binary", f"@{tmp_path / 'image'}", server.url(SYNC)]
    processes.run(*argv, timeout=12)
    assert disk.read_bytes() == DATA


def test_refused_request_gets_no_continue(server: uploads.Server) -> None:
    with server.connect(None) as connection:
        connection.putrequest("POST", SYNC)
        connection.putheader("Content-Length", "1000000")
        connection.putheader("Expect", "100-continue")
        connection.endheaders()
        assert connection.sock.recv(12) == b"HTTP/1.1 401"
