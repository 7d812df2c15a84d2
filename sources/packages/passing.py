"""One pass through a tar archive that is read as a stream, and the files in it as they pass."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

from cdi_worker import errors
from cdi_worker.formats import checksum, detect, readers
from cdi_worker.formats.tar import walk
from cdi_worker.images import image
from cdi_worker.sources import base

_SCRAP: Final = 1 << 20
#: Most bytes after the archive, which tools pad to a record. A stream may be endless.
_LARGEST_END: Final = 64 << 20

A = TypeVar("A", bound=walk.Walk)


class Pass(Generic[A]):
    """One pass through ``whole``, an archive that ``archive`` reads. ``expected``: its checksum, or None."""

    def __init__(
        self,
        whole: base.Image,
        cancel: base.Cancel,
        expected: checksum.Checksum | None,
        archive: Callable[[base.Reader], A],
    ) -> None:
        arrivals = image.Arrivals()
        #: Takes the callback for the bytes that have arrived, and those that will.
        self.report = arrivals.report
        #: Its end ends the parallel ranges of this pass; the attempt may make another.
        self._scope = cancel.child()
        self._reader = whole.ordered(self._scope, arrivals.add)
        self._hashing = None
        if expected is not None:
            self._reader = self._hashing = checksum.HashingReader(self._reader, expected)
        self.archive = archive(self._reader)
        self.is_finished = False

    def close(self) -> None:
        """Close the stream. Safe to call twice."""
        self._reader.close()
        self._scope.close()

    def finish(self) -> None:
        """Read to the end, and verify the checksum of the whole. Safe to call twice."""
        if self.is_finished:
            return
        while self.archive.next() is not None:
            pass
        self.archive.drain(_LARGEST_END)
        if self._hashing is not None:
            self._hashing.verify()
        self.is_finished = True


class PassingFile(base.Source):
    """The file at the current position of a stream; closing its reader leaves the archive open.

    ``hashed``: the algorithms of ``digests``, which are complete after ``rest``.
    """

    def __init__(self, archive: base.Reader, size: int, name: str, hashed: Iterable[str] = ()) -> None:
        self.name = name
        self.size = size
        self.is_used = False
        self.digests = {each: hashlib.new(each, usedforsecurity=False) for each in hashed}
        self._content = readers.Peek(readers.WatchedReader(archive, self._hash), min(size, detect.HEAD))
        self.head = self._content.head
        self.readinto = self._content.readinto

    def open(self, opening: base.Opening) -> base.Facts:
        return base.Facts(name=self.name, size=self.size, head=self.head, once=True)

    def stream(self, offset: int = 0) -> base.Reader:
        if self.is_used or offset > len(self.head):
            raise errors.NoRanges(url=self.name, reason="it passes once")
        self.is_used = True
        readers.fill(self, memoryview(bytearray(offset)))
        return self

    def rest(self) -> None:
        """Read to the end of the file, while it passes."""
        scrap = memoryview(bytearray(_SCRAP))
        while self.readinto(scrap):
            pass

    def _hash(self, data: memoryview) -> None:
        for each in self.digests.values():
            each.update(data)
