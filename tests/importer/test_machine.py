"""CPUs and memory: of the machine, and of the container's control group in both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cdi_worker import machine

HERE = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, HERE),
        ({"cpu.max": "max 100000\n"}, HERE),
        ({"cpu.max": "75000 100000\n"}, 1),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "150000 100000\n"}, min(2, HERE)),
        ({"cpu.max": "9900000 100000\n"}, HERE),
        ({"cpu.max": "nonsense\n"}, HERE),
        ({"cpu.max": "100000 0\n"}, HERE),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, HERE),
        ({"cpu/cpu.cfs_quota_us": "75000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "75000\n"}, HERE),
    ],
)
def test_limit_of_the_container_counts(tmp_path: Path, files: dict[str, str], cpus: int) -> None:
    write(tmp_path, files)
    assert machine.cpus(tmp_path) == cpus


@pytest.mark.parametrize(
    ("files", "has_memory"),
    [
        ({}, True),
        ({"memory.max": "max\n"}, True),
        ({"memory.max": f"{600 << 20}\n"}, False),
        ({"memory.max": f"{1 << 30}\n"}, True),
        ({"memory/memory.limit_in_bytes": f"{600 << 20}\n"}, False),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, True),
    ],
)
def test_memory_of_a_small_pod_is_not_enough(tmp_path: Path, files: dict[str, str], has_memory: bool) -> None:
    write(tmp_path, files)
    assert machine.has_memory(tmp_path) == has_memory


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
