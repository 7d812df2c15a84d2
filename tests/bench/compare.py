"""Measure one row, side after side in turns, and compare the figures."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

import pytest

from tests.bench.bench import Bench, Row, Side
from tests.bench.measure import Cost

OURS: Final = "cdi-worker"
CDI: Final = "CDI's importer"
BEFORE: Final = "before"
#: Characters of a failure that are shown.
_LENGTH = 200
#: A round of more seconds is the only one.
_LONG: Final = 60
#: The deviation, as a part of the mean, below which a side is stable.
_STABLE: Final = 0.05


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
    def median(self) -> Cost:
        """The medians of all rounds, and the largest memory."""
        return Cost(
            statistics.median(cost.wall for cost in self.costs),
            statistics.median(cost.cpu for cost in self.costs),
            self.memory,
        )

    @property
    def memory(self) -> int:
        """The largest memory of all rounds, in bytes."""
        return max(cost.memory for cost in self.costs)

    @property
    def busy(self) -> Mapping[str, float]:
        """The parts of the time in which a CPU and a disk were busy, the work of servers included."""
        wall = sum(cost.wall for cost in self.costs)
        own = min(1, sum(cost.cpu for cost in self.costs) / wall)
        machine = sum(cost.busy for cost in self.costs) / (os.cpu_count() or 1) / wall
        return {"CPU": max(own, machine), "disk": sum(cost.disk for cost in self.costs) / wall}

    @property
    def bound_by(self) -> str:
        """What was busy most of the time; nothing was while all waited for the network."""
        return ", ".join(name for name, part in self.busy.items() if part >= 0.5) or "network"

    def line(self, width: int) -> str:
        """Return a line for the terminal."""
        walls = [cost.wall for cost in self.costs]
        spread = f"{min(walls):7.3f} s … {max(walls):7.3f} s    n={len(walls)}"
        more = f"CPU {self.cpu:6.3f} s    {self.memory >> 20:4} MiB    {self.bound_by}"
        return f"  {self.command:{width}}  {self.mean:7.3f} s ± {self.deviation:6.3f} s    {spread}    {more}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What a row has shown: the figures of its sides, and why others have none."""

    row: Row
    figures: Mapping[str, Figures]
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    bound: float = 0

    @property
    def is_right(self) -> bool:
        """Return whether every side but CDI's has figures."""
        return self.failures.keys() <= {CDI}

    @property
    def bound_by(self) -> str:
        """What our side was bound by; by the network whose bytes took most of the time."""
        ours = self.figures[OURS]
        # Whatever else was busy: the wire itself is a program.
        return "network" if self.bound >= ours.mean / 2 else ours.bound_by

    def times(self, other: str) -> tuple[float, float]:
        """Return how many times as long another side takes, and the deviation of that."""
        both = self.figures[other], self.figures[OURS]
        ratio = both[0].mean / both[1].mean
        return ratio, ratio * math.hypot(*(each.deviation / each.mean for each in both))

    def __str__(self) -> str:
        width = max(map(len, self.figures), default=0)
        lines = [self.row.key, *(each.line(width) for each in self.figures.values())]
        others = [name for name in self.figures if name not in {OURS, BEFORE}]
        for other in others if OURS in self.figures else ():
            ratio, deviation = self.times(other)
            lines.append(f"  {OURS} ran {ratio:.2f} ± {deviation:.2f} times as fast as {other}")
        if self.bound and OURS in self.figures:
            ratio = self.figures[OURS].median.wall / self.bound
            lines.append(f"  {OURS} takes {ratio:.2f} of the least of {self.bound:.3f} s (median)")
        if {OURS, BEFORE} <= self.figures.keys():
            now, then = (self.figures[name].median for name in (OURS, BEFORE))
            cpu = f" and {now.cpu / then.cpu:.2f} of the CPU time" if then.cpu else ""
            lines.append(f"  {OURS} takes {now.wall / then.wall:.2f} of the time{cpu} of {BEFORE} (medians)")
        lines += [f"  {name} failed: {failure}" for name, failure in self.failures.items()]
        return "\n".join(lines)


def row(bench: Bench, declared: Row) -> Comparison:
    """Measure a row; a failure of a side is part of the result, one of a server at its end is not."""
    found = None
    try:
        with declared.open(bench) as sides:
            if bench.is_alone:
                sides = dataclasses.replace(sides, rival=None, cdi=None)  # noqa: PLW2901
            names = {OURS: sides.ours, declared.rival or "alone": sides.rival, CDI: sides.cdi}
            names[BEFORE] = bench.earlier(sides.ours)
            given = {name: side for name, side in names.items() if side is not None}
            measured = dict(zip(given, alternate(bench, [*given.values()]), strict=True))
            failures = {name: costs for name, costs in measured.items() if isinstance(costs, str)}
            figures = {
                name: Figures(name, costs) for name, costs in measured.items() if not isinstance(costs, str)
            }
            found = Comparison(declared, figures, failures, sides.bound)
    except pytest.skip.Exception as err:
        return Comparison(declared, {}, {OURS: f"not run: {err}"})
    except Exception as err:  # noqa: BLE001  the other rows must still be measured
        failure = _short(f"not run: {type(err).__name__}: {err}")
        return found or Comparison(declared, {}, {OURS: failure})
    return found


def alternate(bench: Bench, sides: Sequence[Side]) -> list[list[Cost] | str]:
    """Measure all sides in turn; return the costs of each. One that fails ends with its message.

    Of several rounds, a first one is not counted. A round of more than a minute is the only one.
    """
    costs: list[list[Cost]] = [[] for _ in sides]
    failures: dict[int, str] = {}
    while True:
        for number, side in enumerate(sides):
            if number in failures:
                continue
            # Only this file system: others on the machine may write a lot.
            subprocess.run(["sync", "--file-system", bench.file.parent], check=True)
            before = bench.group.killed() if bench.group else 0
            try:
                costs[number].append(side())
            except Exception as err:  # noqa: BLE001  whatever a side does wrong is its result
                killed = bench.group is not None and bench.group.killed() > before
                failures[number] = ("killed for memory; " if killed else "") + _short(str(err))
        measured = [each for number, each in enumerate(costs) if number not in failures]
        is_only = bench.rounds == 1 or sum(each[0].wall for each in measured) > _LONG
        counted = [each[not is_only :] for each in measured]
        rounds = min(map(len, counted), default=bench.rounds)
        if is_only or rounds >= bench.rounds:
            break
        if 0 < bench.enough <= rounds and all(map(_is_stable, counted)):
            break
    return [failures.get(number) or each[not is_only :] for number, each in enumerate(costs)]


def _is_stable(costs: Sequence[Cost]) -> bool:
    """Return whether the times differ little."""
    walls = [cost.wall for cost in costs]
    return statistics.stdev(walls) <= _STABLE * statistics.fmean(walls)


def _short(text: str) -> str:
    """Return the end of a message, which says why, in one line."""
    return " ".join(text.split())[-_LENGTH:]
