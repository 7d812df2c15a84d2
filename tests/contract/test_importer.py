"""The importer's contract: the real process, its environment, its exit status and its last words.

Messages are compared as the controllers compare them: as strings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from pathlib import Path

import pytest

from tests.support import contract, devices, misbehave, oracle, ovas, processes, servers, worker
from tests.support import disks as disks_module

MiB = 1 << 20


# -- success ----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["raw", "vhdx-log"])
def test_disk_is_imported_to_file_system_volume(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, variant: str
) -> None:
    done = pod.run(IMPORTER_ENDPOINT=web.url(disks.image(variant)))
    assert (done.status, pod.message) == (0, contract.COMPLETE)
    contract.check_disk(pod, disks.expected(variant))
    assert stat.filemode(pod.disk.stat().st_mode) == "-rw-rw----"
    assert [path.name for path in pod.data.iterdir()] == ["disk.img"]


@pytest.mark.parametrize("variant", ["qcow2", "vhdx-log"])
def test_disk_is_imported_to_block_volume(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, device: Path, variant: str
) -> None:
    pod.block = device
    done = pod.call(IMPORTER_ENDPOINT=web.url(disks.image(variant)), IMPORTER_IMAGE_SIZE="16Mi")
    assert (done.status, pod.message) == (0, contract.COMPLETE)
    contract.check_disk(pod, disks.expected(variant))
    assert not [*pod.data.iterdir()]


def test_flags_of_controllers_are_accepted(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks
) -> None:
    env = {**pod.env, "IMPORTER_ENDPOINT": web.url(disks.raw())}
    for arguments in (
        ["-alsologtostderr"],
        ["-v=5"],
        ["-v=3", "-alsologtostderr"],
        # In the forms that Go's flag package accepts, too.
        ["-v", "2", "-alsologtostderr=true", "-stderrthreshold=INFO"],
        ["--v=4", "--logtostderr=false"],
    ):
        assert worker.call(*pod.arguments, *arguments, env=env).status == 0, arguments


def test_cache_mode_does_not_change_the_disk(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks
) -> None:
    done = pod.call(IMPORTER_ENDPOINT=web.url(disks.raw()), CACHE_MODE="TRYNONE")
    assert (done.status, pod.message) == (0, contract.COMPLETE)
    contract.check_disk(pod, disks.raw())


def test_disk_of_an_ova_is_chosen(
    pod: worker.Pod, server: misbehave.Server, disks: disks_module.Disks
) -> None:
    image = disks.image("vmdk-stream").read_bytes()
    packed = ovas.ova(ovas.Disk(image), ovas.Disk(image, "vm-disk2.vmdk"))
    url = server.serve("/vm.ova", misbehave.Page(packed))
    done = pod.call(IMPORTER_ENDPOINT=url)
    contract.check_failure(pod, done, "Unable to process data: OVA image refused (one disk): ")
    done = pod.call(IMPORTER_ENDPOINT=url, CDI_WORKER_DISK="vm-disk2.vmdk")
    assert (done.status, pod.message) == (0, contract.COMPLETE)
    contract.check_disk(pod, disks.expected("vmdk-stream"))


def test_wrong_checksum_of_a_manifest_is_final(
    pod: worker.Pod, server: misbehave.Server, disks: disks_module.Disks
) -> None:
    disk = ovas.Disk(disks.raw().read_bytes())
    described = ("vm.ovf", ovas.descriptor([disk]))
    listed = ovas.manifest([described, (disk.name, b"")])
    packed = ovas.packed(described, (disk.name, disk.data), ("vm.mf", listed))
    url = server.serve("/vm.ova", misbehave.Page(packed, ranges=False))
    done = pod.call(IMPORTER_ENDPOINT=url)
    assert (done.status, "checksum mismatch" in pod.message) == (0, True)
    oracle.unusable(pod.disk)


def test_disk_is_preallocated(pod: worker.Pod, web: servers.Web, disks: disks_module.Disks) -> None:
    url = web.url(disks.image("qcow2"))
    done = pod.call(IMPORTER_ENDPOINT=url, PREALLOCATION="true", IMPORTER_IMAGE_SIZE="9Mi")
    assert (done.status, pod.message) == (0, contract.PREALLOCATED)
    contract.check_disk(pod, disks.expected("qcow2"), 9 * MiB)
    assert pod.disk.stat().st_blocks * 512 >= 9 * MiB


def test_disk_on_a_device_is_preallocated(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, tmp_path: Path
) -> None:
    """Its zeros are written, too: they free no storage below the device."""
    backing = devices.fill(tmp_path / "backing", 16 * MiB)
    with devices.attached(backing) as pod.block:
        for value, message in (("true", contract.PREALLOCATED), ("false", contract.COMPLETE)):
            done = pod.call(IMPORTER_ENDPOINT=web.url(disks.image("qcow2")), PREALLOCATION=value)
            assert (done.status, pod.message) == (0, message)
            contract.check_disk(pod, disks.expected("qcow2"))
            assert (backing.stat().st_blocks * 512 >= 16 * MiB) is (value == "true")


def test_archive_is_unpacked(pod: worker.Pod, web: servers.Web, disks: disks_module.Disks) -> None:
    done = pod.call(IMPORTER_ENDPOINT=web.url(disks.tar("gz")), IMPORTER_CONTENTTYPE="archive")
    assert (done.status, pod.message) == (0, contract.COMPLETE)
    assert {path.name for path in pod.data.iterdir()} == {path.name for path in disks.tree().iterdir()}


def test_archive_is_not_preallocated(pod: worker.Pod, web: servers.Web, disks: disks_module.Disks) -> None:
    """Its files are as packed, holes included: the message must not claim otherwise."""
    env = {"IMPORTER_ENDPOINT": web.url(disks.tar()), "IMPORTER_CONTENTTYPE": "archive"}
    done = pod.call(**env, PREALLOCATION="true")
    assert (done.status, pod.message) == (0, contract.COMPLETE)
    sparse = (pod.data / "sparse").stat()
    assert sparse.st_blocks * 512 < sparse.st_size


# -- scratch ----------------------------------------------------------------------------------


def test_scratch_is_requested_and_used(
    pod: worker.Pod, disks: disks_module.Disks, server: misbehave.Server
) -> None:
    page = misbehave.Page(disks.image("vhdx-log").read_bytes(), ranges=False)
    pod.env["IMPORTER_ENDPOINT"] = server.serve("/disk", page)
    done = pod.run()
    assert (done.status, pod.message) == (0, contract.NEEDS_SCRATCH)
    assert not [*pod.data.iterdir()]
    pod.has_scratch = True
    done = pod.run()
    assert (done.status, pod.message) == (0, contract.COMPLETE)
    contract.check_disk(pod, disks.expected("vhdx-log"))
    assert not [*pod.scratch.iterdir()]


def test_scratch_is_not_requested_with_ranges(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, device: Path
) -> None:
    pod.block = device
    assert pod.call(IMPORTER_ENDPOINT=web.url(disks.image("vhdx-log"))).status == 0
    assert pod.message == contract.COMPLETE


@pytest.mark.parametrize("missing", ["scratch", "checksum"])
def test_failure_of_status_0_needs_its_message(
    pod: worker.Pod, disks: disks_module.Disks, server: misbehave.Server, missing: str
) -> None:
    """Without the message the controller takes status 0 for a disk: the node's file system may be full."""
    page = misbehave.Page(disks.image("vhdx-log").read_bytes(), ranges=False)
    env = {**pod.env, "IMPORTER_ENDPOINT": server.serve("/disk", page)}
    if missing == "checksum":
        env["IMPORTER_CHECKSUM"] = f"md5:{'0' * 32}"
        pod.has_scratch = True
    done = worker.run(*pod.arguments, "--termination-log=/dev/full", env=env)
    assert (done.status, "cannot write the termination message" in done.errors) == (1, True)
    oracle.unusable(pod.disk)


def test_success_does_not_need_its_message(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks
) -> None:
    env = {**pod.env, "IMPORTER_ENDPOINT": web.url(disks.raw())}
    assert worker.run(*pod.arguments, "--termination-log=/dev/full", env=env).status == 0
    contract.check_disk(pod, disks.expected("raw"))


# -- checksums --------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "volume"), [("raw", "file"), ("qcow2", "block"), ("vhdx-log", "file")])
def test_checksum_mismatch_is_final(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks, device: Path, variant: str, volume: str
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
    assert pod.call(**env).status == 0
    contract.check_disk(pod, disks.expected(variant))


def test_malformed_checksum_is_reported(pod: worker.Pod, web: servers.Web, disks: disks_module.Disks) -> None:
    for value in ("sha256:abc", "crc32:00000000", "nonsense", "md5:" + "z" * 32):
        done = pod.call(IMPORTER_ENDPOINT=web.url(disks.raw()), IMPORTER_CHECKSUM=value)
        contract.check_failure(pod, done, "Unable to process data: ", "checksum", value)


# -- invalid requests -------------------------------------------------------------------------


#: Variables, and what the message must name.
INVALID: tuple[tuple[dict[str, str], str], ...] = (
    ({"PREALLOCATION": "yes"}, "PREALLOCATION"),
    ({"IMPORTER_IMAGE_SIZE": "10 GB"}, "IMPORTER_IMAGE_SIZE"),
    ({"FILESYSTEM_OVERHEAD": "much"}, "FILESYSTEM_OVERHEAD"),
    ({"IMPORTER_CONTENTTYPE": "floppy"}, "floppy"),
    ({"IMPORTER_ENDPOINT": ""}, "IMPORTER_ENDPOINT"),
    ({"IMPORTER_ENDPOINT": "http://host:port/"}, "malformed URL"),
    ({"IMPORTER_EXTRA_HEADER_0": "no colon"}, "IMPORTER_EXTRA_HEADER_0"),
    ({"IMPORTER_SOURCE": "carrier-pigeon"}, "carrier-pigeon"),
    ({"IMPORTER_PULL_METHOD": "sneakers"}, "IMPORTER_PULL_METHOD"),
)


def test_invalid_request_is_reported(pod: worker.Pod) -> None:
    for env, phrase in INVALID:
        done = pod.call(**{"IMPORTER_ENDPOINT": "http://127.0.0.1:1/disk", **env})
        contract.check_failure(pod, done, "Unable to process data: ", phrase)


def test_all_errors_of_a_request_are_reported_at_once(pod: worker.Pod) -> None:
    done = pod.call(PREALLOCATION="yes", IMPORTER_IMAGE_SIZE="x", IMPORTER_CONTENTTYPE="floppy")
    contract.check_failure(
        pod, done, "Unable", "PREALLOCATION", "IMPORTER_IMAGE_SIZE", "floppy", "IMPORTER_ENDPOINT"
    )


def test_archive_to_a_device_is_refused(pod: worker.Pod, device: Path) -> None:
    pod.block = device
    done = pod.call(IMPORTER_ENDPOINT="http://127.0.0.1:1/", IMPORTER_CONTENTTYPE="archive")
    contract.check_failure(pod, done, "Unable to process data: ", "archive")


# -- sources that cannot be reached, or fail --------------------------------------------------


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/disk", "http://no-such-host.invalid/disk"])
def test_unreachable_source_is_reported(pod: worker.Pod, url: str) -> None:
    done = pod.run(IMPORTER_ENDPOINT=url)
    contract.check_failure(pod, done, f"Unable to connect to http data source: {url}: ")


def test_refused_request_is_reported(pod: worker.Pod, server: misbehave.Server) -> None:
    for status in (401, 403, 404):
        done = pod.call(IMPORTER_ENDPOINT=server.serve("/disk", misbehave.Page(status=status)))
        contract.check_failure(pod, done, "Unable to connect to http data source: ", str(status))


def test_changed_source_is_a_failed_pull(
    pod: worker.Pod, server: misbehave.Server, disks: disks_module.Disks
) -> None:
    data = disks.raw().read_bytes()
    url = server.serve("/disk", (misbehave.Page(data), 3), misbehave.Page(data, etag='"two"'))
    contract.check_failure(
        pod, pod.call(IMPORTER_ENDPOINT=url), "Unable to process data: ", "failed to pull image"
    )


@pytest.mark.parametrize(("status", "ranges"), [(403, True), (404, False), (410, True)])
def test_refused_in_the_middle_is_a_failed_pull(
    pod: worker.Pod, server: misbehave.Server, disks: disks_module.Disks, status: int, ranges: bool
) -> None:
    """The first bytes arrived, so the message must not blame the address."""
    good = misbehave.Page(disks.raw().read_bytes(), ranges=ranges)
    first = good if ranges else dataclasses.replace(good, cut=MiB)
    url = server.serve("/disk", (first, 1), misbehave.Page(status=status))
    done = pod.call(IMPORTER_ENDPOINT=url)
    beginning = f"Unable to process data: failed to pull image: {url}: refused after the first bytes: "
    contract.check_failure(pod, done, beginning, f"server answers {status}")
    assert [*pod.data.iterdir()] == []


def test_archive_with_wrong_checksum_is_not_unpacked(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks
) -> None:
    """Nothing is moved into place before the checksum is verified."""
    image = disks.tar("gz")
    env = {"IMPORTER_ENDPOINT": web.url(image), "IMPORTER_CONTENTTYPE": "archive"}
    assert pod.call(**env, IMPORTER_CHECKSUM=f"sha512:{'0' * 128}").status == 0
    assert pod.outcome["message"].startswith("Unable to process data: checksum mismatch: expected sha512:000")
    assert [*pod.data.iterdir()] == []
    right = f"sha512:{disks_module.digest(image, 'sha512')}"
    assert pod.call(**env, IMPORTER_CHECKSUM=right).status == 0
    assert {path.name for path in pod.data.iterdir()} == {path.name for path in disks.tree().iterdir()}


@pytest.mark.parametrize(("value", "direct"), [("TRYNONE", True), ("", False)])
def test_cache_mode_chooses_direct_writes(
    pod: worker.Pod,
    server: misbehave.Server,
    disks: disks_module.Disks,
    device: Path,
    value: str,
    direct: bool,
) -> None:
    pod.block = device
    page = misbehave.Page(disks.raw("dense").read_bytes())
    url = server.serve("/disk", (page, 1), dataclasses.replace(page, drip=(64 << 10, 0.1)))
    env = {**pod.env, "IMPORTER_ENDPOINT": url, "CACHE_MODE": value}
    with worker.started(*pod.arguments, env=env) as process:
        processes.wait_for(lambda: server.sent("/disk") > MiB, "the transfer")
        opened = flags(process.pid, device)
        process.terminate()
        assert process.wait(20)
    assert opened
    assert any(each & os.O_DIRECT for each in opened) is direct


def flags(pid: int, path: Path) -> list[int]:
    """Return the flags of each descriptor that a process has open for a file, proc(5)."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if link.readlink() == path:
                lines = Path(f"/proc/{pid}/fdinfo/{link.name}").read_text().splitlines()
                found += [int(line.split()[1], 8) for line in lines if line.startswith("flags:")]
    return found
