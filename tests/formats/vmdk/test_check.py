"""The VMDK reader: images it leaves to qemu-img, and malformed ones."""

from __future__ import annotations

import random
import struct
import zlib

import pytest

from cdi_worker import errors
from cdi_worker.formats.mapped import image as mapped
from cdi_worker.formats.mapped import passing
from cdi_worker.formats.vmdk import check, header
from cdi_worker.formats.vmdk import layout as vmdk_layout
from tests.support import placing, vmdk_stream

SECTOR = 512
GRAIN = vmdk_stream.GRAIN
REACH = vmdk_stream.REACH
#: Sectors of the directory, the two tables and the first grain in an image of ``image``.
DIRECTORY, TABLES, DATA = 21, (22, 26), 128
ZERO_GRAINS = 4
PACKED = 0x30000


def image(
    grains: dict[int, int] | None = None,
    body: bytes = b"",
    *,
    tables: tuple[int, ...] = TABLES,
    size: int = 2 * REACH,
    **fields: int,
) -> bytes:
    """Return an image with two tables; ``grains``: entries by number; ``body``: the bytes from DATA on."""
    entries = [0] * 1024
    for number, entry in (grains or {}).items():
        entries[number] = entry
    values = {"version": 1, "flags": 1, "capacity": size // SECTOR, "grain": 128, "at": 1, "length": 20}
    values |= {"entries": 512, "redundant": 0, "directory": DIRECTORY, "overhead": DATA, "unclean": 0}
    *values, compression = (values | {"compression": 0} | fields).values()
    head = struct.pack("<4sIIQQQQIQQQB4sH", b"KDMV", *values, b"\n \r\n", compression)
    descriptor = b'version=1\nparentCID=ffffffff\ncreateType="monolithicSparse"\nRW 8 SPARSE "x"\n'
    return b"".join(
        (
            head.ljust(SECTOR, b"\0"),
            descriptor.ljust(20 * SECTOR, b"\0"),
            struct.pack(f"<{len(tables)}I", *tables).ljust(SECTOR, b"\0"),
            struct.pack("<1024I", *entries),
            bytes((DATA - TABLES[1] - 4) * SECTOR),
            body,
        )
    )


def packed(grain: bytes, sector: int = 0, size: int | None = None) -> bytes:
    data = zlib.compress(grain)
    marked = struct.pack("<QI", sector, len(data) if size is None else size) + data
    return marked.ljust(-(-len(marked) // SECTOR) * SECTOR, b"\0")


NOISE = random.Random(1).randbytes(3 * GRAIN)


def test_grains_may_be_in_any_order() -> None:
    """Neighbours in both tables, out of order, and not a multiple of a grain apart."""
    data = image({0: DATA + 128, 1: DATA + 256, 512: DATA}, NOISE)
    disk = bytearray(2 * REACH)
    disk[: 2 * GRAIN], disk[REACH : REACH + GRAIN] = NOISE[GRAIN:], NOISE[:GRAIN]
    assert placing.read_vmdk(data) == disk
    moved = image({0: DATA + 129, 1: DATA + 257, 512: DATA + 1}, bytes(SECTOR) + NOISE)
    assert placing.read_vmdk(moved) == disk


@pytest.mark.parametrize("first", [128, 129])
def test_grain_after_a_hole_is_not_merged_with_it(first: int) -> None:
    """A hole is entry 0 or 1, which may be a grain's length before the entry of the next grain."""
    grains = {3: first - 128, 4: first, 5: first + 128, 7: 1}
    data = image(grains, NOISE, flags=1 | ZERO_GRAINS)
    disk = bytearray(2 * REACH)
    disk[4 * GRAIN : 6 * GRAIN] = data[first * SECTOR :][: 2 * GRAIN]
    assert placing.read_vmdk(data) == disk


def test_last_grain_may_end_with_the_disk() -> None:
    data = image({512: DATA}, NOISE[:1024], tables=TABLES, size=REACH + 1024)
    assert placing.read_vmdk(data) == bytes(REACH) + NOISE[:1024]
    with pytest.raises(errors.Truncated):
        placing.read_vmdk(data[:-1])


@pytest.mark.parametrize(
    ("grains", "message"),
    [
        ({0: 1 << 31}, "truncated"),
        ({0: DATA + 257}, "truncated"),
        ({0: 1}, "twice"),
        ({0: DIRECTORY}, "twice"),
        ({0: TABLES[1]}, "twice"),
        ({0: TABLES[1] + 3}, "twice"),
        ({0: DATA, 1: DATA}, "twice"),
        ({0: DATA, 512: DATA}, "twice"),
        ({0: DATA, 1: DATA + 128, 600: DATA + 128}, "twice"),
        ({0: DATA, 512: DATA + 1}, "twice"),
        ({0: DATA + 1, 512: DATA}, "twice"),
        ({0: DATA + 1, 512: DATA + 128}, "twice"),
        ({0: DATA + 128, 512: DATA + 1}, "twice"),
    ],
)
def test_grain_in_the_wrong_place_is_corrupt(grains: dict[int, int], message: str) -> None:
    data = image(grains, NOISE)
    for reader in (placing.read_disk, placing.streamed):
        with pytest.raises(errors.Corrupt, match=message):
            reader(data, form="vmdk")


@pytest.mark.parametrize(
    ("tables", "fields", "message"),
    [
        ((22, 22), {}, "twice"),
        ((22, 23), {}, "twice"),
        ((22, 20), {}, "twice"),
        ((22, DIRECTORY), {}, "twice"),
        ((22, 1 << 31), {}, "need"),
        (TABLES, {"directory": 1 << 40}, "need"),
        (TABLES, {"directory": 20}, "twice"),
        (TABLES, {"directory": 0}, "twice"),
        (TABLES, {"length": 22}, "twice"),
        (TABLES, {"overhead": 1 << 60}, "need"),
    ],
)
def test_table_in_the_wrong_place_is_corrupt(
    tables: tuple[int, ...], fields: dict[str, int], message: str
) -> None:
    data = image({0: DATA}, NOISE, tables=tables, **fields)
    for reader in (placing.read_disk, placing.streamed):
        with pytest.raises(errors.Corrupt, match=message):
            reader(data, form="vmdk")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"flags": 9}, "flags"),
        ({"flags": 1 | 1 << 31}, "flags"),
        ({"flags": 1 | PACKED}, "compression 0"),
        ({"compression": 1}, "compression 1"),
        ({"flags": 1 | PACKED, "compression": 2}, "compression 2"),
        ({"flags": 1 | 1 << 16, "compression": 1}, "without markers"),
        ({"grain": 256}, "256 sectors"),
        ({"entries": 256}, "256 entries"),
        ({"directory": header.AT_END}, "a footer"),
        ({"capacity": 1 << 34 | 1}, "directory"),
        ({"capacity": 1 << 33, "grain": 8}, "directory"),
    ],
)
def test_unsupported_image_is_left_to_qemu_img(fields: dict[str, int], message: str) -> None:
    assert message in check.check(placing.view(image(**fields), ordered=True)).unplaceable


@pytest.mark.parametrize("fields", [{}, {"version": 2}, {"version": 3}, {"flags": 7}, {"capacity": 1 << 34}])
def test_supported_image_has_no_obstacle(fields: dict[str, int]) -> None:
    assert check.check(placing.view(image(**fields), ordered=True)).layout


def test_safety_rules_are_checked_again_by_the_reader() -> None:
    data = image({0: DATA}, NOISE).replace(b"parentCID=ffffffff", b"parentCID=12345678")
    for reader in (placing.read_disk, placing.streamed):
        with pytest.raises(errors.Refused, match="parent"):
            reader(data, form="vmdk")


def compressed(*grains: bytes, size: int = REACH) -> bytes:
    """Return an image of these compressed grains, one after the other."""
    places = [DATA + sum(map(len, grains[:number])) // SECTOR for number in range(len(grains))]
    fields = {"flags": 1 | PACKED, "compression": 1, "version": 3}
    return image(dict(enumerate(places)), b"".join(grains), tables=TABLES[:1], size=size, **fields)


def test_compressed_grains_are_read() -> None:
    data = compressed(packed(NOISE[:GRAIN]), packed(b"a" * GRAIN, 128), packed(NOISE[-GRAIN:], 256))
    assert placing.read_vmdk(data) == (NOISE[:GRAIN] + b"a" * GRAIN + NOISE[-GRAIN:]).ljust(REACH, b"\0")


@pytest.mark.parametrize("stored", [1024, GRAIN])
def test_last_compressed_grain_may_be_short(stored: int) -> None:
    """Some programs compress only the bytes within the disk, others a whole grain."""
    data = compressed(packed(bytes(GRAIN)), packed(NOISE[:stored], 128), size=GRAIN + 1024)
    assert placing.read_vmdk(data) == bytes(GRAIN) + NOISE[:1024]


GOOD = packed(b"b" * GRAIN)


@pytest.mark.parametrize(
    "grain",
    [
        packed(b"a" * GRAIN, 128),
        packed(b"a" * GRAIN, 1 << 60),
        packed(b"a" * GRAIN, size=0),
        packed(b"a" * GRAIN, size=1 << 31),
        packed(b"a" * GRAIN, size=20),
        packed(b"a" * (GRAIN - 1)),
        packed(b"a" * (GRAIN + 1)),
        packed(b"a" * 100 * GRAIN),
        GOOD[:12] + bytes([GOOD[12] ^ 1]) + GOOD[13:],
        struct.pack("<QI", 0, len(zlib.compress(b"b" * GRAIN))) + zlib.compress(b"b" * GRAIN)[:-1] + b"\xff",
    ],
    ids=["other", "far", "empty", "long", "cut", "short", "over", "bomb", "header", "checksum"],
)
def test_malformed_compressed_grain_is_corrupt(grain: bytes) -> None:
    data = compressed(grain.ljust(-(-len(grain) // SECTOR) * SECTOR, b"\0"), packed(NOISE[:GRAIN], 128))
    for reader in (placing.read_disk, placing.streamed):
        with pytest.raises(errors.Corrupt, match="the grain"):
            reader(data, form="vmdk")


def test_overlapping_compressed_grains_are_corrupt() -> None:
    first = packed(NOISE[:GRAIN])
    fields = {"flags": 1 | PACKED, "compression": 1}
    for grains in ({0: DATA, 1: DATA}, {0: DATA, 1: DATA + 3}, {0: DATA, 512: DATA}):
        with pytest.raises(errors.Corrupt):
            placing.read_vmdk(image(grains, first * 2, **fields))


def test_large_empty_disk_needs_no_memory() -> None:
    layout = vmdk_layout.VmdkLayout(header.parse(image(capacity=1 << 34)))
    directory = layout.directory[1]
    data = image(capacity=1 << 34)[: DIRECTORY * SECTOR].ljust(DIRECTORY * SECTOR + directory, b"\0")
    found = placing.image_of(data, "vmdk")
    (window,) = found.windows()
    assert list(window.holes()) == [(0, 8 << 40)]


def test_too_large_an_allocation_is_unsupported() -> None:
    layout = vmdk_layout.VmdkLayout(header.parse(image(grain=8, capacity=1 << 30)))
    allocation = layout.allocation(passing.UNKNOWN)
    with pytest.raises(errors.Unsupported):
        allocation.take_pieces(layout.decode(struct.pack("<512I", 1 << 31, *[0] * 511), 0))
    assert vmdk_layout.VmdkAllocation.LIMIT >= 1 << 26


def test_windows_are_deterministic() -> None:
    """The journal relies on it."""
    data = image({0: DATA + 128, 1: DATA + 256, 512: DATA}, NOISE)
    found = placing.image_of(data, "vmdk")
    assert _batches(found, data) == _batches(found, data) != []


def _batches(found: mapped.MappedImage, data: bytes) -> list[object]:
    batches: list[object] = []
    for window in found.windows():
        for batch in window.tables():
            for table in batch.pieces:
                window.load(table, data[table.host : table.host + table.length])
        window.check()
        batches += window.data()
    return batches
