"""What a worker shows of its progress, against what it has really read from a slow server."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker import contract
from tests.support import clones, devices, meters, oracle, processes, servers, uploads, worker
from tests.support import disks as disks_module

MiB = 1 << 20
#: The disk, and the noise at its end: everything before it is a hole.
SIZE = 512 * MiB
DATA = 12 * MiB
#: Bytes per second of the server: of a connection, and of the connections that an import opens.
RATE = 400 << 10
WIRE = 6 * RATE
PERCENT = "kubevirt_cdi_import_progress_total"


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a disk whose data is at its end."""
    path = tmp_path_factory.mktemp("sparse") / "disk.raw"
    with path.open("wb") as stream:
        stream.truncate(SIZE)
        stream.seek(SIZE - DATA)
        stream.write(random.Random(1).randbytes(DATA))
    return path


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[servers.Web]:
    """Run nginx with a limited rate."""
    folder = tmp_path / "nginx"
    folder.mkdir()
    with servers.nginx(folder, tmp_path, servers.Settings(limit_rate=RATE)) as web:
        yield web


@pytest.fixture
def pod(tmp_path: Path) -> worker.Pod:
    env = {"IMPORTER_SOURCE": "http", "FILESYSTEM_OVERHEAD": "0", "OWNER_UID": "uid"}
    return worker.Pod(tmp_path / "pod", env=env, metrics_port=processes.free_port())


def image_of(sparse: Path, form: str, folder: Path) -> Path:
    path = folder / f"disk.{form}"
    disks_module.convert(sparse, path, disks_module.FORMATS[form])
    return path


@pytest.mark.parametrize("form", ["qcow2", "qcow2-zstd", "vmdk", "vhdx"])
def test_progress_of_a_sparse_image_follows_the_data(
    form: str, sparse: Path, slow: servers.Web, pod: worker.Pod, tmp_path: Path
) -> None:
    """A controller sees the percentage of what must be read, and a speed that the wire has."""
    image = image_of(sparse, form, tmp_path)
    seen: list[meters.Scrape] = []
    with worker.started(*pod.arguments, env={**pod.env, "IMPORTER_ENDPOINT": slow.url(image)}) as process:
        processes.wait_for(lambda: processes.is_listening(pod.metrics_port), "the metrics port")
        seen += meters.scrapes(process, pod.metrics_port)
        assert process.wait() == 0
    oracle.same(pod.disk, sparse)
    moving = [each for each in seen if each.phase == "transfer"]
    assert len(moving) > 8
    percents = [each[PERCENT] for each in seen]
    assert percents == sorted(percents)
    assert moving[0][PERCENT] < 25
    for each in moving:
        # The sparse image has few bytes besides the data.
        assert DATA <= each["cdi_worker_phase_total_bytes"] <= image.stat().st_size < DATA + 16 * MiB
        expected = 100 * each["cdi_worker_read_bytes_total"] / each["cdi_worker_phase_total_bytes"]
        assert abs(each[PERCENT] - expected) < 5
        assert each["cdi_worker_speed_bytes_per_second"] < 1.5 * WIRE
        assert each["cdi_worker_disk_bytes"] == SIZE
    middle = moving[len(moving) // 2]
    assert middle["cdi_worker_speed_bytes_per_second"] > RATE / 2
    left = [each["cdi_worker_remaining_seconds"] for each in (middle, moving[-1])]
    assert 0 <= left[1] < left[0] < 5 * DATA / RATE


def lines_of(output: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_holes_of_a_local_file_are_not_progress(sparse: Path, tmp_path: Path) -> None:
    """The map of the file is known before anything is copied to a slow device."""
    with devices.slow(tmp_path, SIZE, bytes_per_second=2 * MiB) as target:
        done = worker.run("import", sparse, target, "--json", "--progress=json", "--direct")
        assert done.status == 0, done.errors
        with target.open("rb") as have, sparse.open("rb") as want:
            have.seek(SIZE - DATA), want.seek(SIZE - DATA)
            assert have.read() == want.read()
    moving = [line for line in lines_of(done.errors) if line["phase"] == "transfer"]
    assert moving[0]["percent"] == 0
    assert moving[-1]["total"] == DATA
    for line in moving:
        assert line["bytesPerSecond"] < 20 * MiB
        assert line["percent"] <= 100 * line["read"] / DATA + 0.1


@pytest.mark.parametrize("ours", [True, False], ids=["extents", "frames"])
def test_clone_of_a_sparse_device_follows_the_data(
    ours: bool,
    sparse: Path,
    certificates: uploads.Certificates,
    paths: contract.Paths,
    pod: worker.Pod,
    tmp_path: Path,
) -> None:
    """Zeros of a device are read, not moved."""
    with (
        devices.attached(sparse) as source,
        devices.slow(tmp_path, SIZE, bytes_per_second=3 * MiB) as target,
        uploads.Server(certificates, {"DESTINATION": str(target)}, paths) as server,
    ):
        env = clones.environment(server, "block", source, OWNER_UID="uid")
        seen: list[meters.Scrape] = []
        with worker.started(*pod.arguments, env=env) as process:
            processes.wait_for(lambda: processes.is_listening(pod.metrics_port), "the metrics port")
            seen += meters.scrapes(process, pod.metrics_port)
            assert process.wait() == 0
    moving = [each for each in seen if each.phase == "transfer"]
    for each in moving:
        sent = each["cdi_worker_read_bytes_total"]
        assert each["kubevirt_cdi_clone_progress_total"] <= 100 * (sent + 4 * MiB) / DATA
        assert each["cdi_worker_speed_bytes_per_second"] < 200 * MiB
