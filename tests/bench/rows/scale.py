"""Many imports at once, disks with many extents, and disks of growing size."""

from __future__ import annotations

import contextlib
import functools
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench import bench as benches
from tests.bench import inputs, measure
from tests.bench.bench import Bench, Sides, Verdict, Work
from tests.bench.measure import Cost
from tests.support import devices, processes

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
#: Bytes of a data cluster, and of a table. With 64 KiB, a million extents were 64 GiB of data; with 4 KiB,
#: the first table of 16 TiB were larger than QEMU accepts (32 MiB).
CLUSTER = 8 << 10
#: Virtual bytes for each extent of the disks that grow to 16 TiB and a million extents.
SPARSE = 16 * MIB
#: Parts of the largest disk with many extents.
PARTS = (16, 8, 4, 2, 1)
#: How much more time an extent of the larger disk may take.
FLAT = 1.25


@benches.row(
    "many imports at once",
    rival="one import alone; the ratio is to that many imports one after the other",
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
    with inputs.folder(bench.directory, "crowd") as folder:
        url = bench.web.url(inputs.noise(bench.directory, bench.scale.size))
        targets = [folder / f"disk-{number}" for number in range(count)]
        commands = [[*bench.prefix, *benches.importing(url, target)] for target in targets]
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
        url = bench.web.url(_image(bench.directory, spacing, number))
        with _roomy(bench.directory, number * spacing) as folder:
            return bench.run(benches.importing(url, folder / "disk.img"), timeout=3600)

    yield Sides(
        functools.partial(side, count),
        functools.partial(side, less) if factor > 1 else None,
        work=Work(count * CLUSTER, count * CLUSTER),
        verdict=verdict,
    )


def _declare(spacing: int, part: int, smaller: int, curve: str = "") -> None:
    scale = benches.Scale()
    size = scale.extents // part * spacing
    benches.add(
        f"{size // TIB} TiB, an extent in each {spacing // MIB} MiB",
        functools.partial(extents, spacing=spacing, part=part, smaller=smaller),
        rival=f"none: time for each extent of {CLUSTER >> 10} KiB, against the same with fewer extents",
        aim=FLAT,
        pod=False,
        curve=(curve, size) if curve else None,
    )


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
        benches.add(
            f"{_name} of {_size // MIB} MiB",
            functools.partial(growth, name=_name, size=_size),
            pod=False,
            curve=(_name, _size),
        )


def _image(directory: Path, spacing: int, count: int) -> Path:
    """Return a qcow2 image with a cluster of data in each ``spacing`` bytes."""
    path = directory / f"extents-{spacing >> 20}-{count}.qcow2"
    if path.exists():
        return path
    image, script = path.with_suffix(".part"), path.with_suffix(".commands")
    try:
        options = f"cluster_size={CLUSTER}"
        processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-o", options, image, str(count * spacing))
        with script.open("w") as stream:
            for number in range(count):
                # Not at the start of a table each time; never zeros.
                offset = number * spacing + number % (spacing // CLUSTER) * CLUSTER
                stream.write(f"write -q -P {1 + number % 255} {offset} {CLUSTER}\n")
        with script.open("rb") as commands:
            argv = ["qemu-io", "-f", "qcow2", "-t", "unsafe", image]
            subprocess.run(argv, stdin=commands, stdout=subprocess.DEVNULL, check=True)
    finally:
        script.unlink(missing_ok=True)
    return image.rename(path)


@contextlib.contextmanager
def _roomy(directory: Path, size: int) -> Iterator[Path]:
    """Mount a file system with space for a disk of ``size`` bytes.

    A file of ext4 has at most 16 TiB, one of XFS 8 EiB: the device of the second is a file of the first.
    """
    with (
        devices.filesystem("xfs", directory, 1 * TIB) as outer,
        devices.filesystem("xfs", outer, size + size // 16 + GIB) as inner,
    ):
        yield inner
