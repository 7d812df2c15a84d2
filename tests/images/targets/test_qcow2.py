"""A qcow2 file as target: QEMU reads what was written, also after an interruption."""

from __future__ import annotations

import itertools
import random
from concurrent import futures
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images import targets
from cdi_worker.images.targets import file_format, qcow2
from tests.support import devices, processes

MIB = 1 << 20
SIZE = 9 * MIB + 512
#: Of clusters of 512 bytes, a table maps 32 KiB, and refcount blocks need a table of several clusters.
FORMATS = (
    "qcow2",
    "qcow2,cluster_size=512",
    "qcow2,cluster_size=4k",
    "qcow2,cluster_size=2M",
    "qcow2,preallocation=metadata",
    "qcow2,cluster_size=4k,preallocation=falloc",
)


def options(form: str, *, resume: bool = False) -> targets.TargetOptions:
    return targets.TargetOptions(form=file_format.parse(form), resume=resume)


def guest(path: Path) -> bytes:
    """Return the guest's bytes of a file without errors."""
    processes.run("qemu-img", "check", "-q", "-f", "qcow2", path)
    raw = path.with_name("guest")
    processes.run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", path, raw)
    return raw.read_bytes()


def parts(seed: int) -> list[tuple[int, int, bool]]:
    """Return ranges (start, end, zero) of a disk in any order: some begin or end within a cluster."""
    chance = random.Random(seed)
    cuts = sorted({0, SIZE, *(chance.randrange(0, SIZE, 512) for _ in range(60))})
    ranges = [(*each, chance.random() < 0.4) for each in itertools.pairwise(cuts)]
    chance.shuffle(ranges)
    return ranges


def deliver(disk: targets.Target, data: bytes, ranges: list[tuple[int, int, bool]]) -> None:
    def one(start: int, end: int, zero: bool) -> None:
        if zero:
            disk.zero(start, end - start)
        else:
            disk.write(start, memoryview(data)[start:end])

    with futures.ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(one, *part) for part in ranges]:
            each.result()


def expected(data: bytes, ranges: list[tuple[int, int, bool]]) -> bytes:
    disk = bytearray(data)
    for start, end, zero in ranges:
        if zero:
            disk[start:end] = bytes(end - start)
    return bytes(disk)


@pytest.mark.parametrize("form", FORMATS)
def test_disk_written_in_any_order_and_again_after_an_interruption(tmp_path: Path, form: str) -> None:
    """The second run writes data and zeros over what the first has left, of which it keeps the first MiB."""
    path = tmp_path / "disk"
    data, ranges = random.Random(1).randbytes(SIZE), parts(1)
    with targets.open(path, SIZE, options(form)) as disk:
        deliver(disk, data, ranges)
        disk.flush()
        assert disk.storage.read(0, SIZE + 512)[:SIZE] == expected(data, ranges)
        disk.keep()
    again, others = random.Random(2).randbytes(SIZE), [each for each in parts(2) if each[0] >= MIB]
    with targets.open(path, SIZE, options(form, resume=True)) as disk:
        assert disk.resumed
        assert disk.storage.read(0, SIZE) == expected(data, ranges)
        deliver(disk, again, others)
        first = min(start for start, _, _ in others)
        disk.commit()
    assert guest(path) == expected(data, ranges)[:first] + expected(again, others)[first:]
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("disk")] == ["disk"]


@pytest.mark.parametrize("form", FORMATS[:4])
def test_disk_of_unknown_size(tmp_path: Path, form: str) -> None:
    path = tmp_path / "disk"
    with targets.open(path, None, options(form)) as disk:
        disk.write(0, memoryview(b"x" * MIB))
        disk.zero(MIB, MIB)
        disk.commit(3 * MIB)
    assert guest(path) == b"x" * MIB + bytes(2 * MIB)


@pytest.mark.parametrize("form", FORMATS)
def test_disk_without_bytes(tmp_path: Path, form: str) -> None:
    """qemu-img creates it without a table."""
    with targets.open(tmp_path / "disk", 0, options(form)) as disk:
        disk.commit()
    assert guest(tmp_path / "disk") == b""


def test_finished_file_is_read_past_the_page_cache(tmp_path: Path) -> None:
    # Debian 13 has /tmp in memory.
    with devices.filesystem("ext4", tmp_path) as point:
        path = point / "disk"
        with targets.open(path, 8 * MIB, options("qcow2")) as disk:
            disk.write(0, memoryview(random.Random(1).randbytes(8 * MIB)))
            disk.commit()
        assert devices.cached(path) > MIB
        qcow2.check(str(path))
        assert devices.cached(path) < MIB


def test_disk_larger_than_the_tables_is_refused(tmp_path: Path) -> None:
    limit = (1 << 20) * 512 * 64
    with targets.open(tmp_path / "disk", None, options(FORMATS[1])) as disk:
        disk.write(limit - 512, memoryview(bytes([1]) * 512))
        with pytest.raises(errors.TooLarge):
            disk.write(limit - 256, memoryview(bytes(512)))


def test_clusters_without_an_entry_are_not_taken_for_zeros(tmp_path: Path) -> None:
    """A power cut may keep data and lose the entry that maps it."""
    path = tmp_path / "disk"
    with targets.open(path, MIB, options("qcow2")) as disk:
        disk.write(0, memoryview(b"x" * 4096))
        disk.flush()
        disk.keep()
    with (tmp_path / "disk.part").open("r+b") as left:
        # After the header, two clusters of refcounts, two tables, and the cluster with data.
        left.seek(6 << 16)
        left.write(devices.DIRT * MIB)
    with targets.open(path, MIB, options("qcow2", resume=True)) as disk:
        assert disk.resumed
        disk.write(512 << 10, memoryview(b"y" * 4096))
        disk.commit()
    data = guest(path)
    assert data == b"x" * 4096 + bytes(508 << 10) + b"y" * 4096 + bytes((512 << 10) - 4096)


def test_lost_entry_of_a_preallocated_file(tmp_path: Path) -> None:
    """What qemu-img has preallocated is not synced before the first data: a power cut may lose a part."""
    path, form = tmp_path / "disk", "qcow2,preallocation=metadata"
    data = random.Random(1).randbytes(MIB)
    with targets.open(path, MIB, options(form)) as disk:
        disk.keep()
    with (tmp_path / "disk.part").open("r+b") as left:
        left.seek(40)
        left.seek(int.from_bytes(left.read(8), "big"))
        left.seek(int.from_bytes(left.read(8), "big") - (1 << 63))
        left.write(bytes(8))
    with targets.open(path, MIB, options(form, resume=True)) as disk:
        assert disk.resumed
        disk.write(0, memoryview(data))
        disk.commit()
    assert guest(path) == data


@pytest.mark.parametrize(
    "change", ["compressed", "zero flag", "shared cluster", "beyond 2^56", "other clusters"]
)
def test_left_over_with_what_is_not_written_here(tmp_path: Path, change: str) -> None:
    """A table that QEMU would read in another way is not continued, or found at the end."""
    path = tmp_path / "disk"
    with targets.open(path, MIB, options("qcow2")) as disk:
        disk.write(0, memoryview(b"x" * MIB))
        disk.flush()
        disk.keep()
    with (tmp_path / "disk.part").open("r+b") as left:
        # The table of the first cluster follows the first-level table.
        left.seek(40)
        left.seek(int.from_bytes(left.read(8), "big"))
        table = int.from_bytes(left.read(8), "big") - (1 << 63)
        left.seek(table)
        first = int.from_bytes(left.read(8), "big")
        entry = {
            "compressed": first | 1 << 62,
            "zero flag": first | 1,
            "shared cluster": first + (64 << 10),
            "beyond 2^56": first | 1 << 56,
            "other clusters": first,
        }[change]
        left.seek(table)
        left.write(entry.to_bytes(8, "big"))
        if change == "other clusters":
            left.seek(20)
            left.write((15).to_bytes(4, "big"))
    with targets.open(path, MIB, options("qcow2", resume=True)) as disk:
        assert disk.resumed == (change == "shared cluster")
        disk.write(0, memoryview(b"y" * MIB))
        if disk.resumed:
            with pytest.raises(errors.ToolFailed):
                disk.commit()
            return
        disk.commit()
    assert guest(path) == b"y" * MIB
