"""A part of another source: a file in an archive that is read by ranges, in place."""

from __future__ import annotations

import io
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import detect, readers, views
from cdi_worker.sources import base

#: Bytes of a read for headers: small files after a header need no request of their own.
_HEADERS: Final = 32 << 10


class Part(base.Source):
    """``size`` bytes from ``offset`` of ``whole``, an open image with ranges. Closing it leaves that open.

    ``read``: see ``images.image.Image.at_random``.
    """

    def __init__(self, whole: base.Image, offset: int, size: int, read: views.Read) -> None:
        self.name = whole.facts.name
        self.pace = whole.source.pace
        self._whole = whole
        self._offset = offset
        self._size = size
        self._read = read

    def open(self, opening: base.Opening) -> base.Facts:
        head = self._read(self._offset, min(self._size, detect.HEAD))
        return base.Facts(name=self.name, size=self._size, head=head)

    @property
    def ranges(self) -> base.RandomReader | None:
        reader = self._whole.source.ranges
        if isinstance(reader, readers.RequestReader):
            return _ShiftedRequests(reader, self._offset)
        return None if reader is None else _Shifted(reader, self._offset)

    def stream(self, offset: int = 0) -> base.Reader:
        raise errors.NoRanges(url=self.name, reason="a part of an archive is read by ranges only")


def seekable(whole: base.Image, read: views.Read) -> io.BufferedReader:
    """Return a stream of the headers and small files in ``whole``; ``read``: see ``Part``."""
    return io.BufferedReader(readers.SeekableIO(read, whole.facts.size or 0), _HEADERS)


class _Shifted:
    """Reads ranges from ``offset`` on."""

    def __init__(self, reader: base.RandomReader, offset: int) -> None:
        self._reader = reader
        self._offset = offset

    def read_range(self, offset: int, into: memoryview, /) -> int:
        return self._reader.read_range(self._offset + offset, into)


class _ShiftedRequests(_Shifted):
    """Also opens ranges (``formats.readers.RequestReader``)."""

    def __init__(self, reader: readers.RequestReader, offset: int) -> None:
        super().__init__(reader, offset)
        self._requests = reader

    def open_range(self, start: int, end: int, /) -> base.Reader:
        return self._requests.open_range(self._offset + start, self._offset + end)
