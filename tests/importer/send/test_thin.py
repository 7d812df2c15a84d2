"""Clones of thin disks, which are larger than the file system that they are cloned to."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support import clones, devices, oracle, pairs

MIB = 1 << 20
#: Several times the file system, with a few MiB of data.
SIZE = 300 * MIB
receiver = clones.receiver
KINDS = {"block": "blockdevice-clone", "filesystem": "filesystem-clone"}


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume" / "note").write_bytes(random.Random(4).randbytes(MIB))
    return clones.write_disk(tmp_path / "volume" / "disk.img", SIZE)


@pytest.mark.parametrize(
    ("mode", "ours", "image_size"), pairs.covering(list(KINDS), [True, False], ["", "60Mi"])
)
def test_thin_disk_is_cloned_to_a_small_file_system(
    receiver: clones.Receiver, tmp_path: Path, volume: Path, mode: str, ours: bool, image_size: str
) -> None:
    env = {"UPLOAD_IMAGE_SIZE": image_size, "FILESYSTEM_OVERHEAD": "0.06"}
    headers = {"x-cdi-content-type": KINDS[mode]} | (clones.OURS if ours else {})
    with devices.filesystem("ext4", tmp_path, 64 * MIB) as point:
        body = clones.body(volume.parent, mode, ours=ours)
        with receiver.server(env, point) as server:
            answer = server.ask("POST", clones.SYNC, body, headers)
            assert answer.status == 200, answer.text
            assert "Clone Complete" in server.result().message
        oracle.same(point / "disk.img", volume)
        if mode == "filesystem":
            clones.same_tree(volume.parent, point)
        assert (point / "disk.img").stat().st_blocks * 512 < 16 * MIB


@pytest.mark.parametrize(("mode", "ours"), [("block", False), ("filesystem", True)])
def test_data_that_does_not_fit_is_an_error(
    receiver: clones.Receiver, tmp_path: Path, volume: Path, mode: str, ours: bool
) -> None:
    with volume.open("r+b") as stream:
        stream.seek(100 * MIB)
        for _ in range(64):
            stream.write(b"data" * (MIB // 4))
    with devices.filesystem("ext4", tmp_path, 64 * MIB) as point:
        with receiver.server({}, point) as server:
            body = clones.body(volume.parent, mode, ours=ours)
            headers = {"x-cdi-content-type": KINDS[mode]} | (clones.OURS if ours else {})
            answer = server.ask("POST", clones.SYNC, body, headers)
            assert answer.status == 400
            assert "effective image size is larger" in answer.text
        oracle.unusable(point / "disk.img")


def test_preallocated_clone_needs_the_whole_size(
    receiver: clones.Receiver, tmp_path: Path, volume: Path
) -> None:
    env = {"PREALLOCATION": "true"}
    with devices.filesystem("ext4", tmp_path, 64 * MIB) as point:
        with receiver.server(env, point) as server:
            body = clones.body(volume.parent, "block", ours=True)
            headers = {"x-cdi-content-type": "blockdevice-clone", **clones.OURS}
            answer = server.ask("POST", clones.SYNC, body, headers)
            assert (answer.status, "no space left on device" in answer.text) == (400, True), answer.text
        oracle.unusable(point / "disk.img")
