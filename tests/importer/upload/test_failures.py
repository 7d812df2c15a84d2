"""Uploads and clones that fail on this side: the client is told at once, and the server is ready."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import random
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker import contract
from cdi_worker.formats.compressed import snappy
from cdi_worker.upload import headers as upload_headers
from tests.support import devices, oracle, processes, uploads, vmdk_stream

MIB = uploads.MIB
SYNC = uploads.SYNC
NOISE = random.Random(6).randbytes(8 * MIB)
SIZE = 64 * MIB

KINDS: dict[str, dict[str, str]] = {
    "upload": {},
    "blockdevice-clone": {"x-cdi-content-type": "blockdevice-clone"},
    "filesystem-clone": {"x-cdi-content-type": "filesystem-clone"},
}


def stream(kind: str, folder: Path) -> bytes:
    """Return ``NOISE`` as a client of that kind sends it."""
    if kind == "upload":
        return NOISE
    data = NOISE
    if kind == "filesystem-clone":
        (folder / "disk.img").write_bytes(NOISE)
        argv = ["tar", "--create", "--file=-", "disk.img"]
        data = subprocess.run(argv, cwd=folder, check=True, capture_output=True).stdout
    pieces = [memoryview(data)[at : at + 65_536] for at in range(0, len(data), 65_536)]
    return b"".join(snappy.frames(pieces))


@contextlib.contextmanager
def silent(
    server: uploads.Server, body: bytes, headers: dict[str, str]
) -> Iterator[http.client.HTTPSConnection]:
    """Send a part of a body that promises more, and say nothing then."""
    with server.connect() as connection:
        connection.putrequest("POST", SYNC)
        for name, value in {"Content-Length": str(len(body) + SIZE), **headers}.items():
            connection.putheader(name, value)
        connection.endheaders()
        connection.send(body)
        yield connection


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_fails_while_the_client_is_silent(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path, kind: str
) -> None:
    with devices.failing(tmp_path, 2 * SIZE) as target:
        server = uploads.Server(certificates, {"DESTINATION": str(target.path)}, paths)
        # Past the page cache, which knows of failures only in the end.
        wanted = dataclasses.replace(server.settings.wanted, direct=True)
        server.settings = dataclasses.replace(server.settings, wanted=wanted)
        body = stream(kind, tmp_path)
        with server:
            target.fail()
            with silent(server, body, KINDS[kind]) as connection:
                begun = time.monotonic()
                answer = uploads.Answer(connection.getresponse())
                assert (answer.status, "input/output error" in answer.text) == (500, True), answer.text
                assert time.monotonic() - begun < 5
            target.mend()
            assert server.ask("POST", SYNC, body, KINDS[kind]).status == 200
            assert server.result().status == 0


@pytest.mark.parametrize("kind", KINDS)
def test_too_large_while_the_client_is_silent(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path, kind: str
) -> None:
    with uploads.Server(certificates, {"UPLOAD_IMAGE_SIZE": "2Mi"}, paths) as server:
        with silent(server, stream(kind, tmp_path), KINDS[kind]) as connection:
            answer = uploads.Answer(connection.getresponse())
            assert (answer.status, "effective image size" in answer.text) == (400, True), answer.text
        oracle.unusable(Path(paths.data, "disk.img"))
        assert server.ask("POST", SYNC, NOISE[:MIB]).status == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_while_the_client_goes_on(
    certificates: uploads.Certificates, paths: contract.Paths, chunked: bool
) -> None:
    """It sends a gigabyte before it looks for an answer, or until its connection is gone."""
    with uploads.Server(certificates, {"UPLOAD_IMAGE_SIZE": "2Mi"}, paths) as server:
        with server.connect() as connection:
            connection.putrequest("POST", SYNC)
            length = ("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(1 << 30))
            connection.putheader(*length)
            connection.endheaders()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                for _ in range(1 << 10):
                    connection.send(b"100000\r\n" * chunked + NOISE[:MIB] + b"\r\n" * chunked)
            answer = uploads.Answer(connection.getresponse())
            assert (answer.status, "effective image size" in answer.text) == (400, True)
        assert server.ask("POST", SYNC, NOISE[:MIB]).status == 200


@pytest.mark.parametrize("expects", ["", "100-continue"])
def test_too_large_for_curl(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path, expects: str
) -> None:
    processes.need("curl")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.write(NOISE)
        file.truncate(1 << 30)
    with uploads.Server(certificates, {"UPLOAD_IMAGE_SIZE": "2Mi"}, paths) as server:
        made = server.certificates
        argv = ["curl", "-sS", "--cacert", made.authority.certificate, "--cert", made.client.certificate]
        argv += ["--key", made.client.key, "-H", f"Expect: {expects}", "-X", "POST", "-T", image]
        said = processes.run(*argv, "-w", "\n%{json}", server.url(SYNC)).stdout
        text, _, facts = said.partition("\n")
        assert text.startswith("Saving stream failed: effective image size is larger")
        assert json.loads(facts)["http_code"] == 400
        assert server.ask("POST", SYNC, NOISE[:MIB]).status == 200


def test_our_own_clone_to_a_volume_too_small(
    certificates: uploads.Certificates, paths: contract.Paths
) -> None:
    """Said in the stream's first run of zeros, with the rest never sent."""
    headers = {**KINDS["blockdevice-clone"], upload_headers.CHOICE: upload_headers.EXTENTS}
    with uploads.Server(certificates, {"UPLOAD_IMAGE_SIZE": "2Mi"}, paths) as server:
        with silent(server, NOISE[:100], headers) as connection:
            assert uploads.Answer(connection.getresponse()).status in {400, 500}
        assert server.ask("POST", SYNC, NOISE[:MIB]).status == 200


def test_an_image_that_has_to_be_read_twice(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    """Sources that can be read again are, into scratch; of an upload it is said what to do instead."""
    image = bytearray(vmdk_stream.streamed(NOISE[:MIB]))
    image[-512:] = (0).to_bytes(8, "little") + bytes(4) + (9).to_bytes(4, "little") + bytes(496)
    (tmp_path / "scratch").mkdir()
    with_scratch = dataclasses.replace(paths, scratch=str(tmp_path / "scratch"))
    for where, phrase in ((with_scratch, "convert it first: qemu-img convert"), (paths, "scratch space")):
        with uploads.Server(certificates, {}, where) as server:
            answer = server.ask("POST", SYNC, bytes(image))
            assert (answer.status, phrase in answer.text) == (500, True), answer.text
            assert "marker" in answer.text
            oracle.unusable(Path(paths.data, "disk.img"))
            assert server.ask("POST", SYNC, NOISE[:MIB]).status == 200
        Path(paths.data, "disk.img").unlink()
