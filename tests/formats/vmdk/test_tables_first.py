"""Stream-optimized VMDK images with the tables first, as QEMU writes them, and very many grains."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.formats.mapped import passing
from cdi_worker.formats.vmdk import header
from tests.support import placing, processes, vmdk_stream

SECTOR = 512
CHUNK = 4 << 20
GRAIN = 8
TABLE = 512
MANY = passing.LIMIT + TABLE
#: The grains, and sectors, of an image that has more than a lower limit.
GRAINS = 17 * TABLE
TABLES = 23
FIRST = TABLES + GRAINS // TABLE * 4


def image(grains: int) -> bytearray:
    """Return an image with grains of 4 KiB that are each stored in one sector."""
    tables = 22 + -(-grains // TABLE * 4 // SECTOR)
    first = tables + grains // TABLE * 4
    fields = (3, 0x30001, grains * GRAIN, GRAIN, 1, 20, TABLE, 0, 22, first, 0, b"\n \r\n", 1)
    out = bytearray(struct.pack("<4sIIQQQQIQQQB4sH", b"KDMV", *fields).ljust(SECTOR, b"\0"))
    out += vmdk_stream.descriptor(grains * GRAIN)
    out = out.ljust(22 * SECTOR, b"\0")
    out += struct.pack(f"<{grains // TABLE}I", *range(tables, first, 4))
    out = out.ljust(tables * SECTOR, b"\0")
    out += struct.pack(f"<{grains}I", *range(first, first + grains))
    for number in range(grains):
        out += grain(number)
    return out


@functools.cache
def packed(value: int) -> bytes:
    return zlib.compress(bytes([value]) * GRAIN * SECTOR, 1)


def grain(number: int) -> bytes:
    data = packed(1 + number % 255)
    return (struct.pack("<QI", number * GRAIN, len(data)) + data).ljust(SECTOR, b"\0")


def arrivals(data: bytes | bytearray, *, has_bodies: bool = True) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield offset and length on the disk, and the data: None for zeros, and without ``has_bodies``."""

    def read(offset: int, length: int) -> bytes:
        return bytes(data[offset : offset + length])

    follower = placing.follower(bytes(data), "vmdk")
    for start in range(0, len(data) + 1, CHUNK):
        end = min(start + CHUNK, len(data))
        arrival = follower.arrive(start, end, read, last=start + CHUNK > len(data))
        for piece in (piece for batch in arrival.ready for piece in batch.pieces):
            body = follower.inflate(read(piece.host, piece.length), piece) if has_bodies else None
            yield piece.guest, piece.size, body and body[: piece.size]
        yield from ((*hole, None) for hole in arrival.holes)


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> bytearray:
    """Return an image of more grains than may be pending."""
    monkeypatch.setattr(passing, "LIMIT", GRAINS - TABLE)
    return image(GRAINS)


def test_more_grains_than_the_limit_of_pending_ones_are_read(crowd: bytearray) -> None:
    end = 0
    for offset, length, body in arrivals(crowd):
        assert offset == end
        assert body == bytes([1 + offset // (GRAIN * SECTOR) % 255]) * length
        end += length
    assert end == GRAINS * GRAIN * SECTOR


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (TABLES * SECTOR, FIRST + 1),
        (22 * SECTOR, 0),
        (FIRST * SECTOR, 1),
        (FIRST * SECTOR + 8, 1 << 20),
    ],
    ids=["grain", "table", "marker", "length"],
)
def test_contradiction_of_markers_and_tables_needs_scratch(crowd: bytearray, at: int, value: int) -> None:
    changed = crowd[:]
    struct.pack_into("<I", changed, at, value)
    with pytest.raises(errors.ScratchRequired):
        list(arrivals(changed, has_bodies=False))


def test_last_sector_may_be_incomplete(crowd: bytearray) -> None:
    for data in (crowd[:-300], crowd + b"x"):
        assert sum(length for _, length, _ in arrivals(data, has_bodies=False)) == GRAINS * GRAIN * SECTOR
    for data in (crowd[:-500], crowd[: -CHUNK // 2 - 500]):
        with pytest.raises(errors.ScratchRequired):
            list(arrivals(data, has_bodies=False))


def test_image_of_qemu_is_read(tmp_path: Path) -> None:
    processes.need("qemu-img")
    raw, path = tmp_path / "raw", tmp_path / "image"
    with raw.open("wb") as file:
        for offset in (0, 5 << 30, (16 << 30) + 512):
            file.seek(offset)
            file.write(bytes(range(1, 256)) * 1000)
        size = file.truncate((17 << 30) + 1024)
    processes.run(
        *("qemu-img", "convert", "-f", "raw", "-O", "vmdk", "-o", "subformat=streamOptimized"), raw, path
    )
    data = path.read_bytes()
    assert header.parse(data).directory != header.AT_END
    parts = sorted(arrivals(data), key=lambda part: part[0])
    with raw.open("rb") as file:
        end = 0
        for offset, length, body in parts:
            assert offset == end
            end += length
            if body is not None:
                file.seek(offset)
                assert file.read(length) == body
    assert end == size
    assert sum(length for _, length, body in parts if body is not None) == 12 * (64 << 10)


@pytest.mark.slow
def test_large_vmdk_is_crowded(tmp_path: Path) -> None:
    """Grains without markers are tracked one by one when they are not in order."""
    processes.need("qemu-img")
    assert not placing.layout(placing.view(bytes(image(MANY)), ordered=True), "vmdk").crowded
    for size, crowded in (("16G", False), ("17G", True)):
        for form in ("vmdk", "qcow2"):
            processes.run("qemu-img", "create", "-q", "-f", form, tmp_path / size, size)
            layout = placing.layout(placing.view((tmp_path / size).read_bytes(), ordered=True), form)
            assert layout.crowded == (crowded and form == "vmdk")
