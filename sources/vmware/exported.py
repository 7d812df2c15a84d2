"""The disks of a machine by an export lease: streams of vSphere that need no library of VMware."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, Final

import requests

from cdi_worker import errors, masking
from cdi_worker.formats import readers
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.sources import base, fields, wire
from cdi_worker.sources.vmware import lease, locations, session
from cdi_worker.sources.vmware import machine as machines
from cdi_worker.sources.web import http, pinned

log = logging.getLogger(__name__)

#: Seconds to wait after a cancel for what has begun on vSphere, such as a snapshot.
GRACE = 10.0
#: Seconds to end a lease after a cancel: the kubelet allows 30 s in total.
LAST = 15.0
#: Seconds for vSphere to take a snapshot, or to merge a removed one.
MERGED = 600.0
#: Seconds for which a manifest that vSphere does not return is asked for again.
MANIFEST = 30.0
#: What names a snapshot, in a pod and on the command line.
NAMED: Final = ("CDI_WORKER_SNAPSHOT", "--snapshot")
#: How often a host may export a disk again with other bytes.
MOST_REENCODED = 5
#: The name of a snapshot of the worker: its owner's follows.
PREFIX: Final = "cdi-worker"
#: Characters of the owner in the description of a snapshot.
LONGEST_OWNER: Final = 300


class LeaseSource(base.Source):
    """All disks of a machine, or of one of its snapshots; of a disk that the location names, only this.

    A running machine is exported at a snapshot of its own, which is removed at the end. ``why``: the reason
    to read by a lease, if there is another way.
    """

    #: From ``open`` on.
    lease: lease.Lease

    def __init__(self, location: locations.Vsphere, cancel: base.Cancel, why: str = "") -> None:
        self.name = f"{wire.safe_url(location.url)} {location.chosen or location.machine}"
        self.location = location
        self.cancel = cancel
        #: The digests of the streams that were compared with the manifest, by disk.
        self.verified: dict[str, str] = {}
        #: By key: each compares a stream that was read with its entry in the manifest.
        self.comparisons: dict[str, Callable[[lease.Entry], None]] = {}
        self.why = why
        self._open = contextlib.ExitStack()
        self._read = 0
        self._reencoded: collections.Counter[str] = collections.Counter()

    def open(self, opening: base.Opening) -> base.Facts:
        begin = functools.partial(self._begin, opening)
        cancelling.run_apart(begin, self.cancel, grace=GRACE, late=self.close)
        return base.Facts(name=self.name, format="vmdk")

    def describe(self) -> Mapping[str, object]:
        found = {
            "machine": self._machine.name,
            "snapshot": self._snapshot,
            "readBy": "lease",
            "why": self.why,
        }
        return {name: value for name, value in found.items() if value}

    def verify(self) -> None:
        """Compare the streams, which were read, with the manifest; end the lease, remove an own snapshot."""
        entries = retry.patiently(self.lease.manifest, MANIFEST, self.cancel) if self.comparisons else {}
        for key, compare in self.comparisons.items():
            if key in entries:
                compare(entries[key])
            else:
                log.warning("not verified: the host has no manifest of the stream disk=%r", key)
        self._finish(self.lease.complete)
        self.close()

    def finish(self) -> base.Provenance:
        how = f"export lease of {self._product}" + (f" ({self.why})" if self.why else "")
        info = {"Version": how, "Host": self._hosts}
        return base.Provenance(info=info, verified=self.verified)

    def close(self) -> None:
        """Abort the lease unless it has ended, remove an own snapshot, and log out."""
        ending, self._open = self._open, contextlib.ExitStack()
        self._finish(ending.close)

    def count(self, count: int) -> None:
        """Count bytes of a disk, for the progress that vSphere shows."""
        self._read += count

    def reencoded(self, key: str, changed: errors.SourceChanged) -> errors.SourceChanged:
        """Return the error for a stream that was cut, and has other bytes in the answer to a new request.

        The host exports the same disk again then: another attempt compares it with what was delivered.
        """
        self._reencoded[key] += 1
        kind = errors.Reencoded if self._reencoded[key] <= MOST_REENCODED else errors.SourceChanged
        return kind(**changed.fields)

    def identity(self, disk: machines.VirtualDisk) -> str | None:
        """Return the identity of a disk: only a snapshot is immutable, and an own one is not there again."""
        if not self.location.moment:
            return None
        moment = (self.location.machine, disk.object_id, disk.snapshot, disk.change_id, disk.file)
        # The references of snapshots are those of one vCenter.
        return " ".join((self._instance, *moment))

    def at_previous(self, disk: machines.VirtualDisk) -> machines.VirtualDisk | None:
        """Return the disk at the previous checkpoint; None if that is gone: all of the disk is read."""
        previous = self.location.previous
        with contextlib.suppress(errors.Unreachable):
            if previous and "/" not in previous:
                return self._machine.at(previous, disk)
        return self._machine.since(previous, disk) if previous else None

    def _begin(self, opening: base.Opening) -> None:
        location = self.location
        owner = opening.owner.encode("utf-8", "surrogateescape")
        name = f"{PREFIX} {hashlib.sha256(owner).hexdigest()[:16]}"
        with contextlib.ExitStack() as stack:
            opened = stack.enter_context(session.Session(location))
            self._product, self._instance = opened.product, opened.instance
            self._machine = machine = machines.Machine(opened, location.machine)
            if opening.whole:
                # Of a run that was killed.
                self._remove(lambda each: each.name == name)
            snapshot = machine.snapshot(location.moment) if location.moment else None
            if snapshot is None and machine.is_running:
                if not opening.whole:
                    text = f"{machine.name!r} runs: name a snapshot of it ({{}}); this takes none"
                    raise errors.RequestError(fields.Fault(text, *NAMED))
                snapshot = self._take(stack, name, masking.quoted(owner, LONGEST_OWNER))
            self._snapshot = snapshot.reference if snapshot else ""
            if not (disks := self._chosen(snapshot)):
                raise errors.SourceError(reason=f"{self.name}: the machine has no disk")
            self.lease = held = lease.Lease(opened, machine, snapshot, self.cancel.pause, self._percent)
            stack.callback(held.abort)
            stems = collections.Counter(map(_stem, disks))
            self.disks = tuple(self._held(disk, stems) for disk in disks)
            self._hosts = ", ".join(sorted({wire.origin(each.url)[1] for each in held.devices.values()}))
            self._open = stack.pop_all()

    def _chosen(self, snapshot: machines.Snapshot | None) -> list[machines.VirtualDisk]:
        """Return the disks that are exported: the one that the location names, or all."""
        if not self.location.chosen:
            if snapshot is None:
                return self._machine.disks
            lacking = [disk for disk in self._machine.disks if disk.is_independent]
            keys = {disk.key for disk in snapshot.disks}
            return snapshot.disks + [disk for disk in lacking if disk.key not in keys]
        # A path may be that of an earlier file, and the disk may have another controller since then.
        disk = self._machine.disk(self.location.chosen)
        return [self._machine.at(snapshot.reference if snapshot else "", disk)]

    def _held(self, disk: machines.VirtualDisk, stems: Mapping[str, int]) -> base.Held:
        device, obstacle = self.lease.devices.get(disk.address), disk.obstacle
        if disk.is_independent and self._snapshot:
            obstacle = "is independent of snapshots; power the machine off to export it"
        elif device is None and not obstacle:
            obstacle = "is not exported by vSphere; is it independent of snapshots, or shared?"
        stem = _stem(disk)
        if stems[stem] > 1:
            # In other folders, or on other datastores.
            stem += f"-{disk.key}"

        def make(together: bool, cancel: base.Cancel) -> base.Source:
            if device is None or obstacle:
                raise errors.Unsupported(reason=f"{self.name}: disk {disk.label!r} {obstacle}")
            return DeviceSource(self, device, disk, cancel, together=together)

        return base.Held((disk.label, disk.file, str(disk.key)), f"{stem}.img", disk.size, make, obstacle)

    def _percent(self) -> int:
        total = sum(each.size or 0 for each in self.disks)
        return min(99, self._read * 100 // total) if total else 0

    def _finish(self, end: Callable[[], None]) -> None:
        """Call what ends something on vSphere, for a limited time, which is shorter after a cancel."""
        try:
            cancelling.run_apart(end, self.cancel, grace=LAST, limit=MERGED)
        except (TimeoutError, errors.Cancelled):
            log.warning("vSphere has not ended the export in time source=%r", self.name)

    # -- the snapshot of a running machine

    def _take(self, stack: contextlib.ExitStack, name: str, owner: str) -> machines.Snapshot:
        """Take a snapshot, which is removed when ``stack`` is closed."""
        about = f"Temporary, of the import to {owner}. Removed when it ends."
        log.info("taking a snapshot machine=%r name=%r", self._machine.name, name)
        before = {each.reference for each in self._machine.snapshots}
        taken: list[str] = []

        def is_own(each: machines.Snapshot) -> bool:
            # Its reference is not known if vSphere has not answered.
            return each.reference in taken or (
                not taken and each.name == name and each.reference not in before
            )

        stack.callback(self._remove, is_own)
        text = "waiting %.0f s for snapshot %r, to remove it; if it appears later, the next run removes it"
        with self.cancel.on_set(functools.partial(log.warning, text, GRACE, name)):
            found = self._machine.take_snapshot(name, about, self._wait(), quiesce=self.location.quiesce)
        taken.append(found.reference)
        # Of a run that was killed while vSphere took it, which ends before this one is taken.
        self._remove(lambda each: each.name == name and each.reference != found.reference)
        return found

    def _wait(self) -> Callable[[float], None]:
        """Return what waits for a task of vSphere: a cancel does not end what has begun."""
        deadline = time.monotonic() + MERGED

        def pause(seconds: float) -> None:
            if time.monotonic() > deadline:
                raise errors.Unreachable(url=self.name, reason=f"vSphere needs more than {MERGED:.0f} s")
            # vSphere sends no events to this session.
            time.sleep(seconds)

        return pause

    def _remove(self, is_own: Callable[[machines.Snapshot], bool]) -> None:
        """Remove own snapshots."""
        machine = self._machine
        try:
            for each in filter(is_own, machine.read().snapshots):
                machine.remove_snapshot(each, self._wait())
                log.info("removed the snapshot machine=%r name=%r", machine.name, each.name)
        except errors.SourceError as err:
            log.warning("a snapshot of %r is left; remove it in vSphere reason=%s", machine.name, err)


def _stem(disk: machines.VirtualDisk) -> str:
    """Return the name of a disk's file, without the number of a snapshot."""
    file = disk.parents[-1] if disk.parents else disk.file
    return file.rpartition("/")[2].removesuffix(".vmdk") or f"disk-{disk.key}"


class DeviceSource(http.HttpSource):
    """A disk of ``whole``: a streamOptimized VMDK, which its host or vCenter sends in order.

    ``together``: ``whole`` ends when other disks have been read, too.
    """

    #: Where a disk is empty, a host sends almost nothing for a long time.
    min_speed = 0.0

    def __init__(
        self,
        whole: LeaseSource,
        device: lease.Device,
        disk: machines.VirtualDisk,
        cancel: base.Cancel,
        *,
        together: bool,
    ) -> None:
        self._whole, self._key, self._disk, self._together = whole, device.key, disk, together
        super().__init__(_Resource(device, whole, disk.label or disk.file, cancel))
        self._before = whole.at_previous(disk)
        self._is_requested = False
        self._passed: _Passed | None = None

    def open(self, opening: base.Opening) -> base.Facts:
        with self._held_lease():
            served = super().open(dataclasses.replace(opening, whole=False))
        return dataclasses.replace(
            served,
            identity=self._whole.identity(self._disk),
            weak=False,
            digest="",
            format="vmdk",
            disk_size=self._disk.size,
            previous_size=self._before.size if self._before else None,
        )

    @property
    def ranges(self) -> None:
        """None: the manifest has a digest of the whole stream."""

    def _first_answer(self, opening: base.Opening, size: int | None = None) -> tuple[http.Version, bytes]:
        """Request the whole stream; if the host offers ranges, it goes on by one where it is cut."""
        response = self._resource.get(None)
        found = self._open_stream(response)
        self._has_ranges = response.headers.get("Accept-Ranges", "").lower() == "bytes"
        return found

    def stream(self, offset: int = 0) -> base.Reader:
        if self._is_requested:
            self._whole.lease.check(offset)
        self._is_requested = True
        with self._held_lease(offset):
            return super().stream(offset)

    def unwrap(self, served: base.Reader) -> base.Reader:
        """Hash the stream as it passes."""
        self._passed = _Passed(served, self._whole, self._key)
        return self._passed

    def names(self, checkpoint: str) -> frozenset[str]:
        location = self._whole.location
        if checkpoint not in {location.current, location.previous}:
            return frozenset({checkpoint})
        return machines.names(checkpoint, self._disk if checkpoint == location.current else self._before)

    def describe(self) -> Mapping[str, object]:
        return {**self._whole.describe(), "disk": self._disk.label, "file": self._disk.file}

    def verify(self) -> None:
        """Let the stream be compared with the manifest, when all are read. Safe to call twice."""
        passed, self._passed = self._passed, None
        if passed is None:
            return
        # The last one, if it was read again: the host may have exported again for it.
        self._whole.comparisons[self._key] = functools.partial(self._compare, passed)
        if not self._together:
            self._whole.verify()

    def finish(self) -> base.Provenance:
        return base.Provenance() if self._together else self._whole.finish()

    def _compare(self, passed: _Passed, entry: lease.Entry) -> None:
        algorithm, name = passed.hashing.name, self.name
        if entry.size and entry.size != passed.size:
            reason = f"{name}: {passed.size} bytes were received, the host has sent {entry.size}"
            raise errors.SourceError(reason=reason)
        if entry.capacity is not None and entry.capacity != self._disk.size:
            reason = f"{name}: exported with {entry.capacity} bytes, the disk has {self._disk.size}"
            raise errors.SourceError(reason=reason)
        if entry.algorithm != algorithm or not entry.digest:
            log.warning("not verified url=%r: the manifest has no %s of the stream", name, algorithm)
            return
        expected, calculated = (f"{algorithm}:{each}" for each in (entry.digest, passed.hashing.hexdigest()))
        if expected != calculated:
            raise errors.DigestMismatch(url=name, expected=expected, calculated=calculated)
        self._whole.verified[f"export of {self._disk.label or self._disk.file}"] = calculated

    @contextlib.contextmanager
    def _held_lease(self, offset: int = 0) -> Iterator[None]:
        """Explain a failure in the block by a lease that has ended, which says more than a status."""
        try:
            yield
        except errors.Unreachable:
            self._whole.lease.check(offset)
            raise

    def _check_version(self, response: requests.Response, size: int | None) -> None:
        """A host may export again for each request: what was delivered is compared instead."""


class _Passed(readers.Wrapper):
    """A stream as it passes: its hash, and its length."""

    def __init__(self, reader: base.Reader, whole: LeaseSource, key: str) -> None:
        super().__init__(reader)
        self.hashing = whole.lease.new_hash()
        self.size = 0
        self._whole, self._key = whole, key

    def readinto(self, into: memoryview, /) -> int:
        try:
            count = self._reader.readinto(into)
        except errors.SourceChanged as err:
            raise self._whole.reencoded(self._key, err) from err
        self.hashing.update(into[:count])
        self.size += count
        self._whole.count(count)
        return count


class _Resource(pinned.Resource):
    """The stream of a disk. Its URL is its credential; it is neither redirected nor sent through a proxy."""

    reasons: ClassVar[Mapping[int, str]] = {
        401: "the host refuses the URL of the lease, as if it had ended",
        403: "the host refuses the URL of the lease, as if it had ended",
        404: "the host does not know the URL of the lease, as if it had ended",
    }

    def __init__(self, device: lease.Device, whole: LeaseSource, name: str, cancel: base.Cancel) -> None:
        given = whole.location.access
        access = base.Access(
            ca_files=given.ca_files,
            insecure=given.insecure,
            connections=given.connections,
            patience=given.patience,
            min_speed=DeviceSource.min_speed,
        )
        context = None
        pin = device.thumbprint
        if session.is_forbidden(pin):
            # The certificate is verified: by its CA, or on the session's own host by that thumbprint.
            log.info("the lease has only a thumbprint of SHA-1, which the policy of this machine forbids")
            is_own = wire.origin(device.url) == wire.origin(whole.location.url)
            pin = whole.location.thumbprint if is_own else ""
        if pin:
            try:
                context = session.pinned(pin)
            except errors.RequestError as err:
                raise errors.Unreachable(url=whole.name, reason=f"the lease is malformed: {err}") from err
        super().__init__(device.url, access, cancel=cancel, context=context)
        self.name = f"{whole.name} {name}"

    @property
    def timeout(self) -> tuple[float, float]:
        connect, _ = super().timeout
        return connect, 2 * self.access.patience

    def _redirect_target(self, url: str, location: str) -> str:
        raise errors.Unreachable(url=self.name, reason="the host of the lease redirects elsewhere")
