"""The layout of VDI images: the cases that QEMU does not write, compared with QEMU where it reads them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.formats import vdi
from tests.support import disks, placing, processes

MiB = 1 << 20
SIZE = 7 * MiB + 512
MAP, DATA = 512, 1024
#: Written by VirtualBox; QEMU writes no discarded blocks.
ABSENT, DISCARDED = 0xFFFFFFFF, 0xFFFFFFFE


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a disk of 8 blocks, stored in the order 5, 0, 1, 7."""
    path = tmp_path_factory.mktemp("vdi") / "image"
    processes.need("qemu-img", "qemu-io")
    processes.run("qemu-img", "create", "-q", "-f", "vdi", path, str(SIZE))
    for number, block in enumerate((5, 0, 1, 7)):
        length = 512 if block == 7 else MiB
        processes.run("qemu-io", "-f", "vdi", "-c", f"write -q -P {number + 1} {block}M {length}", path)
    return path.read_bytes()


def changed(data: bytes, *fields: tuple[int, str, int]) -> bytes:
    copy = bytearray(data)
    for offset, layout, value in fields:
        struct.pack_into(layout, copy, offset, value)
    return bytes(copy)


def entry(block: int, value: int) -> tuple[int, str, int]:
    return MAP + 4 * block, "<I", value


def check_same(data: bytes, tmp_path: Path) -> bytes:
    """Check that both readers read the same disk as QEMU, and return it."""
    (tmp_path / "image").write_bytes(data)
    disks.to_raw(tmp_path / "image", "vdi", tmp_path / "raw")
    expected = (tmp_path / "raw").read_bytes()
    assert placing.read_disk(data, "vdi") == expected
    assert placing.streamed(data, form="vdi") == expected
    return expected


def test_blocks_in_any_order_are_read(image: bytes, tmp_path: Path) -> None:
    disk = check_same(image, tmp_path)
    assert [disk[block * MiB] for block in range(8)] == [2, 3, 0, 0, 0, 1, 0, 4]


def test_discarded_block_is_zeros(image: bytes, tmp_path: Path) -> None:
    disk = check_same(changed(image, entry(0, DISCARDED), entry(5, ABSENT), entry(6, DISCARDED)), tmp_path)
    assert [disk[block * MiB] for block in range(8)] == [0, 3, 0, 0, 0, 0, 0, 4]


def test_map_and_data_may_be_anywhere(image: bytes, tmp_path: Path) -> None:
    """VirtualBox aligns both. A map behind the data is known late: then the data is kept until it arrives."""
    aligned = image[:DATA].ljust(MiB, b"\0") + image[DATA:]
    check_same(changed(aligned, (344, "<I", MiB)), tmp_path)
    behind = changed(image, (340, "<I", len(image))) + image[MAP:DATA]
    check_same(behind, tmp_path)


def test_size_is_rounded_up_to_a_sector(image: bytes, tmp_path: Path) -> None:
    """VBoxManage convertfromraw writes disks of any size."""
    assert len(check_same(changed(image, (368, "<Q", SIZE - 511)), tmp_path)) == SIZE


@pytest.mark.parametrize(
    ("fields", "error", "reason"),
    [
        ((entry(0, 2),), errors.Corrupt, "used twice"),
        ((entry(3, 3),), errors.Corrupt, "used twice"),
        ((entry(3, 4),), errors.Truncated, "the tables need"),
        ((entry(3, 0xFFFFFFFD),), errors.ImageError, "the tables need|more than"),
        (((344, "<I", 0),), errors.Corrupt, "used twice"),
        (((340, "<I", 0),), errors.Corrupt, "used twice"),
        (((340, "<I", 1 << 30),), errors.Truncated, "the tables need"),
    ],
)
def test_hostile_map_is_an_error(
    image: bytes, fields: tuple[tuple[int, str, int], ...], error: type[errors.Error], reason: str
) -> None:
    data = changed(image, *fields)
    with pytest.raises(error, match=reason):
        placing.read_disk(data, "vdi")
    with pytest.raises(error, match=reason):
        placing.streamed(data, form="vdi")


@pytest.mark.parametrize("length", [DATA - 1, DATA, DATA + MiB, DATA + 3 * MiB + 511])
def test_cut_image_is_truncated(image: bytes, length: int) -> None:
    """QEMU reads zeros past the end of the file."""
    for way in (placing.read_disk, placing.streamed):
        with pytest.raises(errors.Truncated):
            way(image[:length], form="vdi")


def test_memory_of_a_huge_empty_map_is_bounded() -> None:
    """16 TiB, the largest map that is accepted: 64 MiB. A window decodes half a million entries."""
    header = vdi._Header(0x10001, 1, 512, 1 << 30, 512, 16 << 40, MiB, 0, 16 << 20, b"", b"")
    layout = vdi.VdiLayout(header)
    tables = list(layout.tables(placing.no_directory()))
    assert sum(table.length for table in tables) == 64 * MiB
    assert max(table.length for table in tables) <= 32 << 10
    assert layout.decode(b"\xff" * tables[0].length, 0) == []
    assert layout.crowded
