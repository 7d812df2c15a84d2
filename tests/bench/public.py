"""Compare the worker with the tools that people use: ``python -m tests.bench.public``.

Every row alternates with its rivals, one warm-up first. The means, deviations and extremes are printed as
hyperfine does, and ``docs/about/benchmarks.md`` is written. ``CDI_GO_WORKER`` adds CDI's importer (``go``).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import math
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.bench import bench as benches
from tests.bench import inputs, report, rows, run
from tests.bench.bench import Bench, Row
from tests.bench.measure import Cost
from tests.bench.settings import MACHINE

assert rows  # declares all rows
#: The rows, by name and target, and what they are compared with, as a command.
ROWS: Final = {
    "raw, file": "curl | dd",
    "raw.gz, file": "curl | pigz -dc | dd",
    "raw.zst, file": "curl | zstd -dc | dd",
    "raw.xz, file": "curl | xz -T0 -dc | dd",
    "qcow2, file": "curl; qemu-img convert -m 16 -W",
    "c.qcow2, file": "curl; qemu-img convert -m 16 -W",
    "vmdk, file": "curl; qemu-img convert -m 16 -W",
    "vhdx, file": "curl; qemu-img convert -m 16 -W",
    "vmdk in an OVA, file": "curl | tar -x; qemu-img convert -m 16 -W",
    "raw, block": "curl | dd",
    "qcow2, block": "curl; qemu-img convert -m 16 -W",
    "vddk, file": "nbdkit and nbdcopy, as virt-v2v",
    "raw to qcow2, file": "curl; qemu-img convert -O qcow2 -m 16 -W",
    "qcow2 to qcow2, file": "curl; qemu-img convert -O qcow2 -m 16 -W",
    "qcow2 to compressed qcow2 (zstd), file": "curl; qemu-img convert -O qcow2 -c -m 16 -W",
    "oVirt, 5 ms, client library, file": "download of ovirt_imageio.client",
    "archive of small files of /usr, 96 MiB, file": "curl | tar -x",
}
OURS: Final = "cdi-worker"


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one command took in all rounds, in seconds."""

    command: str
    costs: Sequence[Cost]

    @property
    def mean(self) -> float:
        return statistics.fmean(cost.wall for cost in self.costs)

    @property
    def deviation(self) -> float:
        """The standard deviation of the sample."""
        return statistics.stdev(cost.wall for cost in self.costs) if len(self.costs) > 1 else 0.0

    @property
    def cpu(self) -> float:
        return statistics.fmean(cost.cpu for cost in self.costs)

    @property
    def memory(self) -> int:
        """The largest memory of all rounds, in bytes."""
        return max(cost.memory for cost in self.costs)

    def line(self, width: int) -> str:
        """Return a line for the terminal."""
        walls = [cost.wall for cost in self.costs]
        spread = f"{min(walls):7.3f} s … {max(walls):7.3f} s    {len(walls)} runs"
        return f"  {self.command:{width}}  {self.mean:7.3f} s ± {self.deviation:6.3f} s    {spread}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row: our figures, and those of its rivals."""

    name: str
    ours: Figures
    rivals: Sequence[Figures]

    def times(self, rival: Figures) -> tuple[float, float]:
        """Return how many times as long a rival takes, and the deviation of that."""
        ratio = rival.mean / self.ours.mean
        return ratio, ratio * math.hypot(*(each.deviation / each.mean for each in (rival, self.ours)))

    def __str__(self) -> str:
        shown = [self.ours, *self.rivals]
        width = max(len(each.command) for each in shown)
        lines = [self.name, *(each.line(width) for each in shown)]
        for rival in self.rivals:
            ratio, deviation = self.times(rival)
            lines.append(f"  {OURS} ran {ratio:.2f} ± {deviation:.2f} times as fast as {rival.command}")
        return "\n".join(lines)


def compare(bench: Bench, declared: Row) -> Comparison | str:
    """Measure a row. Return why it has no figures if a side fails."""
    with declared.open(bench) as sides:
        compared = [(OURS, sides.ours), (ROWS[declared.key], sides.rival), ("CDI's importer", sides.go)]
        given = [(name, side) for name, side in compared if side is not None]
        for _, side in given:
            side()
        measured = run.alternate(bench, [side for _, side in given])
    figures = []
    for (name, _), found in zip(given, measured, strict=True):
        if isinstance(found, str):
            return f"{declared.key}: {name} failed: {found}"
        figures.append(Figures(name, found))
    return Comparison(declared.key, figures[0], figures[1:])


def page(found: Sequence[Comparison], rounds: int, minutes: float) -> str:
    """Return the page of all comparisons."""
    pairs = [(each, rival) for each in found for rival in each.rivals if rival.command == ROWS[each.name]]
    ratios = [each.times(rival)[0] for each, rival in pairs]
    lines = [["disk, target", "compared with", "its time", OURS, "times as fast", "CPU", "memory"]]
    for each in found:
        for rival in each.rivals:
            ratio, deviation = each.times(rival)
            lines.append(
                [
                    each.name,
                    "`" + rival.command.replace("|", r"\|") + "`",
                    f"{rival.mean:.2f} ± {rival.deviation:.2f} s",
                    f"{each.ours.mean:.2f} ± {each.ours.deviation:.2f} s",
                    f"**{ratio:.2f}** ± {deviation:.2f}",
                    f"{each.ours.cpu / rival.cpu:.2f}",
                    f"{each.ours.memory >> 20} MiB",
                ]
            )
    return PAGE.format(
        mean=statistics.geometric_mean(ratios),
        least=min(ratios),
        most=max(ratios),
        count=len(ratios),
        cpu=statistics.geometric_mean([each.ours.cpu / rival.cpu for each, rival in pairs]),
        memory=max(each.ours.memory for each in found) >> 20,
        rounds=rounds,
        minutes=math.ceil(minutes),
        date=dt.datetime.now(dt.UTC).date(),
        machine=f"{os.cpu_count()} cores, {report.cpu()}, Linux {platform.release()}",
        versions=report.versions(),
        table=report.table(lines),
    )


PAGE = """\
# Benchmarks

- On this machine, cdi-worker is **{mean:.1f} times as fast** as the commands that people use instead: the
  geometric mean of {count} rows, from {least:.2f} to {most:.2f}.
- It needs {cpu:.2f} of their CPU time, and at most {memory} MiB of memory, whatever the size of the disk.
- Its time includes what most of them do not do: the image is checked before it is read, and the disk becomes
  usable only when all of it is on storage.
- Repeat it on a clean Debian 13, in about {minutes} minutes, as root, with 10 GiB of free space: `git clone`
  of this repository, then `make bench-public`. `CDI_GO_WORKER=DIRECTORY` adds CDI's own importer.
- Compare the ratios, not the seconds: all commands of a row alternate on one machine, here a small one.

{table}

Times are means of {rounds} runs ± their standard deviation, after one that is not counted. *CPU* is our CPU
time by that of the command; *memory* is our peak of anonymous memory. The disk is an ext4 file system of
2 GiB with 400 MiB of files from /usr, served by nginx on loopback. Every command ends with a sync.

Measured on {date}: {machine}. {versions}.

[Every row that we measure](benchmarks-rows.md), in pods and over slow networks too, and [why some are not
faster](benchmarks-profile.md), are for those who change the code.
"""


def main() -> None:
    """Measure the rows, print them, and write the page if all could be measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", help="only rows whose name contains this; write no page")
    parser.add_argument("--report", type=Path, default=Path("docs/about/benchmarks.md"))
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="for the disks (10 GiB)")
    given = parser.parse_args()
    # Devices and mounts must not be left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    directory = given.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    inputs.bytecode()
    began = time.monotonic()
    found: list[Comparison] = []
    failures: list[str] = []
    with benches.opened(directory, MACHINE, given.rounds, benches.Scale()) as bench:
        for row in benches.ROWS:
            if row.key not in ROWS or not any(part in row.key for part in given.only or [""]):
                continue
            compared = compare(bench, row)
            print(compared, flush=True)
            if isinstance(compared, str):
                failures.append(compared)
            else:
                found.append(compared)
    if failures:
        sys.exit("not every row has figures")
    if not given.only:
        given.report.write_text(page(found, given.rounds, (time.monotonic() - began) / 60))


if __name__ == "__main__":
    main()
