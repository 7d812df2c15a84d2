"""One pass through an OVA that is read as a stream: its disks are verified when the manifest has passed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import checksum, detect, readers
from cdi_worker.formats.ova import descriptor, package
from cdi_worker.sources import base

log = logging.getLogger(__name__)

_SCRAP: Final = 1 << 20
#: Algorithms of a manifest that comes after the disk (DSP0243; ovftool's --shaAlgorithm).
_LATER: Final = ("sha1", "sha256", "sha512")


class Pass:
    """One pass through an OVA. ``expected``: the checksum of the whole, or None."""

    def __init__(self, whole: base.Image, cancel: base.Cancel, expected: checksum.Checksum | None) -> None:
        self.name = whole.served.name
        self._arrived = 0
        self._report: Callable[[int], None] | None = None
        self._finished = False
        self._files: list[File] = []
        self._hash = checksum.Hash(expected) if expected else None
        self._reader = readers.Watched(whole.ordered(cancel), self._see)
        self.package = package.Package(self._reader)

    def close(self) -> None:
        """Close the stream of the OVA. Safe to call twice."""
        self._reader.close()

    def find(self, choose: Callable[[package.Package], descriptor.Disk]) -> File:
        """Let the archive pass to the disk that ``choose`` returns when the descriptor has passed."""
        disk: descriptor.Disk | None = None
        while self.package.next() is not None:
            disk = disk or choose(self.package)
            if member := self.package.member_of(disk):
                return File(self, disk, member)
        reason = f"the archive has no file {disk.file!r}" if disk else "the archive has no descriptor"
        raise errors.Truncated(format="OVA", reason=reason)

    def next_disk(self) -> File | None:
        """Let the archive pass to the next disk; return None at its end, where everything is verified."""
        while (member := self.package.next()) is not None:
            for disk in self.package.disks:
                if self.package.member_of(disk) == member:
                    self._files.append(File(self, disk, member))
                    return self._files[-1]
        for disk in self.package.disks:
            needed(self.package, disk)
        self.finish()
        for file in self._files:
            file.verify()
        return None

    def finish(self) -> None:
        """Read to the end of the OVA. Raises ``errors.ChecksumMismatch`` for its own checksum."""
        if self._finished:
            return
        while self.package.next() is not None:
            pass
        self.package.drain()
        warn(self.name, self.package)
        if self._hash is not None:
            self._hash.verify()
        self._finished = True

    def report(self, advance: Callable[[int], None]) -> None:
        """Call ``advance`` with the bytes that have arrived, and with those that will."""
        self._report = advance
        advance(self._arrived)
        self._arrived = 0

    def _see(self, data: memoryview) -> None:
        if self._hash is not None:
            self._hash.update(data)
        if self._report is None:
            self._arrived += len(data)
        else:
            self._report(len(data))


class File:
    """A reader of the disk that passes now. Its close leaves the OVA open for ``verify``."""

    def __init__(self, passing: Pass, disk: descriptor.Disk, member: package.Member) -> None:
        self.disk, self.member = disk, member
        self._package = passing.package
        stated = self._package.checksum_of(member)
        names = (stated.algorithm,) if stated else _LATER
        self._hashes = {name: hashlib.new(name, usedforsecurity=False) for name in names}
        head = memoryview(bytearray(min(member.size, detect.HEAD)))
        self.head = bytes(head[: readers.fill(self._package, head)])
        check_compression(disk, self.head)
        self._update(memoryview(self.head))
        self._replay = readers.Bytes(self.head)

    def readinto(self, into: memoryview, /) -> int:
        if count := self._replay.readinto(into):
            return count
        count = self._package.readinto(into)
        self._update(into[:count])
        return count

    def close(self) -> None:
        """Do nothing: the source closes the stream."""

    def rest(self) -> None:
        """Read to the end of the disk."""
        scrap = memoryview(bytearray(_SCRAP))
        while self.readinto(scrap):
            pass

    def verify(self) -> None:
        """Compare with the manifest, if it has passed."""
        if stated := self._package.checksum_of(self.member):
            _compare(stated, self._hashes.get(stated.algorithm))

    def _update(self, data: memoryview) -> None:
        for each in self._hashes.values():
            each.update(data)


def needed(found: package.Package, disk: descriptor.Disk) -> package.Member:
    member = found.member_of(disk)
    if member is None:
        raise errors.Truncated(format="OVA", reason=f"the archive has no file {disk.file!r}")
    return member


def warn(name: str, found: package.Package) -> None:
    if found.checksums is None:
        log.warning("not verified url=%r: the OVA has no manifest", name)


def check_compression(disk: descriptor.Disk, head: bytes) -> None:
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
