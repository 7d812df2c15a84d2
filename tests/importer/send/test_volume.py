"""Clones from volume to volume, with our worker at both ends."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract, progress
from cdi_worker.importer.send import volume
from tests.support import clones, devices, oracle, tls, upload_relay, uploads

MIB = uploads.MIB
SYNC = uploads.SYNC
SIZE = clones.SIZE
DONE = clones.DONE
server = uploads.server
receiver = clones.receiver


@pytest.mark.parametrize("preallocation", ["false", "true"])
def test_file_system_is_cloned_to_file_system(
    receiver: clones.Receiver, folder: Path, preallocation: str
) -> None:
    env = {"PREALLOCATION": preallocation}
    with receiver.server(env) as server:
        message = clones.run(clones.environment(server, "filesystem", folder, PREALLOCATION=preallocation))
        ended = json.loads(server.result().message)
    clones.same_tree(folder, receiver.data)
    copied = receiver.disk.stat()
    assert not (receiver.data / "lost+found").exists()
    assert copied.st_mode & 0o777 == 0o660
    if preallocation == "true":
        assert message == "Clone Complete, Preallocation applied"
        assert copied.st_blocks * 512 >= SIZE
    else:
        assert message == "Clone Complete"
        assert copied.st_blocks * 512 < SIZE // 2
    assert ended == json.loads(clones.FOLDER_DONE)


@pytest.mark.parametrize(("sector", "preallocation"), [(512, "true"), (4096, "false")])
def test_device_is_cloned_to_device(
    receiver: clones.Receiver, tmp_path: Path, sector: int, preallocation: str
) -> None:
    with (
        devices.loop(tmp_path, SIZE, sector=sector) as source,
        devices.loop(tmp_path, SIZE + MIB, sector=4608 - sector) as target,
    ):
        clones.write_disk(source)
        env = {"DESTINATION": str(target), "PREALLOCATION": preallocation}
        with receiver.server(env) as server:
            clones.run(clones.environment(server, "block", source, PREALLOCATION=preallocation))
            assert server.result().status == 0
        oracle.same(target, clones.write_disk(tmp_path / "expected"), beyond=devices.DIRT)


@pytest.mark.parametrize("block", [4096], indirect=True)
def test_file_system_is_cloned_to_device(receiver: clones.Receiver, folder: Path, block: Path) -> None:
    env = {"DESTINATION": str(block), "PREALLOCATION": "true"}
    with receiver.server(env) as server:
        clones.run(clones.environment(server, "filesystem", folder, PREALLOCATION="true"))
        assert server.result().message == DONE.replace("false", "true")
    oracle.same(block, folder / "disk.img", beyond=devices.DIRT)


@pytest.mark.parametrize("preallocation", ["false", "true"])
def test_device_is_cloned_to_file_system(
    receiver: clones.Receiver, tmp_path: Path, preallocation: str
) -> None:
    env = {"UPLOAD_IMAGE_SIZE": "32Mi", "PREALLOCATION": preallocation}
    target = receiver.disk
    target.write_bytes(b"an older disk")
    with devices.loop(tmp_path, SIZE) as source:
        clones.write_disk(source)
        with receiver.server(env) as server:
            clones.run(clones.environment(server, "block", source, PREALLOCATION=preallocation))
            assert server.result().message == DONE.replace("false", preallocation)
    oracle.same(target, clones.write_disk(tmp_path / "expected"))
    found = target.stat()
    assert found.st_size == 32 * MIB
    if preallocation == "true":
        assert found.st_blocks * 512 >= 32 * MIB
    else:
        assert found.st_blocks * 512 < SIZE // 2


def test_empty_volume_is_cloned(server: uploads.Server, paths: contract.Paths, tmp_path: Path) -> None:
    (tmp_path / "empty" / "lost+found").mkdir(parents=True)
    clones.run(clones.environment(server, "filesystem", tmp_path / "empty"))
    assert not list(Path(paths.data).iterdir())


def test_too_small_volume_is_refused(receiver: clones.Receiver, original: Path, tmp_path: Path) -> None:
    with devices.filesystem("tmpfs", tmp_path, MIB) as point:
        with (
            receiver.server({}, point) as server,
            pytest.raises(errors.Error, match=r"400|reset|broken") as caught,
        ):
            clones.run(clones.environment(server, "block", original))
        assert caught.value.status == 3
        oracle.unusable(point / "disk.img")


@pytest.mark.parametrize(
    ("block", "incomplete"),
    [(512, []), (4096, ["disk.img.part", "disk.img.lock"]), (512, ["disk.img.changing"])],
    indirect=["block"],
)
def test_file_system_without_disk_is_refused_by_a_device(
    receiver: clones.Receiver, folder: Path, block: Path, incomplete: list[str]
) -> None:
    (folder / "disk.img").unlink()
    for name in incomplete:
        (folder / name).write_bytes(b"x" * 4096)
    with (
        receiver.server({"DESTINATION": str(block)}) as server,
        pytest.raises(errors.UploadFailed, match="no file named"),
    ):
        clones.run(clones.environment(server, "filesystem", folder))
    oracle.unusable(block)


def test_client_with_another_name_is_refused(server: uploads.Server, original: Path) -> None:
    other = server.certificates.authority.issue(common_name="somebody", client=True)
    keys = {"CLIENT_KEY": other.key.read_text(), "CLIENT_CERT": other.certificate.read_text()}
    with pytest.raises(errors.Error, match=r"401|reset|broken"):
        clones.run({**clones.environment(server, "block", original), **keys})


def test_server_of_another_authority_is_refused(
    server: uploads.Server, original: Path, tmp_path: Path
) -> None:
    other = tls.Authority(tmp_path / "other").certificate.read_text()
    with pytest.raises(errors.Unreachable, match="certificate"):
        clones.run({**clones.environment(server, "block", original), "SERVER_CA_CERT": other})


def test_all_errors_of_the_environment_are_reported() -> None:
    with pytest.raises(errors.RequestError) as caught:
        volume.read({"UPLOAD_URL": "https://x/v1beta1/upload", "VOLUME_MODE": "tape", "PREALLOCATION": "1"})
    for name in (
        "MOUNT_POINT",
        "CLIENT_KEY",
        "CLIENT_CERT",
        "SERVER_CA_CERT",
        "VOLUME_MODE",
        "PREALLOCATION",
    ):
        assert name in str(caught.value)


def test_progress_never_falls_and_ends_at_100(server: uploads.Server, original: Path, disk: Path) -> None:
    meter = progress.Meter()
    volume.send(volume.read(clones.environment(server, "block", original)), meter, cancelling.Cancel())
    assert meter.finished
    # Zeros are not moved.
    assert meter.count == meter.total
    assert 0 < meter.count < SIZE


def test_zeros_are_not_sent(server: uploads.Server, disk: Path, tmp_path: Path) -> None:
    with devices.loop(tmp_path, SIZE, dirt=b"\0") as source, upload_relay.Relay(server.port) as relay:
        clones.run(
            clones.environment(server, "block", source, UPLOAD_URL=f"https://localhost:{relay.port}{SYNC}")
        )
        assert relay.sent < 20_000
    found = disk.stat()
    assert (found.st_size, found.st_blocks) == (SIZE, 0)


def test_empty_device_is_cloned_within_seconds(receiver: clones.Receiver, tmp_path: Path) -> None:
    """CPU seconds of both ends: wall-clock time depends on the machine's other load."""
    size = 8 << 30
    backing = [tmp_path / "source", tmp_path / "target"]
    for path in backing:
        with path.open("wb") as stream:
            stream.truncate(size)
    with (
        devices.attached(backing[0]) as source,
        devices.attached(backing[1]) as target,
        receiver.server({"DESTINATION": str(target)}) as server,
    ):
        started = time.process_time()
        clones.run(clones.environment(server, "block", source))
        assert time.process_time() - started < 4
        assert server.result().message == DONE
    assert all(path.stat().st_blocks * 512 < 2 * MIB for path in backing)


@pytest.mark.parametrize("mode", ["block", "filesystem"])
def test_clone_resumes_after_cuts(server: uploads.Server, disk: Path, tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "volume"
    folder.mkdir()
    device_content = folder / "disk.img"
    device_content.write_bytes(random.Random(6).randbytes(8 * MIB))
    meter = progress.Meter()
    with upload_relay.Relay(server.port, None, 1000, None, 3 * MIB, 5000, 2 * MIB, 40_000) as relay:
        url = f"https://localhost:{relay.port}{SYNC}"
        place = device_content if mode == "block" else folder
        settings = volume.read(clones.environment(server, mode, place, UPLOAD_URL=url))
        volume.send(settings, meter, cancelling.Cancel())
        assert relay.sent < 8 * MIB + 5 * relay.RECORD + 12 * relay.REQUEST
    assert meter.finished
    assert disk.read_bytes() == device_content.read_bytes()
