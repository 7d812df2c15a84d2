"""A blank disk."""

from __future__ import annotations

from collections.abc import Iterator

from cdi_worker.sources import base


class Nowhere(base.Location):
    """The location of a blank disk. It has no endpoint."""

    __slots__ = ()

    def faults(self) -> Iterator[str]:
        return iter(())


class Blank(base.Source):
    """The source for ``IMPORTER_SOURCE=none``."""

    name = "blank"

    def __init__(self, _location: base.Location, _cancel: base.Cancel) -> None: ...

    def open(self, opening: base.Opening) -> base.Facts:
        return base.Facts(name=self.name, size=0, blank=True)
