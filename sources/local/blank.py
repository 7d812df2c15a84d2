"""A blank disk."""

from __future__ import annotations

from cdi_worker.sources import base


class Blank(base.Source):
    """The source for ``IMPORTER_SOURCE=none``."""

    name = "blank"

    def __init__(self, _location: base.Location, _cancel: base.Cancel) -> None: ...

    def open(self, opening: base.Opening) -> base.Facts:
        return base.Facts(name=self.name, size=0, blank=True)
