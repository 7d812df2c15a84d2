"""A blank disk."""

from __future__ import annotations

from cdi_worker.sources import base


def source(_location: base.Location, _cancel: base.Cancel) -> base.Source:
    """Return the source for ``IMPORTER_SOURCE=none``."""
    blank = base.Source()
    blank.name = "blank"
    blank.blank = True
    blank.size = 0
    return blank
