"""The map of a disk in a backup: pages of extents, checked.

A page is the JSON of ``ExportMapResponse`` (kubevirt, pkg/storage/export/virt-exportserver/apis): ``extents``
(null if there are none), each with ``offset``, ``length``, ``type`` and ``description``, and ``next_offset``,
where the next page begins, null on the last one. Nothing states the size of the disk: it is the end of the
last extent (kubevirt#18634).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from cdi_worker import errors, masking
from cdi_worker.formats import smalljson
from cdi_worker.sources import base, extents

#: Extents of a page that is requested, at most. Each is about 75 bytes, written with the longest numbers 110.
PAGE: Final = 4096
LARGEST_PAGE: Final = PAGE * 128
#: Pages of a map: a disk of 512 GiB that changes every 64 KiB, the granularity of QEMU's bitmaps, has 2048. A
#: server with one extent on each would keep an import for days without a byte of the disk.
MOST_PAGES: Final = 1 << 16
#: The largest disk of QEMU, in bytes.
LARGEST: Final = (1 << 63) - 1

#: What is done with an extent: read it, zero it, or leave it as it is. One that reads as zeros is left if the
#: other extents show that the map lists changes, and zeroed otherwise.
READ, ZERO, KEEP, EITHER = range(4)
#: Extents by type and description (``allocDescription`` and ``mergedDescription`` of kubevirt's
#: pkg/storage/nbdclient), and whether the map lists changes; None: either. A hole that does not read as zeros
#: may read as anything (the NBD protocol, base:allocation).
KINDS: Final[dict[tuple[int, str], tuple[int, bool | None]]] = {
    (0, "data"): (READ, False),
    (1, "hole"): (READ, False),
    (2, "zero"): (EITHER, None),
    (3, "hole,zero"): (ZERO, False),
    (0, "clean"): (KEEP, True),
    (1, "dirty"): (READ, True),
    (3, "dirty,zero"): (ZERO, True),
}


class Map:
    """The extents from the first byte of a disk to its end. ``name``: of the disk, for messages.

    Pages are added with ``read``, which continues after a failure.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pages = 0
        self._is_whole = False
        #: Whether the map lists changes; None while both is possible: all extents read as zeros so far.
        self._lists_changes: bool | None = None
        self._kept = extents.Kept()
        #: Where areas that have changed begin and end, and whether the last extent has changed.
        self._borders = hashlib.sha256()
        self._has_changed = False
        #: The size of the disk, in bytes.
        self.size = 0

    @property
    def lists_changes(self) -> bool:
        """Whether the map lists the changes since a checkpoint, and not the data of the whole disk."""
        return bool(self._lists_changes)

    def read(self, ask: Callable[[int], bytes]) -> None:
        """Request the pages that are missing; ``ask`` returns the one that begins at an offset.

        Raises ``errors.SourceError`` if they cannot be a map.
        """
        while not self._is_whole:
            self._add(ask(self.size))
        if not self.size:
            raise self._wrong("it has no extents")

    def extents(self) -> Iterator[base.Extent]:
        """Yield the extents to read or to zero, in order."""
        if self._lists_changes is None:
            yield base.Extent(0, self.size, zero=True)
        yield from self._kept

    def check_same(self, other: Map) -> None:
        """Raise ``errors.SourceChanged`` if ``other`` is not a later answer for the same backup.

        What is allocated may change, because the guest continues to write; size and changes cannot.
        """
        pairs: dict[str, tuple[object, object]] = {
            "size": (self.size, other.size),
            "kind of map": (self._lists_changes, other._lists_changes),
        }
        if self.lists_changes:
            pairs["set of changed areas"] = self._borders.hexdigest(), other._borders.hexdigest()
        for what, (before, now) in pairs.items():
            if before != now:
                raise errors.SourceChanged(url=self._name, what=what, before=before, now=now)

    def _add(self, page: bytes) -> None:
        """Add a page that begins where the last one ended."""
        self._pages += 1
        if self._pages > MOST_PAGES:
            raise self._wrong(f"it has more than {MOST_PAGES} pages")
        if len(page) > LARGEST_PAGE:
            raise self._wrong(f"a page has more than {LARGEST_PAGE} bytes")
        try:
            document = smalljson.parse(page)
            listed, following = document["extents"] or [], document["next_offset"]
            for extent in listed:
                self._append(extent)
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise self._wrong("a page is not of the form that KubeVirt describes") from err
        if following is None:
            self._is_whole = True
        elif not listed or isinstance(following, bool) or following != self.size:
            raise self._wrong(f"a page ends at byte {self.size}, the next begins at {_shown(following)}")

    def _append(self, extent: Any) -> None:
        offset, length = extent["offset"], extent["length"]
        kind, about = KINDS.get((extent["type"], extent["description"]), (None, None))
        if type(offset) is not int or type(length) is not int:
            raise TypeError("extent")
        if kind is None:
            shown = f"{_shown(extent['type'])} ({_shown(extent['description'])})"
            raise self._wrong(f"the extent at byte {offset} has the unknown type {shown}")
        if offset != self.size:
            raise self._wrong(f"the extent after byte {self.size} begins at byte {offset}")
        if not 0 < length <= LARGEST - offset:
            raise self._wrong(f"the extent at byte {offset} has {length} bytes")
        if about is not None and about is not self._lists_changes:
            if self._lists_changes is not None:
                raise self._wrong(f"at byte {offset} it turns from one kind of map into the other")
            self._lists_changes = about
            if offset and not about:
                self._kept.add(base.Extent(0, offset, zero=True))
        self.size = offset + length
        if kind == EITHER:
            if self._lists_changes is None:
                return
            kind = KEEP if self._lists_changes else ZERO
        if self._has_changed != (kind != KEEP):
            self._has_changed = not self._has_changed
            self._borders.update(b"%d " % offset)
        if kind != KEEP:
            self._kept.add(base.Extent(offset, length, zero=kind == ZERO))

    def _wrong(self, what: str) -> errors.SourceError:
        return errors.SourceError(reason=f"{self._name}: the map of the disk is not valid: {what}")


def _shown(value: object) -> str:
    return masking.quoted(repr(value), 40)
