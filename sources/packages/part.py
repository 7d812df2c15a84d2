"""A part of another source: a file in an archive that is read by ranges, in place."""

from __future__ import annotations

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.sources import base


class Part(base.Source):
    """``size`` bytes from ``offset`` of ``whole``, an open image with ranges, which closing leaves open."""

    def __init__(self, whole: base.Image, offset: int, size: int, name: str) -> None:
        self.name = name
        self.size = size
        self._whole = whole
        self._offset = offset
        # How fast the server answers is known already.
        self.pace = whole.served.pace

    def ranges(self) -> base.RandomReader | None:
        found = self._whole.served.ranges()
        if isinstance(found, readers.Continuing):
            return _Continuing(found, self._offset)
        return None if found is None else _Shifted(found, self._offset)

    def stream(self, offset: int = 0) -> base.Reader:
        raise errors.NoRanges(url=self.name, reason="a part of an archive is read by ranges only")

    def verify(self) -> None:
        self._whole.served.verify()


class _Shifted:
    """Reads ranges from ``offset`` on."""

    def __init__(self, reader: base.RandomReader, offset: int) -> None:
        self._reader = reader
        self._offset = offset

    def read_range(self, offset: int, into: memoryview, /) -> int:
        return self._reader.read_range(self._offset + offset, into)


class _Continuing(_Shifted):
    """Also passes on which bytes a thread will read next (``formats.readers.Continuing``)."""

    def __init__(self, reader: readers.Continuing, offset: int) -> None:
        super().__init__(reader, offset)
        self._continuing = reader

    def expect(self, offset: int, length: int, /) -> None:
        self._continuing.expect(self._offset + offset, length)
