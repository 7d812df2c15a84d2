"""Uploads and clones that fail on our side: the client is told at once, and the server stays usable."""

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

from cdi_worker.formats.compressed import snappy
from cdi_worker.importer import contract
from cdi_worker.importer.upload import headers as upload_headers
from tests.support import devices, oracle, processes, uploads, vmdk_stream

MIB = uploads.MIB
SYNC = uploads.SYNC
NOISE = random.Random(6).randbytes(8 * MIB)
server = uploads.server
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
    """Send part of a body, and then nothing more."""
    with server.connect() as connection:
        connection.putrequest("POST", SYNC)
        for name, value in {"Content-Length": str(len(body) + SIZE), **headers}.items():
            connection.putheader(name, value)
        connection.endheaders()
        connection.send(body)
        yield connection


@pytest.mark.parametrize("kind", KINDS)
def test_failing_device_is_reported_to_a_silent_client(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path, kind: str
) -> None:
    with devices.failing(tmp_path, 2 * SIZE) as target:
        server = uploads.Server(certificates, {"DESTINATION": str(target.path)}, paths)
        # With direct I/O: the page cache reports errors only at the end.
        request = dataclasses.replace(server.settings.request, direct=True)
        server.settings = dataclasses.replace(server.settings, request=request)
        body = stream(kind, tmp_path)
        with server:
            target.fail()
            with silent(server, body, KINDS[kind]) as connection:
                begun = time.monotonic()
                answer = uploads.Response(connection.getresponse())
                assert (answer.status, "input/output error" in answer.text) == (500, True), answer.text
                assert time.monotonic() - begun < processes.PATIENCE
            target.mend()
            assert server.ask("POST", SYNC, body, KINDS[kind]).status == 200
            assert server.result().status == 0


@pytest.mark.parametrize("kind", KINDS)
def test_too_large_disk_is_reported_to_a_silent_client(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path, kind: str
) -> None:
    with uploads.Server(certificates, {"UPLOAD_IMAGE_SIZE": "2Mi"}, paths) as server:
        with silent(server, stream(kind, tmp_path), KINDS[kind]) as connection:
            answer = uploads.Response(connection.getresponse())
            assert (answer.status, "effective image size" in answer.text) == (400, True), answer.text
        oracle.unusable(Path(paths.data, "disk.img"))
        assert server.ask("POST", SYNC, NOISE[:MIB]).status == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_disk_is_reported_to_a_sending_client(
    certificates: uploads.Certificates, paths: contract.Paths, chunked: bool
) -> None:
    """The client sends a gigabyte before it reads a response, or until its connection is closed."""
    with uploads.Server(certificates, {"UPLOAD_IMAGE_SIZE": "2Mi"}, paths) as server:
        with server.connect() as connection:
            connection.putrequest("POST", SYNC)
            length = ("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(1 << 30))
            connection.putheader(*length)
            connection.endheaders()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                for _ in range(1 << 10):
                    connection.send(b"100000\r\n" * chunked + NOISE[:MIB] + b"\r\n" * chunked)
            answer = uploads.Response(connection.getresponse())
            assert (answer.status, "effective image size" in answer.text) == (400, True)
        assert server.ask("POST", SYNC, NOISE[:MIB]).status == 200


@pytest.mark.parametrize("expects", ["", "100-continue"])
def test_curl_shows_that_the_disk_is_too_large(
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
        output = processes.run(*argv, "-w", "\n%{json}", server.url(SYNC)).stdout
        text, _, facts = output.partition("\n")
        assert text.startswith("Saving stream failed: effective image size is larger")
        assert json.loads(facts)["http_code"] == 400
        assert server.ask("POST", SYNC, NOISE[:MIB]).status == 200


def test_clone_to_a_too_small_volume_is_refused_early(
    certificates: uploads.Certificates, paths: contract.Paths
) -> None:
    """It is reported in the stream's first run of zeros; the rest is never sent."""
    headers = {**KINDS["blockdevice-clone"], upload_headers.CHOICE: upload_headers.EXTENTS}
    with uploads.Server(certificates, {"UPLOAD_IMAGE_SIZE": "2Mi"}, paths) as server:
        with silent(server, NOISE[:100], headers) as connection:
            assert uploads.Response(connection.getresponse()).status in {400, 500}
        assert server.ask("POST", SYNC, NOISE[:MIB]).status == 200


def test_image_that_must_be_read_twice_is_refused(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    """Other sources are read again, into scratch; for an upload the message says what to do instead."""
    image = bytearray(vmdk_stream.streamed(NOISE[:MIB]))
    image[-512:] = (0).to_bytes(8, "little") + bytes(4) + (9).to_bytes(4, "little") + bytes(496)
    (tmp_path / "scratch").mkdir()
    with_scratch = paths._replace(scratch=str(tmp_path / "scratch"))
    for where, status, phrase in (
        (with_scratch, 400, "convert it first (qemu-img convert"),
        (paths, 500, "scratch space"),
    ):
        with uploads.Server(certificates, {}, where) as server:
            answer = server.ask("POST", SYNC, bytes(image))
            assert (answer.status, phrase in answer.text) == (status, True), answer.text
            assert "marker" in answer.text
            oracle.unusable(Path(paths.data, "disk.img"))
            assert server.ask("POST", SYNC, NOISE[:MIB]).status == 200
        Path(paths.data, "disk.img").unlink()


def test_part_of_a_file_is_not_a_disk(server: uploads.Server, paths: contract.Paths) -> None:
    """Browsers' clients send large files in parts. The first one was a complete disk."""
    headers = {"Content-Range": f"bytes 0-{len(NOISE) - 1}/{2 * len(NOISE)}"}
    answer = server.ask("POST", SYNC, NOISE, headers)
    assert (answer.status, "only a part of the file" in answer.text) == (400, True), answer.text
    assert not [*Path(paths.data).iterdir()]
    assert server.ask("POST", SYNC, NOISE).status == 200
