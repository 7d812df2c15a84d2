"""A virtual machine of vSphere: its disks, their snapshots and changed areas."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, Self, TypeVar

from cdi_worker import errors
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.sources import base, extents
from cdi_worker.sources.vmware import session

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The change id of the beginning: everything that is allocated has changed since then.
ALLOCATED = "*"
#: Seconds for which the request for the allocated areas is repeated: VDDK lists them, too.
ALLOCATED_LIMIT = 2.0
#: In bytes. VDDK reads whole sectors.
SECTOR = 512
#: Requests of a list of changed areas: so many, and one more for each so many bytes that are covered. The
#: 2000 areas of one answer cover 250 MiB, if every other 64 KiB have changed.
FREE_REQUESTS, COVERED = 1024, 64 << 20
#: Seconds between looks at a task, or at a lease.
LOOK = 0.2
#: Seconds for another operation of the machine to end, such as the export of another disk. A Job waits for it
#: nine times.
LOCKED = 3600.0
#: What faults mean for a list of changed areas.
_UNKNOWN_CHANGES: Final = {
    "FileFault": (
        "vSphere has no list of changes since then: changed block tracking is off or was reset, or the "
        "change id belongs to another disk; start again with a full copy"
    ),
    "InvalidArgument": "vSphere refuses the request; check that the change id belongs to this disk",
}
#: The largest disk of vSphere has 62 TiB: so many bytes are counted above, whatever size a server states.
LARGEST = 64 << 40


@dataclasses.dataclass(frozen=True)
class VirtualDisk:
    """A disk, now or at a snapshot. ``snapshot``: its reference, empty for the current state.

    ``file``: path of the disk, ``parents``: those of the files below it. ``size`` in bytes. ``change_id``:
    start of a later delta; empty without changed block tracking. ``label``: as in the client, such as "Hard
    disk 1". ``address``: type and number of the controller, and the unit, as an export has them:
    ``ParaVirtualSCSIController0:0``. ``is_independent``: of snapshots, which lack it. ``obstacle``: why it
    cannot be exported; empty: it can.
    """

    file: str
    key: int
    object_id: str
    size: int
    change_id: str
    parents: tuple[str, ...] = ()
    snapshot: str = ""
    label: str = ""
    address: str = ""
    is_independent: bool = False
    obstacle: str = ""


class Snapshot(NamedTuple):
    """A snapshot of a machine. ``reference``: its managed object id."""

    name: str
    reference: str
    disks: list[VirtualDisk]


class Machine:
    """The virtual machine with this instance UUID, else with this BIOS UUID, and its snapshots."""

    def __init__(self, opened: session.Session, uuid: str) -> None:
        self._session = opened
        self._machine = machine = opened.find(uuid)
        self.reference = _reference(machine)
        self.read()
        log.info("machine name=%r moref=%r running=%s", self.name, self.reference, self.is_running)

    def read(self) -> Self:
        """Read what the machine is now; return it."""
        machine = self._machine

        def look() -> tuple[str, str, list[VirtualDisk], list[Snapshot]]:
            snapshots = []
            trees = list(machine.snapshot.rootSnapshotList) if machine.snapshot else []
            while trees:
                tree = trees.pop(0)
                reference = _reference(tree.snapshot)
                disks = _disks(tree.snapshot.config, reference)
                snapshots.append(Snapshot(tree.name, reference, disks))
                trees += tree.childSnapshotList
            return str(machine.name), str(machine.runtime.powerState), _disks(machine.config), snapshots

        name, power, self.disks, self.snapshots = self._session.call("read the virtual machine", look)
        self.name, self.is_running = name, power != "poweredOff"
        return self

    def disk(self, file: str) -> VirtualDisk:
        """Return the disk with the path ``file``: current, of a snapshot, or a parent of one of these."""
        earlier = [disk for snapshot in self.snapshots for disk in snapshot.disks]
        for matches in (lambda disk: disk.file == file, lambda disk: file in disk.parents):
            found = {
                (disk.key, disk.object_id): dataclasses.replace(disk, snapshot="")
                for disk in (*earlier, *self.disks)
                if matches(disk)
            }
            if len(found) > 1:
                raise errors.SourceError(reason=f"{self.name}: {len(found)} disks match {file!r}")
            for disk in found.values():
                return disk
        names = ", ".join(repr(disk.file) for disk in self.disks)
        reason = f"virtual machine {self.name!r} has no disk {file!r}; it has {names}"
        raise errors.Unreachable(url=self._session.name, reason=reason)

    def at(self, checkpoint: str, disk: VirtualDisk) -> VirtualDisk:
        """Return the disk at a snapshot, given by its reference or unique name; empty: now."""
        disks = self.snapshot(checkpoint).disks if checkpoint else self.disks
        for each in disks:
            # Device keys change when a machine is reconfigured, the object id of a disk does not.
            if each.object_id == disk.object_id if disk.object_id else each.key == disk.key:
                return each
        where = f"snapshot {checkpoint!r} of {self.name!r}" if checkpoint else f"{self.name!r} now"
        raise errors.Unreachable(url=self._session.name, reason=f"{where} does not contain this disk")

    def snapshot(self, checkpoint: str) -> Snapshot:
        """Return the snapshot with this reference, else with this name, which must be unique."""
        matching = [each for each in self.snapshots if each.reference == checkpoint]
        matching = matching or [each for each in self.snapshots if each.name == checkpoint]
        if len(matching) != 1:
            available = ", ".join(f"{each.reference} ({each.name})" for each in self.snapshots) or "none"
            what = f"{'no' if not matching else 'more than one'} snapshot {checkpoint!r}"
            reason = f"virtual machine {self.name!r} has {what}; available: {available}"
            raise errors.Unreachable(url=self._session.name, reason=reason)
        return matching[0]

    def take_snapshot(
        self, name: str, description: str, pause: Callable[[float], object], *, quiesce: bool
    ) -> Snapshot:
        """Take a snapshot without the machine's memory, and wait for it."""
        machine = self._machine

        def begin() -> Any:
            return machine.CreateSnapshot_Task(name, description, memory=False, quiesce=quiesce)

        made = self._run("take a snapshot", begin, pause)
        if made is None:
            raise errors.Unreachable(url=self._session.name, reason="vSphere does not name its snapshot")
        return self.read().snapshot(_reference(made))

    def remove_snapshot(self, snapshot: Snapshot, pause: Callable[[float], object]) -> None:
        """Remove a snapshot but not those below it, and wait until its disks are merged."""
        found = self.managed(snapshot)
        doing = f"remove snapshot {snapshot.name!r}"
        self._run(doing, lambda: found.RemoveSnapshot_Task(removeChildren=False), pause)

    def managed(self, snapshot: Snapshot | None = None) -> Any:
        """Return pyvmomi's object of the machine, or of one of its snapshots."""
        if snapshot is None:
            return self._machine
        return session.pyvmomi().vim.vm.Snapshot(snapshot.reference, self._machine._stub)  # noqa: SLF001  (pyvmomi has no public name for it)

    def _run(self, doing: str, begin: Callable[[], Any], pause: Callable[[float], object]) -> Any:
        """Run a task of vSphere when nothing else locks the machine; return its result."""

        def run() -> Any:
            task = self._session.call(doing, begin)

            def look() -> Any:
                if task.info.error:
                    raise task.info.error
                return task.info

            while str((info := self._session.call(doing, look)).state) != "success":
                pause(LOOK)
            return info.result

        return when_free(run, pause)

    def since(self, change_id: str, disk: VirtualDisk) -> VirtualDisk | None:
        """Return the disk at the snapshot with a change id; None if the snapshot was deleted."""
        for snapshot in self.snapshots:
            for each in snapshot.disks:
                # The id of a disk is part of its change ids.
                if each.change_id == change_id and each.object_id == disk.object_id:
                    return each
        return None

    def changed(self, disk: VirtualDisk, change_id: str, size: int | None = None) -> extents.Kept:
        """Return the areas changed between ``change_id`` and ``disk``, extended to whole sectors.

        ``size``: of the disk at ``change_id``. All bytes after it have changed: vSphere lists only those that
        were written, and a target may hold anything there.
        Raises ``errors.SourceError`` for a list with invalid or overlapping areas, or one that ends early.
        """
        snapshot = self.managed(Snapshot("", disk.snapshot, []))
        areas = extents.Kept()
        known = disk.size if size is None else min(size, disk.size)
        start = last = requests = 0
        # vCenter returns about 2000 areas at most, and the range that they cover.
        while start < disk.size:
            requests += 1
            if requests > FREE_REQUESTS + min(start, LARGEST) // COVERED:
                reached = f"byte {start} of {disk.size} after {requests - 1} requests"
                raise self._malformed(f"reaches only {reached}")

            def ask(start: int = start) -> tuple[int, int, list[tuple[int, int]]]:
                answer = self._machine.QueryChangedDiskAreas(snapshot, disk.key, start, change_id)
                changed = [(int(area.start), int(area.length)) for area in answer.changedArea]
                return int(answer.startOffset), int(answer.startOffset + answer.length), changed

            doing = f"list the areas changed since {change_id!r}"
            begin, end, changed = self._session.call(doing, ask, _UNKNOWN_CHANGES)
            log.debug("changed areas from=%d to=%d count=%d", start, end, len(changed))
            if end <= start:
                reason = f"the list of changed areas ends at byte {end} of {disk.size}"
                raise errors.SourceError(reason=f"{self._session.name}: {reason}")
            if begin != start:
                raise self._malformed(f"begins at byte {begin} instead of {start}")
            for offset, length in changed:
                if offset < last or length < 0:
                    what = f"{length} bytes at byte {offset} after byte {last}"
                    raise self._malformed(f"has an area of {what}")
                last = offset + length
                add(areas, offset, last, known)
            start = end
        add(areas, known, disk.size, disk.size)
        return areas

    def allocated(self, disk: VirtualDisk) -> extents.Kept | None:
        """Return the allocated areas of a disk at a snapshot; None if vSphere does not know them.

        vSphere answers from what it tracks, in milliseconds; VDDK asks the host for each GiB.
        """
        if not disk.snapshot or not disk.change_id:
            return None
        try:
            areas = retry.patiently(lambda: self.changed(disk, ALLOCATED), ALLOCATED_LIMIT, cancelling.NEVER)
        except errors.SourceError as err:
            level = logging.WARNING if isinstance(err, errors.TransferFailed) else logging.INFO
            log.log(level, "allocated areas unknown to vSphere reason=%s", err)
            return None
        # Without VMFS everything counts as allocated; VDDK may know more.
        return areas if sum(area.length for area in areas) < disk.size else None

    def _malformed(self, why: str) -> errors.SourceError:
        return errors.SourceError(
            reason=f"{self._session.name}: the list of changed areas {why}; start again with a full copy"
        )


def when_free(call: Callable[[], T], pause: Callable[[float], object]) -> T:
    """Return the result of ``call``, once no other operation locks the machine."""
    began = 0.0
    while True:
        try:
            return call()
        except session.Busy as err:
            if not began:
                began = time.monotonic()
                log.warning("waiting for the machine, which another export or task locks reason=%s", err)
            if time.monotonic() > began + LOCKED:
                raise errors.Unreachable(url=err.fields["url"], reason=err.fields["reason"]) from err
            pause(10 * LOOK)


def add(areas: extents.Kept, start: int, end: int, size: int) -> None:
    """Add an area of a disk of ``size`` bytes to those before it, extended to whole sectors."""
    start = max(start // SECTOR * SECTOR, areas.end)
    end = min(-(-end // SECTOR) * SECTOR, size)
    if end > start:
        areas.add(base.Extent(start, end - start, zero=False))


def names(given: str, disk: VirtualDisk | None) -> frozenset[str]:
    """Return the names of the checkpoint ``given`` by the request, of a disk at its snapshot.

    A change id is enough. It has the id of the disk, while snapshots have the same references on all disks of
    a machine, and on other hosts.
    """
    if disk is None:
        return frozenset({given})
    return frozenset({disk.change_id} if disk.change_id else {given, disk.snapshot})


def _disks(config: Any, snapshot: str = "") -> list[VirtualDisk]:
    kinds = session.pyvmomi().vim.vm.device
    devices = config.hardware.device if config else ()
    buses = {
        device.key: f"{type(device).__name__.rpartition('.')[2]}{device.busNumber}"
        for device in devices
        if isinstance(device, kinds.VirtualController)
    }
    is_encrypted = bool(getattr(config, "keyId", None))
    return [
        VirtualDisk(
            file=device.backing.fileName,
            key=device.key,
            object_id=device.diskObjectId or "",
            size=device.capacityInBytes or device.capacityInKB * 1024,
            change_id=getattr(device.backing, "changeId", None) or "",
            parents=tuple(_parents(device.backing)),
            snapshot=snapshot,
            label=str(device.deviceInfo.label) if device.deviceInfo else "",
            address=f"{buses.get(device.controllerKey, '')}:{device.unitNumber}",
            is_independent=str(getattr(device.backing, "diskMode", "")).startswith("independent"),
            obstacle=_obstacle(device.backing, is_encrypted=is_encrypted),
        )
        for device in devices
        if isinstance(device, kinds.VirtualDisk) and getattr(device.backing, "fileName", None)
    ]


def _obstacle(backing: Any, *, is_encrypted: bool) -> str:
    if is_encrypted or getattr(backing, "keyId", None):
        return "is encrypted, and vSphere exports no encrypted disks; decrypt it, or read it by VDDK"
    if "RawDisk" in type(backing).__name__:
        return "is a raw device mapping, which vSphere does not export; read it by VDDK, or from its storage"
    return ""


def _parents(backing: Any) -> Iterator[str]:
    while (backing := getattr(backing, "parent", None)) is not None:
        yield backing.fileName


def _reference(managed: Any) -> str:
    return str(managed._moId)  # noqa: SLF001  (pyvmomi has no public name for it)
