"""VMDK images with the tables behind the data, as VMware's programs stream them."""

from __future__ import annotations

import contextlib
import itertools
import random
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.formats.vmdk import check, layout, markers
from cdi_worker.formats.vmdk import header as vmdk_header
from cdi_worker.images.disks import following
from cdi_worker.images.engine import cancelling
from tests.support import disks, placing, vmdk_stream

SECTOR = 512
TABLE, DIRECTORY = vmdk_stream.TABLE, vmdk_stream.DIRECTORY
GRAIN = vmdk_stream.GRAIN
REACH = vmdk_stream.REACH


NOISE = random.Random(1).randbytes(3 * GRAIN)


DISK = NOISE + bytes(REACH) + b"x" * GRAIN + NOISE[:512]


@pytest.mark.slow
def test_disk_is_read_with_tables_last() -> None:
    for zeros in (False, True):
        assert placing.read_vmdk(vmdk_stream.streamed(DISK, zeros=zeros)) == DISK
    assert placing.read_vmdk(vmdk_stream.streamed(bytes(REACH + 512))) == bytes(REACH + 512)


def read_stream(data: bytes) -> bytes:
    return placing.streamed(data, form="vmdk")


def changed(data: bytes, offset: int, layout: str, value: int) -> bytes:
    out = bytearray(data)
    struct.pack_into(layout, out, offset, value)
    return bytes(out)


def at_the_end(data: bytes) -> tuple[int, int]:
    """Return the offsets of the directory and of its first table."""
    (directory,) = struct.unpack_from("<Q", data, len(data) - 1024 + 56)
    (table,) = struct.unpack_from("<I", data, directory * SECTOR)
    return directory * SECTOR, table * SECTOR


@pytest.mark.parametrize("layout", ["<I", "<B"])
def test_markers_that_contradict_the_tables_need_scratch(layout: str) -> None:
    """The tables are authoritative, and another program may read them without the markers."""
    good = vmdk_stream.streamed(DISK)
    directory, table = at_the_end(good)
    for offset in (table, table + 4 * 100, table + 2044, directory, directory + 4):
        (before,) = struct.unpack_from(layout, good, offset)
        with pytest.raises((errors.ScratchRequired, errors.Truncated)):
            read_stream(changed(good, offset, layout, before ^ 0x7F))


def test_misplaced_or_repeated_grain_is_refused() -> None:
    good = vmdk_stream.streamed(DISK)
    first = 128 * SECTOR
    for sector in (256 * 128, 128):
        with pytest.raises(errors.ScratchRequired):
            read_stream(changed(good, first, "<Q", sector))
    for sector in (1, len(DISK) // SECTOR, 1 << 63):
        with pytest.raises(errors.Corrupt):
            read_stream(changed(good, first, "<Q", sector))
    with pytest.raises(errors.Corrupt):
        read_stream(changed(good, first + 8, "<I", 2 * GRAIN))


def test_two_grains_for_one_sector_need_scratch() -> None:
    """The tables have the second one; in a stream, the order of the writes would decide."""
    good = vmdk_stream.streamed(NOISE[: 2 * GRAIN])
    _, table = at_the_end(good)
    bad = changed(changed(good, 128 * SECTOR, "<Q", GRAIN // SECTOR), table, "<I", 0)
    assert placing.read_disk(bad, "vmdk") == bytes(GRAIN) + NOISE[GRAIN : 2 * GRAIN]
    with pytest.raises(errors.ScratchRequired, match="two grains for sector 128"):
        read_stream(bad)


def test_unknown_marker_needs_scratch() -> None:
    good = vmdk_stream.streamed(DISK)
    marker = at_the_end(good)[1] - SECTOR
    for offset, form, value in ((marker + 12, "<I", 5), (marker, "<Q", 1 << 40), (marker, "<Q", 5000)):
        with pytest.raises(errors.ScratchRequired, match="marker"):
            read_stream(changed(good, offset, form, value))


@pytest.mark.parametrize("progress", [1, 100])
def test_markers_of_progress_are_skipped(progress: int) -> None:
    image = vmdk_stream.streamed(DISK, progress=progress)
    assert read_stream(image) == DISK
    assert placing.read_disk(image, "vmdk") == DISK


def test_marker_of_progress_is_no_end() -> None:
    """Also behind the footer, where a marker without content ends the image."""
    good = vmdk_stream.streamed(DISK)
    end = len(good) - SECTOR
    bad = good[:end] + vmdk_stream.marker_of_progress(0)
    for image in (bad, bad + good[end:]):
        with pytest.raises(errors.ImageError):
            read_stream(image)


def test_marker_of_progress_with_content_is_something_else() -> None:
    """A marker with a size is that of a grain, one with a length that of an unknown table."""
    good = vmdk_stream.streamed(DISK, progress=1)
    assert good[128 * SECTOR :].startswith(vmdk_stream.marker_of_progress(0))
    with pytest.raises(errors.ScratchRequired, match="unknown marker"):
        read_stream(changed(good, 128 * SECTOR, "<Q", 1))
    with pytest.raises(errors.ScratchRequired, match="two grains"):
        read_stream(changed(good, 128 * SECTOR + 8, "<I", 16))


def test_endless_markers_of_progress_are_refused() -> None:
    good = vmdk_stream.streamed(DISK)
    image = good[: 128 * SECTOR] + vmdk_stream.marker_of_progress(0) * (markers.MOST_EMPTY + 1)
    with pytest.raises(errors.Corrupt, match="markers without content"):
        read_stream(image + good[128 * SECTOR :])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offset", "layout", "value"),
    [
        (12, "<Q", 8),
        (4, "<I", 1),
        (28, "<Q", 2),
        (56, "<Q", vmdk_header.AT_END),
        (-512 + 12, "<I", 1),
        (-512 + 16, "<I", 1),
        (512, "<Q", 1),
        (1023, "<B", 1),
    ],
)
def test_malformed_footer_is_refused(offset: int, layout: str, value: int) -> None:
    good = vmdk_stream.streamed(DISK)
    bad = changed(good, len(good) - 1024 + offset, layout, value)
    for reader in (placing.read_disk, placing.streamed):
        with pytest.raises(errors.ImageError, match=r"footer|truncated"):
            reader(bad, form="vmdk")


def test_footer_beyond_the_end_is_truncated() -> None:
    good = vmdk_stream.streamed(DISK)
    bad = changed(good, len(good) - 1024 + 64, "<Q", len(good) // SECTOR + 1)
    for reader in (placing.read_disk, placing.streamed):
        with pytest.raises(errors.Truncated):
            reader(bad, form="vmdk")


def test_footer_of_another_geometry_needs_scratch() -> None:
    good = vmdk_stream.streamed(DISK)
    with pytest.raises(errors.ScratchRequired, match="footer"):
        read_stream(changed(good, len(good) - 1024 + 8, "<I", 0x30005))


def test_cut_or_shifted_image_is_refused() -> None:
    good = vmdk_stream.streamed(DISK)
    for length in (*range(65536, len(good), 30_000), len(good) - 1536, len(good) - 512, len(good) - 1):
        with pytest.raises(errors.ImageError):
            read_stream(good[:length])
        with pytest.raises(errors.ImageError):
            placing.read_disk(good[:length], "vmdk")
    shifted = good[:65536] + b"x" + good[65536:]
    for reader in (placing.read_disk, placing.streamed):
        with pytest.raises(errors.ImageError):
            reader(shifted, form="vmdk")


def test_stream_ends_after_the_footer() -> None:
    """At random the footer is searched at the end of the file."""
    good = vmdk_stream.streamed(DISK)
    for junk in (b"x", b"\xff" * (5 << 20)):
        assert placing.streamed(good + junk, form="vmdk") == placing.read_disk(good, form="vmdk")
        with pytest.raises(errors.ImageError):
            placing.read_disk(good + junk, form="vmdk")


@pytest.mark.parametrize("count", [1, SECTOR, (1 << 20) + 1, 5 << 20])
def test_zeros_after_the_end_are_no_part_of_the_image(count: int) -> None:
    """Storage pads files."""
    padded = vmdk_stream.streamed(DISK) + bytes(count)
    assert placing.read_vmdk(padded) == DISK
    assert check.required_length(placing.view(padded)) <= len(padded) - count


def test_zeros_after_the_end_are_limited() -> None:
    padded = vmdk_stream.streamed(DISK) + bytes(check.MOST_ZEROS)
    with pytest.raises(errors.Truncated, match="footer"):
        placing.read_disk(padded, "vmdk")


@pytest.mark.parametrize(
    ("kinds", "gap"),
    [((TABLE, DIRECTORY), 0), ((TABLE,), 1), ((DIRECTORY,), 2), ((TABLE, DIRECTORY), 200), ((TABLE,), 400)],
)
def test_metadata_without_markers_needs_scratch(tmp_path: Path, kinds: tuple[int, ...], gap: int) -> None:
    """At random, as in QEMU, it is found by the footer. ``gap``: unallocated grains before the data."""
    disk = bytes(gap * GRAIN) + NOISE + bytes(GRAIN) + NOISE[: 2 * GRAIN] + bytes(REACH) + NOISE[:GRAIN]
    image = vmdk_stream.streamed(disk, unmarked=kinds)
    (tmp_path / "image").write_bytes(image)
    disks.to_raw(tmp_path / "image", "vmdk", tmp_path / "raw")
    assert (tmp_path / "raw").read_bytes() == disk
    assert placing.read_disk(image, "vmdk") == disk
    with pytest.raises(errors.ScratchRequired, match="without a marker"):
        read_stream(image)


def test_endless_empty_markers_are_refused() -> None:
    good = vmdk_stream.streamed(DISK)
    # In place of the footer.
    endless = good[:-1536] + bytes(512 * (markers.MOST_EMPTY + 1))
    with pytest.raises(errors.Corrupt, match="markers without content"):
        placing.streamed(endless, form="vmdk")


def test_memory_of_markers_is_bounded() -> None:
    """Grains far apart need a table each."""
    header = vmdk_header.parse(vmdk_stream.streamed(bytes(512)))._replace(capacity=1 << 34)
    reader = layout.VmdkLayout(header).follow()
    count = 128 + markers.LIMIT + 1
    stream = bytearray(count * SECTOR)
    for number in range(markers.LIMIT + 1):
        struct.pack_into("<QI", stream, (128 + number) * SECTOR, number * REACH // SECTOR, 1)
    with pytest.raises(errors.ScratchRequired, match="too large"):
        reader.arrive(0, len(stream), lambda offset, length: stream[offset : offset + length], last=False)


def test_too_many_tables_need_scratch() -> None:
    good = vmdk_stream.streamed(bytes(512))
    start = 128 * SECTOR
    block = struct.pack("<QII", 1, 0, 1).ljust(2 * SECTOR, b"\0")
    with pytest.raises(errors.ScratchRequired, match="more tables"):
        read_stream(good[:start] + block * 100 + good[start:])


#: Two tables: grains 0 to 2 and 5 of the first one, 512 and 514 of the second one.
SPARSE = (
    (NOISE + bytes(2 * GRAIN) + NOISE[:GRAIN]).ljust(REACH, b"\0")
    + NOISE[:GRAIN]
    + bytes(GRAIN)
    + NOISE[:512]
)
FIRST = [("grain", 0), ("grain", 1), ("grain", 2), ("grain", 5)]
SECOND = [("grain", 512), ("grain", 514)]
TABLES = [("table", 0), ("table", 1)]


@pytest.mark.parametrize(
    "parts",
    [
        [*FIRST, TABLES[0], *SECOND, TABLES[1]],
        [*SECOND, TABLES[1], *FIRST[::-1], TABLES[0]],
        [*FIRST, *SECOND, *TABLES],
        [*SECOND, *FIRST, *TABLES],
        [*TABLES, *FIRST, TABLES[0], *SECOND, TABLES[1]],
        [*FIRST[:2], *SECOND[:1], *FIRST[2:], TABLES[0], *SECOND[1:], TABLES[1]],
    ],
)
def test_tables_may_have_any_place_after_their_grains(parts: list[tuple[str, int]]) -> None:
    assert placing.read_vmdk(vmdk_stream.arranged(SPARSE, parts)) == SPARSE


@pytest.mark.parametrize("sectors", range(6))
def test_table_across_two_parts_of_the_stream(sectors: int) -> None:
    """``sectors``: of the marker and its table, those in the first part."""
    before = vmdk_stream.arranged(SPARSE, FIRST)
    at = len(before) // SECTOR - 5  # directory and footer with their markers, and the end
    padding = following.CHUNK // SECTOR - at - sectors
    parts = [*FIRST, ("progress", padding), TABLES[0], *SECOND, TABLES[1]]
    image = vmdk_stream.arranged(SPARSE, parts)
    marker = struct.pack("<QII", 4, 0, 1)
    assert image[following.CHUNK - sectors * SECTOR :].startswith(marker)
    assert read_stream(image) == SPARSE


def test_image_that_ends_within_a_table_is_truncated() -> None:
    image = vmdk_stream.arranged(SPARSE, [*SECOND, TABLES[1]])
    table = len(image) - 9 * SECTOR
    for length in (1, 511, 3 * SECTOR, 4 * SECTOR - 1):
        with pytest.raises(errors.Truncated):
            read_stream(image[: table + length])


def test_second_table_for_a_place_is_never_used_unseen() -> None:
    """The directory says which of two tables counts: the one that was compared, or scratch is needed."""
    parts = [*FIRST, TABLES[0], TABLES[0], *SECOND, TABLES[1]]
    assert read_stream(vmdk_stream.arranged(SPARSE, parts, {0: 0})) == SPARSE
    with pytest.raises(errors.ScratchRequired, match="contradict"):
        read_stream(vmdk_stream.arranged(SPARSE, parts, {0: 1}))


def test_grain_after_its_table_needs_scratch() -> None:
    """Also if the directory has a second table with it: the hole in the first one was delivered."""
    parts = [*FIRST[:3], TABLES[0], *SECOND, TABLES[1], FIRST[3], TABLES[0]]
    image = vmdk_stream.arranged(SPARSE, parts)
    assert placing.read_disk(image, "vmdk") == SPARSE
    with pytest.raises(errors.ScratchRequired, match="after its table"):
        read_stream(image)
    # A table with only some grains of its own is not confirmed.
    parts = [*FIRST[:3], TABLES[0], FIRST[3], *SECOND, TABLES[1]]
    with pytest.raises(errors.ScratchRequired):
        read_stream(vmdk_stream.arranged(SPARSE, parts))


def test_table_that_the_directory_lacks_needs_scratch() -> None:
    good = vmdk_stream.arranged(SPARSE, [*FIRST, TABLES[0], *SECOND, TABLES[1]])
    directory, _ = at_the_end(good)
    for number in (0, 1):
        with pytest.raises(errors.ScratchRequired, match="contradict"):
            read_stream(changed(good, directory + 4 * number, "<I", 0))


def test_table_beyond_the_reach_of_the_directory_is_not_confirmed() -> None:
    """Its entries have 32 bits: 2 TiB of file."""
    first = (1 << 32) - 2
    header = vmdk_header.parse(vmdk_stream.streamed(DISK))._replace(overhead=first)
    stream = bytearray(7 * SECTOR)
    struct.pack_into("<QI", stream, 0, 0, 1)
    struct.pack_into("<QII", stream, SECTOR, 4, 0, 1)
    struct.pack_into("<I", stream, 2 * SECTOR, first)

    def read(offset: int, length: int) -> bytes:
        return bytes(stream[offset - first * SECTOR :][:length])

    start, end = first * SECTOR, first * SECTOR + len(stream)
    arrival = layout.VmdkLayout(header).follow().arrive(start, end, read, last=False)
    assert arrival.keep == [(start + SECTOR, start + 6 * SECTOR)]
    assert not list(arrival.holes)


@pytest.mark.parametrize(
    ("size", "most"), [(256 << 30, 64 << 10), pytest.param(8 << 40, 2 << 20, marks=pytest.mark.slow)]
)
def test_memory_for_tables_does_not_grow(size: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``most``: bytes to keep, of the directory (4 for each table) and of tables across two parts."""
    monkeypatch.setattr(following, "MEMORY", most)
    monkeypatch.setattr(markers, "LIMIT", most // 2048)
    parts = vmdk_stream.sparse(size, NOISE[:512].ljust(GRAIN, b"x"))
    head = next(parts)
    stream = Parts(itertools.chain([head], parts))
    found = layout.VmdkLayout(vmdk_header.parse(head))
    opened = contextlib.nullcontext(stream)
    disk = following.FollowingDisk(lambda _: opened, found.follow, size, cancelling.Cancel())
    target = Counting()
    placing.deliver(disk, target)
    assert (target.written, target.zeroed) == (size // REACH * GRAIN, size - size // REACH * GRAIN)


class Parts:
    """A stream of these parts."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._rest = memoryview(b"")

    def readinto(self, into: memoryview, /) -> int:
        """Read the next bytes; return how many."""
        self._rest = self._rest or memoryview(next(self._parts, b""))
        count = min(len(into), len(self._rest))
        into[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        """Do nothing."""


class Counting:
    """A target that counts bytes."""

    def __init__(self) -> None:
        self.written = self.zeroed = 0
        self._lock = threading.Lock()

    def write(self, offset: int, data: memoryview) -> None:
        """Count written bytes, which are one grain at the start of a table."""
        assert offset % REACH + len(data) <= GRAIN
        with self._lock:
            self.written += len(data)

    def zero(self, offset: int, length: int) -> None:
        """Count bytes of holes."""
        assert offset % REACH >= GRAIN
        with self._lock:
            self.zeroed += length
