"""The upload server as its clients and its pod see it."""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from importer import contract, errors, upload_settings
from tests import devices, disks, oracle, processes, tls, uploads

MIB = 1 << 20
SYNC = "/v1beta1/upload"
DATA = random.Random(3).randbytes(3 * MIB) + bytes(5 * MIB) + random.Random(4).randbytes(512)
DONE = '{"preallocationApplied":false,"message":"Upload Complete"}'


@pytest.fixture
def paths(tmp_path: Path) -> contract.Paths:
    for name in ("data", "scratch"):
        (tmp_path / name).mkdir()
    return contract.Paths(
        data=str(tmp_path / "data"),
        block=str(tmp_path / "no-device"),
        scratch=str(tmp_path / "scratch"),
        termination_log=str(tmp_path / "termination-log"),
    )


@pytest.fixture
def disk(paths: contract.Paths) -> Path:
    return Path(paths.data, "disk.img")


@pytest.fixture
def server(certificates: uploads.Certificates, paths: contract.Paths) -> Iterator[uploads.Server]:
    with uploads.Server(certificates, {}, paths) as running:
        yield running


# -- paths, methods, status


def test_healthz_needs_no_certificate(server: uploads.Server) -> None:
    answer = server.ask("GET", "/healthz", client=None)
    assert (answer.status, answer.text) == (200, "OK")


@pytest.mark.parametrize("version", ["v1beta1", "v1alpha1"])
@pytest.mark.parametrize("name", ["upload", "upload-async"])
def test_an_upload_ends_the_server(server: uploads.Server, disk: Path, version: str, name: str) -> None:
    assert server.ask("POST", f"/{version}/{name}", DATA).status == 200
    ended = server.result()
    assert (ended.status, ended.message) == (0, DONE)
    assert disk.read_bytes() == DATA
    assert disk.stat().st_mode & 0o777 == 0o660


@pytest.mark.parametrize("version", ["v1beta1", "v1alpha1"])
def test_clients_probe_with_head(server: uploads.Server, version: str) -> None:
    assert server.ask("HEAD", f"/{version}/upload-async", client=None).status == 200


@pytest.mark.parametrize("name", ["upload", "upload-form", "upload-form-async", "upload-archive"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD"])
def test_other_methods_are_not_found(server: uploads.Server, method: str, name: str) -> None:
    assert server.ask(method, f"/v1beta1/{name}").status == 404


def test_another_path_is_not_found(server: uploads.Server) -> None:
    assert server.ask("POST", "/v1/upload", b"x").status == 404


def test_certificates(server: uploads.Server, certificates: uploads.Certificates, tmp_path: Path) -> None:
    other_name = certificates.authority.issue(common_name="somebody", client=True)
    for client in (None, other_name):
        assert server.ask("POST", SYNC, DATA, client=client).status == 401
    stranger = tls.Authority(tmp_path / "other").issue(common_name=uploads.CLIENT, client=True)
    expired = certificates.authority.issue(common_name=uploads.CLIENT, client=True, days=-1)
    for client in (stranger, expired):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            server.ask("POST", SYNC, b"x", client=client)
    assert server.ask("POST", SYNC, DATA).status == 200


def test_busy_and_done(server: uploads.Server, disk: Path) -> None:
    with server.connect() as waiting, server.connect() as slow:
        waiting.request("GET", "/healthz")
        waiting.getresponse().read()
        server.begin(slow, SYNC, len(DATA))
        slow.send(DATA[:MIB])
        server.wait_until_busy()
        assert server.ask("POST", SYNC, b"x").status == 503
        slow.send(DATA[MIB:])
        assert slow.getresponse().status == 200
    assert server.result().status == 0
    assert disk.read_bytes() == DATA


def assert_soon(condition: Callable[[], bool]) -> None:
    processes.wait_for(condition, "the condition")


def test_too_large(certificates: uploads.Certificates, paths: contract.Paths, disk: Path) -> None:
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


def test_a_refused_image(server: uploads.Server, disk: Path, disks: disks.Disks) -> None:
    image = bytearray(disks.image("qcow2").read_bytes())
    image[8:20] = (512).to_bytes(8, "big") + (9).to_bytes(4, "big")
    answer = server.ask("POST", SYNC, bytes(image))
    assert answer.status == 500
    assert answer.text.startswith("Saving stream failed: qcow2 image refused")
    oracle.unusable(disk)
    assert server.ask("POST", SYNC, DATA).status == 200


# -- bodies


def test_chunked_body_of_unknown_length(server: uploads.Server, disk: Path) -> None:
    pieces = [DATA[start : start + 77_777] for start in range(0, len(DATA), 77_777)]
    assert server.ask("POST", SYNC, pieces).status == 200
    assert disk.read_bytes() == DATA


def test_curl_waits_for_continue(server: uploads.Server, disk: Path, tmp_path: Path) -> None:
    processes.need("curl")
    (tmp_path / "image").write_bytes(DATA)
    made = server.certificates
    argv = ["curl", "-sS", "--fail-with-body", "--cacert", made.authority.certificate]
    argv += ["--cert", made.client.certificate, "--key", made.client.key, "-H", "Expect: 100-continue"]
    argv += ["--expect100-timeout", "15", "--data-binary", f"@{tmp_path / 'image'}", server.url(SYNC)]
    processes.run(*argv, timeout=12)
    assert disk.read_bytes() == DATA


def test_continue_is_not_said_to_the_refused(server: uploads.Server) -> None:
    with server.connect(None) as connection:
        connection.putrequest("POST", SYNC)
        connection.putheader("Content-Length", "1000000")
        connection.putheader("Expect", "100-continue")
        connection.endheaders()
        assert connection.sock.recv(12) == b"HTTP/1.1 401"


def test_connections_are_kept(server: uploads.Server, disk: Path) -> None:
    with server.connect() as connection:
        for _ in range(3):
            connection.request("GET", "/healthz")
            assert connection.getresponse().read() == b"OK"
        connection.request("POST", SYNC, DATA, {"x-cdi-checksum": "sha256:" + "0" * 64})
        assert connection.getresponse().read().startswith(b"Saving stream failed")
        connection.request("POST", SYNC, DATA)
        assert connection.getresponse().status == 200
    assert disk.read_bytes() == DATA


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


@pytest.mark.parametrize("compression", [None, "gz", "xz", "zst"])
def test_archive(
    server: uploads.Server, paths: contract.Paths, disks: disks.Disks, compression: str | None
) -> None:
    body = disks.tar(compression).read_bytes()
    assert server.ask("POST", "/v1beta1/upload-archive", body).status == 200
    assert server.result().message == DONE
    processes.run("diff", "-r", "--no-dereference", disks.tree(), paths.data)


def test_a_disk_is_no_archive(server: uploads.Server, paths: contract.Paths) -> None:
    assert server.ask("POST", "/v1beta1/upload-archive", DATA).status == 500
    assert not list(Path(paths.data).iterdir())


# -- what is made of them


@pytest.mark.parametrize("variant", disks.COMMON)
@pytest.mark.parametrize("name", ["upload", "upload-async"])
def test_every_format(
    server: uploads.Server, disk: Path, disks: disks.Disks, variant: str, name: str
) -> None:
    assert server.ask("POST", f"/v1beta1/{name}", disks.image(variant).read_bytes()).status == 200
    assert server.result().status == 0
    oracle.same(disk, disks.expected(variant))


@pytest.mark.parametrize("variant", ["raw", "qcow2", "qcow2-zlib"])
@pytest.mark.parametrize("compression", [None, "gz"])
def test_no_scratch_is_needed(
    certificates: uploads.Certificates,
    paths: contract.Paths,
    disk: Path,
    disks: disks.Disks,
    variant: str,
    compression: str | None,
) -> None:
    Path(paths.scratch).rmdir()
    with uploads.Server(certificates, {}, paths) as server:
        body = disks.wrapped(variant, compression).read_bytes()
        assert server.ask("POST", SYNC, body).status == 200
    oracle.same(disk, disks.expected(variant))


def test_other_formats_need_scratch(
    certificates: uploads.Certificates, paths: contract.Paths, disks: disks.Disks
) -> None:
    Path(paths.scratch).rmdir()
    with uploads.Server(certificates, {}, paths) as server:
        answer = server.ask("POST", SYNC, disks.image("vhdx").read_bytes())
        assert (answer.status, "scratch space required" in answer.text) == (500, True)


def test_block_device(
    certificates: uploads.Certificates, paths: contract.Paths, block: Path, disks: disks.Disks
) -> None:
    with uploads.Server(certificates, {"DESTINATION": str(block)}, paths) as server:
        assert server.ask("POST", "/v1beta1/upload-archive", disks.tar().read_bytes()).status == 400
        assert server.ask("POST", SYNC, disks.image("qcow2").read_bytes()).status == 200
        assert server.result().status == 0
    oracle.same(block, disks.expected("qcow2"), beyond=devices.DIRT)


def test_preallocation_and_size(
    certificates: uploads.Certificates, paths: contract.Paths, disk: Path
) -> None:
    env = {"PREALLOCATION": "true", "UPLOAD_IMAGE_SIZE": "16Mi", "FILESYSTEM_OVERHEAD": "0.06"}
    with uploads.Server(certificates, env, paths) as server:
        assert server.ask("POST", SYNC, DATA).status == 200
        assert server.result().message == '{"preallocationApplied":true,"message":"Upload Complete"}'
    assert disk.stat().st_size == 15 * MIB
    assert disk.stat().st_blocks * 512 >= 15 * MIB


def test_checksum(server: uploads.Server, disk: Path) -> None:
    wrong = {"x-cdi-checksum": "sha256:" + "0" * 64}
    answer = server.ask("POST", SYNC, DATA, wrong)
    assert (answer.status, "checksum mismatch: expected sha256:000" in answer.text) == (500, True)
    oracle.unusable(disk)
    assert server.ask("POST", SYNC, DATA, {"x-cdi-checksum": "sha256:zz"}).status == 400
    right = {"x-cdi-checksum": f"sha256:{hashlib.sha256(DATA).hexdigest()}"}
    assert server.ask("POST", "/v1beta1/upload-async", DATA, right).status == 200


# -- clients that misbehave


@pytest.mark.parametrize("sent", [0, 1000, MIB, len(DATA) - 1])
def test_a_client_that_disappears(server: uploads.Server, disk: Path, sent: int) -> None:
    with server.connect() as connection:
        server.begin(connection, SYNC, len(DATA))
        connection.send(DATA[:sent])
    assert_soon(lambda: server.ask("POST", SYNC, DATA).status == 200)
    assert disk.read_bytes() == DATA


def test_a_chunked_body_that_breaks_off(server: uploads.Server, disk: Path) -> None:
    with server.connect() as connection:
        connection.putrequest("POST", SYNC)
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        connection.send(b"100000\r\n" + DATA[:MIB] + b"\r\n200000\r\n" + DATA[:1000])
    assert_soon(lambda: server.ask("POST", SYNC, DATA).status == 200)
    assert disk.read_bytes() == DATA


@pytest.mark.parametrize("fault", ["malformed", "silent"])
def test_a_body_that_stops(
    certificates: uploads.Certificates, paths: contract.Paths, disk: Path, fault: str
) -> None:
    with (
        uploads.Server(certificates, {}, paths).impatient() as server,
        server.connect() as connection,
    ):
        connection.putrequest("POST", SYNC)
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        connection.send(b"100000\r\n" + DATA[:MIB] + b"\r\n" + b"zzz\r\nzz" * (fault == "malformed"))
        assert connection.sock.recv(12) == b"HTTP/1.1 500"
        oracle.unusable(disk)
        assert_soon(lambda: server.ask("POST", SYNC, DATA).status == 200)


def test_headers_that_never_end(certificates: uploads.Certificates, paths: contract.Paths) -> None:
    with (
        uploads.Server(certificates, {}, paths).impatient() as server,
        server.connect(None) as connection,
    ):
        connection.connect()
        for letter in b"GET /healthz HTTP/1.1\r\nHo":
            connection.sock.sendall(bytes([letter]))
        assert connection.sock.recv(100) == b""


def test_a_body_longer_than_promised(server: uploads.Server, disk: Path) -> None:
    with server.connect() as connection:
        server.begin(connection, SYNC, len(DATA))
        connection.send(DATA + b"and more\r\n\r\n")
        assert connection.getresponse().status == 200
    assert disk.read_bytes() == DATA
    assert server.result().status == 0


def test_ten_clients_at_once(server: uploads.Server, disk: Path) -> None:
    found: list[int] = []
    gate = threading.Barrier(10)

    def send() -> None:
        with server.connect() as connection:
            connection.connect()
            gate.wait(20)
            try:
                connection.request("POST", SYNC, DATA)
                found.append(connection.getresponse().status)
            except ConnectionError:
                found.append(503)  # refused while it was still sending

    threads = [threading.Thread(target=send) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found.count(200) == 1
    assert set(found) <= {200, 503, 409}
    assert disk.read_bytes() == DATA
    assert server.result().status == 0


def test_garbage_instead_of_tls(server: uploads.Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        plain.recv(1000)
    assert server.ask("GET", "/healthz", client=None).status == 200


# -- the life of the server


def test_deadline(certificates: uploads.Certificates, paths: contract.Paths) -> None:
    now = dt.datetime.now(dt.UTC).isoformat()
    with uploads.Server(certificates, {"DEADLINE": now}, paths) as server:
        ended = server.result()
    assert ended.status == 0
    assert json.loads(ended.message) == {
        "preallocationApplied": False,
        "deadlinePassed": True,
        "message": "Deadline Passed",
    }


def test_a_deadline_waits_for_an_upload(
    certificates: uploads.Certificates, paths: contract.Paths, disk: Path
) -> None:
    deadline = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=1.5)
    with uploads.Server(certificates, {"DEADLINE": deadline.isoformat()}, paths) as server:
        with server.connect() as connection:
            server.begin(connection, SYNC, len(DATA))
            connection.send(DATA[:1000])
            processes.wait_for(lambda: dt.datetime.now(dt.UTC) > deadline, "the deadline")
            assert server.ask("POST", SYNC, b"x").status == 503
            connection.send(DATA[1000:])
            assert connection.getresponse().status == 200
        assert server.result().message == DONE
    assert disk.read_bytes() == DATA


def test_stopped_while_uploading(server: uploads.Server, disk: Path) -> None:
    with server.connect() as connection:
        server.begin(connection, SYNC, len(DATA))
        connection.send(DATA[:MIB])
        server.wait_until_busy()
        server.cancel.set()
        with pytest.raises(errors.Cancelled):
            server.result()
    oracle.unusable(disk)
    assert not list(disk.parent.iterdir())


@pytest.mark.parametrize("variant", ["raw", "vhdx"])
def test_async_answers_before_the_processing(
    certificates: uploads.Certificates,
    paths: contract.Paths,
    tmp_path: Path,
    disks: disks.Disks,
    variant: str,
) -> None:
    """The disk is larger than what may wait on the way to the device, and the device is slow."""
    with devices.slow(tmp_path, 16 * MIB, bytes_per_second=5 * MIB) as target:
        with uploads.Server(certificates, {"DESTINATION": str(target)}, paths) as server:
            body = disks.image(variant, "dense").read_bytes()
            assert server.ask("POST", "/v1beta1/upload-async", body).status == 200
            if variant == "vhdx":
                assert server.ask("POST", SYNC, b"x").status == 503
            assert server.result().message == DONE
        oracle.same(target, disks.expected(variant, "dense"), beyond=devices.DIRT)


def test_memory_is_bounded_and_a_slow_volume_slows_the_client(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    """What the client may be ahead of the device: 8 MiB that wait, and what the kernel keeps of sockets."""
    size = 96 * MIB
    with devices.slow(tmp_path, size, bytes_per_second=24 * MIB) as target:
        made = uploads.Server(certificates, {"DESTINATION": str(target)}, paths)
        argv = [sys.executable, "-m", "importer", f"--termination-log={paths.termination_log}"]
        ready = functools.partial(processes.answers, made.port)
        with processes.running(
            argv, log=tmp_path / "log", ready=ready, env={**os.environ, **made.env}
        ) as pod:
            started = time.monotonic()
            with made.connect() as connection:
                made.begin(connection, SYNC, size)
                for _ in range(size // MIB):
                    connection.send(DATA[:MIB])
                assert time.monotonic() - started > 1
                lines = Path(f"/proc/{pod.pid}/status").read_text().splitlines()
                assert connection.getresponse().status == 200
            (peak,) = (int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
            assert peak < 160 * MIB
            assert pod.wait(20) == 0


def test_faults_of_the_environment_come_together(paths: contract.Paths) -> None:
    env = {"CLIENT_NAME": "x", "LISTEN_PORT": "many", "DEADLINE": "soon", "PREALLOCATION": "maybe"}
    with pytest.raises(errors.RequestError) as caught:
        upload_settings.read(env, paths)
    for name in ("TLS_CERT_FILE", "TLS_KEY_FILE", "CLIENT_CERT_FILE", "LISTEN_PORT", "DEADLINE", "PREALLOC"):
        assert name in str(caught.value)


def test_a_busy_port(server: uploads.Server, paths: contract.Paths) -> None:
    other = uploads.Server(server.certificates, {"LISTEN_PORT": str(server.port)}, paths)
    other.port = server.port
    with other, pytest.raises(errors.RequestError, match="cannot listen"):
        other.result()


@pytest.mark.parametrize("end", ["success", "SIGTERM"])
def test_pod(certificates: uploads.Certificates, paths: contract.Paths, disk: Path, end: str) -> None:
    server = uploads.Server(certificates, {}, paths)
    argv = [sys.executable, "-m", "importer", "-v=3", "-alsologtostderr", f"--data-dir={paths.data}"]
    argv += [f"--block-device={paths.block}", f"--termination-log={paths.termination_log}"]
    with subprocess.Popen(argv, env={**os.environ, **server.env}) as process:
        processes.wait_for(lambda: processes.answers(server.port), "the pod")
        if end == "success":
            assert server.ask("POST", SYNC, DATA).status == 200
        else:
            process.send_signal(signal.SIGTERM)
        status = process.wait(20)
    message = Path(paths.termination_log).read_text()
    if end == "success":
        assert (status, message) == (0, DONE)
        assert disk.read_bytes() == DATA
    else:
        assert (status, message) == (1, "Unable to process data: cancelled")
