"""A virtual machine of vSphere: its disks, their snapshots and changed areas."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

from cdi_worker import errors
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.sources import base, extents
from cdi_worker.sources.vmware import session

log = logging.getLogger(__name__)

#: The change id of the beginning: everything that is allocated has changed since then.
ALLOCATED = "*"
#: Seconds for which the request for the allocated areas is repeated: VDDK lists them, too.
ALLOCATED_LIMIT = 2.0
#: In bytes. VDDK reads whole sectors.
SECTOR = 512
#: Requests of a list of changed areas: so many, and one more for each so many bytes that are covered. The
#: 2000 areas of one answer cover 250 MiB, if every other 64 KiB have changed.
FREE_REQUESTS, COVERED = 1024, 64 << 20
#: The largest disk of vSphere has 62 TiB: so many bytes are counted above, whatever size a server states.
LARGEST = 64 << 40


@dataclasses.dataclass(frozen=True, slots=True)
class VirtualDisk:
    """A disk, now or at a snapshot. ``snapshot``: its reference, empty for the current state.

    ``file``: path of the disk. ``size`` in bytes. ``change_id``: start of a later delta; empty without
    changed block tracking.
    """

    file: str
    key: int
    object_id: str
    size: int
    change_id: str
    snapshot: str = ""


class Machine:
    """The virtual machine with this instance UUID, else with this BIOS UUID."""

    def __init__(self, opened: session.Session, uuid: str) -> None:
        self._session = opened
        self._machine = machine = opened.find(uuid)
        self.reference = _reference(machine)
        self.name, power = opened.call(
            "read the virtual machine", lambda: (str(machine.name), str(machine.runtime.powerState))
        )
        log.info("machine name=%r moref=%r power=%s", self.name, self.reference, power)

    def disk(self, file: str) -> VirtualDisk:
        """Return the disk with the path ``file``: current, of a snapshot, or a parent of one of these."""
        return self._session.call("find the disk", lambda: self._disk(file))

    def at(self, snapshot: str, disk: VirtualDisk) -> VirtualDisk:
        """Return the disk at a snapshot, given by its reference or unique name."""
        return self._session.call("find the snapshot", lambda: self._at(snapshot, disk))

    def since(self, change_id: str, disk: VirtualDisk) -> VirtualDisk | None:
        """Return the disk at the snapshot with a change id; None if the snapshot was deleted."""
        return self._session.call("find the snapshot of the change id", lambda: self._since(change_id, disk))

    def changed(self, disk: VirtualDisk, change_id: str) -> extents.Kept:
        """Return the areas changed between ``change_id`` and ``disk``, extended to whole sectors.

        Raises ``errors.SourceError`` for a list with invalid or overlapping areas, or one that ends early.
        """
        snapshot = session.pyvmomi().vim.vm.Snapshot(disk.snapshot, self._machine._stub)  # noqa: SLF001  (pyvmomi has no public name for it)
        areas = extents.Kept()
        start = last = requests = 0
        # vCenter returns about 2000 areas at most, and the range that they cover.
        while start < disk.size:
            requests += 1
            if requests > FREE_REQUESTS + min(start, LARGEST) // COVERED:
                raise self._malformed(
                    f"reaches only byte {start} of {disk.size} after {requests - 1} requests"
                )

            def ask(start: int = start) -> tuple[int, int, list[tuple[int, int]]]:
                answer = self._machine.QueryChangedDiskAreas(snapshot, disk.key, start, change_id)
                changed = [(int(area.start), int(area.length)) for area in answer.changedArea]
                return int(answer.startOffset), int(answer.startOffset + answer.length), changed

            begin, end, changed = self._session.call(f"list the areas changed since {change_id!r}", ask)
            log.debug("changed areas from=%d to=%d count=%d", start, end, len(changed))
            if end <= start:
                where = f"at byte {end} of {disk.size}"
                raise errors.SourceError(
                    reason=f"{self._session.name}: the list of changed areas ends {where}"
                )
            if begin != start:
                raise self._malformed(f"begins at byte {begin} instead of {start}")
            for offset, length in changed:
                if offset < last or length < 0:
                    what = f"{length} bytes at byte {offset} after byte {last}"
                    raise self._malformed(f"has an area of {what}")
                last = offset + length
                add(areas, offset, last, disk.size)
            start = end
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

    def _disk(self, file: str) -> VirtualDisk:
        now = _disks(self._machine.config)
        earlier = [each for _, snapshot in self._snapshots() for each in _disks(snapshot.config)]
        for matches in (lambda backing: backing.fileName == file, lambda backing: file in _parents(backing)):
            found = {(each.key, each.diskObjectId or ""): each for each in earlier if matches(each.backing)}
            found |= {(each.key, each.diskObjectId or ""): each for each in now if matches(each.backing)}
            if len(found) > 1:
                raise errors.SourceError(reason=f"{self.name}: {len(found)} disks match {file!r}")
            for each in found.values():
                return _describe(each)
        names = ", ".join(repr(each.backing.fileName) for each in now)
        raise errors.Unreachable(
            url=self._session.name,
            reason=f"virtual machine {self.name!r} has no disk {file!r}; it has {names}",
        )

    def _at(self, wanted: str, disk: VirtualDisk) -> VirtualDisk:
        found = list(self._snapshots())
        matching = [each for _, each in found if _reference(each) == wanted]
        matching = matching or [each for name, each in found if name == wanted]
        if len(matching) != 1:
            there = ", ".join(f"{_reference(each)} ({name})" for name, each in found) or "none"
            what = "no" if not matching else "more than one"
            raise errors.Unreachable(
                url=self._session.name,
                reason=f"virtual machine {self.name!r} has {what} snapshot {wanted!r}; available: {there}",
            )
        snapshot = matching[0]
        for each in _disks(snapshot.config):
            # Device keys change when a machine is reconfigured, the object id of a disk does not.
            if (each.diskObjectId or "", each.key)[not disk.object_id] == (disk.object_id or disk.key):
                return dataclasses.replace(_describe(each), snapshot=_reference(snapshot))
        raise errors.Unreachable(
            url=self._session.name, reason=f"snapshot {wanted!r} of {self.name!r} does not contain this disk"
        )

    def _since(self, change_id: str, disk: VirtualDisk) -> VirtualDisk | None:
        for _, snapshot in self._snapshots():
            for each in map(_describe, _disks(snapshot.config)):
                # The id of a disk is part of its change ids.
                if each.change_id == change_id and each.object_id == disk.object_id:
                    return dataclasses.replace(each, snapshot=_reference(snapshot))
        return None

    def _snapshots(self) -> Iterator[tuple[str, Any]]:
        trees = list(self._machine.snapshot.rootSnapshotList) if self._machine.snapshot else []
        while trees:
            tree = trees.pop(0)
            yield tree.name, tree.snapshot
            trees += tree.childSnapshotList


def add(areas: extents.Kept, start: int, end: int, size: int) -> None:
    """Add an area of a disk of ``size`` bytes to those before it, extended to whole sectors."""
    start = max(start // SECTOR * SECTOR, areas.end)
    end = min(-(-end // SECTOR) * SECTOR, size)
    if end > start:
        areas.add(base.Extent(start, end - start, zero=False))


def grow(areas: extents.Kept, before: int, size: int) -> extents.Kept:
    """Return ``areas`` and all from the byte ``before`` to ``size``."""
    found = extents.Kept()
    for area in areas:
        add(found, area.offset, min(area.offset + area.length, before), size)
    add(found, before, size, size)
    return found


def _disks(config: Any) -> list[Any]:
    disk = session.pyvmomi().vim.vm.device.VirtualDisk
    return [
        each
        for each in (config.hardware.device if config else ())
        if isinstance(each, disk) and getattr(each.backing, "fileName", None)
    ]


def _reference(managed: Any) -> str:
    return str(managed._moId)  # noqa: SLF001  (pyvmomi has no public name for it)


def _parents(backing: Any) -> Iterator[str]:
    while (backing := getattr(backing, "parent", None)) is not None:
        yield backing.fileName


def _describe(disk: Any) -> VirtualDisk:
    return VirtualDisk(
        file=disk.backing.fileName,
        key=disk.key,
        object_id=disk.diskObjectId or "",
        size=disk.capacityInBytes or disk.capacityInKB * 1024,
        change_id=getattr(disk.backing, "changeId", None) or "",
    )
