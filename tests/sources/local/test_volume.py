"""Disks of other volumes as sources."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from tests.support import clones, devices, oracle

MIB = 1 << 20


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A disk of 200 MiB with a few MiB of data."""
    (tmp_path / "volume").mkdir()
    return clones.write_disk(tmp_path / "volume" / "disk.img", 200 * MIB)


def clone(volume: Path, target: Path) -> cdi_worker.Result:
    location = cdi_worker.Location(str(volume.parent))
    return cdi_worker.run(cdi_worker.Request(source="volume", location=location, target=str(target)))


def test_thin_disk_is_cloned_to_a_small_file_system(volume: Path, tmp_path: Path) -> None:
    with devices.filesystem("ext4", tmp_path, 64 * MIB) as point:
        clone(volume, point / "disk.img")
        oracle.same(point / "disk.img", volume)


@pytest.mark.parametrize("kind", ["link", "device"])
def test_disk_of_a_volume_is_a_regular_file(tmp_path: Path, device: Path, kind: str) -> None:
    """Whoever fills the volume chooses what is there; this process may read more than it may."""
    disk = tmp_path / "volume/disk.img"
    disk.parent.mkdir()
    if kind == "link":
        disk.symlink_to(device)
    else:
        os.mknod(disk, stat.S_IFBLK | 0o600, device.stat().st_rdev)
    with pytest.raises(errors.Unreachable, match="is not a regular file"):
        clone(disk, tmp_path / "disk.img")
