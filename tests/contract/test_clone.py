"""The contract of the clone source, beyond the tests of its parts."""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path

import pytest

from cdi_worker.formats.compressed import snappy
from cdi_worker.importer import contract, report
from tests.importer.metrics.test_metrics import UID
from tests.support import clones, devices, meters, oracle, processes, uploads, worker

MIB = uploads.MIB
SYNC = uploads.SYNC
server = uploads.server


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    (tmp_path / "volume").mkdir()
    path = tmp_path / "volume" / "disk.img"
    path.write_bytes(random.Random(12).randbytes(16 * MIB))
    return path


def test_clone_replaces_leftovers_of_a_killed_one(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path, volume: Path
) -> None:
    """The clone fits only if leftovers are removed before space is counted, a disk of an earlier job too."""
    with devices.filesystem("tmpfs", tmp_path, 24 * MIB) as point:
        killed = paths._replace(data=str(point))
        (point / ".cdi-worker-unpacking").mkdir()
        devices.fill(point / ".cdi-worker-unpacking" / "disk.img", 2 * MIB)
        devices.fill(point / "disk.img.part", 10 * MIB)
        devices.fill(point / "disk.img", 10 * MIB)
        (point / "of-the-last-clone").touch()
        with uploads.Server(certificates, {}, killed) as server:
            pod = worker.Pod(tmp_path / "source")
            done = pod.run(**clones.environment(server, "filesystem", volume.parent))
            assert (done.status, pod.message) == (0, "Clone Complete"), done.errors
            assert server.result() == report.uploaded(clone=True, preallocated=True)
        assert [path.name for path in point.iterdir()] == ["disk.img"]
        oracle.same(point / "disk.img", volume)


@pytest.mark.parametrize(
    ("block", "name", "sparse"),
    [(512, "disk.img", False), (4096, "vm-disk.img.1", True)],
    indirect=["block"],
)
def test_disk_is_taken_from_upstream_s_tar(
    certificates: uploads.Certificates,
    paths: contract.Paths,
    block: Path,
    volume: Path,
    name: str,
    sparse: bool,
) -> None:
    """Upstream's clone source sends a file-system volume as a tar, here to a block volume."""
    volume = volume.rename(volume.parent / name)
    with volume.open("r+b") as stream:
        stream.seek(2 * MIB)
        stream.write(bytes(9 * MIB))
    processes.run("fallocate", "--dig-holes", volume)
    (volume.parent / "a-note").write_text("before the disk")
    (volume.parent / "z-note").write_text("and behind it")
    flags = ["--sparse"] if sparse else []
    argv = ["tar", "--create", *flags, "--file=-", "./a-note", f"./{name}", "./z-note"]
    made = subprocess.run(argv, cwd=volume.parent, check=True, capture_output=True).stdout
    assert (len(made) < 9 * MIB) is sparse
    stream = b"".join(
        snappy.frames([memoryview(made)[at : at + 65_536] for at in range(0, len(made), 65_536)])
    )
    with uploads.Server(certificates, {"DESTINATION": str(block)}, paths) as server:
        headers = {"x-cdi-content-type": "filesystem-clone"}
        answer = server.ask("POST", SYNC, stream, headers)
        assert answer.status == 200, answer.text
        assert server.result() == report.uploaded(clone=True, preallocated=False)
    oracle.same(block, volume, beyond=devices.DIRT)


@pytest.mark.parametrize("block", [512], indirect=True)
def test_empty_disk_is_not_cloned_to_a_device(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path, block: Path
) -> None:
    """What was on the device stayed there, and the clone was complete."""
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume" / "disk.img").touch()
    with uploads.Server(certificates, {"DESTINATION": str(block)}, paths) as server:
        pod = worker.Pod(tmp_path / "source")
        done = pod.call(**clones.environment(server, "filesystem", tmp_path / "volume"))
        assert (done.status, "the disk has 0 bytes" in pod.message) == (1, True), pod.message
        assert server.running


@pytest.mark.parametrize("fault", ["name", "authority", "others"])
def test_failed_clone_reports_the_error(
    server: uploads.Server, tmp_path: Path, volume: Path, fault: str
) -> None:
    other = server.certificates.authority.issue(common_name="somebody", client=True)
    missing = str(tmp_path / "missing")
    changes: dict[str, list[dict[str, str]]] = {
        "name": [{"CLIENT_KEY": other.key.read_text(), "CLIENT_CERT": other.certificate.read_text()}],
        "authority": [{"SERVER_CA_CERT": other.certificate.read_text()}],
        "others": [
            {"UPLOAD_URL": "https://me:PRIVATE KEY@host:port/v1beta1/upload"},
            {"MOUNT_POINT": missing},
            {"MOUNT_POINT": missing, "VOLUME_MODE": "filesystem"},
            {"VOLUME_MODE": "filesystem"},  # not a directory
            {"CLIENT_KEY": "", "VOLUME_MODE": "tape"},
        ],
    }
    pod = worker.Pod(tmp_path / "source")
    for change in changes[fault]:
        done = pod.call(**{**clones.environment(server, "block", volume), **change})
        assert done.status == 1
        assert pod.message.startswith("Unable to ")
        assert "\n" not in pod.message
        assert "PRIVATE KEY" not in pod.message + done.errors + done.output
        assert "Traceback" not in done.errors


def test_clone_reports_progress(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path, volume: Path
) -> None:
    with devices.slow(tmp_path, 16 * MIB, bytes_per_second=12 * MIB) as target:
        with uploads.Server(certificates, {"DESTINATION": str(target)}, paths) as server:
            pod = worker.Pod(tmp_path / "source", metrics_port=processes.free_port())
            with worker.started(
                *pod.arguments, env=clones.environment(server, "block", volume, OWNER_UID=UID)
            ) as process:
                processes.wait_for(lambda: processes.is_listening(pod.metrics_port), "the metrics port")
                name = f'kubevirt_cdi_clone_progress_total{{ownerUID="{UID}"}}'
                found: list[str] = []

                def is_shown() -> bool:
                    found[:] = re.findall(re.escape(name) + r" ([0-9.]+)\n", meters.scrape(pod.metrics_port))
                    return bool(found)

                processes.wait_for(is_shown, "the percentage")
                assert 0 <= float(found[0]) < 100
                assert process.wait(30) == 0
            assert json.loads(server.result().message)["message"] == "Clone Complete"
        oracle.same(target, volume)
