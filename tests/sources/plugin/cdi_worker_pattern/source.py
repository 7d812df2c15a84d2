"""The source of a pattern disk."""

from __future__ import annotations

import cdi_worker
from cdi_worker_pattern import location


class PatternSource(cdi_worker.Source):
    """A raw disk that can be read anywhere."""

    format = "raw"

    def __init__(self, where: location.Pattern) -> None:
        self.name = where.endpoint
        self.size = int(where.size)
        self.identity = f"{where.endpoint} {where.byte}"
        self._byte = where.byte.to_bytes()

    def ranges(self) -> cdi_worker.RandomReader:
        return self

    def read_range(self, offset: int, into: memoryview, /) -> int:
        into[:] = self._byte * len(into)
        return len(into)


def open(where: location.Pattern, _cancel: cdi_worker.Cancel) -> PatternSource:  # noqa: A001  (the name that a kind has)
    """Return the source of a location."""
    return PatternSource(where)


def zeros(where: cdi_worker.Location, _cancel: cdi_worker.Cancel) -> PatternSource:
    """Return a source by its address only: the target of an entry point without a ``Kind``."""
    return PatternSource(location.Pattern(where.endpoint, where.access))
