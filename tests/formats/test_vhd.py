"""The layout of dynamic VHDs: cases that QEMU does not write, compared with QEMU where it reads them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.formats import views
from cdi_worker.formats.vhd import check as vhd
from tests.support import block_images, disks, placing, processes, vhd_images

MiB = 1 << 20
SIZE = 15 * MiB + 512
BLOCK, BITMAP = 2 * MiB, 512
MAP, DATA = 1536, 2048
ABSENT = 0xFFFFFFFF


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a disk of 8 blocks, stored in the order 5, 0, 1, 7."""
    path = tmp_path_factory.mktemp("vhd") / "image"
    processes.need("qemu-img", "qemu-io")
    processes.run("qemu-img", "create", "-q", "-f", "vpc", "-o", "force_size=on", path, str(SIZE))
    for number, block in enumerate((5, 0, 1, 7)):
        length = min(BLOCK, SIZE - block * BLOCK)
        write = f"write -q -P {number + 1} {block * BLOCK} {length}"
        processes.run("qemu-io", "-f", "vpc", "-c", write, path)
    return path.read_bytes()


def changed(data: bytes, *fields: tuple[int, str, int]) -> bytes:
    copy = bytearray(data)
    for offset, layout, value in fields:
        struct.pack_into(layout, copy, offset, value)
    return vhd_images.with_sums(bytes(copy))


def entry(block: int, value: int) -> tuple[int, str, int]:
    return MAP + 4 * block, ">I", value


def check_same(data: bytes, tmp_path: Path) -> bytes:
    """Check that both readers read the same disk as QEMU, and return it."""
    (tmp_path / "image").write_bytes(data)
    disks.to_raw(tmp_path / "image", "vpc", tmp_path / "raw")
    expected = (tmp_path / "raw").read_bytes()
    assert placing.read_disk(data, "vpc") == expected
    assert placing.streamed(data, form="vpc") == expected
    return expected


def test_blocks_in_any_order_are_read(image: bytes, tmp_path: Path) -> None:
    disk = check_same(image, tmp_path)
    assert [disk[block * BLOCK] for block in range(8)] == [2, 3, 0, 0, 0, 1, 0, 4]


def test_bitmap_does_not_count(image: bytes, tmp_path: Path) -> None:
    """QEMU reads the data of a block whatever its bitmap says."""
    empty = bytearray(image)
    for block in range(4):
        start = DATA + block * (BITMAP + BLOCK)
        assert empty[start : start + BITMAP] == b"\xff" * BITMAP
        empty[start : start + BITMAP] = bytes(BITMAP)
    assert check_same(bytes(empty), tmp_path) == check_same(image, tmp_path)


def test_map_may_be_anywhere(image: bytes, tmp_path: Path) -> None:
    """A map behind the data is known late: then the data is kept until it arrives."""
    behind = image + image[MAP : MAP + 512]
    check_same(changed(behind, (512 + 16, ">Q", len(image))), tmp_path)


@pytest.mark.parametrize(
    ("fields", "error", "reason"),
    [
        (
            (entry(0, (DATA + BLOCK + BITMAP) // 512), entry(1, (DATA + BLOCK) // 512)),
            errors.Corrupt,
            "twice",
        ),
        ((entry(2, DATA // 512),), errors.Corrupt, "used twice"),
        ((entry(2, DATA // 512 - 1),), errors.Corrupt, "used twice"),
        ((entry(2, 0),), errors.Corrupt, "used twice"),
        ((entry(2, 1 << 20),), errors.Truncated, "the tables need"),
        ((entry(2, ABSENT - 1),), errors.ImageError, "the tables need|more than"),
        (((512 + 16, ">Q", 512),), errors.Corrupt, "used twice"),
        (((512 + 16, ">Q", 1 << 40),), errors.Truncated, "the tables need"),
    ],
)
def test_hostile_map_is_an_error(
    image: bytes, fields: tuple[tuple[int, str, int], ...], error: type[errors.Error], reason: str
) -> None:
    data = changed(image, *fields)
    for way in (placing.read_disk, placing.streamed):
        with pytest.raises(error, match=reason):
            way(data, form="vpc")


@pytest.mark.parametrize("length", [MAP + 31, DATA, DATA + BITMAP, DATA + 4 * (BITMAP + BLOCK) - 1])
def test_cut_image_is_truncated(image: bytes, length: int) -> None:
    """Also the last block, of which the disk has one sector, is complete in the file."""
    for way in (placing.read_disk, placing.streamed):
        with pytest.raises(errors.Truncated):
            way(image[:length], form="vpc")


@pytest.mark.parametrize("end", ["blocks", "rest", "zeros"])
def test_size_of_a_stream_is_known_from_the_map(tmp_path: Path, end: str) -> None:
    """The size field is larger than the geometry. Only data in the block of the border must be read first."""
    raw = tmp_path / "raw"
    cut = vhd_images.cut(SIZE)
    with raw.open("wb") as file:
        file.truncate(SIZE)
        if end != "zeros":
            file.seek(SIZE - 1 if end == "blocks" else cut // BLOCK * BLOCK)
            file.write(b"x")
    data = vhd_images.dynamic(raw, b"vpc ", tmp_path / "image").read_bytes()
    early = vhd.check(views.View(data[: 64 << 10]))
    whole = vhd.check(placing.view(data))
    known = cut // BLOCK != SIZE // BLOCK or end == "zeros"
    assert early.complete == known
    if known:
        assert early.virtual_size == whole.virtual_size
    else:
        assert early.needs > MiB
        assert vhd.check(views.View(data)).virtual_size == whole.virtual_size
    assert whole.virtual_size == (SIZE if end == "blocks" else cut)
    found = placing.attempts(data, "vpc")
    assert len(found) == 1
    block_images.check(found, data, "vpc")
