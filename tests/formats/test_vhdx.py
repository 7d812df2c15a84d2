"""The layout of VHDX images: the cases that QEMU does not write, compared with QEMU where it reads them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.formats import vhdx, views
from cdi_worker.formats.mapped import image as mapped
from tests.support import disks, placing, processes, vhdx_images
from tests.support.vhdx_images import HEADERS, LOG

MiB = 1 << 20
SIZE = 7 * MiB + 512
#: As QEMU writes them: the log at 1 MiB, the table, the metadata, and data.
BAT, METADATA, DATA = 2 * MiB, 3 * MiB, 4 * MiB


def create(path: Path, size: int, blocks: tuple[int, ...]) -> Path:
    """Create a disk with blocks of 1 MiB; write those, each full of its number from 1, in this order."""
    processes.need("qemu-img", "qemu-io")
    processes.run("qemu-img", "create", "-q", "-f", "vhdx", "-o", "block_size=1M", path, str(size))
    for number, block in enumerate(blocks):
        length = min(MiB, size - block * MiB)
        processes.run("qemu-io", "-f", "vhdx", "-c", f"write -q -P {number + 1} {block}M {length}", path)
    return path


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return create(tmp_path_factory.mktemp("vhdx") / "image", SIZE, (5, 0, 1, 7)).read_bytes()


def changed(data: bytes, *fields: tuple[int, str, int]) -> bytes:
    copy = bytearray(data)
    for offset, layout, value in fields:
        struct.pack_into(layout, copy, offset, value)
    return vhdx_images.with_sums(bytes(copy))


def entry(block: int, value: int) -> tuple[int, str, int]:
    return BAT + 8 * block, "<Q", value


def host(data: bytes, block: int) -> int:
    """Return the offset of a block in the file."""
    found: int = struct.unpack_from("<Q", data, BAT + 8 * block)[0]
    return found // MiB * MiB


def check_same(data: bytes, tmp_path: Path) -> bytes:
    """Check that both readers read the same disk as QEMU, and return it."""
    (tmp_path / "image").write_bytes(data)
    disks.to_raw(tmp_path / "image", "vhdx", tmp_path / "raw")
    expected = (tmp_path / "raw").read_bytes()
    assert placing.read_disk(data, "vhdx") == expected
    assert placing.streamed(data, form="vhdx") == expected
    return expected


def test_blocks_in_any_order_are_read(image: bytes, tmp_path: Path) -> None:
    disk = check_same(image, tmp_path)
    assert [disk[block * MiB] for block in range(8)] == [2, 3, 0, 0, 0, 1, 0, 4]


@pytest.mark.parametrize("state", [0, 1, 2, 3, 5])
def test_block_without_data_is_zeros(image: bytes, tmp_path: Path, state: int) -> None:
    """A block that was unmapped may keep its place in the file."""
    fields = entry(0, state), entry(1, host(image, 1) | state), entry(3, state)
    disk = check_same(changed(image, *fields), tmp_path)
    assert [disk[block * MiB] for block in range(8)] == [0, 0, 0, 0, 0, 1, 0, 4]


def test_state_of_another_kind_of_image_is_corrupt(image: bytes) -> None:
    for place in (4, 7, DATA | 4, DATA | 7):
        check_error(changed(image, entry(0, place)), errors.Corrupt, "has the state of an image")


@pytest.mark.parametrize(
    ("fields", "error", "reason"),
    [
        ((entry(3, 4 * MiB | 6), entry(0, 4 * MiB | 6)), errors.Corrupt, "used twice"),
        ((entry(0, 6),), errors.Corrupt, "used twice"),
        ((entry(0, MiB | 6),), errors.Corrupt, "used twice"),
        ((entry(0, BAT | 6),), errors.Corrupt, "used twice"),
        ((entry(0, METADATA | 6),), errors.Corrupt, "used twice"),
        ((entry(0, 1 << 40 | 6),), errors.ImageError, "the tables need|more than"),
        ((entry(0, (1 << 64) - MiB | 6),), errors.ImageError, "the tables need|more than"),
        (((vhdx_images.REGIONS + 32, "<Q", METADATA),), errors.Corrupt, "used twice"),
        (((HEADERS[0] + 72, "<Q", BAT), (HEADERS[1] + 72, "<Q", BAT)), errors.Corrupt, "used twice"),
    ],
)
def test_hostile_table_is_an_error(
    image: bytes, fields: tuple[tuple[int, str, int], ...], error: type[errors.Error], reason: str
) -> None:
    check_error(changed(image, *fields), error, reason)


def check_error(data: bytes, error: type[errors.Error], reason: str) -> None:
    for way in (placing.read_disk, placing.streamed):
        with pytest.raises(error, match=reason):
            way(data, form="vhdx")


@pytest.mark.parametrize(
    "length", [1, BAT - 1, BAT + 63, METADATA + 1, 8 * MiB, 11 * MiB - 1, 11 * MiB + 511]
)
def test_cut_image_is_truncated(image: bytes, length: int) -> None:
    assert max(host(image, block) for block in range(8)) == 11 * MiB
    for way in (placing.read_disk, placing.streamed):
        with pytest.raises(errors.Truncated):
            way(image[:length], form="vhdx")


# -- headers


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
    check_same(vhdx_images.with_log(image, (older,)), tmp_path)


def test_damaged_header_does_not_count(image: bytes, tmp_path: Path) -> None:
    """A crash while a header is written leaves the other one."""
    current, older = newest(image)
    torn = bytearray(vhdx_images.with_log(image, (current,)))
    torn[current + LOG] ^= 1
    check_same(bytes(torn), tmp_path)
    torn = bytearray(vhdx_images.with_log(image, (older,)))
    torn[current + LOG] ^= 1
    assert "log" in facts_of(bytes(torn))


@pytest.mark.parametrize("which", [0, 1])
def test_header_of_other_bytes_does_not_count(image: bytes, tmp_path: Path, which: int) -> None:
    at = newest(image)[which]
    check_same(image[:at] + b"\xff" * 4096 + image[at + 4096 :], tmp_path)


def test_equal_headers_are_one(image: bytes, tmp_path: Path) -> None:
    """Disk2vhd writes them."""
    current, older = newest(image)
    check_same(image[:older] + image[current : current + 4096] + image[older + 4096 :], tmp_path)


def test_log_without_length_is_none(image: bytes, tmp_path: Path) -> None:
    fields = [(at + 68, "<I", 0) for at in HEADERS]
    check_same(changed(vhdx_images.with_log(image), *fields), tmp_path)


# -- tables


def test_table_has_an_entry_of_a_bitmap_after_each_chunk(tmp_path: Path) -> None:
    """4096 blocks of 1 MiB. QEMU reads the same bytes there (``read -P``)."""
    blocks = (0, 4095, 4096, 4097, 8191, 8192, 9216)
    path = create(tmp_path / "image", 9217 * MiB - 512, blocks)
    data = path.read_bytes()
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
    size = changed(image, (METADATA + (64 << 10) + 8, "<Q", 8 * MiB))
    data = changed(size, (vhdx_images.metadata(image, vhdx_images.SECTOR), "<I", 4096))
    expected = check_same(size, tmp_path)
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
