"""Place qcow2 and VMDK images by ranges (``formats/test_content``: the disk is that of qemu-img)."""

from __future__ import annotations

import array
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.formats import views
from cdi_worker.formats.mapped import image
from cdi_worker.formats.mapped.pieces import Batch, Piece, batches
from cdi_worker.formats.qcow2 import header, layout
from cdi_worker.images.disks import tables
from cdi_worker.images.engine import fetch
from cdi_worker.scratch import journal
from tests.support import disks as disks_module
from tests.support import placing, processes, qcow2_images, qcow2_parts

MiB = 1 << 20
#: Bytes of a cluster of ``scattered``.
CLUSTER = 8 << 10


def scattered(spacing: int, count: int) -> bytes:
    """Return a qcow2 image with a cluster of data in each ``spacing`` bytes.

    Tables and data alternate in the file, as when a guest writes. There are no refcounts.
    """
    reach = CLUSTER // 8 * CLUSTER  # bytes of the disk that a second-level table maps
    directory, body = array.array("Q", bytes(8 * -(-count * spacing // reach))), bytearray()
    start = CLUSTER + -(-8 * len(directory) // CLUSTER) * CLUSTER
    for number in range(count):
        guest = number * spacing
        if not directory[guest // reach]:
            table = len(body)
            directory[guest // reach] = qcow2_parts.COPIED | start + table
            body += bytes(CLUSTER)
        entry = qcow2_parts.COPIED | start + len(body)
        struct.pack_into(">Q", body, table + guest % reach // CLUSTER * 8, entry)
        body += bytes([1 + number % 255]) * CLUSTER
    length, end = len(directory), start + len(body)
    directory.byteswap()
    head = qcow2_parts.header(bits=13, size=count * spacing, l1=(length, CLUSTER), refcounts=(end, 1))[
        :CLUSTER
    ]
    return head + directory.tobytes().ljust(start - CLUSTER, b"\0") + body + bytes(CLUSTER)


class FailsAfter(placing.Bytes):
    """A file whose reads fail permanently after a number of them; counts the bytes read."""

    def __init__(self, data: bytes, reads: int) -> None:
        super().__init__(data)
        self._left = reads
        self.fetched = 0

    def read_range(self, offset: int, into: memoryview, /) -> int:
        self._left -= 1
        if self._left < 0:
            raise errors.TransferFailed(url="memory", offset=offset, reason="broken")
        self.fetched += len(into)
        return super().read_range(offset, into)


class RecordingDisk:
    """A disk of any size that records its writes and the number of bytes zeroed."""

    def __init__(self) -> None:
        self.written: dict[int, bytes] = {}
        self.zeros = 0
        self._lock = threading.Lock()

    def write(self, offset: int, data: memoryview) -> None:
        with self._lock:
            self.written[offset] = bytes(data)

    def zero(self, offset: int, length: int) -> None:
        with self._lock:
            self.zeros += length


def test_table_of_the_largest_cluster_size_is_read(tmp_path: Path) -> None:
    """One table of 2 MiB maps 512 GiB; entries in its second half are offset from its start."""
    file = tmp_path / "disk.qcow2"
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-o", "cluster_size=2M", file, "500G")
    processes.run("qemu-io", "-f", "qcow2", "-c", "write -q -P 7 10G 2M", "-c", "write -q -P 9 300G 2M", file)
    source = placing.fetcher(placing.Bytes(file.read_bytes()))
    target = RecordingDisk()
    placing.deliver(placing.tables_of(file.read_bytes(), source), target)
    found = sorted((offset >> 20, data[0], len(data) >> 20) for offset, data in target.written.items())
    gib = 1024
    expected = [(10 * gib, 7, 1), (10 * gib + 1, 7, 1), (300 * gib, 9, 1), (300 * gib + 1, 9, 1)]
    assert (found, target.zeros) == (expected, (500 << 30) - 4 * MiB)


@pytest.mark.parametrize("direct", [False, True])
def test_short_pieces_are_written_by_one_thread_at_a_time(direct: bool) -> None:
    """Unless writes wait for storage: each of these threads would take turns with the others."""
    count, spacing = 300, 64 << 10
    data = scattered(spacing, count)

    class Slow(RecordingDisk):
        writing = most = 0

        def write(self, offset: int, data: memoryview) -> None:
            self.writing += 1
            self.most = max(self.most, self.writing)
            # Long enough for another thread to come in.
            time.sleep(0.001)
            super().write(offset, data)
            self.writing -= 1

    target, notes = Slow(), journal.Journal(None, "", count * spacing)
    source = placing.fetcher(placing.Bytes(data))
    placing.deliver(placing.tables_of(data, source, direct=direct), target, notes)
    assert (target.most > 1) == direct
    assert sum(map(len, target.written.values())) == count * CLUSTER
    assert target.zeros == count * (spacing - CLUSTER)


@pytest.mark.parametrize("packed", [False, True])
def test_data_near_its_table_is_read_once(packed: bool, tmp_path: Path) -> None:
    """Tables between which there is little data are read with it: the whole file, once."""
    options = ["-c"] if packed else []
    spaced, file = tmp_path / "spaced", tmp_path / "disk.qcow2"
    spaced.write_bytes(
        b"".join(bytes([1 + number % 255]) * 20_000 + bytes(MiB - 20_000) for number in range(60))
    )
    processes.run("qemu-img", "convert", "-O", "qcow2", "-o", "cluster_size=4k", *options, spaced, file)
    data, size = file.read_bytes(), spaced.stat().st_size
    source, target, counts = FailsAfter(data, 1 << 30), placing.Dirty(size), placing.Counts()
    placing.deliver(placing.tables_of(data, placing.fetcher(source)), target, counts=counts)
    assert target.data == spaced.read_bytes()
    assert source.fetched <= len(data)
    assert source.fetched + counts.skipped == len(data)


def test_data_near_its_table_is_not_delivered_again() -> None:
    """After a failure it is read again with the tables, and only what is missing is written."""
    data, size = scattered(MiB, 60), 60 * MiB
    whole = placing.Dirty(size)
    placing.deliver(placing.tables_of(data, placing.fetcher(placing.Bytes(data))), whole)
    for reads in range(1, 20):
        target, notes = placing.Dirty(size), journal.Journal.in_memory(size)
        with pytest.raises(errors.TransferFailed):
            placing.deliver(placing.tables_of(data, placing.fetcher(FailsAfter(data, reads))), target, notes)
        if not notes.missing(0, CLUSTER):
            break
    target.covered = bytearray(len(target.covered))
    placing.deliver(placing.tables_of(data, placing.fetcher(placing.Bytes(data))), target, notes)
    assert target.data == whole.data
    assert not any(target.covered[: CLUSTER // 512])
    assert any(target.covered)


def test_data_near_tables_is_kept_in_bounded_memory() -> None:
    """Of what does not fit, the data is read again."""
    near, table = tables.Near(3000), Piece(4096, 512, 0, 1 << 20, compressed=False)
    for offset in (4096, 8192, 16384):
        batch = Batch(offset, 1024, [table._replace(host=offset)])
        near.keep(batch, memoryview(bytes([offset >> 10]) * 1024))
    data = [Piece(at + 512, 512, at, 512, compressed=False) for at in (4096, 8192, 16384)]
    found = list(near.split(batches(data, 1 << 20)))
    assert [(part.offset, held and bytes(held)) for part, held in found] == [
        (4096 + 512, bytes([4]) * 512),
        (8192 + 512, bytes([8]) * 512),
        (16384 + 512, None),
    ]
    near.forget()
    assert [held for _, held in near.split(batches(data, 1 << 20))] == [None]


def test_first_level_table_of_a_huge_disk_is_read_in_parts() -> None:
    """Of all of 16 MiB, a read would make several copies."""
    data = scattered(4 << 40, 4)
    lengths = []

    def read(offset: int, length: int) -> bytes:
        lengths.append(length)
        return data[offset : offset + length]

    found = image.MappedImage(layout.Qcow2Layout(header.parse(data[: 64 << 10])), read, len(data))
    assert max(lengths) <= 2 * MiB
    assert sum(lengths) == 16 * MiB
    tables = [table for window in found.windows() for batch in window.tables() for table in batch.pieces]
    assert [table.guest >> 42 for table in tables] == [0, 1, 2, 3]


#: The beginning of ``large``. It has no holes: those that a thread zeroes last the journal may leave out.
NOISE = 0, 18 * MiB


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Return an image of many ranges, and its disk."""
    folder = tmp_path_factory.mktemp("large")
    steps = [
        "qemu-io write -q -s {folder}/noise 0 18M",
        "qemu-io write -q -P 7 20M 3M",
        "qemu-io write -q -c -P 9 24M 1M",
    ]
    qcow2_images.make(qcow2_images.Recipe(32 * MiB, "cluster_size=4k", tuple(steps)), folder / "image")
    disks_module.to_raw(folder / "image", "qcow2", folder / "expected")
    return (folder / "image").read_bytes(), (folder / "expected").read_bytes()


def place(source: fetch.Fetcher, target: placing.Dirty, notes: journal.Journal) -> None:
    laid_out = layout.Qcow2Layout(header.parse(source.read(0, 64 << 10)))

    def opened(reads: Sequence[views.Read]) -> tables.DiskTables:
        return image.MappedImage(laid_out, reads[0], source.size)

    placing.deliver(tables.MappedDisk([lambda _: source], opened, laid_out.virtual_size), target, notes)


def test_resume_skips_finished_ranges(large: tuple[bytes, bytes], tmp_path: Path) -> None:
    """What an earlier attempt has placed is neither fetched nor written again."""
    data, expected = large
    location = journal.Slots(str(tmp_path / "journal"), 0, 0)
    Path(location.path).touch()
    target = placing.Dirty(len(expected))
    notes = journal.Journal(location, "this", len(expected), seconds=0)
    with pytest.raises(errors.TransferFailed):
        place(placing.fetcher(FailsAfter(data, 18)), target, notes)
    target.covered = bytearray(len(target.covered))
    notes = journal.Journal(location, "this", len(expected))
    before = notes.covered
    again = FailsAfter(data, 1 << 30)
    place(placing.fetcher(again), target, notes)
    assert target.data == expected
    assert notes.missing(*NOISE) == []
    assert 0 < before < len(expected)
    fresh = FailsAfter(data, 1 << 30)
    place(placing.fetcher(fresh), placing.Dirty(len(expected)), placing.unjournalled())
    assert again.fetched < fresh.fetched


def test_resume_repeats_the_withheld_start(large: tuple[bytes, bytes], tmp_path: Path) -> None:
    """A crash may lose the start of the disk although it was written."""
    data, expected = large
    location = journal.Slots(str(tmp_path / "journal"), 0, MiB)
    Path(location.path).touch()
    notes = journal.Journal(location, "this", len(expected))
    place(placing.fetcher(placing.Bytes(data)), placing.Dirty(len(expected)), notes)
    assert notes.missing(*NOISE) == [(0, MiB)]
    target, again = placing.Dirty(len(expected)), FailsAfter(data, 1 << 30)
    place(placing.fetcher(again), target, notes)
    assert target.data[:MiB] == expected[:MiB]
    assert again.fetched < 5 * MiB


@pytest.mark.parametrize(
    ("form", "done"), [("qcow2-zstd", False), ("qcow2-512", True), ("vmdk", False), ("vmdk", True)]
)
def test_each_byte_of_the_file_is_read_skipped_or_kept(
    disks: disks_module.Disks, form: str, done: bool
) -> None:
    data = disks.image(form, "ragged").read_bytes()
    file, counts = FailsAfter(data, 1000), placing.Counts()
    disk = placing.tables_of(data, placing.fetcher(file), form.partition("-")[0])
    size = disk.size or 0
    notes = journal.Journal.in_memory(size)
    if done:
        notes.zeroed([(0, size)])
    placing.deliver(disk, placing.Dirty(size), notes, counts)
    assert (counts.kept > 0) == done
    # The directory was read before; parts of the tables are read twice.
    assert abs(file.fetched + counts.skipped + counts.kept - len(data)) < 16 << 10
