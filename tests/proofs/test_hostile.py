"""The hostile images are what they claim, according to qemu-img and GNU tar."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from tests.support import disks as disks_module
from tests.support import hostile, hostile_archives, processes


def info(path: Path, driver: str) -> dict[str, object]:
    output = processes.run("qemu-img", "info", "--output=json", "-f", driver, path).stdout
    return dict(json.loads(output))


@pytest.mark.parametrize("name", list(hostile.IMAGES))
def test_hostile_image_can_be_made(disks: disks_module.Disks, name: str) -> None:
    assert hostile.image(disks, name).stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "field"), [("qcow2-backing", "backing-filename"), ("qed-backing", "backing-filename")]
)
def test_image_has_backing_file(disks: disks_module.Disks, name: str, field: str) -> None:
    assert info(hostile.image(disks, name), name.partition("-")[0])[field] == hostile.SECRET


def test_qemu_reads_the_flat_extent(disks: disks_module.Disks, tmp_path: Path) -> None:
    leaked = tmp_path / "leaked"
    disks_module.to_raw(hostile.image(disks, "vmdk-flat"), "vmdk", leaked)
    assert leaked.read_bytes().startswith(Path(hostile.SECRET).read_bytes())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qcow2-unknown-incompatible", "Unsupported qcow2 feature"),
        ("qcow2-version", "Unsupported qcow2 version"),
        ("qcow2-cluster-bits", "Unsupported cluster size"),
        ("vdi-differencing", "unsupported VDI image"),
        ("vhdx-parent", "Invalid argument"),
    ],
)
def test_qemu_reports_the_error(disks: disks_module.Disks, name: str, message: str) -> None:
    argv: list[str | Path] = ["qemu-img", "info", "-f", name.partition("-")[0], hostile.image(disks, name)]
    assert message in subprocess.run(argv, capture_output=True, text=True, check=False).stderr


def test_bomb_decompresses_to_256_mib(disks: disks_module.Disks) -> None:
    with gzip.open(hostile.bomb(disks, "gz")) as bomb:
        assert sum(len(piece) for piece in iter(lambda: bomb.read(1 << 24), b"")) == 256 << 20


@pytest.mark.parametrize("name", list(hostile_archives.ARCHIVES))
def test_gnu_tar_lists_hostile_archive(disks: disks_module.Disks, name: str) -> None:
    argv: list[str | Path] = ["tar", "--list", "--verbose", "--file", hostile_archives.archive(disks, name)]
    listed = subprocess.run(argv, capture_output=True, text=True, check=False)
    broken = name in ("promised", "truncated", "garbage")
    assert (listed.returncode != 0) == broken, listed.stderr
