"""Stream a tar archive and check each entry, so that it is safe to unpack.

Python's tarfile reads headers of any length into memory, keeps sparse maps as lists of tuples, and its
checks differ between versions. Here memory is bounded, and doubtful entries are errors.
"""

from __future__ import annotations

import array
import io
from collections.abc import Iterator
from typing import Literal, NamedTuple

from cdi_worker import errors
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

#: The name of the disk on a volume with a file system. A program that opens it follows a link, in its mounts.
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
    ``errors.TooLarge``. ``has_disk``: the disk came before the archive, which may not have another. Raises
    ``errors.Refused`` for entries that a safety rule forbids, ``errors.Corrupt``, ``errors.Truncated`` and
    ``errors.TrailingGarbage``.
    """

    def __init__(
        self, reader: readers.Reader, *, limit_bytes: int, thin: bool = False, has_disk: bool = False
    ) -> None:
        super().__init__(io.BufferedReader(readers.Raw(reader), 1 << 16))
        self._limit = limit_bytes
        self._thin = thin
        self._has_disk = has_disk
        self._total = 0
        self._left = 0
        self._padding = 0

    def __iter__(self) -> Iterator[Entry]:
        while (header := self._next_header()) is not None:
            entry = self._entry(header)
            self._check_disk(entry)
            if entry.path:
                yield entry
            self._skip()

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
                if header.started:
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
            raise refused(
                "type", path, f"has type {raw.type!r}; only files, directories and links are allowed"
            )
        size, extents, link = 0, _EMPTY, ""
        if kind == "file":
            size, extents = self._file(header, path)
        elif raw.type == headers.DUMPDIR:
            self._begin(header.stored)  # the names in the directory
        elif raw.type not in headers.WITHOUT_DATA and header.stored:
            raise headers.corrupt(f"{name[:200]!r} is not a file, but has data")
        if kind == "symlink":
            link = symlink(header.link, path)
        elif kind == "hardlink":
            link = "/".join(archive_path(header.link))
        return Entry(path, kind, raw.mode & 0o777, min(max(raw.mtime, 0), _LAST_TIME), size, extents, link)

    def _file(self, header: _Header, path: tuple[str, ...]) -> tuple[int, tar_sparse.Map]:
        """Expect the data of a file. Return its size and its map."""
        if not path:
            raise refused("name", path, "has no name")
        stored = header.stored
        if header.raw.type == headers.SPARSE or header.is_sparse:
            return self._sparse_file(header, stored)
        self._begin(stored, stored)
        return stored, array.array("Q", (0, stored))

    def _sparse_file(self, header: _Header, stored: int) -> tuple[int, tar_sparse.Map]:
        if header.raw.type == headers.SPARSE:
            extents, size = tar_sparse.gnu(header.raw.block, self._take)
        else:
            size = header.sparse_size
            extents, taken = header.sparse_map or tar_sparse.pax(stored, self._take)
            stored -= taken
        tar_sparse.check(extents, size, stored)
        self._begin(stored, size)
        return size, extents

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

    def _skip(self) -> None:
        """Skip the rest of the current entry."""
        if self._left:
            scrap = memoryview(bytearray(min(_SKIP, self._left)))
            while self._left:
                self.readinto(scrap)
        if self._padding:
            self._take(self._padding)
            self._padding = 0

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

    @property
    def started(self) -> bool:
        return bool(self.added)

    def add(self, kind: bytes, data: bytes) -> None:
        if kind == headers.GLOBAL:
            if any(key in _CHECKED or key.startswith(b"GNU.sparse.") for key in headers.records(data)):
                raise errors.Refused(
                    format="tar", rule="header", reason="a global header sets names or sizes of entries"
                )
            return
        if kind in self.added:
            raise headers.corrupt("an entry has two extension headers of the same type")
        self.added[kind] = data
        if kind == headers.EXTENDED:
            self.records = headers.records(data)
            self.is_sparse = any(key.startswith(b"GNU.sparse.") for key in self.records)

    @property
    def name(self) -> bytes:
        if not self.started:
            return self.raw.name
        sparse = self.records.get(b"GNU.sparse.name")
        return sparse if sparse is not None else self._either(headers.LONG_NAME, b"path", self.raw.name)

    @property
    def link(self) -> bytes:
        return self._either(headers.LONG_LINK, b"linkpath", self.raw.link)

    @property
    def stored(self) -> int:
        """Bytes of data in the archive."""
        size = self._decimal(b"size") if b"size" in self.records else self.raw.size
        if not 0 <= size < 1 << 63:
            raise headers.corrupt(f"an entry has an invalid size of {size} bytes")
        return size

    @property
    def sparse_size(self) -> int:
        """Size in bytes of a sparse file in a pax format."""
        key = b"GNU.sparse.realsize"
        return self._decimal(key if key in self.records else b"GNU.sparse.size")

    @property
    def sparse_map(self) -> tuple[tar_sparse.Map, int] | None:
        """The map of a sparse file in pax format 0.0 or 0.1; None in 1.0, where it is before the data."""
        version = tuple(self.records.get(key) for key in _VERSION)
        if version == (b"1", b"0"):
            return None
        if version != (None, None):
            raise errors.Refused(
                format="tar",
                rule="sparse",
                reason="a sparse file has an unknown format; use tar --sparse-version=1.0",
            )
        return tar_sparse.listed(self.records, self.added[headers.EXTENDED]), 0

    def _either(self, kind: bytes, key: bytes, otherwise: bytes) -> bytes:
        long = self.added.get(kind)
        if long is not None:
            otherwise = long.partition(b"\0")[0]
        return self.records.get(key, otherwise)

    def _decimal(self, key: bytes) -> int:
        text = self.records.get(key, b"")
        if not text.isdigit() or len(text) > 19:
            raise headers.corrupt(f"{key!r} is {text!r}, expected a number")
        return int(text)


_IGNORED = frozenset({headers.LABEL, headers.ACL})
_ADDITIONS = {
    kind: kind for kind in (headers.LONG_NAME, headers.LONG_LINK, headers.EXTENDED, headers.GLOBAL)
} | {headers.SOLARIS_EXTENDED: headers.EXTENDED}
_VERSION = (b"GNU.sparse.major", b"GNU.sparse.minor")
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
    if len(name) > _MAX_NAME and (len(name) > _MAX_PATH or any(map(_is_long, parts))):
        raise refused("name", parts, "has a name that is too long")
    if len(parts) > _DEEPEST:
        raise refused("name", parts, f"is below more than {_DEEPEST} directories")
    return parts


def _is_long(part: str) -> bool:
    return len(part.encode(errors="surrogateescape")) > _MAX_NAME


def symlink(target: bytes, path: tuple[str, ...]) -> str:
    """Return the target of the symlink at ``path``, as it is: a symlink is data and is never followed.

    Raises ``errors.Refused`` for a target that no file system can store.
    """
    if not 0 < len(target) <= _MAX_PATH:
        raise refused("link", path, "is a symlink whose target is empty or too long")
    return _decode(target)


def refused(rule: str, path: tuple[str, ...], reason: str) -> errors.Refused:
    """Return the error of a safety rule for an entry."""
    return errors.Refused(format="tar", rule=rule, reason=f"{'/'.join(path)[:200]!r} {reason}")


def _decode(name: bytes) -> str:
    if b"\0" in name:
        raise errors.Corrupt(format="tar", reason=f"a name contains a zero byte: {name[:200]!r}")
    return name.decode(errors="surrogateescape")
