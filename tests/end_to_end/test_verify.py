"""``cdi-worker verify``: the disk is that of the source, or it differs there, or there is no verdict."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images import targets
from tests.support import chains, devices, disks, misbehave, ovas, processes, worker

MIB = 1 << 20
SIZE = 12 * MIB
DATA = bytearray(random.Random(5).randbytes(4 * MIB) + bytes(6 * MIB) + random.Random(6).randbytes(2 * MIB))
FEW = cdi_worker.FetchOptions(connections=2, chunk=512 << 10, no_progress=5)
IMPATIENT = cdi_worker.FetchOptions(connections=2, chunk=512 << 10, no_progress=1)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk.img"
    path.write_bytes(DATA)
    return path


def request(url: str, disk: Path, **options: Any) -> cdi_worker.Request:
    kind = "http" if url.startswith("http") else "local"
    access = cdi_worker.Access(patience=5.0)
    location = options.pop("location", None) or cdi_worker.Location(url, access=access)
    return cdi_worker.Request(
        **{"source": kind, "location": location, "target": str(disk), "fetch": FEW, **options}
    )


def verify(url: str, disk: Path, **options: Any) -> cdi_worker.Verification:
    return cdi_worker.verify(request(url, disk, **options))


# -- the command


def test_command_reports_where_a_disk_differs(server: misbehave.Server, disk: Path) -> None:
    url = server.serve("/disk", misbehave.Page(bytes(DATA)))
    done = worker.call("verify", url, disk)
    assert (done.status, "equal" in done.output) == (0, True)
    devices.change(disk, 5 * MIB + 5, b"x")
    devices.change(disk, 4 * MIB - 8192, bytes(8192))
    done = worker.call("verify", url, disk)
    assert done.status == 9
    assert f"12288 bytes in 2 ranges differ, the first is byte {4 * MIB - 8192}" in done.output
    assert f"  8192 bytes at {4 * MIB - 8192}, zeros in the disk" in done.output
    assert f"  4096 bytes at {5 * MIB}, zeros in the source" in done.output
    done = worker.call("verify", "--quiet", url, disk)
    assert (done.status, done.output, done.errors) == (9, "", "")
    done = worker.call("verify", "--json", url, disk)
    found = json.loads(done.output)
    assert (done.status, found["equal"], found["differed"], found["confirmed"]) == (9, False, 12288, True)
    assert found["differences"][1] == {"offset": 5 * MIB, "length": 4096, "zero": "source"}


def test_command_reads_standard_input_and_a_folder(disk: Path) -> None:
    given = [*worker.COMMAND, "verify", "-", str(disk.parent)]
    done = subprocess.run(given, input=bytes(DATA), capture_output=True, check=False)
    assert done.returncode == 0
    done = subprocess.run(given, input=bytes(DATA[:-1]) + b"x", capture_output=True, check=False)
    assert (done.returncode, b"no, the source is a stream" in done.stdout) == (9, True)


def test_missing_disk_is_a_target_error(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk", misbehave.Page(bytes(DATA)))
    assert worker.call("verify", url, tmp_path / "none").status == 6
    os.mkfifo(tmp_path / "fifo")
    assert worker.call("verify", url, tmp_path / "fifo").status == 6


def test_archive_is_refused(disk: Path) -> None:
    assert worker.call("verify", disk, disk.with_name("other"), "--content-type=archive").status == 2


# -- devices


def test_rest_of_a_device_is_not_compared_and_that_of_a_file_is(
    server: misbehave.Server, tmp_path: Path, disk: Path
) -> None:
    url = server.serve("/disk", misbehave.Page(bytes(DATA)))
    with disk.open("ab") as file:
        file.write(b"\xff" * MIB)
    found = verify(url, disk)
    assert (found.rest, [(each.offset, each.length) for each in found.differences]) == (
        "compared",
        [(SIZE, MIB)],
    )
    with devices.loop(tmp_path, 16 * MIB) as device:
        device.write_bytes(bytes(DATA))
        found = verify(url, device)
        assert (found.is_equal, found.rest, found.disk_size) == (True, "ignored", 16 * MIB)
        devices.change(device, SIZE - 1, bytes([DATA[-1] ^ 1]))
        assert verify(url, device).first == SIZE - 1


def test_mounted_device_without_write_access_is_compared_with_a_warning(tmp_path: Path) -> None:
    point = tmp_path / "point"
    point.mkdir()
    image = tmp_path / "image"
    image.write_bytes(bytes(16 * MIB))
    processes.run("mkfs.ext4", "-q", "-F", image)
    shutil.copy(image, tmp_path / "copy")
    with devices.attached(image) as device:
        processes.run("mount", "-o", "ro,noload", device, point)
        try:
            done = worker.call("verify", "--json", tmp_path / "copy", device)
        finally:
            processes.run("umount", point)
    assert (done.status, json.loads(done.output)["inUse"]) == (0, True)
    assert "mounted" in done.errors


def test_disk_is_opened_without_write_access(tmp_path: Path, disk: Path) -> None:
    with devices.filesystem("tmpfs", tmp_path) as point:
        (point / "disk.img").write_bytes(DATA)
        processes.run("mount", "-o", "remount,ro", point)
        assert verify(str(disk), point / "disk.img").is_equal
        assert not targets.in_use(str(point / "disk.img"))


# -- sources


def test_chain_is_compared(server: misbehave.Server, tmp_path: Path, disk: Path) -> None:
    (tmp_path / "chain").mkdir()
    chain = chains.Chain(tmp_path / "chain")
    chain.base("16M", "write -P 1 0 6M", "write -P 2 9M 3M")
    chain.overlay("write -P 3 1M 64k", "write -z 5M 2M")
    first, *others = (
        server.serve(f"/{path.name}", misbehave.Page(path.read_bytes(), etag=f'"{path.name}"'))
        for path in chain.files
    )
    layers = tuple(map(cdi_worker.Location, others))
    disk.write_bytes(chain.disk().read_bytes())
    assert verify(first, disk, layers=layers).is_equal
    devices.change(disk, 5 * MIB, b"x")
    found = verify(first, disk, layers=layers)
    assert (found.first, found.differences[0].zero) == (5 * MIB, "source")
    assert not verify(first, disk).is_equal


def test_disk_in_an_ova_is_compared(server: misbehave.Server, tmp_path: Path, disk: Path) -> None:
    raw, image = tmp_path / "raw", tmp_path / "image.vmdk"
    raw.write_bytes(DATA)
    disks.convert(raw, image, disks.FORMATS["vmdk-stream"])
    data = ovas.ova(ovas.Disk(image.read_bytes()))
    url = server.serve("/vm.ova", misbehave.Page(data))
    assert verify(url, disk).is_equal
    devices.change(disk, 1, b"x")
    assert not verify(url, disk).is_equal
    # One whose manifest does not fit is no verdict.
    damaged = data.replace(image.read_bytes()[-4096:], b"damage".ljust(4096))
    url = server.serve("/other.ova", misbehave.Page(damaged, ranges=False))
    with pytest.raises(errors.Error) as caught:
        verify(url, disk)
    assert not isinstance(caught.value, errors.Differs)


def test_wrong_checksum_is_no_verdict(server: misbehave.Server, disk: Path) -> None:
    url = server.serve("/disk", misbehave.Page(bytes(DATA)))
    for data in (bytes(DATA), b"other"):
        devices.change(disk, 0, data)
        with pytest.raises(errors.ChecksumMismatch):
            verify(url, disk, checksum="sha256:" + "0" * 64)


def test_cancelled_verification_has_no_verdict(server: misbehave.Server, disk: Path) -> None:
    cancel = cdi_worker.Cancel()
    cancel.set()
    with pytest.raises(errors.Cancelled):
        cdi_worker.verify(request(server.serve("/disk", misbehave.Page(bytes(DATA))), disk), cancel=cancel)


def test_what_only_qemu_reads_needs_no_scratch(server: misbehave.Server, tmp_path: Path, disk: Path) -> None:
    raw, image = tmp_path / "raw", tmp_path / "image"
    raw.write_bytes(DATA)
    disks.convert(raw, image, disks.FORMATS["vmdk-odd"])
    url = server.serve("/disk", misbehave.Page(image.read_bytes()))
    assert verify(url, disk).is_equal


def test_changed_source_is_an_error(server: misbehave.Server, disk: Path) -> None:
    other = bytearray(DATA)
    other[MIB] ^= 1
    # Each of the two readings gets another version, without an identity that would show it.
    first = misbehave.Page(bytes(other), etag=None, modified=None, ranges=False)
    other[MIB] ^= 2
    second = misbehave.Page(bytes(other), etag=None, modified=None, ranges=False)
    url = server.serve("/disk", (first, 1), second)
    with pytest.raises(errors.SourceChanged):
        verify(url, disk)
    url = server.serve("/disk2", (first, 1), misbehave.Page(bytes(DATA), etag=None, ranges=False))
    with pytest.raises(errors.SourceChanged):
        verify(url, disk)


def test_stalled_or_lying_source_is_an_error(server: misbehave.Server, disk: Path) -> None:
    devices.change(disk, 0, b"other")
    for page in (
        misbehave.Page(bytes(DATA), stall_at=9 * MIB),
        misbehave.Page(bytes(DATA), ranges=False, cut_at=9 * MIB, etag=None),
        misbehave.Page(bytes(DATA), lie=lambda first, _: first + 4096 if first else 0),
    ):
        url = server.serve("/disk", page)
        try:
            location = cdi_worker.Location(url, access=cdi_worker.Access(patience=1.0))
            found = verify(url, disk, location=location, fetch=IMPATIENT)
        except errors.SourceError:
            continue
        # Ranges that are wrong are given up for the stream.
        assert [each.offset for each in found.differences] == [0]


def test_disk_that_changes_is_an_error(server: misbehave.Server, disk: Path) -> None:
    changed = []

    class Watching(cdi_worker.NullProgress):
        def advance(self, _count: int) -> None:
            if not changed:
                changed.append(True)
                devices.change(disk, 8 * MIB, b"new")

    url = server.serve("/disk", misbehave.Page(bytes(DATA)))
    with pytest.raises(errors.TargetError, match="changed while it was read"):
        cdi_worker.verify(request(url, disk), Watching())


def test_device_that_changes_is_an_error(server: misbehave.Server, tmp_path: Path) -> None:
    phases = []
    url = server.serve("/disk", misbehave.Page(bytes(DATA)))
    with devices.loop(tmp_path, SIZE) as device:
        device.write_bytes(bytes(DATA))
        devices.change(device, MIB, b"changed")

        class Watching(cdi_worker.NullProgress):
            def phase(self, name: str, _total: int | None) -> None:
                phases.append(name)
                if phases.count("connect") == 2:
                    devices.change(device, MIB, b"again")

        with pytest.raises(errors.TargetError, match="changed while it was read"):
            cdi_worker.verify(request(url, device), Watching())


def test_image_larger_than_the_disk_differs(server: misbehave.Server, disk: Path) -> None:
    url = server.serve("/disk", misbehave.Page(bytes(DATA) + bytes(MIB)))
    found = verify(url, disk)
    assert (found.is_equal, found.differences[-1].zero, found.size - found.disk_size) == (
        False,
        "missing",
        MIB,
    )


def test_progress_has_the_speeds_of_both_ends(server: misbehave.Server, disk: Path) -> None:
    meter = cdi_worker.Meter()
    url = server.serve("/disk", misbehave.Page(bytes(DATA)))
    cdi_worker.verify(request(url, disk), meter)
    numbers = meter.numbers()
    assert numbers.disk_speed is not None
    assert min(numbers.speed, numbers.disk_speed) > 0
    assert any(part.startswith("source ") and ", disk " in part for part in numbers.parts())


def test_delta_is_compared_with_what_has_changed(tmp_path: Path) -> None:
    full, changed, disk = tmp_path / "full.raw", tmp_path / "changed.qcow2", tmp_path / "disk.img"
    full.write_bytes(DATA)
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-b", full, "-F", "raw", changed)
    processes.run("qemu-io", "-f", "qcow2", "-c", "write -P 9 1M 64k", changed)
    names = "--previous-checkpoint=full.raw", "--current-checkpoint=changed.qcow2"
    assert worker.call("import", full, disk, "--current-checkpoint=full.raw").status == 0
    assert worker.call("verify", changed, disk, *names).status == 9
    assert worker.call("import", changed, disk, *names).status == 0
    assert worker.call("verify", changed, disk, *names).status == 0
    # It says nothing of the rest.
    devices.change(disk, 8 * MIB, b"x")
    assert worker.call("verify", changed, disk, *names).status == 0
    assert worker.call("verify", full, disk, "--current-checkpoint=full.raw").status == 9


# -- in a pod


def test_pod_compares_instead_of_importing(pod: worker.Pod, server: misbehave.Server) -> None:
    url = server.serve("/disk", misbehave.Page(bytes(DATA)))
    variables = {"IMPORTER_SOURCE": "http", "IMPORTER_ENDPOINT": url}
    assert pod.call(**variables).status == 0
    before = pod.disk.stat().st_ctime_ns
    assert pod.call(**variables, CDI_WORKER_VERIFY="true").status == 0
    assert pod.outcome == {"message": "Verification Complete", "compared": SIZE}
    assert (pod.disk.stat().st_ctime_ns, [path.name for path in pod.data.iterdir()]) == (before, ["disk.img"])
    devices.change(pod.disk, MIB, b"x")
    done = pod.call(**variables, CDI_WORKER_VERIFY="true", CDI_WORKER_STRICT_EXIT_STATUS="true")
    assert (done.status, "4096 bytes in 1 range differ" in pod.message) == (9, True)


def test_only_an_import_is_verified_in_a_pod(pod: worker.Pod) -> None:
    done = pod.call(IMPORTER_SOURCE="", UPLOAD_URL="https://127.0.0.1:1", CDI_WORKER_VERIFY="true")
    assert (done.status, "only the disk of an import" in pod.message) == (1, True)
