"""Tests of the limits."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

from tests.support import limits

MiB = 1 << 20


def test_cgroup_limits_memory() -> None:
    with limits.cgroup(memory=64 * MiB, cpus=1) as group:
        greedy = [*group.prefix, sys.executable, "-c", "bytearray(200 << 20)"]
        assert subprocess.run(greedy, check=False, capture_output=True).returncode in (-9, 137)
        modest = [*group.prefix, sys.executable, "-c", "bytearray(20 << 20)"]
        assert subprocess.run(modest, check=False).returncode == 0
        assert group.killed() == 1
        assert 20 * MiB < group.peak() <= 64 * MiB


def cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_cgroup_limits_cpu() -> None:
    work = [sys.executable, "-c", "sum(range(9_000_000))"]
    with limits.cgroup(memory=256 * MiB, cpus=0.2) as group:
        began, used = time.monotonic(), cpu_of_children()
        subprocess.run([*group.prefix, *work], check=True)
        assert time.monotonic() - began > 2 * (cpu_of_children() - used)


def test_unprivileged_cannot_read_files_of_root(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    secret.chmod(0o600)
    run = subprocess.run([*limits.unprivileged(), "cat", secret], check=False, capture_output=True)
    assert run.returncode != 0
    user = subprocess.run([*limits.unprivileged(), "id", "-u"], check=True, capture_output=True)
    assert user.stdout == b"107\n"
