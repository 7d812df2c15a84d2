"""What this process holds, and what it has left behind on storage."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import time
from pathlib import Path
from typing import Self

from tests.support import processes


@dataclasses.dataclass(frozen=True)
class Usage:
    """Threads, descriptors, children, resident bytes of this process; files, loop devices of its imports."""

    threads: int
    descriptors: int
    children: int
    loops: int
    files: int
    memory: int

    @classmethod
    def now(cls, directory: Path) -> Self:
        """Return the usage; ``directory`` holds the targets, scratch and all temporary files."""
        gc.collect()
        # Free memory of the C library's arenas is not in use.
        ctypes.CDLL(None).malloc_trim(0)
        tasks = list(Path("/proc/self/task").iterdir())
        return cls(
            threads=len(tasks),
            descriptors=len(os.listdir("/proc/self/fd")) - len(processes.reservations),
            children=sum(len((task / "children").read_text().split()) for task in tasks if task.exists()),
            loops=sum(str(directory) in path.read_text() for path in _backing_files()),
            files=sum(1 for _ in directory.rglob("*")),
            memory=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"),
        )

    @classmethod
    def settled(cls, directory: Path, before: Usage | None = None) -> Self:
        """Return the usage when it is not above ``before``, or after a while: threads may be about to end."""
        deadline = time.monotonic() + processes.PATIENCE
        while True:
            found = cls.now(directory)
            if before is None or not found.above(before) or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def above(self, before: Usage) -> dict[str, int]:
        """Return by how much each count is above an earlier one; memory has a limit of its own."""
        fields = ("threads", "descriptors", "children", "loops", "files")
        rises = {name: getattr(self, name) - getattr(before, name) for name in fields}
        return {name: rise for name, rise in rises.items() if rise > 0}


def _backing_files() -> list[Path]:
    return list(Path("/sys/block").glob("loop*/loop/backing_file"))
