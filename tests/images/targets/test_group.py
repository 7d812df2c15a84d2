"""Disks that become usable together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images import targets
from cdi_worker.images.targets import group
from tests.support import devices, oracle

MiB = 1 << 20
SIZE = 4 * MiB
BOTH = ("a.img", "b.img")


def add(disks: group.Group, path: Path) -> None:
    disks.hold(str(path), targets.take(path, targets.Terms(key="key")))
    options = targets.TargetOptions(claim=disks.claim(str(path)), existing="refuse")
    with targets.open(path, SIZE, options) as disk:
        disk.write(0, memoryview(b"x" * SIZE))
        disks.add(disk, SIZE)


def test_disks_are_usable_after_publishing(tmp_path: Path) -> None:
    with group.Group() as disks:
        for name in BOTH:
            add(disks, tmp_path / name)
        assert not set(BOTH) & set(os.listdir(tmp_path))
        disks.publish()
    assert sorted(os.listdir(tmp_path)) == sorted(BOTH)


def test_no_disk_is_usable_if_another_cannot_be(tmp_path: Path) -> None:
    with group.Group() as disks:
        for name in BOTH:
            add(disks, tmp_path / name)
        (tmp_path / "b.img").write_bytes(b"of another program")
        with pytest.raises(errors.TargetExists):
            disks.publish()
    assert os.listdir(tmp_path) == ["b.img"]
    assert (tmp_path / "b.img").read_bytes() == b"of another program"


def test_no_disk_is_usable_before_the_data_of_all_are_synced(tmp_path: Path) -> None:
    """What the second disk has written is lost, which only its sync shows."""
    with devices.failing(tmp_path, 16 * MiB) as device:
        with group.Group() as disks:
            add(disks, tmp_path / "a.img")
            add(disks, device.path)
            # The sync of a device without dirty pages would succeed: the kernel may have written them by now.
            dirty = os.open(device.path, os.O_RDWR)
            device.fail()
            os.pwrite(dirty, b"x" * 4096, SIZE - 4096)
            with pytest.raises(errors.TargetError, match="input/output error"):
                disks.publish()
            os.close(dirty)
            device.mend()
        assert not (tmp_path / "a.img").exists()
        oracle.unusable(device.path)
