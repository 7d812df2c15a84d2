"""The result of the bench as a page with plots."""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.bench.measure import Cost
from tests.support import processes

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. ``ratio`` is what ``aim`` bounds; ``limits``: each stage by itself."""

    name: str
    target: str
    ours: Cost
    theirs: Cost | None = None
    aim: float | None = None
    ratio: float | None = None
    limits: Mapping[str, Cost] = dataclasses.field(default_factory=dict)
    note: str = ""

    def cells(self) -> list[str]:
        theirs = self.theirs
        slowest = max(self.limits.items(), key=lambda item: item[1].wall, default=None)
        met = (
            ""
            if self.aim is None or self.ratio is None
            else " ok"
            if self.ratio <= self.aim
            else " **missed**"
        )
        return [
            self.name,
            self.target,
            f"{self.ours.wall:.2f}",
            f"{theirs.wall:.2f}" if theirs else "",
            (f"{self.ratio:.2f}" if self.ratio is not None else "") + (f" {self.note}" if self.note else ""),
            f"{self.aim}{met}" if self.aim is not None else "",
            f"{slowest[0]} {slowest[1].wall:.2f}" if slowest else "",
            f"{self.ours.cpu:.2f}"
            + (f" ({self.ours.cpu / theirs.cpu:.2f})" if theirs and theirs.cpu else ""),
            f"{self.ours.memory / MIB:.0f}",
        ]

    def line(self) -> str:
        return " | ".join(self.cells())


HEAD = ["row", "target", "s", "rival s", "ratio", "aim", "slowest stage s", "CPU s (ratio)", "MiB"]


def write(
    path: Path, rows: Sequence[Row], growth: Mapping[str, Sequence[tuple[int, Cost]]], rounds: int
) -> None:
    """Write the page and its plots beside it."""
    plots = path.parent / "benchmarks"
    plots.mkdir(exist_ok=True)
    _plot_times(plots / "times.svg", rows)
    _plot_growth(plots / "memory.svg", growth, "peak memory, MiB", lambda cost: cost.memory / MIB)
    _plot_growth(plots / "growth.svg", growth, "seconds", lambda cost: cost.wall)
    table = [HEAD, ["---"] * len(HEAD), *(row.cells() for row in rows)]
    text = PAGE.format(
        date=dt.datetime.now(dt.UTC).date(),
        machine=f"{os.cpu_count()} cores, {_cpu()}, Linux {platform.release()}",
        versions=_versions(),
        rounds=rounds,
        table="\n".join("| " + " | ".join(cells) + " |" for cells in table),
    )
    path.write_text(text)


PAGE = """\
# Benchmarks

Written by `make bench` on {date}: {machine}. {versions}. Medians of {rounds} rounds, each
row alternating with its rival in one run; read the ratios, the machine is shared and noisy.

The disk is 2 GiB, an ext4 file system with 400 MiB of real files from /usr, served by nginx on
loopback. The rival is what a user would type: `curl | dd bs=1M iflag=fullblock conv=sparse,fsync` with
`pigz -dc`, `xz -T0 -dc` or `zstd -dc` between for raw disks (no `sparse` on a block device),
`curl -o F && qemu-img convert -m 16 -W` and a sync for formats. Uploads are sent by `curl -T`, to ours
and to a server that throws the bytes away, both over TLS; the rival of a clone is `curl -T` of all bytes
of its device to that server. *slowest stage* is the slowest single stage of the rival by itself:
no pipeline of these parts can be faster. CPU counts children; MiB is the
peak of anonymous memory of all processes together. [What holds what is missed](benchmarks-profile.md).

{table}

![time against the rivals](benchmarks/times.svg)

## No growth of memory with the size of the image

![memory against the size of the image](benchmarks/memory.svg)
![time against the size of the image](benchmarks/growth.svg)
"""


def _plot_times(path: Path, rows: Sequence[Row]) -> None:
    from matplotlib import pyplot as plt

    shown = [row for row in rows if row.theirs is not None]
    places = range(len(shown))
    figure, axes = plt.subplots(figsize=(9, 0.4 * len(shown) + 1))
    axes.barh([place + 0.2 for place in places], [row.ours.wall for row in shown], 0.4, label="cdi-worker")
    axes.barh(
        [place - 0.2 for place in places],
        [row.theirs.wall for row in shown if row.theirs],
        0.4,
        label="rival",
    )
    axes.set_yticks(list(places), [f"{row.name}, {row.target}" for row in shown])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def _plot_growth(path, growth, label, value) -> None:  # type: ignore[no-untyped-def]
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    for name, costs in growth.items():
        axes.plot(
            [size / (1 << 30) for size, _ in costs], [value(cost) for _, cost in costs], "o-", label=name
        )
    axes.set_xlabel("size of the disk, GiB")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()
    )


def _versions() -> str:
    tools = {"qemu-img": "--version", "curl": "--version", "xz": "--version", "zstd": "--version"}
    said = [processes.run(tool, flag).stdout.splitlines()[0] for tool, flag in tools.items()]
    return "; ".join([f"Python {platform.python_version()}", *said])
