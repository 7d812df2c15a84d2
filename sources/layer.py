"""The disk in a layer: one file below /disk, found and checked while the layer's tar passes by.

OCI image specification, "Image Layer Filesystem Changeset".
"""

from __future__ import annotations

import dataclasses
import posixpath

from formats import decompress, tar, tar_walk
from importer import errors
from sources import base

FOLDER = "disk"
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
#: What is remembered of /disk, where one file is expected: names of files, and names that are hidden.
MOST_FILES, MOST_HIDDEN = 10, 1000
LONGEST_NAME = 255  # NAME_MAX
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
        self._tar = tar_walk.Walk(reader)
        self._hidden = hidden
        self._name = name
        self._disks: list[str] = []
        self._whiteouts: set[str] = set()
        self._opaque = False
        self.path = ""
        self.size = 0

    def find(self) -> bool:
        """Go to the disk; False when the layer, read to its end, has none."""
        while entry := self._tar.next():
            if self._look(entry):
                self.path, self.size = f"/{FOLDER}/{self._disks[0]}", entry.size
                return True
        self._tar.drain()
        return False

    def readinto(self, into: memoryview, /) -> int:
        """Read the disk that was found."""
        return self._tar.readinto(into)

    def finish(self) -> None:
        """Read the layer to its end. Raises ``errors.Refused`` when there is more than one disk."""
        while entry := self._tar.next():
            self._look(entry)
        self._tar.drain()
        if len(self._disks) > 1:
            raise self._several(str(len(self._disks)))
        if self._whiteouts & set(self._disks):
            raise self._refused("whiteout", f"{self.path} is both there and removed in the same layer")

    def hides(self) -> Hidden:
        """Return what is hidden from the layers below, once this one was read to its end."""
        return Hidden(self._hidden.names | self._whiteouts, self._hidden.everything or self._opaque)

    def _look(self, entry: tar_walk.Entry) -> bool:
        """Take note of an entry; tell whether it is the first disk."""
        parts = [part for part in posixpath.normpath(f"/{entry.name}").split("/") if part]
        if parts in ([OPAQUE], [WHITEOUT + FOLDER], [FOLDER, OPAQUE]):
            self._opaque = True
        elif parts[:1] == [FOLDER]:
            return self._look_inside(entry, parts[1:])
        return False

    def _look_inside(self, entry: tar_walk.Entry, parts: list[str]) -> bool:
        path = f"/{FOLDER}/{'/'.join(parts)}".rstrip("/")
        if not parts and entry.type == tar.DIRECTORY:
            return False
        if parts and parts[-1].startswith(WHITEOUT):
            if len(parts) == 1:
                self._hide(parts[0].removeprefix(WHITEOUT))
            return False
        if parts and parts[0] in self._hidden.names:
            return False
        if entry.type in {tar.SYMLINK, tar.HARD_LINK}:
            raise self._refused("link", f"{path} is a link to {entry.link!r}; the disk has to be a file")
        if entry.type == tar.DIRECTORY or len(parts) != 1:
            raise self._refused("directory", f"{path}: one file is expected in /{FOLDER}, no directories")
        if entry.type != tar.FILE:
            raise self._refused("file type", f"{path} is no plain file")
        if len(parts[0]) > LONGEST_NAME:
            raise self._refused("name", f"{path[:80]}… has too long a name")
        self._disks.append(parts[0])
        if len(self._disks) > MOST_FILES:
            raise self._several(f"more than {MOST_FILES}")
        return len(self._disks) == 1

    def _hide(self, name: str) -> None:
        if len(name) > LONGEST_NAME or len(self._hidden.names) + len(self._whiteouts) >= MOST_HIDDEN:
            raise self._refused("whiteout", f"more than {MOST_HIDDEN} names are removed, or too long a one")
        self._whiteouts.add(name)

    def _several(self, count: str) -> errors.Refused:
        some = ", ".join(f"/{FOLDER}/{name}" for name in self._disks[:MOST_FILES])
        return self._refused("one disk", f"{count} files in /{FOLDER}, one is expected: {some}")

    def _refused(self, rule: str, reason: str) -> errors.Refused:
        return errors.Refused(format="container image", rule=rule, reason=f"{self._name}: {reason}")
