"""The rows of many imports at once, and of disks with many extents."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.bench import inputs, measure, report
from tests.bench.measure import Cost
from tests.support import devices, processes, servers, worker

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
#: Bytes of a data cluster, and of a table. With 64 KiB, a million extents were 64 GiB of data; with 4 KiB,
#: the first table of 16 TiB were larger than QEMU accepts (32 MiB).
CLUSTER = 8 << 10
#: Virtual bytes for each extent of the disks that grow to 16 TiB and a million extents.
SPARSE = 16 * MIB


class Crowd:
    """``count`` imports at once from one nginx to one disk, compared with one import alone.

    The imports are of the same image, so that the disk that is read is not measured.
    """

    def __init__(self, directory: Path, web: servers.Web, count: int, size: int) -> None:
        self._directory = directory / "crowd"
        self._url = web.url(inputs.noise(directory, size))
        self._count = count
        self._size = size

    def rows(self) -> dict[str, Callable[[], report.Row]]:
        """Return the rows by name; both are of one measurement."""
        return {"crowd throughput": self.throughput, "crowd fairness": self.fairness}

    def throughput(self) -> report.Row:
        """Compare the throughput of all together with that of one."""
        crowd, alone = self._measured
        total = self._count * self._size / crowd.cost.wall / MIB
        single = self._size / alone.cost.wall / MIB
        note = (
            f"time by {self._count} times one; {total:.0f} MiB/s, one {single:.0f}; "
            f"{crowd.descriptors} descriptors each (one: {alone.descriptors}), MiB of the largest"
        )
        ratio = crowd.cost.wall / (self._count * alone.cost.wall)
        return report.Row(
            f"{self._count} imports at once", "file", crowd.cost, alone.cost, 1.0, ratio, note=note
        )

    def fairness(self) -> report.Row:
        """Compare the slowest with the fastest."""
        crowd, _ = self._measured
        ratio = max(crowd.walls) / min(crowd.walls)
        name = f"{self._count} imports at once: slowest / fastest"
        return report.Row(name, "file", crowd.cost, aim=1.5, ratio=ratio)

    @functools.cached_property
    def _measured(self) -> tuple[measure.Crowd, measure.Crowd]:
        return self._import(self._count), self._import(1)

    def _import(self, count: int) -> measure.Crowd:
        self._directory.mkdir(exist_ok=True)
        targets = [self._directory / f"disk-{number}" for number in range(count)]
        os.sync()
        try:
            return measure.together([_ours(self._url, target) for target in targets], timeout=3600)
        finally:
            for target in targets:
                target.unlink(missing_ok=True)


class Extents:
    """Disks of many extents of ``CLUSTER`` bytes: qcow2 over http to a sparse file.

    ``extents``: of the largest disk.
    """

    def __init__(self, directory: Path, web: servers.Web, extents: int) -> None:
        self._directory = directory
        self._web = web
        self._extents = extents

    def rows(self) -> dict[str, Callable[[], report.Row]]:
        """Return the rows by name."""
        return {"extents dense": self.dense, "extents sparse": self.sparse}

    def dense(self) -> report.Row:
        """Measure 1 TiB virtual with a million extents: one in each MiB, against an eighth of both."""
        small, large = (self._cost(MIB, self._extents // part) for part in (8, 1))
        return self._row("an extent in each MiB", MIB, small, large, 8)

    def sparse(self) -> report.Row:
        """Measure 16 TiB virtual with a million extents, against a sixteenth of both."""
        (_, small), *_, (_, large) = self.growth
        return self._row("an extent in each 16 MiB", SPARSE, small, large, 16)

    @functools.cached_property
    def growth(self) -> Sequence[tuple[int, Cost]]:
        """Virtual sizes up to 16 TiB, and what their imports cost."""
        counts = [self._extents // part for part in (16, 8, 4, 2, 1)]
        return [(count * SPARSE, self._cost(SPARSE, count)) for count in counts]

    def _row(self, name: str, spacing: int, small: Cost, large: Cost, factor: int) -> report.Row:
        size = self._extents * spacing / TIB
        microseconds = large.wall / self._extents * 1e6
        memory = large.memory / max(small.memory, 1)
        note = f"time an extent by that of 1/{factor}; {microseconds:.0f} us each, memory {memory:.2f} times"
        ratio = large.wall / factor / small.wall
        return report.Row(f"{size:.4g} TiB, {name}", "file", large, aim=1.25, ratio=ratio, note=note)

    def _cost(self, spacing: int, count: int) -> Cost:
        size = count * spacing
        with _image(self._directory, spacing, count) as image, _roomy(self._directory, size) as folder:
            return measure.run(_ours(self._web.url(image), folder / "disk.img"), timeout=3600)


@contextlib.contextmanager
def _image(directory: Path, spacing: int, count: int) -> Iterator[Path]:
    """Make a qcow2 image with a cluster of data in each ``spacing`` bytes; it is removed afterwards."""
    image, script = directory / "extents.qcow2", directory / "extents.commands"
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
        yield image
    finally:
        image.unlink(missing_ok=True)
        script.unlink(missing_ok=True)


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


def _ours(url: str, target: Path) -> list[str | Path]:
    return [*worker.COMMAND, "import", "--force", "--progress", "none", url, target]
