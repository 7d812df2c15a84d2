"""What the machine, and the container's control group, give to this process."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

#: Bytes of memory with which several threads may decompress: they keep up to 100 MiB.
ENOUGH: Final = 1 << 30
_GROUPS: Final = Path("/sys/fs/cgroup")


def cpus(root: Path = _GROUPS) -> int:
    """Return the number of CPUs: those the scheduler may use, at most the container's limit, rounded up.

    ``root``: the control groups, version 2 or 1.
    """
    limit = _words(root / "cpu.max", 2) or (
        *_words(root / "cpu/cpu.cfs_quota_us", 1),
        *_words(root / "cpu/cpu.cfs_period_us", 1),
    )
    allowed = len(os.sched_getaffinity(0))
    if len(limit) != 2 or not all(word.isdigit() for word in limit) or not int(limit[1]):
        return allowed
    return max(1, min(allowed, math.ceil(int(limit[0]) / int(limit[1]))))


def has_memory(root: Path = _GROUPS) -> bool:
    """Return whether the container's limit is at least ``ENOUGH``, or there is none."""
    (limit,) = _words(root / "memory.max", 1) or _words(root / "memory/memory.limit_in_bytes", 1) or ("max",)
    return not limit.isdigit() or int(limit) >= ENOUGH


def _words(path: Path, count: int) -> tuple[str, ...]:
    """Return the words of a file; none if it is missing or has another number of them."""
    try:
        found = tuple(path.read_text().split())
    except OSError:
        return ()
    return found if len(found) == count else ()
