"""Pairs of an image and a disk: the verdict of verify is that of cmp and of qemu-img compare."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import cdi_worker
from tests.support import disks as disks_module
from tests.support import processes, servers

MIB = 1 << 20
Change = Callable[[Path, random.Random], None]


def _flip(path: Path, offset: int, data: bytes | None = None) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        data = bytes([file.read(1)[0] ^ 1]) if data is None else data
        file.seek(offset)
        file.write(data)


def _same(_path: Path, _dice: random.Random) -> None:
    """Change nothing."""


def _bit(path: Path, dice: random.Random) -> None:
    _flip(path, dice.randrange(path.stat().st_size))


def _sector(path: Path, dice: random.Random) -> None:
    _flip(path, dice.randrange(path.stat().st_size // 512) * 512, dice.randbytes(512))


def _zeroed(path: Path, dice: random.Random) -> None:
    """Write zeros, which may be there already."""
    _flip(path, dice.randrange(path.stat().st_size // 4096) * 4096, bytes(4096))


def _hole(path: Path, dice: random.Random) -> None:
    """Leave a hole, where zeros may be already."""
    size = path.stat().st_size
    start = dice.randrange(size // 65536) * 65536
    length = min(size - start, dice.choice((4096, 65536, 3 * 65536)))
    processes.run("fallocate", "--punch-hole", f"--offset={start}", f"--length={length}", path)


def _first(path: Path, _dice: random.Random) -> None:
    _flip(path, 0)


def _tail(path: Path, _dice: random.Random) -> None:
    _flip(path, path.stat().st_size - 1)


def _longer(path: Path, dice: random.Random) -> None:
    os.truncate(path, path.stat().st_size + dice.choice((512, MIB, 64 * MIB)))


def _followed(path: Path, dice: random.Random) -> None:
    """Add zeros, and a byte among them."""
    size = path.stat().st_size
    _longer(path, dice)
    _flip(path, dice.randrange(size, path.stat().st_size))


def _shorter(path: Path, dice: random.Random) -> None:
    os.truncate(path, path.stat().st_size - 512 * dice.randrange(1, 1000))


CHANGES: tuple[Change, ...] = (
    _same,
    _bit,
    _sector,
    _zeroed,
    _hole,
    _first,
    _tail,
    _longer,
    _followed,
    _shorter,
)
#: One image for each way of reading, and its compression.
IMAGES = (
    *((variant, None) for variant in ("raw", "qcow2", "qcow2-zlib", "vmdk", "vmdk-stream", "vdi")),
    *((variant, None) for variant in ("vhd", "vhdx", "vhdx-log", "iso")),
    ("raw", "gz"),
    ("qcow2", "zst"),
)
#: Each image with two changes, once on a server and once in a file.
CASES = [
    (*image, CHANGES[(number + 5 * is_local) % len(CHANGES)], is_local)
    for number, image in enumerate(IMAGES)
    for is_local in (False, True)
]


def oracle(disk: Path, expected: Path) -> tuple[bool, int | None]:
    """Return whether cmp and qemu-img find no difference, and the first byte that differs."""
    found = subprocess.run(["cmp", "-l", disk, expected], capture_output=True, text=True, check=False)
    bytes_differ = found.stdout.split("\n", 1)[0].split()
    first = int(bytes_differ[0]) - 1 if bytes_differ else None
    images = ("-f", "raw", "-F", "raw", disk, expected)
    compared = subprocess.run(["qemu-img", "compare", *images], capture_output=True, check=False)
    assert compared.returncode in {0, 1}
    sizes = disk.stat().st_size - expected.stat().st_size
    # Zeros at the end of a file that was grown are no difference, to qemu-img nor to us. To both of them a
    # disk that lacks zeros is equal, to cmp neither.
    same = compared.returncode == 0 and sizes >= 0
    assert same == (found.returncode == 0) or sizes > 0
    return same, first


@pytest.mark.parametrize(("variant", "compression", "change", "is_local"), CASES)
def test_verdict_is_that_of_cmp_and_qemu_img(
    disks: disks_module.Disks,
    web: servers.Web,
    tmp_path: Path,
    scratch: Path,
    variant: str,
    compression: str | None,
    change: Change,
    is_local: bool,
) -> None:
    expected = disks.expected(variant)
    image = disks.wrapped(variant, compression)
    disk = tmp_path / "disk.img"
    shutil.copyfile(expected, disk)
    change(disk, random.Random(f"{variant} {change.__name__}"))
    before = disk.read_bytes(), disk.stat().st_ctime_ns
    request = cdi_worker.Request(
        source="local" if is_local else "http",
        location=cdi_worker.Location(str(image) if is_local else web.url(image)),
        target=str(disk),
        scratch=str(scratch),
    )
    found = cdi_worker.verify(request)
    same, first = oracle(disk, expected)
    assert found.is_equal == same, found
    assert (found.first is None) >= same, found
    if first is not None:
        assert found.first == first, found
    assert found.confirmed == bool(found.ranges), found
    assert (disk.read_bytes(), disk.stat().st_ctime_ns) == before
    assert [*scratch.iterdir()] == []
    assert {*tmp_path.iterdir()} == {disk, scratch}
