"""The settings that rows are measured in: the machine as it is, and pods as CDI makes them.

CDI gives its workers 0.75 CPU and 600M. The storage of a pod may write 20 MB/s, and the source may be far
away: the network is the loopback interface with a delay (``wire``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support import devices, limits

MIB, GIB = 1 << 20, 1 << 30
#: The directory of CDI's own binaries (cdi-importer), for those who have them.
GO = "CDI_GO_WORKER"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Limits for both sides of a row. Zero: no limit.

    ``delay``: seconds of a round trip; ``wire``: bytes a second of the network; ``disk``: bytes a second that
    the storage writes. ``size``, ``data``: of the disk that most rows import. ``is_special``: only for
    rows that name it.
    """

    name: str
    title: str
    about: str
    cpus: float = 0
    memory: int = 0
    delay: float = 0
    wire: int = 0
    disk: int = 0
    size: int = 2 * GIB
    data: int = 400 * MIB
    is_special: bool = False

    @property
    def is_pod(self) -> bool:
        """Return whether the sides run in a control group."""
        return bool(self.cpus)

    @contextlib.contextmanager
    def limited(self) -> Iterator[limits.Cgroup | None]:
        """Yield the control group of the sides."""
        if not self.is_pod:
            yield None
            return
        with limits.cgroup(memory=self.memory, cpus=self.cpus) as group:
            yield group

    @contextlib.contextmanager
    def storage(self, directory: Path) -> Iterator[tuple[Path, Path]]:
        """Yield a directory and a block device to write to.

        Slow storage is nbdkit's rate filter, also for buffered writes: the block controller of cgroup v1 does
        not see those, and where it does, only a part of the machines has it.
        """
        with contextlib.ExitStack() as stack:
            if not self.disk:
                yield directory, stack.enter_context(devices.loop(directory, self.size))
                return
            slow = [
                stack.enter_context(devices.slow(directory, size, bytes_per_second=self.disk))
                for size in (self.size, 4 * self.size)
            ]
            point = directory / f"slow-{os.urandom(4).hex()}"
            stack.callback(point.rmdir)
            stack.enter_context(devices.mounted("ext4", slow[1], point))
            yield point, slow[0]


#: Bytes a second of 1 Gbit/s.
_WIRE = 125_000_000
MACHINE = Setting("machine", "The machine as it is", "No limits; the network is the loopback interface.")
POD = Setting(
    "pod",
    "In a pod",
    "0.75 CPU and 600M of memory (a control group, page cache included) for each side, as for CDI's workers. "
    "The aim is 0.7 of the rival's time, and no failure at the first try. The disk is 512 MiB, with 100 MiB "
    "of files.",
    cpus=0.75,
    memory=600_000_000,
    size=512 * MIB,
    data=100 * MIB,
)


def _far(milliseconds: int) -> Setting:
    """Return a pod with slow storage and a distant source."""
    return dataclasses.replace(
        POD,
        name=f"pod-{milliseconds}ms",
        title=f"In a pod with slow storage, {milliseconds} ms from the source",
        about="As in a pod; in addition storage that writes 20 MB/s, and a network of 1 Gbit/s with "
        f"{milliseconds} ms of round-trip time.",
        delay=milliseconds / 1000,
        wire=_WIRE,
        disk=20_000_000,
    )


#: For the time that a distant source costs, where storage does not limit.
FAR = dataclasses.replace(
    POD,
    name="far",
    title="In a pod, 50 ms from the source",
    about="0.75 CPU and 600M of memory, a network of 1 Gbit/s, 50 ms of round-trip time; storage as it is.",
    delay=0.05,
    wire=_WIRE,
    size=MACHINE.size,
    data=MACHINE.data,
    is_special=True,
)
#: For counting round trips: one takes so long that the time between them does not count.
DISTANT = dataclasses.replace(
    FAR,
    name="distant",
    title="Round trips",
    about="As above, with a round-trip time of 1 s, so that what takes time between them does not count.",
    delay=1.0,
    size=256 * MIB,
    data=50 * MIB,
)
SETTINGS: Mapping[str, Setting] = {
    setting.name: setting for setting in (MACHINE, POD, _far(5), _far(50), FAR, DISTANT)
}
