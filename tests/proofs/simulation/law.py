"""The law, which is all that the simulation asserts.

- No run reports success unless every byte is right, and would be after a power failure.
- At no moment does the target look usable unless every byte of it is right. The law looks after each change
  of storage: at what a reader sees, at what two unfortunate power failures would leave of a device (of the
  pending writes only the sector that makes the disk usable has reached it, or all but this sector), at each
  prefix of the pending changes of a directory, and now and then at a random state.
- No run changes a disk that another run has finished.
- A verification says equal only of a disk that is, and different only of one that is not.
- Every run ends (``Scheduler.run``), with success or with an error that says what failed; soon, if asked to.
- With the faults gone, one more run succeeds.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import NoReturn

from tests.proofs.simulation import disk as disks
from tests.proofs.simulation import scheduler as schedulers
from tests.proofs.simulation import server

#: Faults of code rather than of an import: the product and the simulator do not fit, or one has a fault.
_OF_CODE = (AttributeError, ImportError, NameError, NotImplementedError, TypeError, AssertionError)
#: One of so many moments is also looked at in a random state after a power failure.
_RANDOM = 16
#: Bytes at the beginning of a device in which the sector is that makes it usable.
_HEAD = 1 << 20
#: How data of others begins: of an earlier owner, and of one that uses the target meanwhile.
_FOREIGN = b"\xff", b"other"
#: Seconds in which a run ends that is asked to. A write in the kernel, which nothing interrupts, may take 40.
_GRACE = 45.0


@dataclasses.dataclass
class _Reader:
    """A verification: the image, the number of its version, and what became of the target meanwhile."""

    served: server.Object
    first: int
    was_right: bool = False
    is_changed: bool = False


class Law:
    """Watches the runs of one world."""

    def __init__(self, disk: disks.Disk, target: str, objects: Sequence[server.Object], seed: str) -> None:
        self._disk = disk
        self._target = target
        self._objects = objects
        self._served: dict[schedulers.Process, tuple[server.Object, int]] = {}
        #: Of each run: what becomes of a disk, and which checksum was demanded.
        self._asked: dict[schedulers.Process, tuple[str, str]] = {}
        #: When a run changed the target for the first time: before that it is not one of its writers.
        self._writing: dict[schedulers.Process, int] = {}
        self._wrote: dict[schedulers.Process, int] = {}
        #: Of each reader: the image, its version when it began, whether the target was that, and was changed.
        self._readers: dict[schedulers.Process, _Reader] = {}
        self._failures: dict[schedulers.Process, Exception] = {}
        self._succeeded: set[schedulers.Process] = set()
        self._finished: tuple[schedulers.Process, int, disks.Sparse] | None = None
        #: Whether a write was on its way when its process was stopped, without a lock that keeps others out.
        self._excused = False
        #: What the target held that is not from an import.
        self._others: list[disks.Sparse] = []
        #: Random states do not change the course of the world.
        self._dice = random.Random(seed)
        self._usable: tuple[int, dict[tuple[int, bytes], list[disks.Sparse]]] = (0, {})
        self.outcomes: list[str] = []
        self.reused()

    # -- events

    def round(self) -> None:
        """Other runs begin; those before have ended."""
        if self._excused:
            self.reused()
        self._excused = False

    def begin(self, process: schedulers.Process, served: server.Object, existing: str, checksum: str) -> None:
        self._served[process] = served, len(served.versions) - 1
        self._asked[process] = existing, checksum

    def wrote(self, process: schedulers.Process, inode: disks.Inode, call: str, *details: object) -> None:
        """Note a change of a disk: a run may replace what was finished before its own first change."""
        world = schedulers.active()
        if inode is self._disk.directory and str(details[-1]).endswith(".lock"):
            return
        self._wrote[process] = world.number()
        writing = self._writing.setdefault(process, self._wrote[process])
        if self._finished and writing > self._finished[1] and self._replaces(process, inode, call, details):
            self._finished = None
        is_stale = any(other > writing for other in self._writing.values())
        if is_stale and process.was_frozen and world.now <= process.frozen:
            self._excused = True

    def reads(self, process: schedulers.Process, served: server.Object) -> None:
        """Note that a verification begins."""
        self._readers[process] = reader = _Reader(served, len(served.versions) - 1)
        reader.was_right = self._is_right(reader)

    def read(
        self, process: schedulers.Process, is_equal: bool | None, error: Exception | None, *, is_clean: bool
    ) -> None:
        """Judge the verdict of a verification, or its failure. ``is_clean``: it met no fault."""
        schedulers.active().note("verdict", is_equal, type(error).__name__)
        reader = self._readers.pop(process)
        if error is not None and not hasattr(error, "retryable"):
            kind = schedulers.Harness if isinstance(error, _OF_CODE) else schedulers.Broken
            raise kind(f"{process.name}: {type(error).__name__}: {error}") from error
        self.outcomes.append({True: "equal", False: "differs", None: "no verdict"}[is_equal])
        inode = self._inode()
        is_device = inode is not None and inode.is_device
        if is_equal and not (reader.was_right or (reader.is_changed and is_device)):
            _require(reader.is_changed and self._is_right(reader), f"{process.name}: says equal, wrongly")
        if reader.is_changed or not reader.was_right or len(reader.served.versions) > reader.first + 1:
            return
        if reader.served.ranges in {"right", "none"}:
            _require(is_equal is not False, f"{process.name}: says that it differs, wrongly")
            _require(not is_clean or is_equal, f"{process.name}: has no verdict without a fault: {error}")

    def _is_right(self, reader: _Reader) -> bool:
        """Return whether the target holds a version that has been served since the reader began."""
        inode = self._inode()
        versions = reader.served.versions[reader.first :]
        return inode is not None and any(_is(inode.data.view, each.stored, inode) for each in versions)

    def changed(self, inode: disks.Inode) -> None:
        """Look at the target: storage, or a directory, has changed."""
        for reader in self._readers.values():
            reader.is_changed = True
        if self._excused:
            return
        if inode.is_device:
            self._look_at_device(inode)
        elif inode is self._disk.directory or any(state.get("disk.img") is inode for state in self._names()):
            self._look_at_file()

    def lost_power(self) -> None:
        """Look at the target: what was not synced is lost."""
        for inode in (self._disk.directory, *self._disk.devices.values()):
            self.changed(inode)

    def _replaces(
        self, process: schedulers.Process, inode: disks.Inode, call: str, details: tuple[object, ...]
    ) -> bool:
        existing = self._asked[process][0]
        if inode.is_device or existing in {"remove", "update"} or self._served[process][0].is_delta:
            return True
        # Only a finished file replaces a finished file.
        return existing == "replace" and call == "rename" and details[-1] == self._target

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
        _require(self._asked[process][1] != "wrong", f"{process.name}: success with a wrong checksum")
        inode = self._inode()
        if inode is None:
            raise schedulers.Broken(f"{process.name}: success without a disk")
        versions = [version.stored for version in served.versions[first:]]
        found = [disk for disk in versions if _is(inode.data.view, disk, inode)]
        if not found:
            differs = _difference(inode.data.view, versions)
            _break(f"{process.name}: success with a wrong disk: {differs}")
        is_durable = _is(inode.data.stable, found[-1], inode)
        _require(is_durable, f"{process.name}: success with a disk that is not durable")
        if not inode.is_device:
            stable = self._disk.directory.stable.get("disk.img")
            _require(stable is inode, f"{process.name}: success with a name that is not durable")
        self._check_finished(process)
        self._finished = process, world.number(), found[-1]

    def failed(self, process: schedulers.Process, error: Exception) -> None:
        world = schedulers.active()
        if process.cancelled is not None and not process.was_frozen:
            took = world.now - process.cancelled
            _require(took < _GRACE, f"{process.name}: ended {took:.0f} s after it was asked to")
        world.note("failure", type(error).__name__, error)
        self.outcomes.append(type(error).__name__)
        self._failures[process] = error
        if not hasattr(error, "retryable"):
            # A call with arguments that the simulator does not take fails in the frame of the product.
            kind = schedulers.Harness if isinstance(error, _OF_CODE) else schedulers.Broken
            raise kind(f"{process.name}: {type(error).__name__}: {error}") from error
        self._check_finished(process)

    def reused(self) -> None:
        """Somebody else has written to the target, or it holds what nobody may be blamed for."""
        self._finished = None
        inode = self._inode()
        if inode is not None:
            self._others += [inode.data.view.copy(), inode.data.stable.copy()]
            self._usable = 0, {}

    def must_have_finished(self, process: schedulers.Process, *, has_lied: bool) -> None:
        """The last run, without faults.

        ``has_lied``: the server had said otherwise how long the changes are. What an earlier run has applied
        is then of another file, as far as anybody knows.
        """
        names = self._disk.directory.entries
        # An update that has not ended is refused as well.
        is_there = self._inode() is not None or "disk.img.changing" in names
        failure = self._failures.get(process)
        is_refused = self._asked[process][0] == "refuse" and is_there and _is_a(failure, "TargetExists")
        is_of_others = has_lied and _is_a(failure, "TargetError") and "but of other files" in str(failure)
        _require(
            process in self._succeeded or is_refused or is_of_others,
            f"{process.name}: failed without a fault",
        )

    # -- moments

    def _look_at_device(self, inode: disks.Inode) -> None:
        """Look at the device now, and at the worst that a power failure might leave."""
        data = inode.data
        usable = self._sectors(data.sector)
        self._require_whole(data.view, usable, "the device")
        if not data.pending:
            self._require_whole(data.stable, usable, "the device after a power failure")
            return
        for start in {start for start, _ in usable}:
            sector = start, start + data.sector
            torn = data.with_only(*sector)
            if (start, torn.read(*sector)) in usable:
                self._require_whole(torn, usable, "the device after a torn write")
            if (start, data.stable.read(*sector)) in usable:
                self._require_whole(data.without(*sector), usable, "the device with its old beginning")
        if not self._dice.randrange(_RANDOM):
            state = data.after_power_cut(self._dice)
            self._require_whole(state, usable, "the device after a power failure")

    def _require_whole(
        self, state: disks.Sparse, usable: dict[tuple[int, bytes], list[disks.Sparse]], what: str
    ) -> None:
        """Require that a device with the usable sector of a disk holds the whole of it."""
        for (start, sector), whole in usable.items():
            looks_usable = state.read(start, start + len(sector)) == sector
            if looks_usable and not any(state.begins_with(each, len(each)) for each in whole):
                _break(f"{what} looks usable, and is wrong: {_difference(state, whole)}")

    def _look_at_file(self) -> None:
        """Look at the file now, and at each name that a power failure might leave."""
        known = self._known()
        names = self._disk.directory.entries
        inode = names.get("disk.img")
        if inode is not None:
            self._require_known(inode.data.view, known, "the file")
        for state in self._disk.directory.states():
            inode = state.get("disk.img")
            if inode is None:
                continue
            self._require_known(inode.data.stable, known, "the file after a power failure")
            if inode.data.pending:
                left = inode.data.after_power_cut(self._dice)
                self._require_known(left, known, "the file after a power failure with torn writes")

    def _require_known(self, state: disks.Sparse, known: list[disks.Sparse], what: str) -> None:
        if state not in known:
            _break(f"{what} has its name, and is wrong: {_difference(state, known)}")

    def _names(self) -> Iterator[dict[str, disks.Inode]]:
        yield self._disk.directory.entries
        yield from self._disk.directory.states()

    def _known(self) -> list[disks.Sparse]:
        """Return each disk that may be on the target."""
        return [each.stored for served in self._objects for each in served.made] + self._others

    def _sectors(self, size: int) -> dict[tuple[int, bytes], list[disks.Sparse]]:
        """Return the known disks by the first sector with data, which makes each usable, and its offset."""
        known = self._known()
        if self._usable[0] != len(known):
            found: dict[tuple[int, bytes], list[disks.Sparse]] = {}
            for disk in known:
                for start in range(0, _HEAD, size):
                    sector = disk.read(start, start + size).ljust(size, b"\0")
                    if any(sector):
                        break
                # What others left is a disk by itself only if it does not begin as an incomplete one.
                is_disk = disk not in self._others or sector.startswith(_FOREIGN)
                if is_disk and any(sector):
                    found.setdefault((start, sector), [])
            for start, sector in found:
                found[start, sector] = [
                    disk for disk in known if disk.read(start, start + size).ljust(size, b"\0") == sector
                ]
            # Others wrote before this sector and left it: zeroing what they wrote uncovers a disk of theirs.
            covered = {
                key for key, whole in found.items() if any(any(disk.read(0, key[0])) for disk in whole)
            }
            self._usable = len(known), {key: whole for key, whole in found.items() if key not in covered}
        return self._usable[1]

    # -- helpers

    def _inode(self) -> disks.Inode | None:
        return self._disk.devices.get(self._target) or self._disk.directory.entries.get("disk.img")

    def _check_finished(self, process: schedulers.Process) -> None:
        if self._finished is None or self._finished[0] is process or self._excused:
            return
        other, _, disk = self._finished
        inode = self._inode()
        kept = inode is not None and _is(inode.data.view, disk, inode)
        _require(kept, f"{process.name}: changed the disk that {other.name} had finished")


def _is(data: disks.Sparse, disk: disks.Sparse, inode: disks.Inode) -> bool:
    """Return whether these are the bytes of a disk: a file has no others, a device may."""
    return data.begins_with(disk, len(disk)) if inode.is_device else data == disk


def _is_a(failure: Exception | None, name: str) -> bool:
    # Each run has classes of its own.
    return type(failure).__name__ == name


def _require(condition: object, what: str) -> None:
    if not condition:
        _break(what)


def _break(what: str) -> NoReturn:
    error = schedulers.Broken(what)
    if schedulers.running is not None:
        schedulers.running.fails(error)
    raise error


def _difference(found: disks.Sparse, versions: list[disks.Sparse]) -> str:
    """Say where the bytes differ from each version."""
    words = []
    for number, version in enumerate(versions):
        chunks = sorted({at for at in (*found.chunks, *version.chunks) if at * disks.CHUNK < len(version)})
        wrong = [
            at
            for chunk in chunks
            for at in range(chunk * disks.CHUNK, min(len(version), (chunk + 1) * disks.CHUNK), disks.SECTOR)
            if found.read(at, at + 512) != version.read(at, at + 512)
        ]
        words.append(f"{number}: {len(wrong)} of {len(version) // 512} sectors from byte {wrong[:1]}")
    return f"{len(found)} bytes; against disk {'; '.join(words)}"
