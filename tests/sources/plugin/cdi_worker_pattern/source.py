"""The source of a pattern disk."""

from __future__ import annotations

import cdi_worker
from cdi_worker_pattern import location


class PatternSource(cdi_worker.Source):
    """A raw disk that can be read anywhere."""

    def __init__(self, where: location.Pattern) -> None:
        self.name = where.endpoint
        self._where = where
        self._byte = where.byte.to_bytes()

    def open(self, opening: cdi_worker.Opening) -> cdi_worker.Facts:
        return cdi_worker.Facts(
            name=self.name,
            size=int(self._where.size),
            identity=f"{self.name} {self._where.byte}",
            format="raw",
        )

    def read_range(self, offset: int, into: memoryview, /) -> int:
        into[:] = self._byte * len(into)
        return len(into)


def open(where: location.Pattern, _cancel: cdi_worker.Cancel) -> PatternSource:  # noqa: A001  (the name that a kind has)
    """Return the source of a location."""
    return PatternSource(where)


class BrokenSource(PatternSource):
    """A source whose author did not expect what happens while it is read."""

    def read_range(self, offset: int, into: memoryview, /) -> int:
        raise KeyError(f"page {offset}")


def broken(where: cdi_worker.Location, _cancel: cdi_worker.Cancel) -> BrokenSource:
    """Return a source that fails while it is read, or at once if the address says so."""
    if where.endpoint == "pattern:0":
        raise ZeroDivisionError("pattern of no bytes")
    return BrokenSource(location.Pattern(where.endpoint, where.access))


def zeros(where: cdi_worker.Location, _cancel: cdi_worker.Cancel) -> PatternSource:
    """Return a source by its address only: the target of an entry point without a ``Kind``."""
    return PatternSource(location.Pattern(where.endpoint, where.access))
