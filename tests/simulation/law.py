"""The law, which is all that the simulation asserts.

- No run reports success unless every byte is right, and would be after a power failure.
- No run changes a disk that another run has finished.
- Every run ends (``Scheduler.run``), with success or with an error that says what failed.
- With the faults gone, one more run succeeds.
"""

from __future__ import annotations

from tests.simulation import disk as disks
from tests.simulation import scheduler as schedulers
from tests.simulation import server


class Law:
    """Watches the runs of one world."""

    def __init__(self, disk: disks.Disk, target: str) -> None:
        self._disk = disk
        self._target = target
        self._began: dict[schedulers.Process, float] = {}
        self._served: dict[schedulers.Process, tuple[server.Object, int]] = {}
        self._succeeded: set[schedulers.Process] = set()
        self._finished: tuple[schedulers.Process, float, bytes] | None = None
        self.outcomes: list[str] = []

    # -- events

    def begin(self, process: schedulers.Process, served: server.Object) -> None:
        world = schedulers.active()
        self._began[process] = world.now
        self._served[process] = served, len(served.versions) - 1

    def wrote(self, process: schedulers.Process, inode: disks.Inode, call: str) -> None:
        """Note a change of a disk: a run may replace what was finished before it began."""
        if self._finished and self._began[process] >= self._finished[1] and self._is_target(inode):
            self._finished = None

    def succeeded(self, process: schedulers.Process) -> None:
        world = schedulers.active()
        world.note("success")
        self._succeeded.add(process)
        self.outcomes.append("success")
        served, first = self._served[process]
        inode = self._disk.devices.get(self._target) or self._disk.directory.entries.get("disk.img")
        assert inode is not None, f"{process.name}: success without a disk"
        versions = [version.disk for version in served.versions[first:]]
        found = [disk for disk in versions if self._is(inode.data.view, disk, inode)]
        assert found, f"{process.name}: success with a wrong disk: {_difference(inode.data.view, versions)}"
        assert self._is(inode.data.stable, found[-1], inode), (
            f"{process.name}: success with a disk that is not durable"
        )
        if not inode.is_device:
            stable = self._disk.directory.stable.get("disk.img")
            assert stable is inode, f"{process.name}: success with a name that is not durable"
        self._check_finished(process)
        self._finished = process, world.now, found[-1]

    def failed(self, process: schedulers.Process, error: Exception) -> None:
        world = schedulers.active()
        world.note("failure", type(error).__name__, error)
        self.outcomes.append(type(error).__name__)
        if not hasattr(error, "retryable"):
            raise AssertionError(f"{process.name}: {type(error).__name__}: {error}") from error
        self._check_finished(process)

    def reused(self) -> None:
        """Somebody else has written to the device."""
        self._finished = None

    def must_have_finished(self, process: schedulers.Process) -> None:
        """The last run, without faults."""
        assert process in self._succeeded, f"{process.name}: failed without a fault"

    # -- helpers

    def _is_target(self, inode: disks.Inode) -> bool:
        return inode.is_device or inode in {
            self._disk.directory,
            self._disk.directory.entries.get("disk.img"),
        }

    def _is(self, data: bytearray, disk: bytes, inode: disks.Inode) -> bool:
        """Return whether these are the bytes of a disk: a file has no others, a device may."""
        padded = disk + bytes(-len(disk) % disks.SECTOR)
        return data[: len(padded)] == padded and (inode.is_device or len(data) == len(padded))

    def _check_finished(self, process: schedulers.Process) -> None:
        if self._finished is None or self._finished[0] is process:
            return
        other, _, disk = self._finished
        inode = self._disk.devices.get(self._target) or self._disk.directory.entries.get("disk.img")
        kept = inode is not None and self._is(inode.data.view, disk, inode)
        assert kept, f"{process.name}: changed the disk that {other.name} had finished"


def _difference(found: bytearray, versions: list[bytes]) -> str:
    """Say where the bytes differ from each version."""
    words = []
    for number, version in enumerate(versions):
        wrong = [
            at
            for at in range(0, len(version), disks.SECTOR)
            if found[at : at + 512] != version[at : at + 512]
        ]
        words.append(f"version {number}: {len(wrong)} of {len(version) // 512} sectors from byte {wrong[:1]}")
    return f"{len(found)} bytes; {'; '.join(words)}"
