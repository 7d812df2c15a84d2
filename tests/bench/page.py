"""Write the figures of all rows as a page."""

from __future__ import annotations

import datetime as dt
import math
import os
import platform
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from tests.bench.compare import CDI, OURS, Comparison
from tests.support import processes


def page(found: Sequence[Comparison], rounds: int, minutes: float) -> str:
    """Return the page. Each row has figures of our side and of its rival."""
    full = [each for each in found if not each.row.is_least]
    ratios = [each.times(each.row.rival)[0] for each in full]
    return PAGE.format(
        mean=statistics.geometric_mean(ratios),
        least=min(ratios),
        most=max(ratios),
        count=len(ratios),
        cpu=statistics.geometric_mean([_cpu(each) for each in full]),
        memory=max(each.figures[OURS].memory for each in full) >> 20,
        rounds=rounds,
        minutes=math.ceil(minutes),
        date=dt.datetime.now(dt.UTC).date(),
        machine=f"{os.cpu_count()} cores, {_processor()}, Linux {platform.release()}",
        versions=_versions(),
        table=_table(found),
    )


def _table(found: Sequence[Comparison]) -> str:
    """Return a line for each row, with a column for CDI's worker if that was measured."""
    titles = ["disk, target", "compared with", "its time", OURS, "times as fast", "CPU", "memory"]
    has_cdi = any(CDI in each.figures for each in found)
    lines = [[*titles, *[CDI] * has_cdi]]
    lines.append(["---"] * len(lines[0]))
    lines += [[*_cells(each), *[_cdi(each)] * has_cdi] for each in found]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(each: Comparison) -> list[str]:
    ours, rival = each.figures[OURS], each.figures[each.row.rival]
    ratio, deviation = each.times(each.row.rival)
    # CPU and memory of the servers are not measured.
    usage = ["", ""] if each.row.is_least else [f"{_cpu(each):.2f}", f"{ours.memory >> 20} MiB"]
    return [
        each.row.key,
        "`" + rival.command.replace("|", r"\|") + "`" + ("¹" if each.row.is_least else ""),
        f"{rival.mean:.2f} ± {rival.deviation:.2f} s",
        f"{ours.mean:.2f} ± {ours.deviation:.2f} s",
        f"**{ratio:.2f}** ± {deviation:.2f}",
        *usage,
    ]


def _cdi(each: Comparison) -> str:
    """Return the time of CDI's worker, by ours."""
    if CDI not in each.figures:
        return "failed" if CDI in each.failures else ""
    figures, (ratio, _) = each.figures[CDI], each.times(CDI)
    return f"{figures.mean:.2f} ± {figures.deviation:.2f} s ({ratio:.2f})"


def _cpu(each: Comparison) -> float:
    """Return our CPU time by the rival's, of which a hundredth of a second is the least that is counted."""
    return max(each.figures[OURS].cpu, 0.01) / max(each.figures[each.row.rival].cpu, 0.01)


PAGE = """\
# Benchmarks

- On this machine, cdi-worker is **{mean:.1f} times as fast** as the commands that people use instead: the
  geometric mean of {count} rows, from {least:.2f} to {most:.2f}. It needs {cpu:.2f} of their CPU time, and at
  most {memory} MiB of memory, whatever the size of the disk.
- Its time includes what most of them do not do: the image is checked before it is read, and the disk becomes
  usable only when all of it is on storage.
- Compare the ratios, not the seconds. Repeat it on a clean Debian 13, in about {minutes} minutes, as root,
  with 10 GiB of free space: `git clone` of this repository, then `make bench`.

{table}

Times are means of {rounds} runs ± their standard deviation, after one that is not counted. *CPU* is our CPU
time by that of the command; *memory* is our peak of anonymous memory. The disk is an ext4 file system of
2 GiB with 400 MiB of files from /usr, served by nginx on loopback. Every command ends with a sync.
A command with ¹ sends all bytes of the disk to a server that discards them, which is less than is needed: its
row is not in the mean.

Measured on {date}: {machine}. {versions}.
"""


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (each.partition(": ")[2] for each in lines if each.startswith("model name"))
    return next(names, platform.machine())


def _versions() -> str:
    """Return the versions of the programs that are measured."""
    tools = ("qemu-img", "curl", "xz", "zstd")
    found = {tool: re.search(r"\d+(?:\.\d+)+", processes.run(tool, "--version").stdout) for tool in tools}
    named = [f"{tool} {version[0] if version else ''}" for tool, version in found.items()]
    return ", ".join([f"Python {platform.python_version()}", *named])
