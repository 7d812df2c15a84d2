"""A disk in an OVA, wherever the OVA is: a member of a tar archive that another source serves.

By ranges only the headers, the descriptor and the wanted disk are read. A source without ranges is read once,
and the disk is written as it passes. A checksum of the whole OVA also needs all of its bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import checksum, detect, views
from cdi_worker.formats.ova import descriptor, package
from cdi_worker.formats.tar import walk
from cdi_worker.sources import base
from cdi_worker.sources.packages import part, passing

log = logging.getLogger(__name__)

#: Algorithms of a manifest that comes after the disk (DSP0243; ovftool's --shaAlgorithm).
_LATER: Final = ("sha1", "sha256", "sha512")


class Pass(passing.Pass[package.Package]):
    """One pass through an OVA: its disks are verified when the manifest has passed."""

    def __init__(self, whole: base.Image, cancel: base.Cancel, expected: checksum.Checksum | None) -> None:
        super().__init__(whole, cancel, expected, package.Package)
        self.name = whole.facts.name

    def find(self, choose: Callable[[package.Package], descriptor.Disk]) -> File:
        """Let the archive pass to the disk that ``choose`` returns when the descriptor has passed."""
        disk: descriptor.Disk | None = None
        while self.archive.next() is not None:
            disk = disk or choose(self.archive)
            if member := self.archive.member_of(disk):
                return File(self, disk, member)
        reason = f"the archive has no file {disk.file!r}" if disk else "the archive has no descriptor"
        raise errors.Truncated(format="OVA", reason=reason)

    def files(self) -> Iterator[File]:
        """Yield each disk as it passes; at the end everything is verified."""
        passed: list[File] = []
        while (member := self.archive.next()) is not None:
            for disk in self.archive.disks:
                if self.archive.member_of(disk) == member:
                    passed.append(File(self, disk, member))
                    yield passed[-1]
        for disk in self.archive.disks:
            self.archive.needed(disk)
        self.finish()
        for file in passed:
            file.verify()

    def finish(self) -> None:
        if not self.is_finished:
            super().finish()
            _warn(self.name, self.archive)


class File(passing.File):
    """A disk that passes now."""

    def __init__(self, stream: Pass, disk: descriptor.Disk, member: walk.Entry) -> None:
        self.disk, self.member = disk, member
        self.package = stream.archive
        stated = self.package.checksum_of(member)
        hashed = (stated.algorithm,) if stated else _LATER
        super().__init__(self.package, member.size, f"{stream.name}#{disk.file}", hashed)
        _check_compression(disk, self.head)

    def verify(self) -> None:
        """Read the rest, and compare with the manifest if it has passed. Safe to call twice."""
        self.rest()
        if stated := self.package.checksum_of(self.member):
            _compare(stated, self.digests().get(stated.algorithm))


class OvaSource(base.Source):
    """The disk ``choice`` (its file name, disk id or number; empty: the only one) in ``whole``, an open OVA.

    ``expected``: the checksum of the whole OVA, or None. Closing it leaves ``whole`` open.
    """

    def __init__(
        self,
        whole: base.Image,
        choice: str,
        expected: checksum.Checksum | None,
        cancel: base.Cancel,
    ) -> None:
        self.name = whole.facts.name
        self._whole = whole
        self._choice = choice
        self._expected = expected
        self._cancel = cancel
        self._passing: Pass | None = None
        self._file: File | None = None
        self._obstacle: errors.Error | None = None
        self._package: package.Package | None = None

    def open(self, opening: base.Opening) -> base.Facts:
        read = self._whole.at_random(self._cancel) if self._expected is None else None
        facts = self._open_pass() if read is None else self._open_ranges(read, opening)
        log.info("disk file=%r size=%r ranges=%s", facts.description["disk"], facts.size, read is not None)
        return facts

    def close(self) -> None:
        if self._passing is not None:
            self._passing.close()

    @property
    def complete(self) -> tuple[descriptor.Disk, ...]:
        """The disks that the descriptor lists. Raises an error if one cannot be imported, or is not there."""
        if (found := self._package) is None:
            return ()
        check(self._whole, *found.disks)
        for disk in found.disks:
            found.checksum_of(found.needed(disk))
        return found.disks

    def stream(self, offset: int = 0) -> base.Reader:
        raise errors.NoRanges(url=self.name, reason="a part of an archive is read by ranges only")

    def verify(self) -> None:
        """Read the rest of an OVA that passes, and verify the checksums. Safe to call twice."""
        if self._passing is not None and self._file is not None:
            self._file.rest()
            self._passing.finish()
            self._file.verify()
        self._whole.verify()

    def _open_ranges(self, read: views.Read, opening: base.Opening) -> base.Facts:
        """Read all headers, the descriptor and the manifest; check them before the disk is read."""
        self._package = found = package.Package(part.seekable(self._whole, read))
        for _ in found.within(self._whole.facts.size or 0):
            pass
        disk = self._choose(found)
        member = found.needed(disk)
        stated = found.checksum_of(member)
        _warn(self._whole.facts.name, found)
        place = part.Part(self._whole, member.offset, member.size, read).open(opening)
        _check_compression(disk, place.head)
        checksum = f"{stated.algorithm}:{stated.digest}" if stated else ""
        return self._stated(place, found, disk, member, checksum=checksum, manifest=checksum or "none")

    def _open_pass(self) -> base.Facts:
        file = self._begin_pass()
        # All of the OVA passes.
        wire = base.Wire(self._whole.facts.size, functools.partial(self._ordered, file.size))
        passing = base.Facts(name="", size=file.size, head=file.head, wire=wire)
        return self._stated(passing, file.package, file.disk, file.member, manifest="not read yet")

    def _stated(
        self,
        facts: base.Facts,
        found: package.Package,
        disk: descriptor.Disk,
        member: walk.Entry,
        *,
        manifest: str,
        checksum: str = "",
    ) -> base.Facts:
        """Complete the facts of a disk. ``manifest``: the checksum that the manifest states for it."""
        whole = self._whole.facts
        disks = [disk.describe() for disk in found.disks]
        return dataclasses.replace(
            facts,
            name=f"{whole.name}#{disk.file}",
            identity=whole.identity and f"{whole.identity} {member.name} at {member.offset}",
            weak=whole.weak,
            once=whole.once,
            checksum=checksum,
            obstacle=self._obstacle,
            description={**whole.description, "disks": disks, "disk": disk.file, "manifest": manifest},
        )

    def _ordered(self, size: int, cancel: base.Cancel, advance: Callable[[int], None]) -> base.Reader:
        """Let the OVA pass to the disk, again if its first pass was used."""
        file = self._file
        if file is None or file.is_used:
            file = self._begin_pass()
        if file.size != size:
            before, now = f"{size} bytes", f"{file.size} bytes"
            raise errors.SourceChanged(url=file.name, what="disk", before=before, now=now)
        assert self._passing is not None  # noqa: S101  (see ``_begin_pass``)
        self._passing.report(advance)
        return file.stream()

    def _begin_pass(self) -> File:
        self.close()
        self._passing = Pass(self._whole, self._cancel, self._expected)
        self._file = self._passing.find(self._choose)
        return self._file

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
            advice = "choose one with --disk (in a pod: CDI_WORKER_DISK)"
            reason = f"{self._whole.facts.name}: {what}: {listed}; {advice}"
            self._obstacle = descriptor.refused("one disk", reason)
            return next((disk for disk in disks if not disk.obstacle), disks[0])
        check(self._whole, named[0])
        return named[0]


def disks(whole: base.Image, cancel: base.Cancel) -> tuple[descriptor.Disk, ...]:
    """Return the disks of ``whole``, an open OVA with ranges, if the headers show that all are there."""
    with contextlib.closing(OvaSource(whole, "", None, cancel)) as opened:
        opened.open(base.Opening(whole.engine))
        return opened.complete


def check(whole: base.Image, *disks: descriptor.Disk) -> None:
    """Raise ``errors.Unsupported`` if one of ``disks`` of ``whole`` cannot be imported."""
    for disk in disks:
        if disk.obstacle:
            raise errors.Unsupported(reason=f"{whole.facts.name}: disk {disk.file!r} {disk.obstacle}")


def _listed(disk: descriptor.Disk) -> str:
    capacity = "" if disk.capacity is None else f", {disk.capacity} bytes"
    return f"{disk.index} {disk.file} ({disk.id}{capacity})"


def _warn(name: str, found: package.Package) -> None:
    if found.checksums is None:
        log.warning("not verified url=%r: the OVA has no manifest", name)


def _check_compression(disk: descriptor.Disk, head: bytes) -> None:
    """Refuse a file that is not compressed as the descriptor states."""
    if disk.compression and detect.detect(head) != disk.compression:
        reason = f"the descriptor states that {disk.file!r} is compressed with {disk.compression}; it is not"
        raise descriptor.refused("compression", reason)


def _compare(stated: checksum.Checksum, calculated: str | None) -> None:
    """Raise ``errors.ChecksumMismatch``; an algorithm that was not computed differs too."""
    if calculated is None:
        reason = f"the manifest comes after the disk and states its {stated.algorithm}"
        raise errors.Unsupported(reason=f"{reason}; supported there: {', '.join(_LATER)}")
    if calculated != stated.digest:
        raise errors.ChecksumMismatch(
            algorithm=stated.algorithm, expected=stated.digest, calculated=calculated
        )
