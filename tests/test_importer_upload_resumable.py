"""Uploads in several requests, and the command that makes them."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from importer import contract, errors, progress, upload_file
from tests import devices, oracle, processes, uploads

MIB = 1 << 20
PLACE = "/v1beta1/upload-resumable"
DATA = random.Random(9).randbytes(3 * MIB) + bytes(2 * MIB) + random.Random(8).randbytes(MIB)
TUS = {"Tus-Resumable": "1.0.0"}
MORE = {**TUS, "Content-Type": "application/offset+octet-stream"}


@pytest.fixture
def paths(tmp_path: Path) -> contract.Paths:
    (tmp_path / "data").mkdir()
    return contract.Paths(data=str(tmp_path / "data"), block="/no", scratch="/no", metrics_port=0)


@pytest.fixture
def disk(paths: contract.Paths) -> Path:
    return Path(paths.data, "disk.img")


@pytest.fixture
def server(certificates: uploads.Certificates, paths: contract.Paths) -> Iterator[uploads.Server]:
    with uploads.Server(certificates, {}, paths) as running:
        yield running


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (tmp_path / "image").write_bytes(DATA)
    return tmp_path / "image"


def create(server: uploads.Server, length: int = len(DATA), **headers: str) -> str:
    answer = server.ask("POST", PLACE, b"", {**TUS, "Upload-Length": str(length), **headers})
    assert (answer.status, answer.headers["Upload-Offset"]) == (201, "0")
    location = answer.headers["Location"]
    assert location.startswith(PLACE + "/")
    return location


def patch(server: uploads.Server, where: str, offset: int, data: bytes, **headers: str) -> uploads.Answer:
    return server.ask("PATCH", where, data, {**MORE, "Upload-Offset": str(offset), **headers})


def offset_of(server: uploads.Server, where: str = PLACE) -> int:
    answer = server.ask("HEAD", where, None, TUS)
    assert answer.status == 200
    assert answer.headers["Cache-Control"] == "no-store"
    return int(answer.headers["Upload-Offset"])


# -- the protocol


def test_options(server: uploads.Server) -> None:
    answer = server.ask("OPTIONS", PLACE)
    assert answer.status == 204
    assert answer.headers["Tus-Version"] == "1.0.0"
    assert "creation" in answer.headers["Tus-Extension"]
    assert server.ask("OPTIONS", PLACE, client=None).status == 401
    assert server.ask("GET", PLACE).status == 404
    assert server.ask("HEAD", PLACE).status == 404


def test_in_parts(server: uploads.Server, disk: Path) -> None:
    where = create(server, **{"Upload-Metadata": "filename ZGlzaw=="})
    assert patch(server, where, 0, DATA[:MIB]).headers["Upload-Offset"] == str(MIB)
    assert offset_of(server) == offset_of(server, where) == MIB
    assert server.ask("HEAD", where).headers["Upload-Metadata"] == "filename ZGlzaw=="
    assert patch(server, where, MIB, b"").status == 204
    for wrong in (0, MIB - 1, MIB + 1):
        assert patch(server, where, wrong, DATA[wrong : wrong + 1000]).status == 409
    last = patch(server, where, MIB, DATA[MIB:])
    assert (last.status, last.headers["Upload-Offset"]) == (204, str(len(DATA)))
    assert server.result().status == 0
    assert disk.read_bytes() == DATA


def test_what_is_refused(server: uploads.Server) -> None:
    assert server.ask("POST", PLACE, b"", TUS).status == 400
    assert server.ask("POST", PLACE, b"", {**TUS, "Upload-Length": "-1"}).status == 400
    assert server.ask("POST", PLACE, b"", {"Tus-Resumable": "0.2.2", "Upload-Length": "1"}).status == 412
    where = create(server)
    assert server.ask("PATCH", where, DATA, {**TUS, "Upload-Offset": "0"}).status == 415
    assert patch(server, where, 0, DATA + b"x").status == 413
    assert patch(server, PLACE + "/another", 0, DATA).status == 404
    assert server.ask("PATCH", where, DATA, {**MORE, "Upload-Offset": "0"}, client=None).status == 401


def test_a_length_of_none(server: uploads.Server, disk: Path) -> None:
    assert server.ask("POST", PLACE, b"", {**TUS, "Upload-Defer-Length": "1"}).status == 201
    with server.connect() as connection:
        headers = {**MORE, "Upload-Offset": "0"}
        connection.request("PATCH", PLACE, iter([DATA[:MIB], DATA[MIB:]]), headers, encode_chunked=True)
        assert connection.getresponse().status == 204
    assert disk.read_bytes() == DATA


def test_termination(server: uploads.Server, disk: Path) -> None:
    where = create(server)
    patch(server, where, 0, DATA[:1000])
    assert server.ask("DELETE", where, None, TUS).status == 204
    processes.wait_for(lambda: server.ask("HEAD", where, None, TUS).status == 404, "the end of the upload")
    oracle.unusable(disk)
    assert patch(server, create(server), 0, DATA).status == 204


def test_a_connection_that_breaks(server: uploads.Server, disk: Path) -> None:
    where = create(server)
    sent = 0
    while sent < len(DATA):
        with server.connect() as connection:
            connection.putrequest("PATCH", where)
            for name, value in {**MORE, "Upload-Offset": str(sent)}.items():
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(DATA) - sent))
            connection.endheaders()
            connection.send(DATA[sent : sent + 1_300_000])
            if sent + 1_300_000 >= len(DATA):
                assert connection.getresponse().status == 204
                break
        now = offset_of(server, where)
        assert sent <= now <= sent + 1_300_000
        sent = now
    assert disk.read_bytes() == DATA


def test_the_same_client_again_while_the_old_connection_hangs(server: uploads.Server, disk: Path) -> None:
    where = create(server)
    with server.connect() as dead:
        dead.putrequest("PATCH", where)
        for name, value in {**MORE, "Upload-Offset": "0", "Content-Length": str(len(DATA))}.items():
            dead.putheader(name, value)
        dead.endheaders()
        dead.send(DATA[:MIB])
        processes.wait_for(lambda: offset_of(server, where) > 0, "the first bytes")
        now = offset_of(server, where)
        assert patch(server, where, now, DATA[now:]).status == 204
    assert disk.read_bytes() == DATA


def test_an_abandoned_upload_makes_way(server: uploads.Server, disk: Path) -> None:
    for _ in range(2):
        patch(server, create(server, 5 * MIB), 0, bytes(1000))
    assert server.ask("POST", "/v1beta1/upload", DATA).status == 200
    assert disk.read_bytes() == DATA


def test_an_upload_that_nobody_goes_on_with(
    certificates: uploads.Certificates, paths: contract.Paths, disk: Path
) -> None:
    with uploads.Server(certificates, {}, paths).impatient() as server:
        where = create(server)
        patch(server, where, 0, DATA[:MIB])
        processes.wait_for(lambda: server.ask("HEAD", where, None, TUS).status == 404, "impatience")
        oracle.unusable(disk)


def test_a_wrong_checksum(server: uploads.Server, disk: Path) -> None:
    where = create(server, **{"x-cdi-checksum": "sha256:" + "0" * 64})
    answer = patch(server, where, 0, DATA)
    assert (answer.status, "checksum mismatch" in answer.text) == (500, True)
    oracle.unusable(disk)


# -- the command


def wanted(server: uploads.Server, image: Path, **more: object) -> upload_file.Wanted:
    made = server.certificates
    found = {
        "path": str(image),
        "url": f"https://localhost:{server.port}",
        "ca_file": str(made.authority.certificate),
        "certificate": str(made.client.certificate),
        "key": str(made.client.key),
        "stall": 20.0,
        **more,
    }
    return upload_file.Wanted(**found)  # type: ignore[arg-type]


def test_command(server: uploads.Server, image: Path, disk: Path) -> None:
    made = server.certificates
    argv = [sys.executable, "-m", "importer", "upload", image, server.url(""), "--progress", "lines"]
    argv += ["--ca-file", made.authority.certificate, "--cert", made.client.certificate]
    argv += ["--key", made.client.key, "--checksum", f"sha256:{hashlib.sha256(DATA).hexdigest()}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert "100.0% done" in done.stderr
    assert disk.read_bytes() == DATA


def test_the_command_says_what_the_server_says(server: uploads.Server, image: Path) -> None:
    with pytest.raises(errors.UploadFailed, match="checksum mismatch"):
        upload_file.send(
            wanted(server, image, checksum="md5:" + "0" * 32), progress.NullProgress(), threading.Event()
        )
    with pytest.raises(errors.UploadFailed, match="401"):
        upload_file.send(
            wanted(server, image, certificate="", key=""), progress.NullProgress(), threading.Event()
        )
    with pytest.raises(errors.Unreachable, match="certificate"):
        upload_file.send(wanted(server, image, ca_file=""), progress.NullProgress(), threading.Event())


def test_a_server_that_knows_only_one_request(image: Path) -> None:
    """Such as CDI's upload proxy, which wants a token."""
    with uploads.OneRequest.serving() as port:
        url = f"http://127.0.0.1:{port}"
        upload_file.send(
            upload_file.Wanted(str(image), url, token="secret"), progress.NullProgress(), threading.Event()
        )
    seen = uploads.OneRequest.seen
    assert [(method, path) for method, path, _, _ in seen] == [
        ("HEAD", PLACE),
        ("POST", PLACE),
        ("POST", "/v1beta1/upload"),
    ]
    assert {headers["Authorization"] for _, _, headers, _ in seen} == {"Bearer secret"}
    assert seen[-1][3] == DATA


def test_the_command_goes_on_after_breaks(server: uploads.Server, image: Path, disk: Path) -> None:
    with uploads.Relay(server.port, None, None, 2 * MIB, 2000, MIB, 1) as relay:
        meter = progress.Meter()
        url = f"https://localhost:{relay.port}"
        upload_file.send(wanted(server, image, url=url), meter, threading.Event())
        # Starting over each time would send 3 MiB and 2001 bytes twice; a reset loses what was not read yet.
        assert relay.sent < len(DATA) + 3 * MIB
    assert (meter.finished, meter.count) == (True, len(DATA))
    assert disk.read_bytes() == DATA


def test_another_run_goes_on(server: uploads.Server, image: Path, disk: Path) -> None:
    cancel = threading.Event()

    class Stop(progress.NullProgress):
        def advance(self, count: int) -> None:
            processes.wait_for(lambda: server.received > 100_000, "the first bytes")
            cancel.set()

    with pytest.raises(errors.Cancelled):
        upload_file.send(wanted(server, image), Stop(), cancel)
    begun = offset_of(server)
    assert begun > 0
    with uploads.Relay(server.port) as relay:
        url = f"https://localhost:{relay.port}"
        upload_file.send(wanted(server, image, url=url), progress.NullProgress(), threading.Event())
        assert relay.sent < len(DATA) - begun + 100_000
    assert disk.read_bytes() == DATA


def test_the_server_is_started_anew(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    image = tmp_path / "noise"
    image.write_bytes(random.Random(2).randbytes(24 * MIB))
    with devices.slow(tmp_path, 24 * MIB, bytes_per_second=16 * MIB) as target:
        env = {"DESTINATION": str(target)}
        first = uploads.Server(certificates, env, paths)
        ended: list[BaseException | None] = []
        meter = progress.Meter()

        def send() -> None:
            try:
                upload_file.send(wanted(first, image), meter, threading.Event())
                ended.append(None)
            except errors.Error as err:
                ended.append(err)

        argv = [sys.executable, "-m", "importer", "-v=3", "--termination-log=/dev/null"]
        log = tmp_path / "log"
        ready = functools.partial(processes.answers, first.port)
        with processes.running(argv, log=log, ready=ready, env={**os.environ, **first.env}) as pod:
            client = threading.Thread(target=send)
            client.start()
            processes.wait_for(lambda: meter.count > 12 * MIB, "half of the disk")
            pod.send_signal(signal.SIGKILL)
        second = uploads.Server(certificates, {**env, "LISTEN_PORT": str(first.port)}, paths)
        second.port = first.port
        with second:
            client.join(processes.PATIENCE)
            assert ended == [None]
            assert second.result().status == 0
        oracle.same(target, image)
