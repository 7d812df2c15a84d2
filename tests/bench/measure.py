"""Run a command and measure its cost."""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of wall clock and of CPU, and the largest memory of all samples, in bytes.

    CPU counts the command and all its children, not the kernel's own threads. Memory is the sum of
    the proportional set sizes (smaps_rollup, Pss without that of files) of the command and
    its children, sampled every 20 ms.
    """

    wall: float
    cpu: float
    memory: int


def run(argv: Sequence[str | Path], *, timeout: float = 900) -> Cost:
    """Run one command; raise with its output if it fails."""
    before = os.times()
    started = time.perf_counter()
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        sampler = _Sampler(process.pid)
        sampler.start()
        output, _ = process.communicate(timeout=timeout)
        wall = time.perf_counter() - started
        sampler.stop.set()
        sampler.join()
    if process.returncode:
        raise AssertionError(
            f"{argv} ended with {process.returncode}: {output.decode(errors='replace')[-2000:]}"
        )
    after = os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return Cost(wall, cpu, sampler.peak)


def median(costs: Sequence[Cost]) -> Cost:
    """Return the medians of several runs, and the maximum of memory."""
    return Cost(
        statistics.median(cost.wall for cost in costs),
        statistics.median(cost.cpu for cost in costs),
        max(cost.memory for cost in costs),
    )


def alternate(rounds: int, sides: Sequence[Callable[[], Cost]]) -> list[Cost]:
    """Measure all sides in turn, ``rounds`` times; return the median of each."""
    costs: list[list[Cost]] = [[] for _ in sides]
    for _ in range(rounds):
        for found, side in zip(costs, sides, strict=True):
            os.sync()
            found.append(side())
    return [median(found) for found in costs]


class _Sampler(threading.Thread):
    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self.peak = 0
        self._pid = pid

    def run(self) -> None:
        while not self.stop.wait(0.02):
            self.peak = max(self.peak, sum(_memory(pid) for pid in _family(self._pid)))


def _family(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def _memory(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines[1:] if line.endswith("kB")}
    return sizes.get("Pss_Anon", 0) + sizes.get("Pss_Shmem", 0)
