"""Read an OVA: a tar archive with an OVF descriptor, the files it names, and perhaps a manifest.

DSP0243, 5.3: the descriptor comes first. Programs write the manifest after it (VMware) or last (VirtualBox).
"""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Mapping

from cdi_worker import errors, masking
from cdi_worker.formats import checksum, facts, readers
from cdi_worker.formats.ova import descriptor
from cdi_worker.formats.tar import archive, headers, walk

#: Most members of an archive, with folders: each costs a request if the archive is read by ranges.
_MOST = 4096
#: Largest manifest, in bytes: it has a line for each file.
_LARGEST_MANIFEST = 1 << 20
#: ``SHA256(vm-disk1.vmdk)= 5fb1…``, with or without blanks and hyphens. OpenSSL 3 writes ``SHA2-256``.
_LINE = re.compile(r"\s*([A-Za-z0-9-]+)\s*\(\s*(?:\./)*(.+)\)\s*=\s*([0-9A-Fa-f]+)\s*")


class Package(walk.Walk):
    """Read the members of an OVA in one pass, without folders, under names that are safe.

    ``disks``: known after the first member, the descriptor. ``checksums``: of the manifest, None before it.
    Raises ``errors.Refused``, ``errors.Corrupt`` and ``errors.Truncated``.
    """

    def __init__(self, reader: readers.Reader | io.BufferedReader) -> None:
        super().__init__(reader, "OVA")
        self.disks: tuple[descriptor.OvfDisk, ...] = ()
        self.checksums: Mapping[str, checksum.Checksum] | None = None
        self.members: dict[str, walk.Member] = {}
        self._descriptor: tuple[str, bytes] = ("", b"")
        #: For each name that a disk's member may have, its other name.
        self._other: dict[str, str] = {}
        self._count = 0

    def next(self) -> walk.Member | None:
        """Go to the next member; return None at the end of the archive."""
        while entry := super().next():
            self._count += 1
            if self._count > _MOST:
                raise descriptor.refused("size", f"more than {_MOST} members")
            path = archive.archive_path(entry.name)
            if entry.type == headers.DIRECTORY or walk.is_metadata(entry):
                continue
            member = entry._replace(name="/".join(path))
            self._add(member)
            return member
        if not self.members:
            raise descriptor.refused("descriptor", "the archive is empty")
        if self.checksums is None and not self.has_end_mark:
            # Only a manifest lists the members, and it may be what is cut off.
            reason = f"the archive ends at byte {self.at} without an end mark and without a manifest"
            raise errors.Truncated(format="OVA", reason=reason)
        return None

    def member_of(self, disk: descriptor.OvfDisk) -> walk.Member | None:
        """Return the member of a disk; None if not read yet. Raises ``errors.Refused`` for a bad one."""
        member = next((self.members[name] for name in self._names(disk) if name in self.members), None)
        if member is None:
            return None
        what = f"{disk.file!r}"
        if member.type == headers.SPARSE:
            raise descriptor.refused("sparse", f"{what} is a sparse member; pack it without tar --sparse")
        if member.type != headers.FILE:
            raise descriptor.refused("type", f"{what} is not a file but has type {member.type!r}")
        if disk.size is not None and not disk.compression and disk.size != member.size:
            stated = f"the descriptor states {disk.size} bytes for {what}, the archive has {member.size}"
            raise descriptor.refused("size", f"{stated}; it was changed or cut")
        return member

    def needed(self, disk: descriptor.OvfDisk) -> walk.Member:
        """Return the member of a disk at the end of the archive. Raises an error if it is missing."""
        member = self.member_of(disk)
        if member is None:
            reason = f"the archive has no file {self._names(disk)[0]!r}"
            if self.has_end_mark:
                raise descriptor.refused("reference", f"{reason}, which the descriptor names")
            raise errors.Truncated(format="OVA", reason=reason)
        return member

    def checksum_of(self, member: walk.Member) -> checksum.Checksum | None:
        """Return the checksum in the manifest; None without a manifest, or before it."""
        if self.checksums is None:
            return None
        if member.name not in self.checksums:
            raise descriptor.refused("manifest", f"the manifest has no checksum of {member.name!r}")
        return self.checksums[member.name]

    def check_listed(self) -> None:
        """Raise ``errors.Refused`` if the manifest was read and does not list a disk."""
        for disk in self.disks if self.checksums is not None else ():
            if not self.checksums or not any(name in self.checksums for name in self._names(disk)):
                raise descriptor.refused("manifest", f"the manifest has no checksum of {disk.file!r}")

    def _names(self, disk: descriptor.OvfDisk) -> tuple[str, ...]:
        """Return the names that the member of a disk may have: ``ovf:href`` is relative to the descriptor."""
        folder = posixpath.dirname(self._descriptor[0])
        return tuple(posixpath.join(folder, name) for name in descriptor.names(disk.file))

    def _add(self, member: walk.Member) -> None:
        """Check a member, and read it if it is the descriptor or the manifest."""
        if member.name in self.members:
            raise descriptor.refused("duplicate", f"two members with the name {member.name!r}")
        if (other := self._other.get(member.name)) in self.members:
            both = f"{other!r} and {member.name!r}"
            raise descriptor.refused("duplicate", f"{both} could both be the file of one disk; rename one")
        if member.size > facts.MAX_VIRTUAL_SIZE:
            raise descriptor.refused("size", f"{member.name!r} has {member.size} bytes")
        is_descriptor = member.name.lower().endswith(".ovf")
        if is_descriptor and self.members:
            raise descriptor.refused("descriptor", f"a second descriptor, {member.name!r}")
        if not is_descriptor and not self.members:
            raise descriptor.refused("descriptor", f"{member.name!r} comes first, not the descriptor")
        self.members[member.name] = member
        if is_descriptor:
            data = self._content(member, descriptor.LARGEST, "descriptor")
            self._descriptor = member.name, data
            self.disks = descriptor.parse(data)
            if not self.disks:
                raise descriptor.refused("one disk", "the descriptor lists no disk with a file")
            for disk in self.disks:
                possible = self._names(disk)
                self._other |= zip(possible, reversed(possible), strict=True) if len(possible) > 1 else ()
        elif member.name.lower().endswith(".mf"):
            if self.checksums is not None:
                raise descriptor.refused("manifest", f"a second manifest, {member.name!r}")
            content = self._content(member, _LARGEST_MANIFEST, "manifest")
            self.checksums = parse_manifest(content, posixpath.dirname(member.name))
            name, data = self._descriptor
            # DSP0243, 5.1: the manifest lists every file of the package, also the descriptor.
            if stated := self.checksum_of(self.members[name]):
                hashed = checksum.Hash(stated)
                hashed.update(memoryview(data))
                hashed.verify()

    def _content(self, member: walk.Member, limit: int, what: str) -> bytes:
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


def parse_manifest(data: bytes, folder: str = "") -> dict[str, checksum.Checksum]:
    """Return the checksums in a manifest (``.mf``) in ``folder`` by file name (DSP0243, 5.1).

    Raises ``errors.Refused`` for two different checksums of a file by one algorithm, ``errors.Corrupt`` for
    any other line.
    """
    checksums: dict[str, dict[str, str]] = {}
    for line in data.decode("utf-8-sig", errors="surrogateescape").splitlines():
        if not line.strip():
            continue
        match = _LINE.fullmatch(line)
        if not match:
            reason = f"not a checksum: {masking.quoted(line, 200)!r}"
            raise errors.Corrupt(format="OVF manifest", reason=reason)
        name = match[2].strip()
        try:
            algorithm = match[1].lower().replace("sha2-", "sha").replace("-", "")
            stated = checksum.parse(f"{algorithm}:{match[3]}")
        except errors.RequestError as err:
            reason = f"{masking.quoted(name, 200)!r}: {err}"
            raise errors.Corrupt(format="OVF manifest", reason=reason) from err
        of_file = checksums.setdefault(posixpath.join(folder, name), {})
        if of_file.setdefault(algorithm, str(stated)) != str(stated):
            reason = f"the manifest has two checksums of {masking.quoted(name, 200)!r}"
            raise descriptor.refused("manifest", reason)
    return {name: checksum.parse(",".join(each.values())) for name, each in checksums.items()}
