"""What grows: images of many extents, and many imports at once."""

from __future__ import annotations

import array
import functools
import os
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from tests.bench import bench as benches
from tests.bench import inputs, measure
from tests.bench.bench import Bench, Sides
from tests.bench.measure import Cost
from tests.support import devices

MIB, GIB = 1 << 20, 1 << 30
#: Bytes of a cluster of data, and of a table.
CLUSTER = 8 << 10
#: Imports at once.
CROWD = 50
_COPIED = 1 << 63


def extents(bench: Bench, spacing: int, count: int) -> Iterator[Sides]:
    """Measure a qcow2 image with ``count`` extents, one in each ``spacing`` bytes."""
    image = _image(bench.directory, spacing, count)
    # In memory, as the disk would limit small writes. XFS frees the space of a removed disk later.
    with (
        devices.filesystem("tmpfs", bench.directory, 8 * GIB) as outer,
        devices.filesystem("xfs", outer, 2 * count * spacing + GIB) as folder,
    ):
        disk, url = folder / "disk.img", bench.web.url(image)
        convert = f"qemu-img convert -f qcow2 -O raw {bench.temporary} {disk} && sync {disk}"
        rival = f"curl -sf {url} -o {bench.temporary} && {convert}"
        yield Sides(bench.imports(url, disk), bench.shell(rival, disk))
    image.unlink()


for _count, _spacing in ((100_000, MIB), (32 << 10, 64 * MIB)):
    benches.row(
        f"qcow2, {_count} extents, one in each {_spacing // MIB} MiB",
        rival="curl; qemu-img convert",
        more=True,
    )(functools.partial(extents, spacing=_spacing, count=_count))


@benches.row(f"{CROWD} imports at once", rival="one after the other", more=True)
def crowd(bench: Bench) -> Iterator[Sides]:
    """Measure imports of one image to as many disks."""
    url = bench.web.url(inputs.noise(bench.directory, 32 * MIB))
    with inputs.folder(bench.directory, "crowd") as folder:
        commands = [benches.importing(url, folder / f"{number}.img") for number in range(CROWD)]

        yield Sides(functools.partial(together, commands, CROWD), functools.partial(together, commands, 1))


def together(commands: Sequence[Sequence[str | Path]], at_once: int) -> Cost:
    """Measure commands, so many at once."""
    before, busy, began = os.times(), measure.busy(), time.perf_counter()
    for first in range(0, len(commands), at_once):
        some = [
            subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for argv in commands[first : first + at_once]
        ]
        statuses = [each.wait() for each in some]
        assert not any(statuses)
    after = os.times()
    cpu = sum(after[2:4]) - sum(before[2:4])
    return Cost(time.perf_counter() - began, cpu, 0, measure.busy() - busy)


def _image(directory: Path, spacing: int, count: int) -> Path:
    """Make a qcow2 image with a cluster of data in each ``spacing`` bytes.

    Tables and data alternate in the file, as when a guest writes. qemu-io would need minutes. Its refcounts
    are missing: they are not read.
    """
    path = directory / f"extents-{count}.qcow2"
    with path.open("wb") as stream:
        _write(stream, spacing, count)
    return path


def _write(stream: BinaryIO, spacing: int, count: int) -> None:
    """Write header, first-level table, and each second-level table with its data (docs/interop/qcow2.txt)."""
    reach = CLUSTER // 8 * CLUSTER  # bytes of the disk that a second-level table maps
    each = max(1, reach // spacing)  # extents of a table
    first = array.array("Q", bytes(8 * -(-count * spacing // reach)))
    start = 2 * CLUSTER + -(-8 * len(first) // CLUSTER) * CLUSTER
    tables = range(start, start + -(-count // each) * (1 + each) * CLUSTER, (1 + each) * CLUSTER)
    for number, table in enumerate(tables):
        first[number * each * spacing // reach] = _COPIED | table
    fields = (b"QFI\xfb", 3, 0, 0, CLUSTER.bit_length() - 1, count * spacing, 0, len(first), 2 * CLUSTER)
    header = struct.pack(">4sIQIIQIIQ", *fields) + struct.pack(
        ">QIIQQQQII", CLUSTER, 1, 0, 0, 0, 0, 0, 4, 104
    )
    stream.write(header.ljust(2 * CLUSTER, b"\0"))
    stream.write(_big_endian(first).ljust(start - 2 * CLUSTER, b"\0"))
    for table, offset in enumerate(tables):
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
