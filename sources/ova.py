"""A disk in an OVA, wherever the OVA is: a member of a tar archive that another source serves.

By ranges only the headers, the descriptor and the wanted disk are read. A source without ranges is read once,
and the disk is written as it passes. A checksum of the whole OVA also needs all of its bytes.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable, Mapping
from typing import Final, Self

from cdi_worker import errors
from cdi_worker.formats import checksum, detect, readers
from cdi_worker.formats.ova import descriptor, package
from cdi_worker.sources import base, part

log = logging.getLogger(__name__)

#: Bytes of a read for headers: small files after a header need no request of their own.
_HEADERS: Final = 32 << 10
_SCRAP: Final = 1 << 20
#: Algorithms of a manifest that comes after the disk (DSP0243; ovftool's --shaAlgorithm).
_LATER: Final = ("sha1", "sha256", "sha512")


class OvaSource(part.Part):
    """The disk ``choice`` (its file name, disk id or number; empty: the only one) in ``whole``, an open OVA.

    ``expected``: the checksum of the whole OVA, or None. Closing it closes ``whole`` too.
    """

    def __init__(
        self,
        whole: base.Source,
        choice: str,
        expected: checksum.Checksum | None,
        cancel: base.Cancel,
    ) -> None:
        super().__init__(whole, 0, 0, whole.name)
        self.engine = whole.engine
        self.once = whole.once
        self.weak = whole.weak
        self._choice = choice
        self._expected = expected
        self._cancel = cancel
        self._passing: _Passing | None = None
        self._disk: descriptor.Disk | None = None
        self._package: package.Package | None = None

    def __enter__(self) -> Self:
        read = self.engine.at_random(self._whole, self._cancel) if self._expected is None else None
        if read is not None:
            self._open_ranges(read)
        else:
            self._passing = passing = self._pass()
            self._package, self.size, self.head = passing.package, passing.member.size, passing.head
            self._name(passing.disk, passing.member)
        disk, member = self._disk, self.size
        log.info("disk file=%r size=%r ranges=%s", disk.file if disk else "", member, read is not None)
        return self

    def close(self) -> None:
        if self._passing is not None:
            self._passing.close()
        self._whole.close()

    @property
    def transferred(self) -> int | None:
        """The size of the OVA if all of it passes, else that of the disk's file."""
        return self.size if self._is_random else self._whole.size

    def ranges(self) -> base.RandomReader | None:
        return super().ranges() if self._passing is None else None

    def ordered(self, cancel: base.Cancel, advance: Callable[[int], None] = lambda _: None) -> base.Reader:
        if self._is_random:
            return super().ordered(cancel, advance)
        begun, self.begun = self.begun, None
        passing = self._passing if self._passing is not None and begun else self._begin()
        passing.report(advance)
        return begun or _Lent(passing)

    def verify(self) -> None:
        """Read the rest of an OVA that passes, and verify the checksums. Safe to call twice."""
        if self._passing is not None:
            self._passing.finish(self._expected)
        self._whole.verify()

    def describe(self) -> Mapping[str, object]:
        """Return the disks, which one is imported, and the checksum that the manifest states for it."""
        if self._package is None or self._disk is None:
            return {}
        there = self.checksum or ("not read yet" if self._passing is not None else "none")
        disks = [disk.describe() for disk in self._package.disks]
        return {**self._whole.describe(), "disks": disks, "disk": self._disk.file, "manifest": there}

    def _open_ranges(self, read: Callable[[int, int], bytes]) -> None:
        """Read all headers, the descriptor and the manifest; check them before the disk is read."""
        size = self._whole.size or 0
        self._package = found = package.Package(io.BufferedReader(readers.Seekable(read, size), _HEADERS))
        while (member := found.next()) is not None:
            if member.offset + member.size > size:
                reason = f"{member.name!r} ends at byte {member.offset + member.size} of {size}"
                raise errors.Truncated(format="OVA", reason=reason)
        disk = self._choose(found)
        chosen = _needed(found, disk)
        stated = found.checksum_of(chosen)
        _warn(self._whole.name, found)
        self.checksum = f"{stated.algorithm}:{stated.digest}" if stated else ""
        self._offset, self.size = chosen.offset, chosen.size
        self.head = read(chosen.offset, min(chosen.size, detect.HEAD))
        _check_compression(disk, self.head)
        self._name(disk, chosen)

    def _name(self, disk: descriptor.Disk, member: package.Member) -> None:
        self._disk = disk
        self.name = f"{self._whole.name}#{disk.file}"
        if self._whole.identity is not None:
            self.identity = f"{self._whole.identity} {member.name} at {member.offset}"

    @property
    def _is_random(self) -> bool:
        """Whether the disk is read by ranges; those of a server may turn out to be wrong later."""
        return self._passing is None and self.engine.at_random(self._whole, self._cancel) is not None

    def _begin(self) -> _Passing:
        """Let the OVA pass to the disk, again if its first pass was used."""
        if self._passing is None or not self._passing.is_fresh:
            if self._passing is not None:
                self._passing.close()
            self._passing = self._pass()
            # A pass verifies the disk by itself.
            self.checksum = ""
            self._check_same(self._passing.member)
        self._passing.is_fresh = False
        return self._passing

    def _check_same(self, now: package.Member) -> None:
        if now.size != self.size:
            before, after = f"{self.size} bytes", f"{now.size} bytes"
            raise errors.SourceChanged(url=self.name, what="disk", before=before, now=after)

    def _pass(self) -> _Passing:
        return _Passing(self._whole, self._cancel, self._choose, hashed=self._expected)

    def _choose(self, found: package.Package) -> descriptor.Disk:
        """Return the wanted disk; if that is none or not known, the first one, which can be examined."""
        disks, choice = found.disks, self._choice
        named = [disk for disk in disks if choice in descriptor.names(disk.file)]
        named = named or [disk for disk in disks if choice in {disk.id, str(disk.index)}]
        if not choice:
            named = list(disks)
        if len(named) != 1:
            what = f"holds {len(disks)} disks" if not choice else f"has no disk {choice!r}"
            listed = ", ".join(_listed(disk) for disk in disks)
            reason = (
                f"{self._whole.name}: {what}: {listed}; choose one with --disk (in a pod: CDI_WORKER_DISK)"
            )
            self.obstacle = descriptor.refused("one disk", reason)
            return disks[0]
        if named[0].obstacle:
            raise errors.Unsupported(reason=f"{self._whole.name}: disk {named[0].file!r} {named[0].obstacle}")
        return named[0]


class _Passing:
    """A pass through an OVA, up to the disk; a reader of the disk. ``finish`` reads what follows.

    ``hashed``: the checksum of the whole, whose algorithm is computed.
    """

    def __init__(
        self,
        whole: base.Source,
        cancel: base.Cancel,
        choose: Callable[[package.Package], descriptor.Disk],
        *,
        hashed: checksum.Checksum | None,
    ) -> None:
        self.is_fresh = True
        self._arrived = 0
        self._report: Callable[[int], None] | None = None
        self._finished = False
        self._name = whole.name
        self._whole = hashlib.new(hashed.algorithm, usedforsecurity=False) if hashed else None
        self._reader = readers.Watched(whole.ordered(cancel), self._see)
        try:
            self.package = package.Package(self._reader)
            self.disk, self.member = self._find(choose)
            stated = self.package.checksum_of(self.member)
            names = (stated.algorithm,) if stated else _LATER
            self._hashes = {name: hashlib.new(name, usedforsecurity=False) for name in names}
            head = memoryview(bytearray(min(self.member.size, detect.HEAD)))
            self.head = bytes(head[: readers.fill(self.package, head)])
            _check_compression(self.disk, self.head)
        except BaseException:
            self._reader.close()
            raise
        self._hash(memoryview(self.head))
        self._replay = readers.Bytes(self.head)

    def readinto(self, into: memoryview, /) -> int:
        if count := self._replay.readinto(into):
            return count
        count = self.package.readinto(into)
        self._hash(into[:count])
        return count

    def close(self) -> None:
        """Close the stream of the OVA. Safe to call twice."""
        self._reader.close()

    def report(self, advance: Callable[[int], None]) -> None:
        """Call ``advance`` with the bytes that have arrived, and with those that will."""
        self._report = advance
        advance(self._arrived)
        self._arrived = 0

    def finish(self, expected: checksum.Checksum | None) -> None:
        """Read to the end of the OVA. Raises ``errors.ChecksumMismatch`` for the disk and for the whole."""
        if self._finished:
            return
        scrap = memoryview(bytearray(_SCRAP))
        while self.readinto(scrap):
            pass
        while self.package.next() is not None:
            pass
        self.package.drain()
        _warn(self._name, self.package)
        if stated := self.package.checksum_of(self.member):
            _compare(stated, self._hashes.get(stated.algorithm))
        if expected is not None:
            _compare(expected, self._whole)
        self._finished = True

    def _find(
        self, choose: Callable[[package.Package], descriptor.Disk]
    ) -> tuple[descriptor.Disk, package.Member]:
        disk: descriptor.Disk | None = None
        while self.package.next() is not None:
            disk = disk or choose(self.package)
            if member := self.package.member_of(disk):
                return disk, member
        reason = f"the archive has no file {disk.file!r}" if disk else "the archive has no descriptor"
        raise errors.Truncated(format="OVA", reason=reason)

    def _see(self, data: memoryview) -> None:
        if self._whole is not None:
            self._whole.update(data)
        if self._report is None:
            self._arrived += len(data)
        else:
            self._report(len(data))

    def _hash(self, data: memoryview) -> None:
        for each in self._hashes.values():
            each.update(data)


class _Lent:
    """A reader whose close leaves the OVA open for ``verify``."""

    def __init__(self, reader: base.Reader) -> None:
        self._reader = reader

    def readinto(self, into: memoryview, /) -> int:
        return self._reader.readinto(into)

    def close(self) -> None:
        """Do nothing: the source closes the stream."""


def _needed(found: package.Package, disk: descriptor.Disk) -> package.Member:
    member = found.member_of(disk)
    if member is None:
        raise errors.Truncated(format="OVA", reason=f"the archive has no file {disk.file!r}")
    return member


def _warn(name: str, found: package.Package) -> None:
    if found.checksums is None:
        log.warning("not verified url=%r: the OVA has no manifest", name)


def _check_compression(disk: descriptor.Disk, head: bytes) -> None:
    """Refuse a file that is not compressed as the descriptor states."""
    if disk.compression and detect.detect(head) != disk.compression:
        reason = f"the descriptor states that {disk.file!r} is compressed with {disk.compression}; it is not"
        raise descriptor.refused("compression", reason)


def _compare(stated: checksum.Checksum, hashed: hashlib._Hash | None) -> None:
    """Raise ``errors.ChecksumMismatch``; an algorithm that was not computed differs too."""
    if hashed is None:
        reason = f"the manifest comes after the disk and states its {stated.algorithm}"
        raise errors.Unsupported(reason=f"{reason}; supported there: {', '.join(_LATER)}")
    calculated = hashed.hexdigest()
    if calculated != stated.digest:
        raise errors.ChecksumMismatch(
            algorithm=stated.algorithm, expected=stated.digest, calculated=calculated
        )


def _listed(disk: descriptor.Disk) -> str:
    capacity = "" if disk.capacity is None else f", {disk.capacity} bytes"
    return f"{disk.index} {disk.file} ({disk.id}{capacity})"
