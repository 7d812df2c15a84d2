"""The importer's contract: the real process, its environment, its exit status and its last words.

Messages are compared as the controllers compare them: as strings.
"""

from __future__ import annotations

import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import devices, limits, misbehave, oracle, processes, servers, worker
from tests import disks as disks_module

MiB = 1 << 20
COMPLETE = '{"scratchSpaceRequired":false,"preallocationApplied":false,"message":"Import Complete"}'
PREALLOCATED = '{"scratchSpaceRequired":false,"preallocationApplied":true,"message":"Import Complete"}'
BLANK = '{"preallocationApplied":false,"message":"Import Complete"}'
NEEDS_SCRATCH = '{"scratchSpaceRequired":true,"preallocationApplied":false,"message":"Import Complete"}'


@pytest.fixture
def pod(tmp_path: Path) -> worker.Pod:
    """Make a pod with a volume that has a file system."""
    return worker.Pod(tmp_path / "pod", env={"IMPORTER_SOURCE": "http", "FILESYSTEM_OVERHEAD": "0"})


@pytest.fixture
def server() -> Iterator[misbehave.Server]:
    with misbehave.Server() as running:
        yield running


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    with devices.loop(tmp_path, 16 * MiB) as made:
        yield made


def check_failure(pod: worker.Pod, done: worker.Done, beginning: str, *phrases: str) -> None:
    """Check that a run failed, said so in one line, and left nothing usable."""
    assert done.status == 1, done.errors
    assert pod.message.startswith(beginning)
    for phrase in phrases:
        assert phrase in pod.message
    assert "\n" not in pod.message
    assert len(pod.message.encode()) <= 4096
    assert "Traceback" not in done.errors
    oracle.unusable(pod.disk)


def check_disk(pod: worker.Pod, expected: Path, size: int | None = None) -> None:
    oracle.same(pod.disk, expected, beyond=devices.DIRT if pod.block else b"\0")
    if not pod.block:
        assert pod.disk.stat().st_size == size or expected.stat().st_size
        assert [path.name for path in pod.data.iterdir()] == ["disk.img"]


# -- done ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["raw", "qcow2", "vmdk"])
def test_file_system_volume(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, variant: str
) -> None:
    done = pod.run(IMPORTER_ENDPOINT=web.url(disks.image(variant)))
    assert (done.status, pod.message) == (0, COMPLETE)
    check_disk(pod, disks.expected(variant))
    assert stat.filemode(pod.disk.stat().st_mode) == "-rw-rw----"


@pytest.mark.parametrize("variant", ["raw", "qcow2", "vmdk"])
def test_block_volume(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, device: Path, variant: str
) -> None:
    pod.block = device
    done = pod.run(IMPORTER_ENDPOINT=web.url(disks.image(variant)), IMPORTER_IMAGE_SIZE="16Mi")
    assert (done.status, pod.message) == (0, COMPLETE)
    check_disk(pod, disks.expected(variant))
    assert not [*pod.data.iterdir()]


@pytest.mark.parametrize("arguments", [["-alsologtostderr"], ["-v=5"], ["-v=3", "-alsologtostderr"]])
def test_flags_of_controllers(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, arguments: list[str]
) -> None:
    env = {**pod.env, "IMPORTER_ENDPOINT": web.url(disks.raw())}
    assert worker.run(*pod.arguments, *arguments, env=env).status == 0


@pytest.mark.parametrize("value", ["TRYNONE", ""])
def test_cache_mode_makes_the_same_disk(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, value: str
) -> None:
    done = pod.run(IMPORTER_ENDPOINT=web.url(disks.raw()), CACHE_MODE=value)
    assert (done.status, pod.message) == (0, COMPLETE)
    check_disk(pod, disks.raw())


def test_preallocation(pod: worker.Pod, web: servers.Web, disks: disks_module.Disks) -> None:
    url = web.url(disks.image("qcow2"))
    done = pod.run(IMPORTER_ENDPOINT=url, PREALLOCATION="true", IMPORTER_IMAGE_SIZE="9Mi")
    assert (done.status, pod.message) == (0, PREALLOCATED)
    check_disk(pod, disks.expected("qcow2"), 9 * MiB)
    assert pod.disk.stat().st_blocks * 512 >= 9 * MiB


def test_archive(pod: worker.Pod, web: servers.Web, disks: disks_module.Disks) -> None:
    done = pod.run(IMPORTER_ENDPOINT=web.url(disks.tar("gz")), IMPORTER_CONTENTTYPE="archive")
    assert (done.status, pod.message) == (0, COMPLETE)
    assert {path.name for path in pod.data.iterdir()} == {path.name for path in disks.tree().iterdir()}


# -- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "overhead", "size"),
    [
        ("20Mi", "0", 20 * MiB),
        ("20M", "0", 19 * MiB),
        ("20Mi", "0.055", 18 * MiB),
        ("20Mi", "0.06", 18 * MiB),
        ("8Mi", "0.06", 8 * MiB),  # the image is larger than what is usable: not grown, not shrunk
        ("2e7", "", 19 * MiB),
        ("", "0.06", 8 * MiB),
    ],
)
def test_file_is_grown_never_shrunk(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, requested: str, overhead: str, size: int
) -> None:
    done = pod.run(
        IMPORTER_ENDPOINT=web.url(disks.image("qcow2")),
        IMPORTER_IMAGE_SIZE=requested,
        FILESYSTEM_OVERHEAD=overhead,
    )
    assert (done.status, pod.message) == (0, COMPLETE)
    check_disk(pod, disks.expected("qcow2"), size)
    assert pod.disk.stat().st_size == size


@pytest.mark.parametrize("variant", ["raw", "qcow2", "vhdx"])
def test_too_large_for_the_request(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, variant: str
) -> None:
    done = pod.run(IMPORTER_ENDPOINT=web.url(disks.image(variant)), IMPORTER_IMAGE_SIZE="7Mi")
    sentence = (
        f"virtual image size {8 * MiB} is larger than the reported available storage {7 * MiB}. "
        "A larger PVC is required"
    )
    check_failure(pod, done, "Unable to process data: ", sentence)


def test_too_large_for_the_device(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, device: Path
) -> None:
    pod.block = device
    done = pod.run(IMPORTER_ENDPOINT=web.url(disks.image("qcow2", "far")))
    check_failure(pod, done, "Unable to process data: ", f"reported available storage {16 * MiB}. ")


def test_no_space_left(pod: worker.Pod, web: servers.Web, disks: disks_module.Disks) -> None:
    with devices.filesystem("tmpfs", pod.data, 2 * MiB) as small:
        pod.directory = small
        pod.data.mkdir()
        pod.headers.mkdir()
        pod.env["IMPORTER_ENDPOINT"] = web.url(disks.wrapped("raw", "gz", "dense"))
        done = pod.run()
        assert done.status == 1
        assert (
            "no space left on device" in pod.message or "is larger than the reported available" in pod.message
        )
        assert not pod.disk.exists()


def test_left_overs_do_not_count(pod: worker.Pod, web: servers.Web, disks: disks_module.Disks) -> None:
    with devices.filesystem("tmpfs", pod.data, 12 * MiB) as small:
        pod.directory = small
        pod.data.mkdir()
        pod.headers.mkdir()
        for name in ("disk.img", "disk.img.part"):
            devices.fill(pod.data / name, 5 * MiB)
        assert pod.run(IMPORTER_ENDPOINT=web.url(disks.image("qcow2"))).status == 0
        check_disk(pod, disks.expected("qcow2"))


# -- blank -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("overhead", "size"), [("0", 20 * MiB), ("0.055", 18 * MiB)])
def test_blank_file(pod: worker.Pod, overhead: str, size: int) -> None:
    done = pod.run(IMPORTER_SOURCE="none", IMPORTER_IMAGE_SIZE="20Mi", FILESYSTEM_OVERHEAD=overhead)
    assert (done.status, pod.message) == (0, BLANK)
    assert pod.disk.read_bytes() == bytes(size)
    assert pod.disk.stat().st_blocks == 0


def test_blank_file_preallocated(pod: worker.Pod) -> None:
    done = pod.run(IMPORTER_SOURCE="none", IMPORTER_IMAGE_SIZE="4Mi", PREALLOCATION="true")
    assert (done.status, pod.message) == (0, BLANK.replace("false", "true"))
    assert pod.disk.read_bytes() == bytes(4 * MiB)
    assert pod.disk.stat().st_blocks * 512 >= 4 * MiB


def test_blank_device_is_left_alone(pod: worker.Pod, device: Path) -> None:
    pod.block = device
    assert pod.run(IMPORTER_SOURCE="none", IMPORTER_IMAGE_SIZE="4Mi").status == 0
    assert device.read_bytes() == devices.DIRT * 16 * MiB


def test_blank_device_preallocated_is_zeroed(pod: worker.Pod, device: Path) -> None:
    pod.block = device
    done = pod.run(IMPORTER_SOURCE="none", IMPORTER_IMAGE_SIZE="4Mi", PREALLOCATION="true")
    assert (done.status, pod.message) == (0, BLANK.replace("false", "true"))
    assert device.read_bytes() == bytes(4 * MiB) + devices.DIRT * 12 * MiB


def test_blank_archive_is_an_error(pod: worker.Pod) -> None:
    done = pod.run(IMPORTER_SOURCE="none", IMPORTER_CONTENTTYPE="archive", IMPORTER_IMAGE_SIZE="4Mi")
    check_failure(pod, done, "Unable to process data: ", "blank")


# -- scratch ---------------------------------------------------------------------------------


def test_scratch_is_asked_for_and_used(
    pod: worker.Pod, disks: disks_module.Disks, server: misbehave.Server
) -> None:
    page = misbehave.Page(disks.image("vmdk").read_bytes(), ranges=False)
    pod.env["IMPORTER_ENDPOINT"] = server.serve("/disk", page)
    done = pod.run()
    assert (done.status, pod.message) == (0, NEEDS_SCRATCH)
    assert not [*pod.data.iterdir()]
    pod.has_scratch = True
    done = pod.run()
    assert (done.status, pod.message) == (0, COMPLETE)
    check_disk(pod, disks.expected("vmdk"))
    assert not [*pod.scratch.iterdir()]


def test_scratch_is_not_asked_for_a_block_volume_with_ranges(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, device: Path
) -> None:
    pod.block = device
    assert pod.run(IMPORTER_ENDPOINT=web.url(disks.image("vhdx"))).status == 0
    assert pod.message == COMPLETE


# -- checksums -------------------------------------------------------------------------------


@pytest.mark.parametrize("volume", ["file", "block"])
@pytest.mark.parametrize("variant", ["raw", "qcow2", "vmdk"])
def test_checksum_mismatch_is_final(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, device: Path, volume: str, variant: str
) -> None:
    pod.block = device if volume == "block" else None
    pod.has_scratch = True
    image = disks.image(variant)
    env = {"IMPORTER_ENDPOINT": web.url(image), "IMPORTER_CHECKSUM": f"SHA1:{'0' * 40}"}
    assert pod.run(**env).status == 0
    mismatch = (
        f"checksum mismatch: expected sha1:{'0' * 40}, calculated sha1:{disks_module.digest(image, 'sha1')}"
    )
    assert pod.message == f'{{"message":"Unable to process data: {mismatch}"}}'
    oracle.unusable(pod.disk)
    env["IMPORTER_CHECKSUM"] = f"sha1:{disks_module.digest(image, 'sha1')}"
    assert pod.run(**env).status == 0
    check_disk(pod, disks.expected(variant))


@pytest.mark.parametrize("value", ["sha256:abc", "crc32:00000000", "nonsense", "md5:" + "z" * 32])
def test_malformed_checksum(pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, value: str) -> None:
    done = pod.run(IMPORTER_ENDPOINT=web.url(disks.raw()), IMPORTER_CHECKSUM=value)
    check_failure(pod, done, "Unable to process data: ", "checksum")


# -- requests that make no sense --------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "phrase"),
    [
        ({"PREALLOCATION": "yes"}, "PREALLOCATION"),
        ({"IMPORTER_IMAGE_SIZE": "10 GB"}, "IMPORTER_IMAGE_SIZE"),
        ({"FILESYSTEM_OVERHEAD": "much"}, "FILESYSTEM_OVERHEAD"),
        ({"IMPORTER_CONTENTTYPE": "floppy"}, "floppy"),
        ({"IMPORTER_ENDPOINT": ""}, "IMPORTER_ENDPOINT"),
        ({"IMPORTER_ENDPOINT": "http://host:port/"}, "malformed URL"),
        ({"IMPORTER_EXTRA_HEADER_0": "no colon"}, "IMPORTER_EXTRA_HEADER_0"),
        ({"IMPORTER_SOURCE": "carrier-pigeon"}, "carrier-pigeon"),
        ({"IMPORTER_PULL_METHOD": "sneakers"}, "IMPORTER_PULL_METHOD"),
    ],
)
def test_request_without_sense(pod: worker.Pod, env: dict[str, str], phrase: str) -> None:
    done = pod.run(**{"IMPORTER_ENDPOINT": "http://127.0.0.1:1/disk", **env})
    check_failure(pod, done, "Unable to process data: ", phrase)


def test_all_faults_are_told_at_once(pod: worker.Pod) -> None:
    done = pod.run(PREALLOCATION="yes", IMPORTER_IMAGE_SIZE="x", IMPORTER_CONTENTTYPE="floppy")
    check_failure(pod, done, "Unable", "PREALLOCATION", "IMPORTER_IMAGE_SIZE", "floppy", "IMPORTER_ENDPOINT")


def test_archive_onto_a_device(pod: worker.Pod, device: Path) -> None:
    pod.block = device
    done = pod.run(IMPORTER_ENDPOINT="http://127.0.0.1:1/", IMPORTER_CONTENTTYPE="archive")
    check_failure(pod, done, "Unable to process data: ", "archive")


# -- sources that cannot be reached, or break ---------------------------------------------------


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/disk", "http://no-such-host.invalid/disk", "https://127.0.0.1:1/disk"]
)
def test_unreachable(pod: worker.Pod, url: str) -> None:
    done = pod.run(IMPORTER_ENDPOINT=url)
    check_failure(pod, done, f"Unable to connect to http data source: {url}: ")


@pytest.mark.parametrize("status", [401, 403, 404])
def test_refused(pod: worker.Pod, server: misbehave.Server, status: int) -> None:
    done = pod.run(IMPORTER_ENDPOINT=server.serve("/disk", misbehave.Page(status=status)))
    check_failure(pod, done, "Unable to connect to http data source: ", str(status))


def test_changed_source_is_a_failed_pull(
    pod: worker.Pod, server: misbehave.Server, disks: disks_module.Disks
) -> None:
    data = disks.raw().read_bytes()
    url = server.serve("/disk", (misbehave.Page(data), 3), misbehave.Page(data, etag='"two"'))
    check_failure(pod, pod.run(IMPORTER_ENDPOINT=url), "Unable to process data: ", "failed to pull image")


# -- killed, and started again --------------------------------------------------------------


@pytest.mark.parametrize("volume", ["file", "block"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("variant", ["raw", "qcow2", "vmdk"])
def test_killed_worker_starts_again(
    pod: worker.Pod,
    server: misbehave.Server,
    disks: disks_module.Disks,
    device: Path,
    variant: str,
    number: int,
    volume: str,
) -> None:
    pod.block = device if volume == "block" else None
    data = disks.image(variant).read_bytes()
    good = misbehave.Page(data)
    url = server.serve("/disk", (good, 2), misbehave.Page(data, stall=1000))
    pod.env["IMPORTER_ENDPOINT"] = url
    with worker.started(*pod.arguments, env=pod.env) as process:
        processes.wait_for(lambda: len(server.gets("/disk")) > 2, "the stall")
        process.send_signal(number)
        status = process.wait(20)
    assert status != 0
    oracle.unusable(pod.disk)
    server.serve("/disk", good)
    assert pod.run().status == 0
    assert pod.message == COMPLETE
    check_disk(pod, disks.expected(variant))


# -- rights ----------------------------------------------------------------------------------


def test_without_rights(pod: worker.Pod, web: servers.Web, disks: disks_module.Disks) -> None:
    """A user of its own, a volume of its group, nothing else to write to."""
    for path in (pod.directory, pod.data):
        processes.run("chown", "107:107", path)
    for path in [*pod.directory.parents][:-1]:
        path.chmod(path.stat().st_mode | 0o055)
    pod.env["IMPORTER_ENDPOINT"] = web.url(disks.image("vmdk"))
    done = pod.run(prefix=limits.unprivileged())
    assert (done.status, pod.message) == (0, COMPLETE), done.errors
    check_disk(pod, disks.expected("vmdk"))
    assert pod.disk.stat().st_uid == 107
