"""Where bytes come from: each module knows one protocol and no disk."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from cdi_worker import errors
from cdi_worker.sources import base

#: What the contract calls a source, and the module that knows it.
MODULES = {
    "gcs": "cdi_worker.sources.objects.gcs",
    "http": "cdi_worker.sources.web",
    "imageio": "cdi_worker.sources.ovirt.source",
    "local": "cdi_worker.sources.local",
    "none": "cdi_worker.sources.blank",
    "s3": "cdi_worker.sources.objects.s3",
    "registry": "cdi_worker.sources.registry.source",
    "vddk": "cdi_worker.sources.vmware.source",
    "volume": "cdi_worker.sources.volume",
}
ENTRY_POINTS = "cdi_worker.sources"


#: Makes a source of a location. The source stops waiting when the second argument says so.
Factory = Callable[[base.Location, base.Cancel], base.Source]


def find(kind: str) -> Factory:
    """Return the factory of a source, ours or a third party's.

    Modules are imported when used: start-up is part of every import. Third parties register a
    callable ``(Location, Cancel) -> Source`` in the entry-point group ``sources``.
    """
    if kind in MODULES:
        factory: Factory = importlib.import_module(MODULES[kind]).source
        return factory
    from importlib import metadata

    for point in metadata.entry_points(group=ENTRY_POINTS, name=kind):
        found: Factory = point.load()
        return found
    raise errors.RequestError(f"unknown source {kind!r}: one of {', '.join(sorted(MODULES))}")
