"""Stream a tar archive and check each entry, so that it is safe to unpack.

Python's tarfile reads headers of any length into memory, keeps sparse maps as lists of tuples, and its
checks differ between versions. Here memory is bounded, and doubtful entries are errors.
"""

from __future__ import annotations

import array
import io
from collections.abc import Iterator
from typing import Literal, NamedTuple

from cdi_worker import errors, masking
from cdi_worker.formats import readers
from cdi_worker.formats.tar import headers
from cdi_worker.formats.tar import sparse as tar_sparse

_SKIP = 1 << 18
_ZEROS = bytes(headers.BLOCK)
_LAST_TIME = 1 << 40
#: Zeros after the last entry. GNU tar fills a record, rarely above 1 MiB; a stream of zeros may be endless.
_LARGEST_END = 64 << 20
#: Bytes of headers that an archive of any size may have.
_HEADERS = 1 << 30

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


class Archive(headers.Stream):
    """Read a tar archive. Iterate over it once, and read the data of each entry before the next one.

    ``limit_bytes``: space on the target; more data, or a larger file unless ``thin``, raises
    ``errors.TooLarge``. ``has_disk``: the disk was sent before the archive, which may have no other. Raises
    ``errors.Refused`` for entries that a safety rule forbids, ``errors.Corrupt``, ``errors.Truncated`` and
    ``errors.TrailingGarbage``.
    """

    def __init__(
        self, reader: readers.Reader, *, limit_bytes: int, thin: bool = False, has_disk: bool = False
    ) -> None:
        super().__init__(io.BufferedReader(readers.RawIO(reader), 1 << 16))
        self._limit = limit_bytes
        self._thin = thin
        self._has_disk = has_disk
        self._total = 0
        self._left = 0
        self._padding = 0

    def __iter__(self) -> Iterator[Entry]:
        scrap = memoryview(bytearray(_SKIP))
        while (header := self._next_header()) is not None:
            entry = self._entry(header)
            self._check_disk(entry)
            if entry.path:
                yield entry
            while self._left:
                self.readinto(scrap)
            if self._padding:
                self._take(self._padding)
                self._padding = 0

    def readinto(self, into: memoryview, /) -> int:
        """Read data of the current entry; return 0 only after its last byte."""
        count = self._stream.readinto(into[: self._left])
        self.at += count
        self._left -= count
        if not count and self._left and len(into):
            raise self._truncated()
        return count

    def _next_header(self) -> _Header | None:
        header = _Header()
        while True:
            block = self._take(headers.BLOCK)
            if block == _ZEROS:
                if header.added:
                    raise headers.corrupt("the archive ends between the headers of an entry")
                self._expect_end()
                return None
            if self.at > 2 * self._limit + _HEADERS:
                raise errors.TooLarge(virtual_size=self.at, available=self._limit)
            raw = headers.parse(block)
            if raw.type in _IGNORED:
                self._take_header(raw.size)
            elif raw.type in _ADDITIONS:
                header.add(_ADDITIONS[raw.type], self._take_header(raw.size))
            else:
                header.raw = raw
                return header

    def _entry(self, header: _Header) -> Entry:
        raw, name = header.raw, header.name
        path = archive_path(name)
        kind = _KINDS.get(raw.type)
        if raw.type == headers.FILE and name.endswith(b"/"):
            kind = "directory"  # as in archives from before POSIX
        if kind is None:
            reason = f"has type {raw.type!r}; only files, directories and links are allowed"
            raise refused("type", path, reason)
        size, extents, link = 0, _EMPTY, ""
        if kind == "file":
            size, extents = self._file(header, path)
        elif raw.type == headers.DUMPDIR:
            self._begin(header.stored)  # the names in the directory
        elif raw.type not in headers.WITHOUT_DATA and header.stored:
            raise headers.corrupt(f"{masking.quoted(name, 200)!r} is not a file, but has data")
        if kind == "symlink":
            if not 0 < len(header.link) <= _MAX_PATH:
                raise refused("link", path, "is a symlink whose target is empty or too long")
            link = _decode(header.link)  # data: a symlink is never followed
        elif kind == "hardlink":
            link = "/".join(archive_path(header.link))
        return Entry(path, kind, raw.mode & 0o777, min(max(raw.mtime, 0), _LAST_TIME), size, extents, link)

    def _file(self, header: _Header, path: tuple[str, ...]) -> tuple[int, tar_sparse.Map]:
        """Prepare to read the data of a file. Return its size and its map."""
        if not path:
            raise refused("name", path, "has no name")
        stored = header.stored
        if header.raw.type == headers.SPARSE or header.is_sparse:
            extended = header.added.get(headers.EXTENDED, b"")
            extents, size, stored = tar_sparse.of(header.raw, header.records, extended, stored, self._take)
            self._begin(stored, size)
            return size, extents
        self._begin(stored, stored)
        return stored, array.array("Q", (0, stored))

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

    def _begin(self, stored: int, size: int = 0) -> None:
        """Expect ``stored`` bytes of data, of an entry of ``size`` bytes. Raises ``errors.TooLarge``."""
        self._total += stored
        needed = self._total if self._thin else max(size, self._total)
        if needed > self._limit:
            raise errors.TooLarge(virtual_size=needed, available=self._limit)
        self._left, self._padding = stored, -stored % headers.BLOCK

    def _expect_end(self) -> None:
        """Check that only zeros follow. POSIX requires two zero blocks, some tools write one."""
        start = self.at
        while data := self._stream.read(_SKIP):
            if data.strip(b"\0") or self.at - start > _LARGEST_END:
                raise errors.TrailingGarbage(format="tar", offset=self.at)
            self.at += len(data)


class _Header:
    """The header of an entry, combined with the extended and long-name headers before it."""

    raw: headers.Raw
    #: Whether it is a sparse file in a pax format.
    is_sparse = False

    def __init__(self) -> None:
        self.added: dict[bytes, bytes] = {}
        self.records: dict[bytes, bytes] = {}

    def add(self, kind: bytes, data: bytes) -> None:
        if kind == headers.GLOBAL:
            if any(key in _CHECKED or key.startswith(b"GNU.sparse.") for key in headers.records(data)):
                raise headers.refused("header", "a global header sets names or sizes of entries")
            return
        if kind in self.added:
            raise headers.corrupt("an entry has two extension headers of the same type")
        self.added[kind] = data
        if kind == headers.EXTENDED:
            self.records = headers.records(data)
            self.is_sparse = any(key.startswith(b"GNU.sparse.") for key in self.records)

    @property
    def name(self) -> bytes:
        if not self.added:
            return self.raw.name
        sparse = self.records.get(b"GNU.sparse.name")
        return sparse if sparse is not None else self._either(headers.LONG_NAME, b"path", self.raw.name)

    @property
    def link(self) -> bytes:
        return self._either(headers.LONG_LINK, b"linkpath", self.raw.link)

    @property
    def stored(self) -> int:
        """Bytes of data in the archive."""
        size = headers.decimal(self.records, b"size") if b"size" in self.records else self.raw.size
        if not 0 <= size < 1 << 63:
            raise headers.corrupt(f"an entry has an invalid size of {size} bytes")
        return size

    def _either(self, kind: bytes, key: bytes, otherwise: bytes) -> bytes:
        long = self.added.get(kind)
        if long is not None:
            otherwise = long.partition(b"\0")[0]
        return self.records.get(key, otherwise)


_IGNORED = frozenset({headers.LABEL, headers.ACL})
_ADDITIONS = {
    kind: kind for kind in (headers.LONG_NAME, headers.LONG_LINK, headers.EXTENDED, headers.GLOBAL)
} | {headers.SOLARIS_EXTENDED: headers.EXTENDED}
_CHECKED = frozenset({b"path", b"linkpath", b"size"})


_MAX_NAME, _MAX_PATH = 255, 4095  # NAME_MAX, PATH_MAX with its NUL
_DEEPEST = 256  # each level costs a descriptor and a stack frame when a tree is merged or removed


def archive_path(name: bytes) -> tuple[str, ...]:
    """Split a name into its parts; empty for the root directory itself. Raises ``errors.Refused``."""
    parts = tuple([part for part in _decode(name).split("/") if part not in {"", "."}])
    if name.startswith(b"/"):
        raise refused("absolute", parts, "has an absolute path")
    if ".." in parts:
        raise refused("dotdot", parts, 'leads outside: contains ".."')
    is_long = (len(part.encode(errors="surrogateescape")) > _MAX_NAME for part in parts)
    if len(name) > _MAX_NAME and (len(name) > _MAX_PATH or any(is_long)):
        raise refused("name", parts, "has a name that is too long")
    if len(parts) > _DEEPEST:
        raise refused("name", parts, f"is below more than {_DEEPEST} directories")
    return parts


def refused(rule: str, path: tuple[str, ...], reason: str) -> errors.Refused:
    """Return the error of a safety rule for an entry."""
    return headers.refused(rule, f"{masking.quoted('/'.join(path), 200)!r} {reason}")


def _decode(name: bytes) -> str:
    if b"\0" in name:
        raise headers.corrupt(f"a name contains a zero byte: {masking.quoted(name, 200)!r}")
    return name.decode(errors="surrogateescape")
