"""Go through an OVA: a tar archive with an OVF descriptor, the files it names, and perhaps a manifest.

DSP0243, 5.3: the descriptor comes first. Programs write the manifest after it (VMware) or last (VirtualBox).
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping

from cdi_worker import errors
from cdi_worker.formats import checksum, facts, readers
from cdi_worker.formats.ova import descriptor
from cdi_worker.formats.tar import archive, headers, walk

#: Members of an archive, folders too: each costs a request where it is read by ranges.
_MOST = 4096
#: Bytes of a manifest: a line for each file.
_LARGEST_MANIFEST = 1 << 20
#: ``SHA256(vm-disk1.vmdk)= 5fb1…``, with or without blanks and hyphens.
_LINE = re.compile(r"\s*([A-Za-z0-9-]+)\s*\((.+)\)\s*=\s*([0-9A-Fa-f]+)\s*")


class Package(walk.Walk):
    """One pass through an OVA: its members without folders, under names that are safe.

    ``disks``: known after the first member, the descriptor. ``checksums``: of the manifest, None before it.
    Raises ``errors.Refused``, ``errors.Corrupt`` and ``errors.Truncated``.
    """

    def __init__(self, reader: readers.Reader | io.BufferedReader) -> None:
        super().__init__(reader, "OVA")
        self.disks: tuple[descriptor.Disk, ...] = ()
        self.checksums: Mapping[str, checksum.Checksum] | None = None
        self.members: dict[str, walk.Entry] = {}
        self._descriptor: tuple[str, bytes] = ("", b"")
        #: The other name of a member that a disk could mean.
        self._other: dict[str, str] = {}
        self._count = 0

    def next(self) -> walk.Entry | None:
        """Go to the next member; return None at the end of the archive."""
        while entry := super().next():
            self._count += 1
            if self._count > _MOST:
                raise descriptor.refused("size", f"more than {_MOST} members")
            path = archive.archive_path(entry.name.encode(errors="surrogateescape"))
            if entry.type == headers.DIRECTORY:
                continue
            member = entry._replace(name="/".join(path))
            self._note(member)
            return member
        if not self.members:
            raise descriptor.refused("descriptor", "the archive is empty")
        if self.checksums is None and not self.has_end_mark:
            # Only a manifest says what is in a package; here it may be what is missing.
            reason = f"the archive ends at byte {self.at} without an end mark and without a manifest"
            raise errors.Truncated(format="OVA", reason=reason)
        return None

    def member_of(self, disk: descriptor.Disk) -> walk.Entry | None:
        """Return the member of a disk, None if it has not passed. Raises ``errors.Refused`` for a bad one."""
        found = next(
            (self.members[name] for name in descriptor.names(disk.file) if name in self.members), None
        )
        if found is None:
            return None
        what = f"{disk.file!r}"
        if found.type == headers.SPARSE:
            raise descriptor.refused("sparse", f"{what} is a sparse member; pack it without tar --sparse")
        if found.type != headers.FILE:
            raise descriptor.refused("type", f"{what} is not a file but has type {found.type!r}")
        if disk.size is not None and not disk.compression and disk.size != found.size:
            stated = f"the descriptor states {disk.size} bytes for {what}, the archive has {found.size}"
            raise descriptor.refused("size", f"{stated}; it was changed or cut")
        return found

    def needed(self, disk: descriptor.Disk) -> walk.Entry:
        """Return the member of a disk, as ``member_of``. Raises ``errors.Truncated`` if there is none."""
        member = self.member_of(disk)
        if member is None:
            raise errors.Truncated(format="OVA", reason=f"the archive has no file {disk.file!r}")
        return member

    def checksum_of(self, member: walk.Entry) -> checksum.Checksum | None:
        """Return the checksum in the manifest; None without a manifest, or before it."""
        if self.checksums is None:
            return None
        if member.name not in self.checksums:
            raise descriptor.refused("manifest", f"the manifest has no checksum of {member.name!r}")
        return self.checksums[member.name]

    def check_listed(self) -> None:
        """Raise ``errors.Refused`` if the manifest has passed and does not list a disk, which may come."""
        for disk in self.disks if self.checksums is not None else ():
            if not self.checksums or not any(name in self.checksums for name in descriptor.names(disk.file)):
                raise descriptor.refused("manifest", f"the manifest has no checksum of {disk.file!r}")

    def _note(self, member: walk.Entry) -> None:
        if member.name in self.members:
            raise descriptor.refused("duplicate", f"two members with the name {member.name!r}")
        if (other := self._other.get(member.name)) in self.members:
            both = f"{other!r} and {member.name!r}"
            raise descriptor.refused("duplicate", f"{both} could both be the file of one disk; rename one")
        if member.size > facts.MAX_VIRTUAL_SIZE:
            raise descriptor.refused("size", f"{member.name!r} has {member.size} bytes")
        is_first = not self.members
        self.members[member.name] = member
        if is_first or member.name.lower().endswith(".ovf"):
            self._take_descriptor(member, is_first=is_first)
        elif member.name.lower().endswith(".mf"):
            self._take_manifest(member)

    def _take_descriptor(self, member: walk.Entry, *, is_first: bool) -> None:
        if not is_first:
            raise descriptor.refused("descriptor", f"a second descriptor, {member.name!r}")
        if not member.name.lower().endswith(".ovf"):
            raise descriptor.refused("descriptor", f"{member.name!r} comes first, not the descriptor")
        data = self._content(member, descriptor.LARGEST, "descriptor")
        self._descriptor = member.name, data
        self.disks = descriptor.parse(data)
        if not self.disks:
            raise descriptor.refused("one disk", "the descriptor lists no disk with a file")
        for disk in self.disks:
            possible = descriptor.names(disk.file)
            self._other |= zip(possible, reversed(possible), strict=True) if len(possible) > 1 else ()

    def _take_manifest(self, member: walk.Entry) -> None:
        if self.checksums is not None:
            raise descriptor.refused("manifest", f"a second manifest, {member.name!r}")
        self.checksums = parse_manifest(self._content(member, _LARGEST_MANIFEST, "manifest"))
        name, data = self._descriptor
        # DSP0243, 5.1: the manifest lists every file of the package; the descriptor says what the disks are.
        if stated := self.checksum_of(self.members[name]):
            calculated = hashlib.new(stated.algorithm, data, usedforsecurity=False).hexdigest()
            if calculated != stated.digest:
                raise errors.ChecksumMismatch(
                    algorithm=stated.algorithm, expected=stated.digest, calculated=calculated
                )

    def _content(self, member: walk.Entry, limit: int, what: str) -> bytes:
        if member.type != headers.FILE:
            raise descriptor.refused("type", f"the {what} {member.name!r} is not a file")
        if member.size > limit:
            raise descriptor.refused("size", f"the {what} has {member.size} bytes, at most {limit} are read")
        data = memoryview(bytearray(member.size))
        readers.fill(self, data)
        return bytes(data)


def is_ova(head: bytes) -> bool:
    """Return whether a tar archive that begins with ``head`` is an OVA: its first file is a descriptor."""
    return walk.first_file(head).lower().endswith(".ovf")


def parse_manifest(data: bytes) -> dict[str, checksum.Checksum]:
    """Return the checksums in a manifest (``.mf``) by file name (DSP0243, 5.1).

    Raises ``errors.Refused`` for two different checksums of a file, ``errors.Corrupt`` for any other line.
    """
    found: dict[str, checksum.Checksum] = {}
    for line in data.decode(errors="surrogateescape").splitlines():
        if not line.strip():
            continue
        match = _LINE.fullmatch(line)
        if not match:
            raise errors.Corrupt(format="OVF manifest", reason=f"not a checksum: {line[:200]!r}")
        name = match[2].strip()
        try:
            stated = checksum.parse(f"{match[1].replace('-', '')}:{match[3]}")
        except errors.RequestError as err:
            raise errors.Corrupt(format="OVF manifest", reason=f"{name[:200]!r}: {err}") from err
        if found.setdefault(name, stated) != stated:
            raise descriptor.refused("manifest", f"the manifest has two checksums of {name[:200]!r}")
    return found
