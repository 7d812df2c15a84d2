"""Stream a tar archive and yield its headers.

Python's tarfile reads headers of any length into memory, keeps sparse maps as lists of tuples, and its checks
differ between versions. Here memory is bounded, and doubtful headers are errors. Names may be absolute and
links may lead anywhere, as in container layers: ``formats.tar.archive`` has the checks for unpacking.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.formats.tar import headers, sparse

BUFFER = 1 << 18
#: Bytes of the extension headers before an entry. A stream may have them without end.
_HEADERS = 4 * headers.LARGEST_HEADER

_IGNORED = frozenset({headers.LABEL, headers.ACL})
_EXTENSIONS = {kind: kind for kind in (headers.LONG_NAME, headers.LONG_LINK, headers.EXTENDED)} | {
    headers.SOLARIS_EXTENDED: headers.EXTENDED
}


class Member(NamedTuple):
    """An entry. ``type``: a constant of ``formats.tar.headers``; SPARSE for sparse files of any format.

    Its data begins at ``offset``. ``size``: of the file; of a sparse one ``stored`` bytes are in the archive.
    """

    name: str
    type: bytes
    link: str
    size: int
    offset: int
    stored: int
    mode: int
    mtime: int


class Walk:
    """Read a tar archive entry by entry; ``next`` skips the unread data of the entry before.

    In a seekable file (``io.BufferedReader``) it seeks, also past the end of a truncated file: ``readinto``
    raises ``errors.Truncated`` then. ``at``: offset of the next byte. ``has_end_mark``: known after ``next``
    has returned None. ``kind``: what the archive is, for messages.
    """

    has_end_mark = False

    def __init__(self, reader: readers.Reader | io.BufferedReader, kind: str = "tar") -> None:
        self.kind = kind
        self.at = 0
        if not isinstance(reader, io.BufferedReader):
            reader = io.BufferedReader(readers.RawIO(reader), BUFFER)
        self._stream = reader
        self._left = 0
        self._padding = 0
        #: The map and the size of the current entry, if it is a sparse file.
        self._sparse: tuple[sparse.Map, int] | None = None

    def next(self) -> Member | None:
        """Go to the next entry; return None at the end of the archive, with or without an end marker."""
        self._skip(self._left + self._padding)
        self._left = self._padding = 0
        extensions: dict[bytes, bytes] = {}
        start = self.at
        # Not every tool writes an end marker.
        while (block := self._take(headers.BLOCK, or_end=True)).strip(b"\0"):
            if self.at - start > _HEADERS:
                reason = f"extension headers of more than {_HEADERS} bytes before an entry"
                raise headers.refused("header", reason)
            raw = headers.parse(block)
            if raw.type in _IGNORED:
                self._take_header(raw.size)
            elif raw.type == headers.GLOBAL:
                self._check_global(self._take_header(raw.size))
            elif (kind := _EXTENSIONS.get(raw.type)) is None:
                return self._entry(raw, extensions)
            elif kind in extensions:
                raise headers.corrupt("an entry has two extension headers of the same type")
            else:
                extensions[kind] = self._take_header(raw.size)
        if extensions:
            raise headers.corrupt("the archive ends between the headers of an entry")
        self.has_end_mark = bool(block)
        return None

    def readinto(self, into: memoryview, /) -> int:
        """Read data of the current entry, as it is in the archive; return 0 after its last byte."""
        count = self._stream.readinto1(into[: self._left])
        if not count and self._left and len(into):
            raise self._truncated()
        self.at += count
        self._left -= count
        return count

    def file(self) -> readers.Reader:
        """Return a reader of the current entry with zeros in place of the holes of a sparse file."""
        if self._sparse is None:
            return self
        buffers = itertools.repeat(memoryview(bytearray(BUFFER)))
        return readers.RunsReader(sparse.runs(self, *self._sparse, buffers))

    def close(self) -> None:
        """Do nothing: the caller closes the stream."""

    def within(self, size: int) -> Iterator[Member]:
        """Yield the entries of an archive of ``size`` bytes. Raises ``errors.Truncated`` if one is cut."""
        while entry := self.next():
            if (end := entry.offset + entry.stored) > size:
                reason = f"{entry.name!r} ends at byte {end} of {size}"
                raise errors.Truncated(format=self.kind, reason=reason)
            yield entry

    def drain(self, most: int | None = None) -> None:
        """Read to the end of the stream; any bytes may follow the archive.

        Raises ``errors.TrailingGarbage`` for more than ``most``: a stream may be endless.
        """
        end, scrap = self.at, memoryview(bytearray(BUFFER))
        while count := self._stream.readinto1(scrap):
            self.at += count
            if most is not None and self.at - end > most:
                raise errors.TrailingGarbage(format=self.kind, offset=end)

    def _check_global(self, data: bytes) -> None:
        """Do nothing: a global header is ignored, as by Go's archive/tar, which container tools use."""

    def _entry(self, raw: headers.Raw, extensions: dict[bytes, bytes]) -> Member:
        name, link, kind = raw.name, raw.link, raw.type
        records: dict[bytes, bytes] = {}
        # Most entries have none, and an archive may have millions of entries.
        if extensions:
            records = headers.records(extensions.get(headers.EXTENDED, b""))
            long_name, long_link = (extensions.get(each) for each in (headers.LONG_NAME, headers.LONG_LINK))
            name = records.get(b"path", name if long_name is None else long_name.partition(b"\0")[0])
            link = records.get(b"linkpath", link if long_link is None else long_link.partition(b"\0")[0])
        size = stored = 0
        if kind not in headers.WITHOUT_DATA:
            # The size in an extended header overrides the entry's own.
            size = stored = headers.decimal(records, b"size") if b"size" in records else raw.size
            if not 0 <= stored < 1 << 63:
                raise headers.corrupt(f"an entry has an invalid size of {stored} bytes")
        self._sparse = None
        has_map = bool(records) and any(key.startswith(b"GNU.sparse.") for key in records)
        if kind == headers.SPARSE or (has_map and kind == headers.FILE):
            kind, name = headers.SPARSE, records.get(b"GNU.sparse.name", name)
            extended = extensions.get(headers.EXTENDED, b"")
            extents, size, stored = sparse.of(raw, records, extended, stored, self._take)
            self._sparse = extents, size
        self._left, self._padding = stored, -stored % headers.BLOCK
        if kind == headers.FILE and name.endswith(b"/"):
            kind = headers.DIRECTORY  # as in archives from before POSIX
        shown, target = name.decode(errors="surrogateescape"), link.decode(errors="surrogateescape")
        return Member(shown, kind, target, size, self.at, stored, raw.mode, raw.mtime)

    def _take(self, count: int, *, or_end: bool = False) -> bytes:
        """Read ``count`` bytes; ``or_end``: or none at the end of the stream."""
        data = self._stream.read(count)
        self.at += len(data)
        if len(data) < count and (data or not or_end):
            raise self._truncated()
        return data

    def _take_header(self, size: int) -> bytes:
        """Read the content of a long-name or extended header."""
        if not 0 <= size <= headers.LARGEST_HEADER:
            reason = f"an extension header has {size} bytes, the limit is {headers.LARGEST_HEADER} bytes"
            raise headers.refused("header", reason)
        return self._take(size + -size % headers.BLOCK)[:size]

    def _truncated(self) -> errors.Truncated:
        return errors.Truncated(format="tar", reason=f"the archive ends at byte {self.at}")

    def _skip(self, count: int) -> None:
        if self._stream.seekable():
            self._stream.seek(count, io.SEEK_CUR)
            self.at += count
            return
        if count < headers.BLOCK:
            self._take(count)
            return
        scrap = memoryview(bytearray(min(count, BUFFER)))
        while count:
            got = self._stream.readinto1(scrap[:count])
            if not got:
                raise self._truncated()
            self.at += got
            count -= got


def files(head: bytes) -> Iterator[Member]:
    """Yield the files of an archive whose headers are in ``head``, its first bytes."""
    entries = Walk(readers.BytesReader(head))
    with contextlib.suppress(errors.ImageError):
        while (entry := entries.next()) is not None:
            if entry.type != headers.DIRECTORY and not is_metadata(entry):
                yield entry


def first_file(head: bytes) -> str:
    """Return the name of the first file of an archive that begins with ``head``; empty: none found."""
    return next((entry.name for entry in files(head)), "")


def is_metadata(entry: Member) -> bool:
    """Return whether an entry is metadata of another one, which the tar of macOS adds (AppleDouble)."""
    return entry.name.rpartition("/")[2].startswith("._")
