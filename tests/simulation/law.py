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
    """Watches the runs of one world. ``keeps``: only a finished file replaces a finished file."""

    def __init__(self, disk: disks.Disk, target: str, *, keeps: bool) -> None:
        self._disk = disk
        self._target = target
        self._keeps = keeps
        self._served: dict[schedulers.Process, tuple[server.Object, int]] = {}
        #: When a run changed the target for the first time: before that it is not one of its writers.
        self._writing: dict[schedulers.Process, int] = {}
        self._wrote: dict[schedulers.Process, int] = {}
        self._succeeded: set[schedulers.Process] = set()
        self._finished: tuple[schedulers.Process, int, bytes] | None = None
        #: Whether a write was on its way when its process was stopped, without a lock that keeps others out.
        self._excused = False
        self.outcomes: list[str] = []

    # -- events

    def round(self) -> None:
        """Other runs begin; those before have ended."""
        self._excused = False

    def begin(self, process: schedulers.Process, served: server.Object) -> None:
        self._served[process] = served, len(served.versions) - 1

    def wrote(self, process: schedulers.Process, inode: disks.Inode, call: str, *details: object) -> None:
        """Note a change of a disk: a run may replace what was finished before its own first change."""
        world = schedulers.active()
        if inode is self._disk.directory and str(details[-1]).endswith(".lock"):
            return
        self._wrote[process] = world.number()
        writing = self._writing.setdefault(process, self._wrote[process])
        if self._finished and writing > self._finished[1] and self._replaces(inode, call, details):
            self._finished = None
        is_stale = any(other > writing for other in self._writing.values())
        if is_stale and process.was_frozen and world.now <= process.frozen:
            self._excused = True

    def _replaces(self, inode: disks.Inode, call: str, details: tuple[object, ...]) -> bool:
        if inode.is_device or not self._keeps:
            return True
        return call == "rename" and details[-1] == self._target

    def succeeded(self, process: schedulers.Process, resumed: int) -> None:
        world = schedulers.active()
        world.note("success")
        self._succeeded.add(process)
        self.outcomes.append("resumed" if resumed else "success")
        last = self._wrote.get(process, 0)
        if self._excused or any(other > last for other in self._writing.values()):
            # It was stopped after its last change; another run, which no lock kept out, has begun since then.
            return
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
        self._finished = process, world.number(), found[-1]

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
        if self._finished is None or self._finished[0] is process or self._excused:
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
