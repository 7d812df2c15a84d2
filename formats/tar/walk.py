"""Goes through a tar that passes, for who looks for one entry among many.

To unpack one there is ``formats.tar.archive``, which refuses what it would rather not make. Here names may
be absolute and links lead anywhere, as they do in the layers of operating systems: they are only told.
What makes an entry what it is, follows Go's archive/tar, which container tools read layers with.
"""

from __future__ import annotations

import io
from typing import NamedTuple

from cdi_worker.formats import readers
from cdi_worker.formats.tar import headers

BUFFER = 1 << 18
#: Types that say nothing with a size: links, devices, directories and pipes.
_WITHOUT_DATA = frozenset(b"123456"[at : at + 1] for at in range(6))


class Entry(NamedTuple):
    """An entry. ``type``: of ``formats.tar.headers``, a sparse file's whatever says that it is one."""

    name: str
    type: bytes
    link: str
    size: int


class Walk(headers.Stream):
    """Reads a tar; ``next`` passes over what was not read of the entry before, and to an entry's data.

    In a file that is given instead of a reader it leaps, also beyond the end: who reads data has to look.
    """

    def __init__(self, reader: readers.Reader | io.BufferedReader) -> None:
        if isinstance(reader, io.BufferedReader):
            super().__init__(reader)
        else:
            super().__init__(io.BufferedReader(readers.Raw(reader), BUFFER))
        self._left = 0
        self._padding = 0

    def next(self) -> Entry | None:
        """Go to the next entry; None at the end of the archive, marked or not."""
        self._pass(self._left + self._padding)
        self._left = self._padding = 0
        names: dict[bytes, bytes] = {}
        records: dict[bytes, bytes] = {}
        while (block := self._block()).strip(b"\0"):
            raw = headers.parse(block)
            if raw.type == headers.EXTENDED:
                records = headers.records(self._take_header(raw.size))
            elif raw.type == headers.GLOBAL:
                self._take_header(raw.size)
            elif raw.type in {headers.LONG_NAME, headers.LONG_LINK}:
                names[raw.type] = self._take_header(raw.size).partition(b"\0")[0]
            else:
                return self._entry(raw, names, records)
        if names or records:
            raise headers.corrupt("it ends between an entry's headers")
        return None

    def readinto(self, into: memoryview, /) -> int:
        """Read data of the current entry; 0 after its last byte."""
        count = self._stream.readinto1(into[: self._left])
        if not count and self._left and len(into):
            raise self._truncated()
        self.at += count
        self._left -= count
        return count

    def drain(self) -> None:
        """Read on to the end, whatever follows the archive."""
        scrap = memoryview(bytearray(BUFFER))
        while count := self._stream.readinto1(scrap):
            self.at += count

    def _entry(self, raw: headers.Raw, names: dict[bytes, bytes], records: dict[bytes, bytes]) -> Entry:
        name = records.get(b"path", names.get(headers.LONG_NAME, raw.name))
        link = records.get(b"linkpath", names.get(headers.LONG_LINK, raw.link))
        kind = raw.type
        more = kind == headers.SPARSE and raw.block[482]
        while more:
            # The map of a sparse file goes on.
            more = self._take(headers.BLOCK)[504]
        if any(key.startswith(b"GNU.sparse.") for key in records):
            kind, name = headers.SPARSE, records.get(b"GNU.sparse.name", name)
        size = 0 if raw.type in _WITHOUT_DATA else _size(records.get(b"size"), raw)
        self._left, self._padding = size, -size % headers.BLOCK
        if kind == headers.FILE and name.endswith(b"/"):
            kind = headers.DIRECTORY  # as told before POSIX
        return Entry(_text(name), kind, _text(link), size)

    def _block(self) -> bytes:
        """Return the next block, nothing at the end: not every tool marks that."""
        return self._take(headers.BLOCK) if self._stream.peek(1) else b""

    def _pass(self, count: int) -> None:
        if self._stream.seekable():
            self._stream.seek(count, io.SEEK_CUR)
            self.at += count
            return
        scrap = memoryview(bytearray(min(count, BUFFER)))
        while count:
            got = self._stream.readinto1(scrap[:count])
            if not got:
                raise self._truncated()
            self.at += got
            count -= got


def _size(stated: bytes | None, raw: headers.Raw) -> int:
    """Return the bytes of data that follow; an extended header's word counts more than the entry's own."""
    if stated is not None and (not stated.isdigit() or len(stated) > 19):
        raise headers.corrupt(f"a size is {stated[:50]!r}")
    size = raw.size if stated is None else int(stated)
    if not 0 <= size < 1 << 63:
        raise headers.corrupt(f"an entry is of {size} bytes")
    return size


def _text(name: bytes) -> str:
    return name.decode(errors="surrogateescape")
