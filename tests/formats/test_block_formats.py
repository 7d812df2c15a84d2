"""Images of blocks (VDI, VHD, VHDX): what QEMU does not write, compared with QEMU where it reads it."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.formats import vdi, vhdx, views
from cdi_worker.formats.mapped import image as mapped
from cdi_worker.formats.vhd import check as vhd
from tests.support import block_images, disks, placing, processes, vhd_images, vhdx_images
from tests.support.vhdx_images import HEADERS, LOG

MiB = 1 << 20
#: Entries of a map; VirtualBox writes discarded blocks, QEMU does not.
ABSENT, DISCARDED = 0xFFFFFFFF, 0xFFFFFFFE
Field = tuple[int, str, int]


@dataclasses.dataclass(frozen=True)
class Form:
    """A format as QEMU writes it: bytes of the disk and of a block, offsets of the map and of the data.

    ``layout``: of an entry of the map. ``sums``: corrects the checksums of an image.
    """

    driver: str
    options: str
    size: int
    block: int
    map: int
    data: int
    layout: str
    sums: Callable[[bytes], bytes] = bytes

    def image(self, path: Path, blocks: tuple[int, ...] = (5, 0, 1, 7), size: int = 0) -> bytes:
        """Return an image that has these blocks in this order, each full of its number from 1."""
        processes.need("qemu-img", "qemu-io")
        size = size or self.size
        create = ("qemu-img", "create", "-q", "-f", self.driver, "-o", self.options)
        processes.run(*create, path, str(size))
        for number, block in enumerate(blocks):
            start = block * self.block
            write = f"write -q -P {number + 1} {start} {min(self.block, size - start)}"
            processes.run("qemu-io", "-f", self.driver, "-c", write, path)
        return path.read_bytes()

    def entry(self, block: int, value: int) -> Field:
        return self.map + struct.calcsize(self.layout) * block, self.layout, value

    def changed(self, data: bytes, *fields: Field) -> bytes:
        copy = bytearray(data)
        for offset, layout, value in fields:
            struct.pack_into(layout, copy, offset, value)
        return self.sums(bytes(copy))

    def check_same(self, data: bytes, folder: Path) -> bytes:
        """Check that both readers read the same disk as QEMU, and return it."""
        (folder / "image").write_bytes(data)
        disks.to_raw(folder / "image", self.driver, folder / "raw")
        expected = (folder / "raw").read_bytes()
        assert placing.read_disk(data, self.driver) == expected
        assert placing.streamed(data, form=self.driver) == expected
        return expected

    def check_error(self, data: bytes, error: type[errors.Error], reason: str | None = None) -> None:
        for way in (placing.read_disk, placing.streamed):
            with pytest.raises(error, match=reason):
                way(data, form=self.driver)

    def numbers(self, disk: bytes) -> list[int]:
        """Return the first byte of each block."""
        return [disk[block * self.block] for block in range(8)]


VDI = Form("vdi", "static=off", 7 * MiB + 512, MiB, 512, 1024, "<I")
VHD = Form("vpc", "force_size=on", 15 * MiB + 512, 2 * MiB, 1536, 2048, ">I", vhd_images.with_sums)
#: The log is at 1 MiB, the metadata between table and data.
VHDX = Form("vhdx", "block_size=1M", 7 * MiB + 512, MiB, 2 * MiB, 4 * MiB, "<Q", vhdx_images.with_sums)
METADATA = 3 * MiB
#: Bytes of the bitmap before each block of a VHD.
BITMAP = 512
every = pytest.mark.parametrize("form", [VDI, VHD, VHDX], ids=lambda form: form.driver)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("blocks")
    return {form.driver: form.image(folder / form.driver) for form in (VDI, VHD, VHDX)}


@every
def test_blocks_in_any_order_are_read(form: Form, images: dict[str, bytes], tmp_path: Path) -> None:
    disk = form.check_same(images[form.driver], tmp_path)
    assert form.numbers(disk) == [2, 3, 0, 0, 0, 1, 0, 4]


@pytest.mark.parametrize(
    ("form", "fields", "error", "reason"),
    [
        (VDI, (VDI.entry(0, 2),), errors.Corrupt, "used twice"),
        (VDI, (VDI.entry(3, 3),), errors.Corrupt, "used twice"),
        (VDI, (VDI.entry(3, 4),), errors.Truncated, "the tables need"),
        (VDI, (VDI.entry(3, 0xFFFFFFFD),), errors.ImageError, "the tables need|more than"),
        (VDI, ((344, "<I", 0),), errors.Corrupt, "used twice"),
        (VDI, ((340, "<I", 0),), errors.Corrupt, "used twice"),
        (VDI, ((340, "<I", 1 << 30),), errors.Truncated, "the tables need"),
        (
            VHD,
            (
                VHD.entry(0, (VHD.data + VHD.block + BITMAP) // 512),
                VHD.entry(1, (VHD.data + VHD.block) // 512),
            ),
            errors.Corrupt,
            "twice",
        ),
        (VHD, (VHD.entry(2, VHD.data // 512),), errors.Corrupt, "used twice"),
        (VHD, (VHD.entry(2, VHD.data // 512 - 1),), errors.Corrupt, "used twice"),
        (VHD, (VHD.entry(2, 0),), errors.Corrupt, "used twice"),
        (VHD, (VHD.entry(2, 1 << 20),), errors.Truncated, "the tables need"),
        (VHD, (VHD.entry(2, ABSENT - 1),), errors.ImageError, "the tables need|more than"),
        (VHD, ((512 + 16, ">Q", 512),), errors.Corrupt, "used twice"),
        (VHD, ((512 + 16, ">Q", 1 << 40),), errors.Truncated, "the tables need"),
        (VHDX, (VHDX.entry(3, 4 * MiB | 6), VHDX.entry(0, 4 * MiB | 6)), errors.Corrupt, "used twice"),
        (VHDX, (VHDX.entry(0, 6),), errors.Corrupt, "used twice"),
        (VHDX, (VHDX.entry(0, MiB | 6),), errors.Corrupt, "used twice"),
        (VHDX, (VHDX.entry(0, VHDX.map | 6),), errors.Corrupt, "used twice"),
        (VHDX, (VHDX.entry(0, METADATA | 6),), errors.Corrupt, "used twice"),
        (VHDX, (VHDX.entry(0, 1 << 40 | 6),), errors.ImageError, "the tables need|more than"),
        (VHDX, (VHDX.entry(0, (1 << 64) - MiB | 6),), errors.ImageError, "the tables need|more than"),
        (VHDX, ((vhdx_images.REGIONS + 32, "<Q", METADATA),), errors.Corrupt, "used twice"),
        (
            VHDX,
            ((HEADERS[0] + 72, "<Q", VHDX.map), (HEADERS[1] + 72, "<Q", VHDX.map)),
            errors.Corrupt,
            "used twice",
        ),
    ],
)
def test_hostile_map_is_an_error(
    images: dict[str, bytes], form: Form, fields: tuple[Field, ...], error: type[errors.Error], reason: str
) -> None:
    form.check_error(form.changed(images[form.driver], *fields), error, reason)


@pytest.mark.parametrize(
    ("form", "lengths"),
    [
        (VDI, (VDI.data - 1, VDI.data, VDI.data + MiB, VDI.data + 3 * MiB + 511)),
        # Also the last block, of which the disk has one sector, is complete in the file.
        (VHD, (VHD.map + 31, VHD.data, VHD.data + BITMAP, VHD.data + 4 * (BITMAP + VHD.block) - 1)),
        (VHDX, (1, VHDX.map - 1, VHDX.map + 63, METADATA + 1, 8 * MiB, 11 * MiB - 1, 11 * MiB + 511)),
    ],
)
def test_cut_image_is_truncated(images: dict[str, bytes], form: Form, lengths: tuple[int, ...]) -> None:
    """QEMU reads zeros past the end of a VDI."""
    for length in lengths:
        form.check_error(images[form.driver][:length], errors.Truncated)


# -- VDI


def test_discarded_block_is_zeros(images: dict[str, bytes], tmp_path: Path) -> None:
    fields = VDI.entry(0, DISCARDED), VDI.entry(5, ABSENT), VDI.entry(6, DISCARDED)
    disk = VDI.check_same(VDI.changed(images["vdi"], *fields), tmp_path)
    assert VDI.numbers(disk) == [0, 3, 0, 0, 0, 0, 0, 4]


def test_map_and_data_may_be_anywhere(images: dict[str, bytes], tmp_path: Path) -> None:
    """VirtualBox aligns both. A map behind the data is known late: then the data is kept until it arrives."""
    image = images["vdi"]
    aligned = image[: VDI.data].ljust(MiB, b"\0") + image[VDI.data :]
    VDI.check_same(VDI.changed(aligned, (344, "<I", MiB)), tmp_path)
    behind = VDI.changed(image, (340, "<I", len(image))) + image[VDI.map : VDI.data]
    VDI.check_same(behind, tmp_path)
    image = images["vpc"]
    behind = image + image[VHD.map : VHD.map + 512]
    VHD.check_same(VHD.changed(behind, (512 + 16, ">Q", len(image))), tmp_path)


def test_size_is_rounded_up_to_a_sector(images: dict[str, bytes], tmp_path: Path) -> None:
    """VBoxManage convertfromraw writes disks of any size."""
    image = VDI.changed(images["vdi"], (368, "<Q", VDI.size - 511))
    assert len(VDI.check_same(image, tmp_path)) == VDI.size


def test_memory_of_a_huge_empty_map_is_bounded() -> None:
    """16 TiB, the largest map that is accepted: 64 MiB. A window decodes half a million entries."""
    header = vdi._Header(0x10001, 1, 512, 1 << 30, 512, 16 << 40, MiB, 0, 16 << 20, b"", b"")
    layout = vdi.VdiLayout(header)
    tables = list(layout.tables(placing.no_directory()))
    assert sum(table.length for table in tables) == 64 * MiB
    assert max(table.length for table in tables) <= 32 << 10
    assert layout.decode(b"\xff" * tables[0].length, 0) == []
    assert layout.crowded


# -- VHD


def test_bitmap_does_not_count(images: dict[str, bytes], tmp_path: Path) -> None:
    """QEMU reads the data of a block whatever its bitmap says."""
    image = images["vpc"]
    empty = bytearray(image)
    for block in range(4):
        start = VHD.data + block * (BITMAP + VHD.block)
        assert empty[start : start + BITMAP] == b"\xff" * BITMAP
        empty[start : start + BITMAP] = bytes(BITMAP)
    assert VHD.check_same(bytes(empty), tmp_path) == VHD.check_same(image, tmp_path)


@pytest.mark.parametrize("end", ["blocks", "rest", "zeros"])
def test_size_of_a_stream_is_known_from_the_map(tmp_path: Path, end: str) -> None:
    """The size field is larger than the geometry. Only data in the block of the border must be read first."""
    raw = tmp_path / "raw"
    cut = vhd_images.cut(VHD.size)
    with raw.open("wb") as file:
        file.truncate(VHD.size)
        if end != "zeros":
            file.seek(VHD.size - 1 if end == "blocks" else cut // VHD.block * VHD.block)
            file.write(b"x")
    data = vhd_images.dynamic(raw, b"vpc ", tmp_path / "image").read_bytes()
    early = vhd.check(views.View(data[: 64 << 10]))
    whole = vhd.check(placing.view(data))
    known = cut // VHD.block != VHD.size // VHD.block or end == "zeros"
    assert early.complete == known
    if known:
        assert early.virtual_size == whole.virtual_size
    else:
        assert early.needs > MiB
        assert vhd.check(views.View(data)).virtual_size == whole.virtual_size
    assert whole.virtual_size == (VHD.size if end == "blocks" else cut)
    found = placing.attempts(data, "vpc")
    assert len(found) == 1
    block_images.check(found, data, "vpc")


# -- VHDX


@pytest.fixture
def image(images: dict[str, bytes]) -> bytes:
    return images["vhdx"]


def host(data: bytes, block: int) -> int:
    """Return the offset of a block in the file."""
    found: int = struct.unpack_from("<Q", data, VHDX.map + 8 * block)[0]
    return found // MiB * MiB


@pytest.mark.parametrize("state", [0, 1, 2, 3, 5])
def test_block_without_data_is_zeros(image: bytes, tmp_path: Path, state: int) -> None:
    """A block that was unmapped may keep its place in the file."""
    fields = VHDX.entry(0, state), VHDX.entry(1, host(image, 1) | state), VHDX.entry(3, state)
    disk = VHDX.check_same(VHDX.changed(image, *fields), tmp_path)
    assert VHDX.numbers(disk) == [0, 0, 0, 0, 0, 1, 0, 4]


def test_state_of_another_kind_of_image_is_corrupt(image: bytes) -> None:
    for place in (4, 7, VHDX.data | 4, VHDX.data | 7):
        VHDX.check_error(
            VHDX.changed(image, VHDX.entry(0, place)), errors.Corrupt, "has the state of an image"
        )


def facts_of(data: bytes) -> str:
    """Return why the built-in reader does not support an image."""
    return vhdx.check(placing.view(data)).unplaceable


def newest(data: bytes) -> tuple[int, int]:
    """Return the offsets of the current and of the older header."""
    first, second = sorted(HEADERS, key=lambda at: struct.unpack_from("<Q", data, at + 8), reverse=True)
    return first, second


def test_log_of_the_current_header_counts(image: bytes, tmp_path: Path) -> None:
    current, older = newest(image)
    assert "log" in facts_of(vhdx_images.with_log(image, (current,)))
    assert "log" in facts_of(vhdx_images.with_log(image))
    VHDX.check_same(vhdx_images.with_log(image, (older,)), tmp_path)


def test_damaged_header_does_not_count(image: bytes, tmp_path: Path) -> None:
    """A crash while a header is written leaves the other one."""
    current, older = newest(image)
    torn = bytearray(vhdx_images.with_log(image, (current,)))
    torn[current + LOG] ^= 1
    VHDX.check_same(bytes(torn), tmp_path)
    torn = bytearray(vhdx_images.with_log(image, (older,)))
    torn[current + LOG] ^= 1
    assert "log" in facts_of(bytes(torn))


@pytest.mark.parametrize("which", [0, 1])
def test_header_of_other_bytes_does_not_count(image: bytes, tmp_path: Path, which: int) -> None:
    at = newest(image)[which]
    VHDX.check_same(image[:at] + b"\xff" * 4096 + image[at + 4096 :], tmp_path)


def test_equal_headers_are_one(image: bytes, tmp_path: Path) -> None:
    """Disk2vhd writes them."""
    current, older = newest(image)
    VHDX.check_same(image[:older] + image[current : current + 4096] + image[older + 4096 :], tmp_path)


def test_log_without_length_is_none(image: bytes, tmp_path: Path) -> None:
    fields = [(at + 68, "<I", 0) for at in HEADERS]
    VHDX.check_same(VHDX.changed(vhdx_images.with_log(image), *fields), tmp_path)


def test_table_has_an_entry_of_a_bitmap_after_each_chunk(tmp_path: Path) -> None:
    """4096 blocks of 1 MiB. QEMU reads the same bytes there (``read -P``)."""
    blocks = (0, 4095, 4096, 4097, 8191, 8192, 9216)
    path = tmp_path / "image"
    data = VHDX.image(path, blocks, 9217 * MiB - 512)
    found = mapped.MappedImage(placing.layout(placing.view(data), "vhdx"), placing.view(data).at, len(data))
    pieces = {}
    for window in found.windows():
        for batch in window.tables():
            for table in batch.pieces:
                window.load(table, data[table.host : table.host + table.length])
        window.check()
        for batch in window.data():
            pieces.update({piece.guest: piece for piece in batch.pieces})
    assert sorted(pieces) == [block * MiB for block in blocks]
    for number, block in enumerate(blocks):
        piece = pieces[block * MiB]
        assert data[piece.host : piece.host + piece.length] == bytes([number + 1]) * piece.size
        read = f"read -q -P {number + 1} {piece.guest} {piece.size}"
        assert "Pattern" not in processes.run("qemu-io", "-r", "-f", "vhdx", "-c", read, path).stdout


def test_sectors_of_4096_bytes_change_the_length_of_a_chunk(image: bytes, tmp_path: Path) -> None:
    """QEMU cannot read them. In a disk of one chunk the table is the same, which shows the bytes."""
    size = VHDX.changed(image, (METADATA + (64 << 10) + 8, "<Q", 8 * MiB))
    data = VHDX.changed(size, (vhdx_images.metadata(image, vhdx_images.SECTOR), "<I", 4096))
    expected = VHDX.check_same(size, tmp_path)
    assert placing.read_disk(data, "vhdx") == placing.streamed(data, form="vhdx") == expected
    assert [vhdx.check(placing.view(each)).sector_size for each in (image, data)] == [512, 4096]
    for sector, blocks in ((image, 4096), (data, 32768)):
        layout = placing.layout(placing.view(sector), "vhdx")
        assert isinstance(layout, vhdx.VhdxLayout)
        assert [layout.index(block) for block in (0, blocks - 1, blocks)] == [0, blocks - 1, blocks + 1]


def test_stream_needs_a_longer_head(image: bytes) -> None:
    """The check says how much; it needs a few rounds at most."""
    length, rounds = 256 << 10, 0
    while (found := vhdx.check(views.View(image[:length]))).needs:
        assert not found.complete
        assert found.needs > length
        length, rounds = found.needs, rounds + 1
    assert found.complete
    assert METADATA < length <= METADATA + (128 << 10)
    assert rounds < 10
