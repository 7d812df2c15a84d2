"""The contract of the upload server, beyond the tests of its parts."""

from __future__ import annotations

import datetime as dt
import random
import shutil
from fractions import Fraction
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.importer import contract, report
from cdi_worker.importer.upload import server as upload_server
from cdi_worker.importer.upload import settings
from tests.support import devices, disks, oracle, processes, uploads

MIB = 1 << 20
DATA = random.Random(11).randbytes(3 * MIB)
VERSIONS = ("v1beta1", "v1alpha1")
NAMES = ("upload", "upload-async", "upload-form", "upload-form-async", "upload-archive")
PATHS = [f"/{version}/{name}" for version in VERSIONS for name in NAMES]
BOUNDARY = "boundary"
server = uploads.server


# -- the environment -------------------------------------------------------------------------

NEEDED = dict.fromkeys(("TLS_CERT_FILE", "TLS_KEY_FILE", "CLIENT_CERT_FILE", "CLIENT_NAME"), "x")


def test_environment_has_defaults(tmp_path: Path) -> None:
    made = settings.read(NEEDED, contract.Paths())
    assert (made.host, made.port, made.deadline) == ("0.0.0.0", 8443, None)
    wanted = made.request
    assert (wanted.target, wanted.room.size, wanted.room.overhead) == ("/data/disk.img", None, 0)
    assert not wanted.preallocation
    device = tmp_path / "device"
    device.touch()
    assert settings.read(NEEDED, contract.Paths(block=str(device))).request.target == str(device)


def test_all_variables_are_read() -> None:
    variables = {
        "LISTEN_ADDRESS": "::1",
        "LISTEN_PORT": "9443",
        "DESTINATION": "/dev/cdi-block-volume",
        "UPLOAD_IMAGE_SIZE": "10Gi",
        "FILESYSTEM_OVERHEAD": "0.06",
        "PREALLOCATION": "true",
    }
    made = settings.read({**NEEDED, **variables}, contract.Paths())
    wanted = made.request
    assert (made.host, made.port, wanted.target) == ("::1", 9443, "/dev/cdi-block-volume")
    assert (wanted.room.size, wanted.room.overhead, wanted.preallocation) == (
        10 << 30,
        Fraction("0.06"),
        True,
    )


def test_deadline_is_parsed() -> None:
    expected = dt.datetime(2026, 11, 20, 10, tzinfo=dt.UTC)
    for text in ("2026-11-20T10:00:00Z", "2026-11-20T10:00:00.123456789Z", "2026-11-20T12:00:00+02:00"):
        made = settings.read({**NEEDED, "DEADLINE": text}, contract.Paths())
        assert made.deadline is not None
        assert made.deadline.replace(microsecond=0) == expected


def test_deadline_without_a_time_zone_is_refused() -> None:
    for text in ("2026-11-20T10:00:00", "2026-11-20", "soon"):
        with pytest.raises(errors.RequestError, match="is not an RFC 3339 time"):
            settings.read({**NEEDED, "DEADLINE": text}, contract.Paths())


# -- paths and status ------------------------------------------------------------------------


def body(name: str, disks: disks.Disks) -> tuple[bytes, dict[str, str]]:
    """Return the body to send to a path with this name, and its headers."""
    if name == "upload-archive":
        return disks.tar("gz").read_bytes(), {}
    if "form" not in name:
        return DATA, {}
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    form = head.encode() + DATA + f"\r\n--{BOUNDARY}--\r\n".encode()
    return form, {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


@pytest.mark.parametrize("name", NAMES)
def test_every_path_accepts_an_upload(
    certificates: uploads.Certificates, paths: contract.Paths, disks: disks.Disks, name: str
) -> None:
    for version in VERSIONS:
        data, headers = body(name, disks)
        with uploads.Server(certificates, {}, paths) as server:
            answer = server.ask("POST", f"/{version}/{name}", data, headers)
            assert answer.status == 200, answer.text
            assert server.result() == report.uploaded(clone=False, preallocated=False)
        if name != "upload-archive":
            assert Path(paths.data, "disk.img").read_bytes() == DATA
        else:
            processes.run("diff", "-r", "--no-dereference", disks.tree(), paths.data)
        shutil.rmtree(paths.data)
        Path(paths.data).mkdir()


def test_archive_is_not_preallocated(
    certificates: uploads.Certificates, paths: contract.Paths, disks: disks.Disks
) -> None:
    with uploads.Server(certificates, {"PREALLOCATION": "true"}, paths) as server:
        assert server.ask("POST", "/v1beta1/upload-archive", disks.tar("xz").read_bytes()).status == 200
        assert server.result() == report.uploaded(clone=False, preallocated=False)


def test_other_clients_and_paths_are_refused(server: uploads.Server, paths: contract.Paths) -> None:
    other = server.certificates.authority.issue(common_name="somebody", client=True)
    for path in PATHS:
        for client in (None, other):
            assert server.ask("POST", path, client=client).status == 401
        assert server.ask("PUT", path, client=None).status == 404
    assert not [*Path(paths.data).iterdir()]


def test_busy_server_refuses_every_path(server: uploads.Server) -> None:
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
    """Keep listening after the first success, as a server does for a moment."""

    def _serve(self) -> report.Report:
        self._face = upload_server.Server(self.settings, self.cancel)
        with self._face.listen():
            self.cancel.wait()
        return report.uploaded(clone=False, preallocated=False)


def test_finished_server_refuses_every_path(
    certificates: uploads.Certificates, paths: contract.Paths
) -> None:
    with Lingering(certificates, {}, paths) as server:
        assert server.ask("POST", PATHS[0], DATA).status == 200
        for path in PATHS:
            assert server.ask("POST", path).status == 409
    assert Path(paths.data, "disk.img").read_bytes() == DATA


def test_upload_larger_than_the_device_is_refused(
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


TOO_LARGE = "Saving stream failed: effective image size is larger than the reported available storage: "


def test_volume_filled_by_others_is_reported(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    """As for an image whose size is known to be too large, and as with CDI's server."""
    with devices.filesystem("tmpfs", tmp_path, 8 * MIB) as point:
        made = paths._replace(data=str(point))
        with uploads.Server(certificates, {}, made) as server:
            with server.connect() as connection:
                server.begin(connection, PATHS[0], len(2 * DATA))
                connection.send(DATA)
                processes.wait_for(lambda: server.received == len(DATA), "the first bytes")
                others = devices.fill(point / "others", 4 * MIB)
                connection.send(DATA)
                answer = uploads.Response(connection.getresponse())
            assert (answer.status, answer.text.startswith(TOO_LARGE)) == (400, True)
            assert answer.text.endswith("no space left on device")
            assert [*point.iterdir()] == [others]
            assert server.ask("POST", PATHS[0], DATA).status == 200


def test_too_small_scratch_is_reported(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path, disks: disks.Disks
) -> None:
    body = disks.image("vhdx-log").read_bytes()
    with (
        devices.filesystem("tmpfs", tmp_path, MIB) as point,
        uploads.Server(certificates, {}, paths._replace(scratch=str(point))) as server,
    ):
        for sent in (body, iter([body[:MIB], body[MIB:]])):
            answer = server.ask("POST", PATHS[0], sent)
            assert (answer.status, answer.text.startswith(TOO_LARGE)) == (400, True)
            assert answer.text.endswith("no space left on device")
        assert not [*Path(paths.data).iterdir()]


def test_failing_device_is_reported(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path, disks: disks.Disks
) -> None:
    """Data that never reached storage is not a success, and the server accepts another attempt."""
    image = disks.image("qcow2", "dense").read_bytes()
    with devices.failing(tmp_path, 16 * MIB) as target:
        with uploads.Server(certificates, {"DESTINATION": str(target.path)}, paths) as server:
            with server.connect() as connection:
                server.begin(connection, PATHS[0], len(image))
                connection.send(image[:MIB])
                processes.wait_for(lambda: server.received == MIB, "the first bytes")
                target.fail()
                connection.send(image[MIB:])
                answer = uploads.Response(connection.getresponse())
            assert (answer.status, "input/output error" in answer.text) == (500, True)
            target.mend()
            assert server.ask("POST", PATHS[0], image).status == 200
            assert server.result().status == 0
        oracle.same(target.path, disks.expected("qcow2", "dense"), beyond=devices.DIRT)


def test_upload_replaces_leftovers_of_a_killed_archive(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    with devices.filesystem("tmpfs", tmp_path, 4 * MIB) as point:
        (point / ".cdi-worker-unpacking").mkdir()
        devices.fill(point / ".cdi-worker-unpacking" / "x", 3 * MIB)
        with uploads.Server(certificates, {}, paths._replace(data=str(point))) as server:
            assert server.ask("POST", PATHS[0], DATA).status == 200
        assert [path.name for path in point.iterdir()] == ["disk.img"]
