"""The contract of the upload server and the clone source, where tests of the parts do not hold it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import random
import re
import subprocess
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from formats import snappy
from importer import contract, report, upload, upload_settings
from tests import devices, disks, oracle, processes, uploads, worker
from tests.test_importer_metrics import UID, scrape

MIB = 1 << 20
DATA = random.Random(11).randbytes(3 * MIB)
VERSIONS = ("v1beta1", "v1alpha1")
NAMES = ("upload", "upload-async", "upload-form", "upload-form-async", "upload-archive")
PATHS = [f"/{version}/{name}" for version in VERSIONS for name in NAMES]
BOUNDARY = "boundary"


@pytest.fixture
def server(certificates: uploads.Certificates, paths: contract.Paths) -> Iterator[uploads.Server]:
    with uploads.Server(certificates, {}, paths) as running:
        yield running


# -- the environment -------------------------------------------------------------------------

NEEDED = dict.fromkeys(("TLS_CERT_FILE", "TLS_KEY_FILE", "CLIENT_CERT_FILE", "CLIENT_NAME"), "x")


def test_defaults(tmp_path: Path) -> None:
    made = upload_settings.read(NEEDED, contract.Paths())
    assert (made.host, made.port, made.deadline) == ("0.0.0.0", 8443, None)
    wanted = made.wanted
    assert (wanted.target, wanted.image_size, wanted.overhead) == ("/data/disk.img", None, 0)
    assert not wanted.preallocation
    device = tmp_path / "device"
    device.touch()
    assert upload_settings.read(NEEDED, contract.Paths(block=str(device))).wanted.target == str(device)


def test_everything_said() -> None:
    said = {
        "LISTEN_ADDRESS": "::1",
        "LISTEN_PORT": "9443",
        "DESTINATION": "/dev/cdi-block-volume",
        "UPLOAD_IMAGE_SIZE": "10Gi",
        "FILESYSTEM_OVERHEAD": "0.06",
        "PREALLOCATION": "true",
    }
    made = upload_settings.read({**NEEDED, **said}, contract.Paths())
    wanted = made.wanted
    assert (made.host, made.port, wanted.target) == ("::1", 9443, "/dev/cdi-block-volume")
    assert (wanted.image_size, wanted.overhead, wanted.preallocation) == (10 << 30, Fraction("0.06"), True)


@pytest.mark.parametrize(
    "text", ["2026-11-20T10:00:00Z", "2026-11-20T10:00:00.123456789Z", "2026-11-20T12:00:00+02:00"]
)
def test_deadlines(text: str) -> None:
    made = upload_settings.read({**NEEDED, "DEADLINE": text}, contract.Paths())
    assert made.deadline is not None
    expected = dt.datetime(2026, 11, 20, 10, tzinfo=dt.UTC)
    assert made.deadline.replace(microsecond=0) == expected


# -- paths and status ------------------------------------------------------------------------


def body(path: str, disks: disks.Disks) -> tuple[bytes, dict[str, str]]:
    """Return what a path wants, and its headers."""
    if path.endswith("archive"):
        return disks.tar("gz").read_bytes(), {}
    if "form" not in path:
        return DATA, {}
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    form = head.encode() + DATA + f"\r\n--{BOUNDARY}--\r\n".encode()
    return form, {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


@pytest.mark.parametrize("path", PATHS)
def test_every_path(server: uploads.Server, paths: contract.Paths, disks: disks.Disks, path: str) -> None:
    data, headers = body(path, disks)
    answer = server.ask("POST", path, data, headers)
    assert answer.status == 200, answer.text
    assert server.result() == report.uploaded(clone=False, preallocated=False)
    if not path.endswith("archive"):
        assert Path(paths.data, "disk.img").read_bytes() == DATA
    else:
        processes.run("diff", "-r", "--no-dereference", disks.tree(), paths.data)


def test_an_archive_is_not_preallocated(
    certificates: uploads.Certificates, paths: contract.Paths, disks: disks.Disks
) -> None:
    with uploads.Server(certificates, {"PREALLOCATION": "true"}, paths) as server:
        assert server.ask("POST", "/v1beta1/upload-archive", disks.tar("xz").read_bytes()).status == 200
        assert server.result() == report.uploaded(clone=False, preallocated=False)


def test_nobody_else_gets_anywhere(server: uploads.Server, paths: contract.Paths) -> None:
    other = server.certificates.authority.issue(common_name="somebody", client=True)
    for path in PATHS:
        for client in (None, other):
            assert server.ask("POST", path, client=client).status == 401
        assert server.ask("PUT", path, client=None).status == 404
    assert not [*Path(paths.data).iterdir()]


def test_busy_on_every_path(server: uploads.Server) -> None:
    with server.connect() as slow:
        server.begin(slow, PATHS[0], len(DATA))
        slow.send(DATA[:1000])
        server.wait_until_busy()
        for path in PATHS:
            assert server.ask("POST", path).status == 503
            assert server.ask("POST", path, client=None).status == 401
        assert server.ask("GET", "/healthz", client=None).status == 200
        slow.send(DATA[1000:])
        assert slow.getresponse().status == 200


class Lingering(uploads.Server):
    """Goes on listening after the first success, as a server does for a moment."""

    def _serve(self) -> report.Report:
        self._face = upload.make(self.settings, self.cancel)
        with self._face.listening():
            self.cancel.wait()
        return report.uploaded(clone=False, preallocated=False)


def test_done_on_every_path(certificates: uploads.Certificates, paths: contract.Paths) -> None:
    with Lingering(certificates, {}, paths) as server:
        assert server.ask("POST", PATHS[0], DATA).status == 200
        for path in PATHS:
            assert server.ask("POST", path).status == 409
    assert Path(paths.data, "disk.img").read_bytes() == DATA


def test_too_large_for_the_device(
    certificates: uploads.Certificates, paths: contract.Paths, disks: disks.Disks, device: Path
) -> None:
    with uploads.Server(certificates, {"DESTINATION": str(device)}, paths) as server:
        for image in (disks.image("qcow2", "far"), disks.raw("far")):
            answer = server.ask("POST", PATHS[0], image.read_bytes())
            assert answer.status == 400
            assert answer.text.startswith(
                "Saving stream failed: effective image size is larger than the reported available storage"
            )
            oracle.unusable(device)


@pytest.mark.parametrize("variant", ["raw", "qcow2"])
def test_a_device_that_fails(
    certificates: uploads.Certificates,
    paths: contract.Paths,
    tmp_path: Path,
    disks: disks.Disks,
    variant: str,
) -> None:
    """Data that never came to storage is no success, and the server is there for another attempt."""
    image = disks.image(variant, "dense").read_bytes()
    with devices.failing(tmp_path, 16 * MIB) as target:
        with uploads.Server(certificates, {"DESTINATION": str(target.path)}, paths) as server:
            with server.connect() as connection:
                server.begin(connection, PATHS[0], len(image))
                connection.send(image[:MIB])
                processes.wait_for(lambda: server.received == MIB, "the first bytes")
                target.fail()
                connection.send(image[MIB:])
                answer = uploads.Answer(connection.getresponse())
            assert (answer.status, "input/output error" in answer.text) == (500, True)
            target.mend()
            assert server.ask("POST", PATHS[0], image).status == 200
            assert server.result().status == 0
        oracle.same(target.path, disks.expected(variant, "dense"), beyond=devices.DIRT)


def test_a_deadline_that_passed_long_before_the_end(
    certificates: uploads.Certificates, paths: contract.Paths
) -> None:
    deadline = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=4)
    with uploads.Server(certificates, {"DEADLINE": deadline.isoformat()}, paths) as server:
        with server.connect() as connection:
            server.begin(connection, PATHS[0], len(DATA))
            connection.send(DATA[:1000])
            server.wait_until_busy()
            late = deadline + dt.timedelta(seconds=5 * upload.TURN)
            processes.wait_for(lambda: dt.datetime.now(dt.UTC) > late, "several looks at the clock")
            connection.send(DATA[1000:])
            assert connection.getresponse().status == 200
        assert server.result() == report.uploaded(clone=False, preallocated=False)


# -- clones ----------------------------------------------------------------------------------


def source(server: uploads.Server, mode: str, place: Path, **more: str) -> dict[str, str]:
    made = server.certificates
    return {
        "CLIENT_KEY": made.client.key.read_text(),
        "CLIENT_CERT": made.client.certificate.read_text(),
        "SERVER_CA_CERT": made.authority.certificate.read_text(),
        "UPLOAD_URL": server.url(PATHS[0]),
        "VOLUME_MODE": mode,
        "MOUNT_POINT": str(place),
        "OWNER_UID": UID,
        **more,
    }


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    (tmp_path / "volume").mkdir()
    path = tmp_path / "volume" / "disk.img"
    path.write_bytes(random.Random(12).randbytes(16 * MIB))
    return path


def test_a_clone_over_what_a_killed_one_has_left(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path, noise: Path
) -> None:
    """It fits only when the left-overs are gone before room is counted, the disk of one before included."""
    with devices.filesystem("tmpfs", tmp_path, 24 * MIB) as point:
        killed = dataclasses.replace(paths, data=str(point))
        (point / ".cdi-worker-unpacking").mkdir()
        devices.fill(point / ".cdi-worker-unpacking" / "disk.img", 2 * MIB)
        devices.fill(point / "disk.img.part", 10 * MIB)
        devices.fill(point / "disk.img", 10 * MIB)
        (point / "of-the-last-clone").touch()
        with uploads.Server(certificates, {}, killed) as server:
            pod = worker.Pod(tmp_path / "source")
            done = pod.run(**source(server, "filesystem", noise.parent))
            assert (done.status, pod.message) == (0, "Clone Complete"), done.errors
            assert server.result() == report.uploaded(clone=True, preallocated=False)
        assert [path.name for path in point.iterdir()] == ["disk.img"]
        oracle.same(point / "disk.img", noise)


@pytest.mark.parametrize(
    ("name", "sparse"), [("disk.img", True), ("disk.img", False), ("vm-disk.img.1", True)]
)
def test_a_disk_out_of_upstream_s_tar(
    certificates: uploads.Certificates,
    paths: contract.Paths,
    block: Path,
    noise: Path,
    name: str,
    sparse: bool,
) -> None:
    """What its source sends of a volume with a file system, to one that is a device."""
    noise = noise.rename(noise.parent / name)
    with noise.open("r+b") as stream:
        stream.seek(2 * MIB)
        stream.write(bytes(9 * MIB))
    processes.run("fallocate", "--dig-holes", noise)
    (noise.parent / "a-note").write_text("before the disk")
    (noise.parent / "z-note").write_text("and behind it")
    flags = ["--sparse"] if sparse else []
    argv = ["tar", "--create", *flags, "--file=-", "./a-note", f"./{name}", "./z-note"]
    made = subprocess.run(argv, cwd=noise.parent, check=True, capture_output=True).stdout
    assert (len(made) < 9 * MIB) is sparse
    stream = b"".join(
        snappy.frames([memoryview(made)[at : at + 65_536] for at in range(0, len(made), 65_536)])
    )
    with uploads.Server(certificates, {"DESTINATION": str(block)}, paths) as server:
        headers = {"x-cdi-content-type": "filesystem-clone"}
        answer = server.ask("POST", PATHS[0], stream, headers)
        assert answer.status == 200, answer.text
        assert server.result() == report.uploaded(clone=True, preallocated=False)
    oracle.same(block, noise, beyond=devices.DIRT)


def test_an_upload_over_an_archive_that_was_killed(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    with devices.filesystem("tmpfs", tmp_path, 4 * MIB) as point:
        (point / ".cdi-worker-unpacking").mkdir()
        devices.fill(point / ".cdi-worker-unpacking" / "x", 3 * MIB)
        with uploads.Server(certificates, {}, dataclasses.replace(paths, data=str(point))) as server:
            assert server.ask("POST", PATHS[0], DATA).status == 200
        assert [path.name for path in point.iterdir()] == ["disk.img"]


@pytest.mark.parametrize("fault", ["name", "authority", "address", "no volume", "environment"])
def test_a_failed_clone(server: uploads.Server, tmp_path: Path, noise: Path, fault: str) -> None:
    other = server.certificates.authority.issue(common_name="somebody", client=True)
    changes = {
        "name": {"CLIENT_KEY": other.key.read_text(), "CLIENT_CERT": other.certificate.read_text()},
        "authority": {"SERVER_CA_CERT": other.certificate.read_text()},
        "address": {"UPLOAD_URL": "https://me:PRIVATE KEY@host:port/v1beta1/upload"},
        "no volume": {"MOUNT_POINT": str(tmp_path / "missing")},
        "environment": {"CLIENT_KEY": "", "VOLUME_MODE": "tape"},
    }
    pod = worker.Pod(tmp_path / "source")
    done = pod.run(**{**source(server, "block", noise), **changes[fault]})
    assert done.status == 1
    assert pod.message.startswith("Unable to ")
    assert "\n" not in pod.message
    assert "PRIVATE KEY" not in pod.message + done.errors + done.output
    assert "Traceback" not in done.errors


def test_progress_of_a_clone(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path, noise: Path
) -> None:
    with devices.slow(tmp_path, 16 * MIB, bytes_per_second=6 * MIB) as target:
        with uploads.Server(certificates, {"DESTINATION": str(target)}, paths) as server:
            pod = worker.Pod(tmp_path / "source", metrics_port=processes.free_port())
            with worker.started(*pod.arguments, env=source(server, "block", noise)) as process:
                processes.wait_for(lambda: processes.answers(pod.metrics_port), "the metrics port")
                name = f'kubevirt_cdi_clone_progress_total{{ownerUID="{UID}"}}'
                (found,) = re.findall(re.escape(name) + r" ([0-9.]+)\n", scrape(pod.metrics_port))
                assert 0 <= float(found) < 100
                assert process.wait(30) == 0
            assert json.loads(server.result().message)["message"] == "Clone Complete"
        oracle.same(target, noise)
