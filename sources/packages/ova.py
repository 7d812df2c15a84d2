"""The disks in an OVA, wherever the OVA is: members of a tar archive that another source serves.

By ranges, only the headers, the descriptor and the wanted disk are read. Without ranges, or to verify a
checksum of the whole OVA, all of it is read once, and the disk is written meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias, TypeVar

from cdi_worker import errors
from cdi_worker.formats import checksum, detect, views
from cdi_worker.formats.ova import descriptor, package
from cdi_worker.formats.tar import walk
from cdi_worker.sources import base
from cdi_worker.sources.packages import choice, part, passing

log = logging.getLogger(__name__)

#: Algorithms of a manifest that comes after the disk (DSP0243; ovftool's --shaAlgorithm).
_LATER: Final = ("sha1", "sha256", "sha512")
T = TypeVar("T")
#: Called with all disks; returns a function for each that imports it.
Begin: TypeAlias = Callable[[Sequence[base.Held]], Sequence[Callable[[base.Source], T]]]


class Pass(passing.Pass[package.Package]):
    """One pass through an OVA: its disks are verified once the manifest is read."""

    def __init__(self, whole: base.Image, cancel: base.Cancel, expected: checksum.Checksum | None) -> None:
        super().__init__(whole, cancel, expected, package.Package)
        self.name = whole.facts.name

    def find(self, choose: Callable[[package.Package], descriptor.OvfDisk]) -> PassingDisk:
        """Read on to the disk that ``choose`` selects once the descriptor is read."""
        disk: descriptor.OvfDisk | None = None
        while self.archive.next() is not None:
            disk = disk or choose(self.archive)
            if member := self.archive.member_of(disk):
                return PassingDisk(self, disk, member)
        assert disk is not None  # noqa: S101  (an archive whose first file is no descriptor is refused)
        return PassingDisk(self, disk, self.archive.needed(disk))

    def files(self) -> Iterator[PassingDisk]:
        """Yield each disk when the stream is at it; at the end everything is verified."""
        passed: list[PassingDisk] = []
        while (member := self.archive.next()) is not None:
            for disk in self.archive.disks:
                if self.archive.member_of(disk) == member:
                    passed.append(PassingDisk(self, disk, member))
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


class PassingDisk(passing.PassingFile):
    """The disk at the current position of the stream."""

    def __init__(self, stream: Pass, disk: descriptor.OvfDisk, member: walk.Member) -> None:
        self.disk, self.member = disk, member
        self.package = stream.archive
        stated = self.package.checksum_of(member)
        hashed = [each.algorithm for each in (stated, *stated.more)] if stated else _LATER
        super().__init__(self.package, member.size, f"{stream.name}#{disk.file}", hashed)
        _check_compression(disk, self.head)

    def verify(self) -> None:
        """Read the rest, and compare with the manifest if that was read. Safe to call twice."""
        self.rest()
        if stated := self.package.checksum_of(self.member):
            for each in (stated, *stated.more):
                if each.algorithm not in self.digests:
                    reason = f"the manifest comes after the disk and states its {each.algorithm}"
                    raise errors.Unsupported(reason=f"{reason}; supported there: {', '.join(_LATER)}")
                if (calculated := self.digests[each.algorithm].hexdigest()) != each.digest:
                    raise errors.ChecksumMismatch(
                        algorithm=each.algorithm, expected=each.digest, calculated=calculated
                    )


class OvaSource(base.Source):
    """The disk ``choice`` (its file name, disk id or number; empty: the only one) in ``whole``, an open OVA.

    ``expected``: the checksum of the whole OVA, or None. Closing it leaves ``whole`` open.
    """

    def __init__(
        self, whole: base.Image, choice: str, expected: checksum.Checksum | None, cancel: base.Cancel
    ) -> None:
        self.name = whole.facts.name
        self.pace = whole.source.pace
        self._whole = whole
        self._choice = choice
        self._expected = expected
        self._cancel = cancel
        self._passing: Pass | None = None
        self._file: PassingDisk | None = None
        self._obstacle: errors.Error | None = None
        #: The disk in an OVA that is read by ranges.
        self._part: part.Part | None = None
        self._size = 0
        self._description: Mapping[str, object] = {}

    def open(self, opening: base.Opening) -> base.Facts:
        read = self._whole.at_random(self._cancel) if self._expected is None else None
        stated = ""
        if read is None:
            file = self._begin_pass()
            found, disk, member, head = file.package, file.disk, file.member, file.head
            manifest = "not read yet"
        else:
            found = _read_headers(self._whole, read)
            disk = self._choose(found)
            member = found.needed(disk)
            stated = str(found.checksum_of(member) or "")
            manifest = stated or "none"
            self._part = part.Part(self._whole, member.offset, member.size, read)
            head = self._part.open(opening).head
            _check_compression(disk, head)
        self._size = member.size
        self._description = {
            **self._whole.source.describe(),
            "disks": [each.describe() for each in found.disks],
            "disk": disk.file,
            "manifest": manifest,
        }
        log.info("disk file=%r size=%r ranges=%s", disk.file, member.size, read is not None)
        whole = self._whole.facts
        return base.Facts(
            name=f"{whole.name}#{disk.file}",
            size=member.size,
            head=head,
            identity=whole.identity and f"{whole.identity} {member.name} at {member.offset}",
            weak=whole.weak,
            checksum=stated,
            once=whole.once,
            obstacle=self._obstacle,
        )

    @property
    def ranges(self) -> base.RandomReader | None:
        return None if self._part is None else self._part.ranges

    @property
    def wire(self) -> base.Wire | None:
        # All of the OVA passes.
        return None if self._file is None else base.Wire(self._whole.facts.size, self._ordered)

    def describe(self) -> Mapping[str, object]:
        return self._description

    def finish(self) -> base.Provenance:
        return self._whole.finish()

    def close(self) -> None:
        if self._passing is not None:
            self._passing.close()

    def stream(self, offset: int = 0) -> base.Reader:
        raise errors.NoRanges(url=self.name, reason="a part of an archive is read by ranges only")

    def verify(self) -> None:
        """Read the rest of an OVA that is a stream, and verify the checksums. Safe to call twice."""
        if self._passing is not None and self._file is not None:
            self._file.rest()
            self._passing.finish()
            self._file.verify()
        self._whole.verify()

    def _ordered(self, cancel: base.Cancel, advance: Callable[[int], None]) -> base.Reader:
        """Return a reader of the disk in the stream, which is opened again if the disk was read before."""
        file = self._file
        if file is None or file.is_used:
            file = self._begin_pass()
        if file.size != self._size:
            before, now = f"{self._size} bytes", f"{file.size} bytes"
            raise errors.SourceChanged(url=file.name, what="disk", before=before, now=now)
        assert self._passing is not None  # noqa: S101  (see ``_begin_pass``)
        self._passing.report(advance)
        return file.stream()

    def _begin_pass(self) -> PassingDisk:
        self.close()
        self._passing = Pass(self._whole, self._cancel, self._expected)
        self._file = self._passing.find(self._choose)
        return self._file

    def _choose(self, found: package.Package) -> descriptor.OvfDisk:
        """Return the requested disk; without one, or if it is unknown, the first, which can be examined."""
        disks = held(self._whole, found, self._expected)
        index, self._obstacle = choice.choose(self._whole.facts.name, "OVA", disks, self._choice)
        return found.disks[index]


class _Member(OvaSource):
    """One of several disks. Its source is notified once, when all are on storage."""

    def finish(self) -> base.Provenance:
        return base.Provenance()


def read_each(
    whole: base.Image, expected: checksum.Checksum | None, cancel: base.Cancel, begin: Begin[T]
) -> list[T]:
    """Import each disk of ``whole``, an open OVA, in one pass; return the results."""
    imports: Sequence[Callable[[base.Source], T]] = ()
    results = []
    with contextlib.closing(Pass(whole, cancel, expected)) as stream:
        for file in stream.files():
            if not imports:
                found = held(whole, stream.archive, expected)
                choice.check(whole.facts.name, *found)
                stream.archive.check_listed()
                imports = begin(found)
            results.append(imports[file.disk.index - 1](file))
    return results


def disks(whole: base.Image, expected: checksum.Checksum | None, read: views.Read) -> tuple[base.Held, ...]:
    """Return the disks of ``whole``, an open OVA that is read by ranges.

    Raises an error if one cannot be imported, or is not there.
    """
    found = _read_headers(whole, read)
    listed = held(whole, found, expected)
    choice.check(whole.facts.name, *listed)
    for disk in found.disks:
        found.checksum_of(found.needed(disk))
    return listed


def held(
    whole: base.Image, found: package.Package, expected: checksum.Checksum | None
) -> tuple[base.Held, ...]:
    """Return the disks that the descriptor of ``whole`` lists, an open OVA."""

    def make(file: str, together: bool, cancel: base.Cancel) -> OvaSource:
        return (_Member if together else OvaSource)(whole, file, expected, cancel)

    return tuple(
        base.Held(
            tuple(dict.fromkeys(filter(None, (disk.file, disk.id, *descriptor.names(disk.file))))),
            disk.file,
            disk.capacity,
            functools.partial(make, disk.file),
            disk.obstacle,
        )
        for disk in found.disks
    )


def _read_headers(whole: base.Image, read: views.Read) -> package.Package:
    """Read and check all headers, the descriptor and the manifest, before a disk is read."""
    found = package.Package(part.seekable(whole, read))
    for _ in found.within(whole.facts.size or 0):
        pass
    _warn(whole.facts.name, found)
    return found


def _warn(name: str, found: package.Package) -> None:
    if found.checksums is None:
        log.warning("not verified url=%r: the OVA has no manifest", name)


def _check_compression(disk: descriptor.OvfDisk, head: bytes) -> None:
    """Refuse a file that is not compressed as the descriptor states."""
    if disk.compression and detect.detect(head) != disk.compression:
        reason = f"the descriptor states that {disk.file!r} is compressed with {disk.compression}; it is not"
        raise descriptor.refused("compression", reason)
