"""The life cycle of the upload server and of its pod."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.importer import contract, report
from cdi_worker.importer.upload import server as upload_server
from cdi_worker.importer.upload import settings
from tests.support import devices, disks, oracle, processes, uploads

MIB = uploads.MIB
SYNC = uploads.SYNC
DATA = uploads.DATA
DONE = uploads.DONE
paths = uploads.with_scratch
server = uploads.server


def test_deadline_ends_the_server(certificates: uploads.Certificates, paths: contract.Paths) -> None:
    now = dt.datetime.now(dt.UTC).isoformat()
    with uploads.Server(certificates, {"DEADLINE": now}, paths) as server:
        ended = server.result()
    assert ended.status == 0
    assert json.loads(ended.message) == {
        "preallocationApplied": False,
        "deadlinePassed": True,
        "message": "Deadline Passed",
    }


def test_deadline_waits_for_a_running_upload(
    certificates: uploads.Certificates, paths: contract.Paths, disk: Path
) -> None:
    deadline = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=1.5)
    with uploads.Server(certificates, {"DEADLINE": deadline.isoformat()}, paths) as server:
        with server.connect() as connection:
            server.begin(connection, SYNC, len(DATA))
            connection.send(DATA[:1000])
            late = deadline + dt.timedelta(seconds=0.3)
            processes.wait_for(lambda: dt.datetime.now(dt.UTC) > late, "several looks at the clock")
            refused = server.ask("POST", SYNC, b"x")
            reason = "503: another upload is running, or its disk is being written"
            assert (refused.status, refused.text) == (503, reason)
            connection.send(DATA[1000:])
            assert connection.getresponse().status == 200
        assert server.result().message == DONE
    assert disk.read_bytes() == DATA


@pytest.mark.parametrize("moment", [0.0, 0.005, 0.02])
def test_stop_at_the_last_byte_is_consistent(server: uploads.Server, disk: Path, moment: float) -> None:
    """Whatever comes first, the client, the message and the volume agree."""
    with server.connect() as connection:
        server.begin(connection, SYNC, len(DATA))
        connection.send(DATA[:-1])
        threading.Timer(moment, server.cancel.set).start()
        connection.send(DATA[-1:])
        good = connection.getresponse().status == 200
    check_agreement(server, disk, good)


@pytest.mark.parametrize(
    ("path", "moment"),
    [(SYNC, 0.0), (SYNC, 0.05), (SYNC, 0.15), (uploads.RESUMABLE, 0.0), (uploads.RESUMABLE, 0.1)],
)
def test_upload_at_the_deadline_is_consistent(
    certificates: uploads.Certificates, paths: contract.Paths, disk: Path, path: str, moment: float
) -> None:
    deadline = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=0.5)
    good = False
    with uploads.Server(certificates, {"DEADLINE": deadline.isoformat()}, paths) as server:
        time.sleep(max(0.0, (deadline - dt.datetime.now(dt.UTC)).total_seconds()) + moment)
        with contextlib.suppress(OSError):
            if path == SYNC:
                good = server.ask("POST", path, DATA).status == 200
            else:
                made = {**uploads.TUS, "Upload-Length": str(len(DATA))}
                server.ask("POST", path, b"", made)
                good = (
                    server.ask("PATCH", path, DATA, {**uploads.PATCH_HEADERS, "Upload-Offset": "0"}).status
                    == 204
                )
        check_agreement(server, disk, good)


def check_agreement(server: uploads.Server, disk: Path, good: bool) -> None:
    """Check that the server and the volume agree on success or failure."""
    message = ""
    with contextlib.suppress(errors.Cancelled):
        message = server.result().message
    assert (message == DONE, disk.exists()) == (good, good)
    assert not [path for path in disk.parent.iterdir() if path != disk]


class Ending(uploads.Server):
    """A server about to end: running uploads were stopped, connections are still open."""

    def _serve(self) -> report.Report:
        self._face = upload_server.Server(self.settings, self.cancel)
        # Before it listens: no request comes first.
        self._face._end()
        with self._face.listen():
            self.cancel.wait()
        return report.deadline_passed()


def test_no_upload_starts_while_the_server_ends(
    certificates: uploads.Certificates, paths: contract.Paths, disk: Path
) -> None:
    with Ending(certificates, {}, paths) as server:
        assert server.ask("POST", SYNC, DATA).status == 503
        create = {**uploads.TUS, "Upload-Length": "5"}
        assert server.ask("POST", uploads.RESUMABLE, b"", create).status == 503
        assert server.ask("GET", "/healthz").status == 200
    assert not disk.exists()


@pytest.mark.parametrize("variant", ["vhdx-log", "qcow2"])
def test_stop_during_processing_leaves_nothing(
    certificates: uploads.Certificates,
    paths: contract.Paths,
    tmp_path: Path,
    disks: disks.Disks,
    variant: str,
) -> None:
    """The rest of the conversion, and bytes that wait for the device, are abandoned."""
    with devices.slow(tmp_path, 16 * MIB, bytes_per_second=4 * MIB) as target:
        server = uploads.Server(certificates, {"DESTINATION": str(target)}, paths)
        request = dataclasses.replace(server.settings.request, direct=True)
        server.settings = dataclasses.replace(server.settings, request=request)
        body = disks.image(variant, "dense").read_bytes()
        with server, server.connect() as connection:
            connection.request("POST", SYNC, body)
            processes.wait_for(lambda: server.received == len(body), "all bytes")
            begun = time.monotonic()
            server.cancel.set()
            with pytest.raises(errors.Cancelled):
                server.result()
            assert time.monotonic() - begun < 6
        oracle.unusable(target)


def test_async_upload_is_answered_before_processing(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path, disks: disks.Disks
) -> None:
    """The disk is larger than the buffers before the device, and the device is slow."""
    with devices.slow(tmp_path, 16 * MIB, bytes_per_second=8 * MIB) as target:
        with uploads.Server(certificates, {"DESTINATION": str(target)}, paths) as server:
            body = disks.image("vhdx-log", "dense").read_bytes()
            assert server.ask("POST", "/v1beta1/upload-async", body).status == 200
            assert server.ask("POST", SYNC, b"x").status == 503
            assert server.result().message == DONE
        oracle.same(target, disks.expected("vhdx-log", "dense"), beyond=devices.DIRT)


def test_slow_volume_slows_the_client_down(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    """The client may be ahead of the device by 8 MiB, and by the kernel's socket buffers."""
    size = 96 * MIB
    with devices.slow(tmp_path, size, bytes_per_second=40 * MIB) as target:
        made = uploads.Server(certificates, {"DESTINATION": str(target)}, paths)
        argv = [sys.executable, "-m", "cdi_worker", f"--termination-log={paths.termination_log}"]
        ready = functools.partial(processes.is_listening, made.port)
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


def test_all_errors_of_the_environment_are_reported(paths: contract.Paths) -> None:
    env = {
        "CLIENT_NAME": "x",
        "LISTEN_PORT": "many",
        "DEADLINE": "soon",
        "PREALLOCATION": "maybe",
        "DESTINATION": "-",
    }
    with pytest.raises(errors.RequestError) as caught:
        settings.read(env, paths)
    for name in (
        "TLS_CERT_FILE",
        "TLS_KEY_FILE",
        "CLIENT_CERT_FILE",
        "LISTEN_PORT",
        "DEADLINE",
        "PREALLOC",
        "DESTINATION",
    ):
        assert name in str(caught.value)


def test_busy_port_is_reported(server: uploads.Server, paths: contract.Paths) -> None:
    other = uploads.Server(server.certificates, {"LISTEN_PORT": str(server.port)}, paths)
    other.port = server.port
    with other, pytest.raises(errors.RequestError, match="cannot listen"):
        other.result()


@pytest.mark.parametrize("end", ["success", "SIGTERM"])
def test_server_runs_as_a_process(
    certificates: uploads.Certificates, paths: contract.Paths, disk: Path, end: str
) -> None:
    server = uploads.Server(certificates, {}, paths)
    argv = [sys.executable, "-m", "cdi_worker", "-v=3", "-alsologtostderr", f"--data-dir={paths.data}"]
    argv += [f"--block-device={paths.block}", f"--termination-log={paths.termination_log}"]
    with subprocess.Popen(argv, env={**os.environ, **server.env}) as process:
        processes.wait_for(lambda: processes.is_listening(server.port), "the pod")
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
