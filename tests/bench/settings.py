"""The settings that rows are measured in: the machine as it is, and pods as CDI makes them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

from tests.support import limits

MIB, GIB = 1 << 20, 1 << 30


@dataclasses.dataclass(frozen=True)
class Setting:
    """Limits for all sides of a row. Zero: no limit. ``size``, ``data``: of the disk of most rows."""

    name: str
    cpus: float = 0
    memory: int = 0
    size: int = 2 * GIB
    data: int = 400 * MIB

    @contextlib.contextmanager
    def limited(self) -> Iterator[limits.Cgroup | None]:
        """Yield the control group of the sides, page cache included."""
        if not self.cpus:
            yield None
            return
        with limits.cgroup(memory=self.memory, cpus=self.cpus) as group:
            yield group


MACHINE = Setting("machine")
#: The limits that CDI gives its workers.
POD = Setting("pod", cpus=0.75, memory=600_000_000, size=512 * MIB, data=100 * MIB)
#: Those that may be chosen for all rows.
SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in (MACHINE, POD)}
