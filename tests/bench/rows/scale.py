"""Many imports at once, disks with many extents, and disks of growing size."""

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
from tests.bench.bench import Bench, Sides, Verdict, Work
from tests.bench.measure import Cost
from tests.support import devices, limits, servers

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
#: Bytes of a data cluster, and of a table. With 64 KiB, a million extents were 64 GiB of data; with 4 KiB,
#: the first table of 16 TiB were larger than QEMU accepts (32 MiB).
CLUSTER = 8 << 10
#: Virtual bytes for each extent of the disks that grow to 16 TiB and a quarter of a million extents.
SPARSE = 64 * MIB
_COPIED = 1 << 63
#: Of the file system for these disks: 8 GiB of data, and its own tables.
_MEMORY = 14 * GIB
#: Of the extents of the densest disk.
PARTS = (64, 32, 16, 8, 4)
#: Bytes that nginx sends to one of many imports before another has its turn.
TURN = 128 << 10
#: How much more time an extent of the larger disk may take.
FLAT = 1.25


@benches.row(
    "many imports at once",
    rival="one import alone in its pod; the ratio is to that many imports one after the other",
    aim=1.0,
    pod=False,
)
def throughput(bench: Bench) -> Iterator[Sides]:
    """Compare the throughput of many imports, of one image from one nginx to one disk, with that of one."""
    crowds: dict[int, list[measure.Crowd]] = {bench.scale.imports: [], 1: []}
    bytes_ = bench.scale.imports * bench.scale.size

    def verdict(costs: Sequence[Cost]) -> Verdict:
        together, alone = costs
        descriptors = [max(crowd.descriptors for crowd in found) for found in crowds.values()]
        note = (
            f"time by {bench.scale.imports} times one; {bytes_ / together.wall / MIB:.0f} MiB/s, one "
            f"{bench.scale.size / alone.wall / MIB:.0f}; {descriptors[0]} descriptors each "
            f"(one: {descriptors[1]})"
        )
        return together.wall / (bench.scale.imports * alone.wall), note

    yield Sides(
        functools.partial(_crowd, bench, bench.scale.imports, crowds[bench.scale.imports]),
        functools.partial(_crowd, bench, 1, crowds[1]),
        work=Work(bytes_, bytes_),
        verdict=verdict,
    )


@benches.row(
    "many imports at once: slowest / fastest", rival="none: the slowest by the fastest", aim=1.5, pod=False
)
def fairness(bench: Bench) -> Iterator[Sides]:
    """Compare the slowest of many imports at once with the fastest."""
    crowds: list[measure.Crowd] = []
    bytes_ = bench.scale.imports * bench.scale.size
    yield Sides(
        functools.partial(_crowd, bench, bench.scale.imports, crowds),
        work=Work(bytes_, bytes_),
        verdict=lambda _: (
            statistics.median(max(crowd.walls) / min(crowd.walls) for crowd in crowds),
            "slowest / fastest",
        ),
    )


def _crowd(bench: Bench, count: int, kept: list[measure.Crowd]) -> Cost:
    """Run ``count`` imports, each in the control group of a pod.

    In one group for all, the scheduler divides the CPUs by threads: imports that have begun to read, with six
    threads, then slow down the start of the others.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(inputs.folder(bench.directory, "crowd"))
        web = stack.enter_context(benches.nginx(bench.directory, "crowd", servers.Settings(turn=TURN)))
        url = web.url(inputs.noise(bench.directory, bench.scale.size))
        commands = []
        for number in range(count):
            pod = stack.enter_context(limits.cgroup(memory=settings.POD.memory, cpus=settings.POD.cpus))
            commands.append([*pod.prefix, *benches.importing(url, folder / f"disk-{number}")])
        kept.append(measure.together(commands, timeout=3600))
    return kept[-1].cost


def extents(bench: Bench, spacing: int, part: int, smaller: int) -> Iterator[Sides]:
    """Measure a disk with an extent of ``CLUSTER`` bytes in each ``spacing``, against a part of it."""
    count, less = (bench.scale.extents // each for each in (part, smaller))
    factor = count // less

    def verdict(costs: Sequence[Cost]) -> Verdict:
        large, small = costs[0], costs[-1]
        memory = large.memory / max(small.memory, 1)
        each = f"{large.wall / count * 1e6:.0f} us an extent, memory {memory:.2f} times"
        return large.wall / factor / small.wall, f"time an extent by that of 1/{factor}; {each}"

    def side(number: int) -> Cost:
        with (
            _image(bench.directory, spacing, number) as image,
            _roomy(bench.directory, number * spacing) as folder,
        ):
            os.sync()
            argv = benches.importing(bench.web.url(image), folder / "disk.img")
            return bench.run(argv, timeout=3600)

    yield Sides(
        functools.partial(side, count),
        functools.partial(side, less) if factor > 1 else None,
        work=Work(count * CLUSTER, count * CLUSTER),
        verdict=verdict,
    )


def _declare(spacing: int, part: int, smaller: int, curve: str = "") -> None:
    scale = benches.Scale()
    size = scale.extents // part * spacing
    benches.row(
        f"{size // TIB} TiB, an extent in each {spacing // MIB} MiB",
        rival=f"none: time for each extent of {CLUSTER >> 10} KiB, against the same with fewer extents",
        aim=FLAT,
        pod=False,
        curve=(curve, size) if curve else None,
    )(functools.partial(extents, spacing=spacing, part=part, smaller=smaller))


_declare(MIB, 1, 8)
for _part in PARTS:
    _declare(SPARSE, _part, PARTS[0], f"qcow2, an extent of {CLUSTER >> 10} KiB in each {SPARSE >> 20} MiB")


def growth(bench: Bench, name: str, size: int) -> Iterator[Sides]:
    """Measure time and memory against the size of the image."""
    raw = inputs.disk(bench.directory, size, size // 5)
    path = raw if name == "raw" else inputs.form(raw, name)
    yield Sides(bench.imports(bench.web.url(path), bench.file), work=Work(path.stat().st_size, size // 5))


for _name in ("raw", "raw.gz", "c.qcow2"):
    for _size in (512 * MIB, GIB, 2 * GIB, 4 * GIB):
        benches.row(f"{_name} of {_size // MIB} MiB", pod=False, curve=(_name, _size))(
            functools.partial(growth, name=_name, size=_size)
        )


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
