"""Each way to zero a range, reached on storage that refuses the better ones."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker.images import kernel
from cdi_worker.images.targets import zeroing
from tests.support import devices, pairs

MiB = 1 << 20


class Written:
    """The plain writes of a ladder, and their ranges."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.ranges: list[tuple[int, int]] = []

    def __call__(self, offset: int, data: memoryview) -> None:
        os.pwrite(self.fd, data, offset)
        self.ranges.append((offset, offset + len(data)))


@contextlib.contextmanager
def ladder(
    path: Path, rungs: tuple[zeroing.Rung, ...], sector: int
) -> Iterator[tuple[zeroing.Ladder, Written]]:
    fd = os.open(path, os.O_RDWR)
    written = Written(fd)
    try:
        yield zeroing.Ladder(fd, rungs, sector, written), written
        os.fsync(fd)
    finally:
        os.close(fd)


def refusals(caplog: pytest.LogCaptureFixture) -> list[object]:
    return [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]


def check(path: Path, start: int, end: int) -> None:
    """Check that exactly this range is zero, on a target that was filled with 0xFF."""
    expected = b"\xff" * start + bytes(end - start)
    data = path.read_bytes()
    assert data == expected + b"\xff" * (len(data) - end)


@pytest.mark.parametrize(("rung", "sector"), pairs.covering(zeroing.SPARSE, [512, 4096]))
def test_each_way_zeroes_a_device(tmp_path: Path, sector: int, rung: zeroing.Rung) -> None:
    with devices.loop(tmp_path, 4 * MiB, sector=sector) as device:
        with ladder(device, (rung,), sector) as (climb, written):
            climb.zero(MiB, 3 * MiB)
        assert written.ranges == []
        check(device, MiB, 3 * MiB)


@pytest.mark.parametrize(
    ("start", "end", "sector"),
    [
        (1, 4095, 4096),
        (1, 4097, 512),
        (513, 3 * MiB + 7, 512),
        (513, 3 * MiB + 7, 4096),
        (4095, 8193, 512),
        (4095, 8193, 4096),
        (512, 1536, 512),
        (512, 1536, 4096),
    ],
)
def test_unaligned_edges_are_written(tmp_path: Path, sector: int, start: int, end: int) -> None:
    with devices.loop(tmp_path, 4 * MiB, sector=sector) as device:
        with ladder(device, zeroing.SPARSE, sector) as (climb, written):
            climb.zero(start, end)
        assert sum(stop - begin for begin, stop in written.ranges) < 2 * sector
        check(device, start, end)


def test_device_without_unmap_is_zeroed_by_the_kernel(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "cdi_worker.images.targets.zeroing")
    with devices.filesystem("ramfs", tmp_path) as point:
        backing = devices.fill(point / "disk", 4 * MiB)
        with devices.attached(backing, direct=False) as device:
            with ladder(device, zeroing.SPARSE, 512) as (climb, written):
                climb.zero(MiB, 2 * MiB)
                climb.zero(2 * MiB, 3 * MiB)
            assert written.ranges == []
            check(device, MiB, 3 * MiB)
    assert refusals(caplog) == ["punch_hole"]


@pytest.mark.parametrize(
    ("kind", "rungs", "refused"),
    [
        ("ext4", zeroing.SPARSE, []),
        ("ext4", zeroing.ALLOCATED, []),
        ("ext4", (kernel.zero_out,), ["zero_out"]),
        ("tmpfs", zeroing.ALLOCATED, ["zero_range"]),
        ("ramfs", zeroing.SPARSE, ["punch_hole", "zero_range", "zero_out"]),
    ],
)
def test_refused_way_is_not_tried_again(
    tmp_path: Path,
    kind: str,
    rungs: tuple[zeroing.Rung, ...],
    refused: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "cdi_worker.images.targets.zeroing")
    with devices.filesystem(kind, tmp_path) as point:
        path = devices.fill(point / "disk", 4 * MiB)
        with ladder(path, rungs, 512) as (climb, written):
            climb.zero(0, MiB)
            climb.zero(MiB, 2 * MiB)
        assert bool(written.ranges) == (len(refused) == len(rungs))
        check(path, 0, 2 * MiB)
    assert refusals(caplog) == refused


def test_error_is_not_a_refusal(tmp_path: Path) -> None:
    path = devices.fill(tmp_path / "disk", MiB)
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            zeroing.Ladder(fd, zeroing.SPARSE, 512, Written(fd)).zero(0, MiB)
    finally:
        os.close(fd)


def test_refusal_within_a_long_range_is_handled(tmp_path: Path) -> None:
    """The rest of a range, from where one way is refused, is zeroed by the next way."""
    size, middle = 1 << 30, 512 * MiB
    spots = [0, 20 * MiB, middle - 512, middle, middle + 17 * MiB, 800 * MiB, size - 512]
    path = tmp_path / "disk"
    with path.open("wb") as file:
        file.truncate(size)
        for spot in spots:
            os.pwrite(file.fileno(), devices.DIRT * 512, spot)

    def refuse_half_way(fd: int, offset: int, length: int) -> None:
        """Punch holes up to the middle of the file, then refuse."""
        if offset >= middle:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        kernel.punch_hole(fd, offset, length)

    with ladder(path, (refuse_half_way, kernel.zero_range), 512) as (climb, written):
        climb.zero(0, size)
    assert written.ranges == []
    with path.open("rb") as file:
        assert all(os.pread(file.fileno(), 512, spot) == bytes(512) for spot in spots)
