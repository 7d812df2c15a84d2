"""Many imports at once, and disks with many extents."""

from __future__ import annotations

import array
import contextlib
import functools
import os
import statistics
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from tests.bench import bench as benches
from tests.bench import inputs, measure, settings
from tests.bench.bench import Bench, Bound, Sides
from tests.bench.measure import Cost
from tests.support import devices, limits, servers

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
#: Bytes of a data cluster, and of a table. With 64 KiB, a million extents were 64 GiB of data; with 4 KiB,
#: the first table of 16 TiB were larger than QEMU accepts (32 MiB).
CLUSTER = 8 << 10
_COPIED = 1 << 63
#: Of the file system for these disks: 8 GiB of data, and its own tables.
_MEMORY = 14 * GIB
#: The imports at once, and the bytes of each.
IMPORTS, IMPORTED = 50, 128 * MIB
#: Bytes that nginx sends to one of many imports before another has its turn.
TURN = 128 << 10
#: How much more time an extent of the larger disk may take, and how much more memory all of them.
FLAT, GROWN = 1.25, 2.0


@benches.row(f"{IMPORTS} imports at once", rival="one alone", is_extra=True)
def crowd(bench: Bench) -> Iterator[Sides]:
    """Compare many imports of one image from one nginx to one disk with one that is alone."""
    crowds: list[measure.Crowd] = []

    def bounds(costs: Sequence[Cost]) -> list[Bound]:
        together, alone = costs
        spread = statistics.median(max(each.walls) / min(each.walls) for each in crowds)
        return [
            Bound("time by that of as many in a row", together.wall / (IMPORTS * alone.wall), 1.0),
            Bound("the slowest by the fastest", spread, 1.5),
        ]

    yield Sides(
        functools.partial(_crowd, bench, IMPORTS, crowds),
        functools.partial(_crowd, bench, 1, []),
        bounds=bounds,
    )


def _crowd(bench: Bench, count: int, kept: list[measure.Crowd]) -> Cost:
    """Run ``count`` imports, each in the control group of a pod.

    In one group for all, the scheduler divides the CPUs by threads: imports that have begun to read, with six
    threads, then slow down the start of the others.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(inputs.folder(bench.directory, "crowd"))
        web = stack.enter_context(benches.nginx(bench.directory, "crowd", servers.Settings(turn=TURN)))
        url = web.url(inputs.noise(bench.directory, IMPORTED))
        commands = []
        for number in range(count):
            pod = stack.enter_context(limits.cgroup(memory=settings.POD.memory, cpus=settings.POD.cpus))
            commands.append([*pod.prefix, *benches.importing(url, folder / f"disk-{number}")])
        kept.append(measure.together(commands, timeout=3600))
    return kept[-1].cost


def extents(bench: Bench, spacing: int, count: int, fewer: int) -> Iterator[Sides]:
    """Measure a disk with an extent of ``CLUSTER`` bytes in each ``spacing``, against a part of it."""

    def bounds(costs: Sequence[Cost]) -> list[Bound]:
        large, small = costs
        each = (large.wall / count) / (small.wall / fewer)
        return [
            Bound(f"time for an extent by that of 1/{count // fewer}", each, FLAT),
            Bound("memory by that", large.memory / small.memory, GROWN),
        ]

    def side(number: int) -> Cost:
        with (
            _image(bench.directory, spacing, number) as image,
            _roomy(bench.directory, number * spacing) as folder,
        ):
            os.sync()
            argv = benches.importing(bench.web.url(image), folder / "disk.img")
            return bench.run(argv, timeout=3600)

    yield Sides(functools.partial(side, count), functools.partial(side, fewer), bounds=bounds)


for _spacing, _count, _fewer in ((MIB, 1 << 20, 1 << 17), (64 * MIB, 1 << 18, 1 << 14)):
    benches.row(
        f"{_count * _spacing // TIB} TiB, an extent in each {_spacing // MIB} MiB",
        rival="with fewer extents",
        is_extra=True,
    )(functools.partial(extents, spacing=_spacing, count=_count, fewer=_fewer))


@contextlib.contextmanager
def _image(directory: Path, spacing: int, count: int) -> Iterator[Path]:
    """Make a qcow2 image with a cluster of data in each ``spacing`` bytes; it is removed afterwards.

    Tables and data alternate in the file, as when a guest writes. qemu-io would need half an hour for a
    million tables.
    """
    path = directory / f"extents-{os.urandom(4).hex()}.qcow2"
    try:
        with path.open("wb") as stream:
            _write_image(stream, spacing, count)
        yield path
    finally:
        path.unlink(missing_ok=True)


def _write_image(stream: BinaryIO, spacing: int, count: int) -> None:
    """Write header, first-level table and refcounts, then each second-level table with its data.

    The format is that of QEMU's docs/interop/qcow2.txt.
    """
    reach = CLUSTER // 8 * CLUSTER  # bytes of the disk that a second-level table maps
    each = max(1, reach // spacing)  # extents of a table
    tables = -(-count // each)
    directory = -(-(count * spacing) // reach)
    level1 = -(-directory * 8 // CLUSTER)
    per_block = CLUSTER // 2  # clusters of a block of refcounts
    clusters = 1 + level1 + tables + count
    blocks = -(-clusters // (per_block - 2))
    first = 1 + level1 + -(-blocks * 8 // CLUSTER) + blocks
    clusters += first - 1 - level1
    level2 = [(first + table * (1 + each)) * CLUSTER for table in range(tables)]
    counts = array.array("Q", bytes(directory * 8))
    for table, offset in enumerate(level2):
        counts[table * each * spacing // reach] = _COPIED | offset
    place = 1 + level1 + -(-blocks * 8 // CLUSTER)
    header = (b"QFI\xfb", 3, 0, 0, CLUSTER.bit_length() - 1, count * spacing, 0, directory, CLUSTER)
    more = ((1 + level1) * CLUSTER, place - 1 - level1, 0, 0, 0, 0, 0, 4, 104)
    stream.write(struct.pack(">4sIQIIQIIQ", *header) + struct.pack(">QIIQQQQII", *more))
    _pad(stream, CLUSTER)
    stream.write(_big_endian(counts))
    _pad(stream, (1 + level1) * CLUSTER)
    stream.write(_big_endian(array.array("Q", [(place + block) * CLUSTER for block in range(blocks)])))
    _pad(stream, place * CLUSTER)
    stream.write(_big_endian(array.array("H", [1]) * clusters))
    _pad(stream, first * CLUSTER)
    for table, offset in enumerate(level2):
        numbers = range(table * each, min(count, (table + 1) * each))
        entries = array.array("Q", bytes(CLUSTER))
        for index, number in enumerate(numbers, 1):
            # Not at the start of each part.
            guest = number * spacing + number % (spacing // CLUSTER) * CLUSTER
            entries[guest % reach // CLUSTER] = _COPIED | offset + index * CLUSTER
        stream.write(_big_endian(entries))
        stream.writelines(bytes([1 + number % 255]) * CLUSTER for number in numbers)


def _big_endian(values: array.array[int]) -> bytes:
    values.byteswap()
    return values.tobytes()


def _pad(stream: BinaryIO, end: int) -> None:
    stream.write(bytes(end - stream.tell()))


@contextlib.contextmanager
def _roomy(directory: Path, size: int) -> Iterator[Path]:
    """Mount a file system in memory with space for a disk of ``size`` bytes.

    In memory, so that small writes all over a disk are not limited by that disk. XFS,
    because a file of ext4 has at most 16 TiB.
    """
    with (
        devices.filesystem("tmpfs", directory, _MEMORY) as outer,
        devices.filesystem("xfs", outer, size + size // 16 + GIB) as inner,
    ):
        yield inner
