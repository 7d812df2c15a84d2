"""Run commands and measure their cost."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of wall clock and of CPU, and the largest memory of all samples, in bytes.

    CPU counts the command and all its children, not the kernel's own threads. Memory is the sum of
    the proportional set sizes (smaps_rollup, Pss without that of files) of the command and
    its children, sampled every 20 ms, with many commands at once less often.
    """

    wall: float
    cpu: float
    memory: int


@dataclasses.dataclass(frozen=True)
class Crowd:
    """Commands that ran at once: the seconds of each, and the cost of all.

    ``cost.memory`` is that of the largest command, with its children.
    """

    cost: Cost
    walls: Sequence[float]


def run(argv: Sequence[str | Path], *, timeout: float = 900) -> Cost:
    """Run one command; raise with its output if it fails."""
    return together([argv], timeout=timeout).cost


def together(commands: Sequence[Sequence[str | Path]], *, timeout: float = 900) -> Crowd:
    """Start all commands and wait for them; raise with the output of the first that failed."""
    before = os.times()
    started = time.perf_counter()
    with contextlib.ExitStack() as stack, futures.ThreadPoolExecutor(len(commands)) as pool:
        running = [
            stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            for argv in commands
        ]
        sampler = _Sampler([process.pid for process in running])
        sampler.start()
        ending = [pool.submit(_finish, process, started, timeout) for process in running]
        futures.wait(ending)
        sampler.stop.set()
        sampler.join()
        walls = [each.result() for each in ending]
    after = os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return Crowd(Cost(max(walls), cpu, sampler.memory), walls)


def _finish(process: subprocess.Popen[bytes], started: float, timeout: float) -> float:
    """Return the seconds at which the process ended."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    ended = time.perf_counter() - started
    if process.returncode:
        text = output.decode(errors="replace")[-2000:]
        raise AssertionError(f"{process.args!r} ended with {process.returncode}: {text}")
    return ended


class _Sampler(threading.Thread):
    """Samples the memory of the commands with these process ids; keeps that of the largest."""

    def __init__(self, pids: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self.memory = 0
        self._pids = pids

    def run(self) -> None:
        # A sample takes the kernel some time for each process.
        while not self.stop.wait(0.02 * len(self._pids)):
            for pid in self._pids:
                self.memory = max(self.memory, sum(map(_memory, _family(pid))))


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
