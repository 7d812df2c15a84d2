"""Read several files as one: their bytes follow each other, with gaps between them."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images.engine import seams


class Joined:
    """Read ``parts``, by the ascending offsets of their first bytes; see ``formats.readers.RandomReader``.

    A read is within one part.
    """

    def __init__(self, parts: Mapping[int, readers.RandomReader]) -> None:
        self._parts = parts
        self._offsets = [*parts]

    def read_range(self, offset: int, into: memoryview, /) -> int:
        """Read within a part."""
        start = self._start(offset)
        return self._parts[start].read_range(offset - start, into)

    def _start(self, offset: int) -> int:
        return self._offsets[bisect.bisect_right(self._offsets, offset) - 1]


class JoinedSeams(Joined):
    """Read parts whose ranges are compared with each other; see ``seams.Compared``."""

    def __init__(self, parts: Mapping[int, seams.Seams]) -> None:
        super().__init__(parts)
        self._compared = parts
        #: That of the slowest server so far.
        self.pace = max((part.pace for part in parts.values()), key=lambda pace: pace.cost)

    def expect(self, offset: int, length: int, /) -> None:
        """Set the range of this thread's next request; see ``formats.readers.Continuing``."""
        start = self._start(offset)
        self._compared[start].expect(offset - start, length)

    def differing(self, at: int, /) -> errors.WrongRanges:
        """Return the error for two requests that disagree about the bytes from ``at``."""
        start = self._start(at)
        return self._compared[start].differing(at - start)
