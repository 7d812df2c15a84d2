"""The importer's contract: limits of a disk's size, and its final size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import contract, devices, processes, servers, worker
from tests.support import disks as disks_module

MiB = 1 << 20


# -- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "overhead", "size"),
    [
        ("20Mi", "0", 20 * MiB),
        ("20M", "0", 19 * MiB),
        ("20Mi", "0.055", 18 * MiB),
        ("20Mi", "0.06", 18 * MiB),
        ("8Mi", "0.06", 8 * MiB),  # the image is larger than the usable size: not grown, not shrunk
        ("2e7", "", 19 * MiB),
        ("", "0.06", 8 * MiB),
    ],
)
def test_file_is_grown_and_never_shrunk(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, requested: str, overhead: str, size: int
) -> None:
    done = pod.call(
        IMPORTER_ENDPOINT=web.url(disks.image("qcow2")),
        IMPORTER_IMAGE_SIZE=requested,
        FILESYSTEM_OVERHEAD=overhead,
    )
    assert (done.status, pod.message) == (0, contract.COMPLETE)
    contract.check_disk(pod, disks.expected("qcow2"), size)


def test_disk_larger_than_the_request_is_refused(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks
) -> None:
    sentence = (
        f"virtual image size {8 * MiB} is larger than the reported available storage {7 * MiB}. "
        "A larger PVC is required"
    )
    for variant in ("raw", "qcow2", "vhdx-log"):
        done = pod.call(IMPORTER_ENDPOINT=web.url(disks.image(variant)), IMPORTER_IMAGE_SIZE="7Mi")
        contract.check_failure(pod, done, "Unable to process data: ", sentence)


def test_disk_larger_than_the_device_is_refused(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, device: Path
) -> None:
    pod.block = device
    done = pod.call(IMPORTER_ENDPOINT=web.url(disks.image("qcow2", "far")))
    contract.check_failure(pod, done, "Unable to process data: ", f"reported available storage {16 * MiB}. ")


def test_device_size_overrides_the_request(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, device: Path
) -> None:
    """The size of a device is fixed, so a request for less does not limit the disk."""
    pod.block = device
    done = pod.call(IMPORTER_ENDPOINT=web.url(disks.image("qcow2")), IMPORTER_IMAGE_SIZE="7Mi")
    assert (done.status, pod.message) == (0, contract.COMPLETE)
    contract.check_disk(pod, disks.expected("qcow2"))


@pytest.mark.parametrize(
    ("compression", "phrase"),
    [(None, "is larger than the reported available storage"), ("gz", "no space left on device")],
    ids=["size-known", "size-unknown"],
)
def test_full_volume_is_reported(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, compression: str | None, phrase: str
) -> None:
    with devices.filesystem("tmpfs", pod.data, 2 * MiB) as small:
        pod.directory = small
        pod.data.mkdir()
        pod.headers.mkdir()
        done = pod.call(IMPORTER_ENDPOINT=web.url(disks.wrapped("raw", compression, "dense")))
        contract.check_failure(pod, done, "Unable to process data: ", phrase)
        assert not pod.disk.exists()


@pytest.mark.parametrize("route", ["stream", "convert", "unpack"])
def test_exceeded_quota_is_reported(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, route: str
) -> None:
    """A quota does not show in the free space: it is exceeded during the import."""
    image = {"stream": disks.raw("dense"), "convert": disks.image("vhdx-log", "dense"), "unpack": disks.tar()}
    with devices.filesystem("btrfs", pod.directory) as point:
        processes.run("btrfs", "quota", "enable", point)
        processes.run("btrfs", "qgroup", "limit", "1M" if route == "unpack" else "3M", point)
        volume = worker.Pod(point, env=pod.env)
        kind = "archive" if route == "unpack" else "kubevirt"
        done = volume.call(IMPORTER_ENDPOINT=web.url(image[route]), IMPORTER_CONTENTTYPE=kind)
        contract.check_failure(volume, done, "Unable to process data: ", "disk quota exceeded")
        assert [*volume.data.iterdir()] == []


@pytest.mark.parametrize(
    "left_over",
    [{"disk.img": 9 * MiB, "disk.img.part": 2 * MiB}, {"disk.img": 2 * MiB, "disk.img.part": 9 * MiB}],
)
def test_leftovers_count_as_free_space(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, left_over: dict[str, int]
) -> None:
    with devices.filesystem("tmpfs", pod.data, 12 * MiB) as small:
        pod.directory = small
        pod.data.mkdir()
        pod.headers.mkdir()
        for name, size in left_over.items():
            devices.fill(pod.data / name, size)
        assert pod.call(IMPORTER_ENDPOINT=web.url(disks.image("qcow2", "dense"))).status == 0
        contract.check_disk(pod, disks.expected("qcow2", "dense"))


def test_leftovers_count_as_free_space_for_an_archive(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, tmp_path: Path
) -> None:
    """Leftovers of an archive, or of a disk imported here before."""
    env = {**pod.env, "IMPORTER_ENDPOINT": web.url(disks.tar()), "IMPORTER_CONTENTTYPE": "archive"}
    with devices.filesystem("tmpfs", tmp_path, 4 * MiB) as volume:
        (volume / ".cdi-worker-unpacking").mkdir()
        devices.fill(volume / ".cdi-worker-unpacking" / "x", MiB)
        devices.fill(volume / "disk.img.part", 2 * MiB)
        done = worker.call(*pod.arguments, f"--data-dir={volume}", env=env)
        assert (done.status, pod.message) == (0, contract.COMPLETE)
        assert {path.name for path in volume.iterdir()} == {path.name for path in disks.tree().iterdir()}


# -- blank ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overhead", "size"), [("0", 20 * MiB), ("0.055", 18 * MiB)])
def test_blank_file_has_requested_size(pod: worker.Pod, overhead: str, size: int) -> None:
    done = pod.run(IMPORTER_SOURCE="none", IMPORTER_IMAGE_SIZE="20Mi", FILESYSTEM_OVERHEAD=overhead)
    assert (done.status, pod.message) == (0, contract.BLANK)
    assert pod.disk.read_bytes() == bytes(size)
    assert pod.disk.stat().st_blocks == 0


def test_blank_file_is_preallocated(pod: worker.Pod) -> None:
    done = pod.call(IMPORTER_SOURCE="none", IMPORTER_IMAGE_SIZE="4Mi", PREALLOCATION="true")
    assert (done.status, pod.message) == (0, contract.BLANK.replace("false", "true"))
    assert pod.disk.read_bytes() == bytes(4 * MiB)
    assert pod.disk.stat().st_blocks * 512 >= 4 * MiB


def test_blank_device_is_not_written(pod: worker.Pod, device: Path) -> None:
    pod.block = device
    assert pod.call(IMPORTER_SOURCE="none", IMPORTER_IMAGE_SIZE="4Mi").status == 0
    assert device.read_bytes() == devices.DIRT * 16 * MiB


def test_preallocated_blank_device_is_zeroed(pod: worker.Pod, device: Path) -> None:
    pod.block = device
    done = pod.call(IMPORTER_SOURCE="none", IMPORTER_IMAGE_SIZE="4Mi", PREALLOCATION="true")
    assert (done.status, pod.message) == (0, contract.BLANK.replace("false", "true"))
    assert device.read_bytes() == bytes(4 * MiB) + devices.DIRT * 12 * MiB


def test_blank_archive_is_an_error(pod: worker.Pod) -> None:
    done = pod.call(IMPORTER_SOURCE="none", IMPORTER_CONTENTTYPE="archive", IMPORTER_IMAGE_SIZE="4Mi")
    contract.check_failure(
        pod, done, "Unable to process data: ", "source 'none' does not support content type archive"
    )
