"""``--size`` and ``blank``: at least the given size, in whole sectors, on every kind of target."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support import devices, disks, oracle, worker

MiB = 1 << 20
TOO_LARGE = 8


def run_json(*arguments: object, status: int = 0) -> Any:
    done = worker.call(*map(str, arguments), "--json")
    assert done.status == status, done.errors
    return json.loads(done.output) if status == 0 else done.error_message


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Write a raw disk of 377000 bytes, which is not a multiple of 512."""
    path = tmp_path / "image"
    path.write_bytes(random.Random(1).randbytes(377_000))
    return path


@pytest.mark.parametrize(
    ("size", "expected"),
    [("377000", 377_344), ("377344", 377_344), ("377345", 377_856), ("10M", 10_000_384), ("3Mi", 3 * MiB)],
)
def test_file_has_at_least_the_size(image: Path, tmp_path: Path, size: str, expected: int) -> None:
    assert run_json("import", image, tmp_path / "disk.img", f"--size={size}")["size"] == expected
    disk = (tmp_path / "disk.img").read_bytes()
    assert disk == image.read_bytes() + bytes(expected - 377_000)
    assert run_json("blank", tmp_path / "blank.img", size)["size"] == expected
    assert (tmp_path / "blank.img").read_bytes() == bytes(expected)


@pytest.mark.parametrize("sector", [512, 4096])
def test_device_of_the_size_is_accepted_and_a_smaller_one_refused(
    image: Path, tmp_path: Path, sector: int
) -> None:
    with devices.loop(tmp_path, 400 * 1024, sector=sector) as device:
        run_json("import", image, device, "--size=409600")
        oracle.same(device, image, beyond=None)
        assert device.read_bytes()[377_344:] == bytes(409_600 - 377_344)
        device.write_bytes(devices.DIRT * 409_600)
        run_json("blank", device, "377000", "--preallocate")
        assert device.read_bytes()[:377_344] == bytes(377_344)
        assert device.read_bytes()[377_344:] == devices.DIRT * (409_600 - 377_344)
        for command in (("import", image, device, "--size=409601"), ("blank", device, "409601")):
            assert "name a larger target" in run_json(*command, status=TOO_LARGE)


@pytest.mark.parametrize("command", ["import", "blank"])
def test_file_system_without_room_for_the_size_is_refused(image: Path, tmp_path: Path, command: str) -> None:
    """Instead of a disk that is smaller than requested."""
    with devices.filesystem("tmpfs", tmp_path, 4 * MiB) as small:
        target = small / "disk.img"
        words = ("import", image, target, "--size=10M") if command == "import" else ("blank", target, "10M")
        assert "name a larger target" in run_json(*words, status=TOO_LARGE)
        assert not [*small.iterdir()]


def test_compressed_image_is_grown_to_the_size(tmp_path: Path, image: Path) -> None:
    packed = tmp_path / "image.gz"
    packed.write_bytes(disks.COMPRESSIONS["gz"](image.read_bytes()))
    assert run_json("import", packed, tmp_path / "disk.img", "--size=400000")["size"] == 400_384
    assert (tmp_path / "disk.img").read_bytes() == image.read_bytes() + bytes(400_384 - 377_000)
