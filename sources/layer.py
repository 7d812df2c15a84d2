"""The disk in a layer: one file below /disk, found and checked while the layer's tar passes by.

OCI image specification, "Image Layer Filesystem Changeset".
"""

from __future__ import annotations

import dataclasses
import posixpath
import tarfile
from typing import IO, cast

from formats import decompress
from importer import errors
from sources import base

FOLDER = "disk"
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
#: Names, pax records and sparse maps of one entry may take this many bytes together.
LARGEST_HEADER = 1 << 20
_BUFFER = 1 << 18
_BLOCK = 512
_MAGICS = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst"}


def plain(reader: base.Reader, head: bytes) -> base.Reader:
    """Return a reader of the tar in a layer that begins with ``head``: gzip, zstd or not compressed.

    The media type is not asked: images are known whose type and bytes differ.
    """
    skippable = len(head) > 3 and head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5
    kind = "zst" if skippable else next((_MAGICS[magic] for magic in _MAGICS if head.startswith(magic)), "")
    return decompress.open(kind, reader) if kind else reader


@dataclasses.dataclass(frozen=True, slots=True)
class Hidden:
    """What upper layers hide of /disk in the layers below them."""

    names: frozenset[str] = frozenset()
    everything: bool = False


class Layer:
    """A layer as it passes. ``hidden``: what the layers above hide of it; ``name`` is for messages.

    ``find`` goes to the disk, ``readinto`` reads it, ``finish`` goes to the end of the layer and
    checks that the disk was the only one. ``path`` and ``size`` are the disk's.
    """

    def __init__(self, reader: base.Reader, hidden: Hidden, name: str) -> None:
        self._file = _Forward(reader)
        self._hidden = hidden
        self._name = name
        self._tar: tarfile.TarFile | None = None
        self._disks: list[str] = []
        self._whiteouts: set[str] = set()
        self._opaque = False
        self._end = 0
        self.path = ""
        self.size = 0

    def find(self) -> bool:
        """Go to the disk; False when the layer, read to its end, has none."""
        while member := self._next():
            if self._look(member):
                self.path, self.size = f"/{FOLDER}/{self._disks[0]}", member.size
                self._file.seek(member.offset_data)
                self._end = member.offset_data + member.size
                return True
        self._file.drain()
        return False

    def readinto(self, into: memoryview, /) -> int:
        """Read the disk that was found."""
        return self._file.readinto(into[: max(0, self._end - self._file.tell())])

    def finish(self) -> None:
        """Read the layer to its end. Raises ``errors.Refused`` when there is more than one disk."""
        while member := self._next():
            self._look(member)
        self._file.drain()
        if len(self._disks) > 1:
            some = ", ".join(f"/{FOLDER}/{name}" for name in self._disks[:10])
            raise self._refused("one disk", f"{len(self._disks)} files in /{FOLDER}, one is expected: {some}")
        if self._whiteouts & set(self._disks):
            raise self._refused("whiteout", f"{self.path} is both there and removed in the same layer")

    def hides(self) -> Hidden:
        """Return what is hidden from the layers below, once this one was read to its end."""
        return Hidden(self._hidden.names | self._whiteouts, self._hidden.everything or self._opaque)

    def _look(self, member: tarfile.TarInfo) -> bool:
        """Take note of an entry; tell whether it is the first disk."""
        parts = [part for part in posixpath.normpath(f"/{member.name}").split("/") if part]
        if parts in ([OPAQUE], [WHITEOUT + FOLDER], [FOLDER, OPAQUE]):
            self._opaque = True
        elif parts[:1] == [FOLDER]:
            return self._look_inside(member, parts[1:])
        return False

    def _look_inside(self, member: tarfile.TarInfo, parts: list[str]) -> bool:
        path = f"/{FOLDER}/{'/'.join(parts)}".rstrip("/")
        if not parts and member.isdir():
            return False
        if parts and parts[-1].startswith(WHITEOUT):
            if len(parts) == 1:
                self._whiteouts.add(parts[0].removeprefix(WHITEOUT))
            return False
        if parts and parts[0] in self._hidden.names:
            return False
        if member.issym() or member.islnk():
            raise self._refused("link", f"{path} is a link to {member.linkname!r}; the disk has to be a file")
        if member.isdir() or len(parts) != 1:
            raise self._refused("directory", f"{path}: one file is expected in /{FOLDER}, no directories")
        if not member.isreg() or member.issparse():
            raise self._refused("file type", f"{path} is no plain file")
        self._disks.append(parts[0])
        return len(self._disks) == 1

    def _next(self) -> tarfile.TarInfo | None:
        self._file.start_header()
        try:
            if self._tar is None:
                self._tar = tarfile.TarFile(
                    fileobj=cast("IO[bytes]", self._file), encoding="utf-8", errors="surrogateescape"
                )
            member = self._tar.next()
            # tarfile keeps every member it has seen; there may be millions.
            self._tar.members = []  # type: ignore[attr-defined]
        except (tarfile.TarError, ValueError, OverflowError, RecursionError) as err:
            raise errors.Corrupt(format="layer", reason=f"{self._name}: not a tar archive: {err}") from err
        if member is None and not self._file.at_end_mark():
            # tarfile takes a broken header for the end.
            raise errors.Corrupt(format="layer", reason=f"{self._name}: broken header in the tar archive")
        return member

    def _refused(self, rule: str, reason: str) -> errors.Refused:
        return errors.Refused(format="container image", rule=rule, reason=f"{self._name}: {reason}")


class _Forward:
    """As much of a file as tarfile needs to walk a stream, and the stream itself for large members.

    Only forward, and with a bound on what a header may take.
    """

    name = "layer"
    mode = "rb"

    def __init__(self, reader: base.Reader) -> None:
        self._reader = reader
        self._buffer = memoryview(bytearray(_BUFFER))
        self._at = self._filled = 0
        self._position = 0
        self._header = 0
        self._last = b""

    def start_header(self) -> None:
        """A new entry begins: it has the whole of its allowance."""
        self._header = 0

    def at_end_mark(self) -> bool:
        """Tell whether what was read last marks the end of a tar: a block of zeros, or nothing at all."""
        return not self._last.strip(b"\0")

    def readinto(self, into: memoryview, /) -> int:
        """Read the next bytes; large reads go past the buffer."""
        if self._at == self._filled:
            if len(into) >= _BUFFER:
                count = self._reader.readinto(into)
                self._position += count
                return count
            self._at, self._filled = 0, self._reader.readinto(self._buffer) if len(into) else 0
        count = min(len(into), self._filled - self._at)
        into[:count] = self._buffer[self._at : self._at + count]
        self._at += count
        self._position += count
        return count

    def drain(self) -> None:
        """Read to the end."""
        self._at = self._filled
        while count := self._reader.readinto(self._buffer):
            self._position += count

    # -- what tarfile calls ----------------------------------------------------------------------

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        self._header += size
        if not 0 <= size <= LARGEST_HEADER or self._header > LARGEST_HEADER:
            reason = f"an entry's header takes more than {LARGEST_HEADER} bytes"
            raise errors.Refused(format="layer", rule="header size", reason=reason)
        data = bytearray(size)
        done = 0
        while done < size and (count := self.readinto(memoryview(data)[done:])):
            done += count
        self._last = bytes(data[:done][-_BLOCK:])
        return bytes(data[:done])

    def seek(self, position: int) -> None:
        left = position - self._position
        if left < 0:
            raise errors.Corrupt(format="layer", reason="an entry with a negative size")
        while left:
            if self._at == self._filled:
                self._at, self._filled = 0, self._reader.readinto(self._buffer)
            if not self._filled:
                reason = f"the tar ends at byte {self._position}, before its entry does"
                raise errors.Truncated(format="layer", reason=reason)
            count = min(left, self._filled - self._at)
            self._at += count
            self._position += count
            left -= count
