"""Disks that become usable together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images import target
from cdi_worker.images.target import group

MiB = 1 << 20
BOTH = ("a.img", "b.img")


def add(disks: group.Group, path: Path) -> None:
    disks.hold(str(path), target.take(path, target.Terms(key="key")))
    options = target.Options(claim=disks.claim(str(path)), existing="refuse")
    with target.open(path, MiB, options) as disk:
        disk.write(0, memoryview(b"x" * MiB))
        disks.add(disk, MiB)


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
