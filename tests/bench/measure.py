"""Run commands and measure their cost."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of wall clock and of CPU, and the largest memory of all samples, in bytes.

    CPU counts the command and all its children, not the kernel's own threads. Memory is the sum of
    the proportional set sizes (smaps_rollup, Pss without that of files) of the command and
    its children, sampled every 20 ms.

    ``busy``: CPU seconds of all programs and of the kernel, the servers' too; ``disk``: seconds in which the
    busiest block device had a request. ``read``: bytes read from the source, as our JSON says; ``written``:
    bytes that the command and its children wrote to storage (write_bytes of /proc/PID/io).
    """

    wall: float
    cpu: float
    memory: int
    busy: float = 0
    disk: float = 0
    read: int = 0
    written: int = 0


def run(argv: Sequence[str | Path], *, timeout: float = 900) -> Cost:
    """Run one command; raise with its output if it fails."""
    before, began, disks, written = os.times(), busy(), _disks(), _written()
    started = time.perf_counter()
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        sampler = _Sampler(process.pid)
        sampler.start()
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
        finally:
            wall = time.perf_counter() - started
            sampler.stop.set()
            sampler.join()
    after = os.times()
    if process.returncode:
        text = output.decode(errors="replace")[-2000:]
        raise AssertionError(f"{argv!r} ended with {process.returncode}: {text}")
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    disk = max(then - disks.get(name, then) for name, then in _disks().items())
    return Cost(wall, cpu, sampler.memory, busy() - began, disk, _read(output), _written() - written)


def _read(output: bytes) -> int:
    """Return the bytes that our imports say they have read: 0 in the output of other commands."""
    return sum(int(count) for count in re.findall(rb'^\{"source": .*?"read": (\d+)', output, re.MULTILINE))


def _written() -> int:
    """Return the bytes that this process and the children it has waited for wrote to storage."""
    found = re.search(r"^write_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def busy() -> float:
    """Return the CPU seconds of the machine since its boot: all but idle, and waiting for I/O."""
    counts = [int(count) for count in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(counts) - counts[3] - counts[4]) / os.sysconf("SC_CLK_TCK")


def _disks() -> dict[str, float]:
    """Return the seconds since boot in which each block device had a request (Documentation/iostats.rst)."""
    lines = map(str.split, Path("/proc/diskstats").read_text().splitlines())
    return {line[2]: int(line[12]) / 1000 for line in lines}


class _Sampler(threading.Thread):
    """Samples the memory of a command with its children; keeps the largest."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self.memory = 0
        self._pid = pid

    def run(self) -> None:
        while not self.stop.wait(0.02):
            self.memory = max(self.memory, sum(map(_memory, _family(self._pid))))


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
