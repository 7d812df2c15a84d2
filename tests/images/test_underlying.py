"""What sysfs says of devices that this kernel has not: its files are written here, as Linux shows them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cdi_worker.images import underlying

#: A disk with a volume group on its second partition, two volumes on that, and a path of a multipath device.
DEVICES = {
    "sda": {"dev": "8:0"},
    "sda/sda1": {"dev": "8:1", "partition": "1", "start": "2048", "size": "2048"},
    "sda/sda2": {"dev": "8:2", "partition": "2", "start": "4096", "size": "8192"},
    "dm-0": {"dev": "252:0", "slaves": "sda/sda2"},
    "dm-1": {"dev": "252:1", "slaves": "sda/sda2"},
    "dm-2": {"dev": "252:2", "slaves": "dm-1"},
    "sdb": {"dev": "8:16"},
    "mpatha": {"dev": "252:9", "slaves": "sdb"},
}


@pytest.fixture
def sys(tmp_path: Path) -> str:
    (tmp_path / "dev/block").mkdir(parents=True)
    for name, files in DEVICES.items():
        folder = tmp_path / "devices" / name
        (folder / "slaves").mkdir(parents=True)
        for file, text in files.items():
            if file == "slaves":
                (folder / file / Path(text).name).symlink_to(tmp_path / "devices" / text)
            else:
                (folder / file).write_text(f"{text}\n")
        (tmp_path / "dev/block" / files["dev"]).symlink_to(folder)
    return str(tmp_path)


def device(name: str) -> os.stat_result:
    major, minor = DEVICES[name]["dev"].split(":")
    fields = [stat.S_IFBLK, 0, 5, 1, 0, 0, 0, 0, 0, 0]
    return os.stat_result(fields, {"st_rdev": os.makedev(int(major), int(minor))})


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ("sda", "sda", True),
        ("sda", "sda/sda1", True),
        ("sda/sda1", "sda/sda2", False),
        ("sda", "dm-0", True),
        ("sda/sda2", "dm-0", True),
        ("sda/sda1", "dm-0", False),
        ("dm-0", "dm-1", False),  # two logical volumes
        ("dm-1", "dm-2", True),
        ("dm-0", "dm-2", False),
        ("sda", "dm-2", True),
        ("sdb", "mpatha", True),
        ("sda", "mpatha", False),
    ],
)
def test_devices_share_storage(sys: str, one: str, other: str, shared: bool) -> None:
    for pair in ((one, other), (other, one)):
        assert underlying.share(*map(device, pair), sys) is shared
