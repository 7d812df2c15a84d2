"""Stream a tar archive and check each entry, so that it is safe to unpack."""

from __future__ import annotations

import array
from collections.abc import Iterator
from typing import Literal, NamedTuple

from cdi_worker import errors, masking
from cdi_worker.formats import readers
from cdi_worker.formats.tar import headers, walk
from cdi_worker.formats.tar import sparse as tar_sparse

_SKIP = 1 << 18
_LAST_TIME = 1 << 40
#: Zeros after the last entry. GNU tar fills a record, rarely above 1 MiB; a stream of zeros may be endless.
_LARGEST_END = 64 << 20
#: Bytes of headers that an archive of any size may have.
_HEADERS = 1 << 30
_MAX_NAME, _MAX_PATH = 255, 4095  # NAME_MAX, PATH_MAX with its NUL
_DEEPEST = 256  # each level costs a descriptor and a stack frame when a tree is merged or removed

#: The disk on a volume with a file system: a link there would be followed by the program that opens it.
DISK = "disk.img"

_EMPTY: tar_sparse.Map = array.array("Q")

Kind = Literal["file", "directory", "symlink", "hardlink"]

_KINDS: dict[bytes, Kind] = {
    headers.FILE: "file",
    headers.SPARSE: "file",
    headers.DIRECTORY: "directory",
    headers.DUMPDIR: "directory",
    headers.SYMLINK: "symlink",
    headers.HARD_LINK: "hardlink",
}


class Entry(NamedTuple):
    """A file, directory or link to create below the target directory.

    ``path``: the parts of its path, none of them ``..``. ``link``: target of a symlink, which may lead
    anywhere, or path of the file that a hard link refers to. ``size``: bytes of a file; only its ``extents``
    are in the archive, the rest reads as zeros.
    """

    path: tuple[str, ...]
    kind: Kind
    mode: int
    mtime: int
    size: int = 0
    map: tar_sparse.Map = _EMPTY
    link: str = ""

    def extents(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) in bytes of the data that ``Archive.readinto`` returns, in order."""
        return tar_sparse.pairs(self.map)


class Archive(walk.Walk):
    """Read a tar archive. Iterate over it once, and read the data of each entry before the next one.

    ``limit_bytes``: space on the target; more data, or a larger file unless ``thin``, raises
    ``errors.TooLarge``. ``has_disk``: the disk was sent before the archive, which may have no other. Raises
    ``errors.Refused`` for entries that a safety rule forbids, ``errors.Corrupt``, ``errors.Truncated`` and
    ``errors.TrailingGarbage``.
    """

    def __init__(
        self, reader: readers.Reader, *, limit_bytes: int, thin: bool = False, has_disk: bool = False
    ) -> None:
        super().__init__(reader)
        self._limit = limit_bytes
        self._thin = thin
        self._has_disk = has_disk
        self._total = 0

    def __iter__(self) -> Iterator[Entry]:
        while (member := self.next()) is not None:
            if self.at > 2 * self._limit + _HEADERS:
                raise errors.TooLarge(virtual_size=self.at, available=self._limit)
            entry = self._checked(member)
            self._check_disk(entry)
            if entry.path:
                yield entry
        if not self.has_end_mark:
            raise self._truncated()
        # POSIX requires two zero blocks, some tools write one.
        start = self.at
        while data := self._stream.read(_SKIP):
            if data.strip(b"\0") or self.at - start > _LARGEST_END:
                raise errors.TrailingGarbage(format="tar", offset=self.at)
            self.at += len(data)

    def _check_global(self, data: bytes) -> None:
        """Refuse a global header that other programs would apply to the entries."""
        if any(key in _CHECKED or key.startswith(b"GNU.sparse.") for key in headers.records(data)):
            raise headers.refused("header", "a global header sets names or sizes of entries")

    def _checked(self, member: walk.Member) -> Entry:
        path = archive_path(member.name)
        kind = _KINDS.get(member.type)
        if kind is None:
            reason = f"has type {member.type!r}; only files, directories and links are allowed"
            raise refused("type", path, reason)
        extents, link = _EMPTY, ""
        if kind == "file":
            if not path:
                raise refused("name", path, "has no name")
            extents = self._sparse[0] if self._sparse else array.array("Q", (0, member.stored))
        elif member.type == headers.DIRECTORY and member.stored:
            raise headers.corrupt(f"{masking.quoted(member.name, 200)!r} is not a file, but has data")
        self._total += member.stored
        needed = self._total if self._thin else max(member.size, self._total)
        if needed > self._limit:
            raise errors.TooLarge(virtual_size=needed, available=self._limit)
        if kind == "symlink":
            link = _without_zero(member.link)  # data: a symlink is never followed
            if not 0 < len(link.encode(errors="surrogateescape")) <= _MAX_PATH:
                raise refused("link", path, "is a symlink whose target is empty or too long")
        elif kind == "hardlink":
            link = "/".join(archive_path(member.link))
        mode, mtime = member.mode & 0o777, min(max(member.mtime, 0), _LAST_TIME)
        return Entry(path, kind, mode, mtime, member.size if kind == "file" else 0, extents, link)

    def _check_disk(self, entry: Entry) -> None:
        """Refuse a disk that is not a file, and a second one.

        It may be a hard link to an earlier file, which may be a symlink: ``staging`` checks that.
        """
        if entry.path[:1] != (DISK,):
            return
        if entry.kind == "hardlink" and entry.link == DISK and self._has_disk:
            return  # "tar --create FILE FILE" makes the second one of these
        if len(entry.path) > 1 or entry.kind not in {"file", "hardlink"}:
            kind = "directory" if len(entry.path) > 1 else entry.kind
            raise refused("disk", (DISK,), f"is a {kind}; the disk of a volume must be a file")
        if self._has_disk:
            raise refused("disk", (DISK,), "is there twice; which one is the disk of the volume is not known")
        self._has_disk = True


_CHECKED = frozenset({b"path", b"linkpath", b"size"})


def archive_path(name: str) -> tuple[str, ...]:
    """Split a name into its parts; empty for the root directory itself. Raises ``errors.Refused``."""
    parts = tuple([part for part in _without_zero(name).split("/") if part not in {"", "."}])
    if name.startswith("/"):
        raise refused("absolute", parts, "has an absolute path")
    if ".." in parts:
        raise refused("dotdot", parts, 'leads outside: contains ".."')
    # A character has at most four bytes.
    if len(name) > _MAX_NAME // 4:
        encoded = name.encode(errors="surrogateescape")
        if len(encoded) > _MAX_PATH or max(map(len, encoded.split(b"/"))) > _MAX_NAME:
            raise refused("name", parts, "has a name that is too long")
    if len(parts) > _DEEPEST:
        raise refused("name", parts, f"is below more than {_DEEPEST} directories")
    return parts


def refused(rule: str, path: tuple[str, ...], reason: str) -> errors.Refused:
    """Return the error of a safety rule for an entry."""
    return headers.refused(rule, f"{masking.quoted('/'.join(path), 200)!r} {reason}")


def _without_zero(name: str) -> str:
    if "\0" in name:
        raise headers.corrupt(f"a name contains a zero byte: {masking.quoted(name, 200)!r}")
    return name
