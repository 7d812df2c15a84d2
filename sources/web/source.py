"""The source of ``IMPORTER_SOURCE=http``."""

from __future__ import annotations

from cdi_worker.sources import base
from cdi_worker.sources.web import http, locations, nodepull, pinned


def source(location: locations.Http, cancel: base.Cancel) -> base.Source:
    """Return the source for ``IMPORTER_SOURCE=http``: a web server, or node pull."""
    if location.pull_method == "node":
        return nodepull.NodePullSource(location, cancel)
    return http.HttpSource(pinned.Resource(location.endpoint, location.access, cancel=cancel))
