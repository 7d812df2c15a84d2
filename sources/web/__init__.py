"""The source of ``IMPORTER_SOURCE=http``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cdi_worker.sources import base


def source(location: base.Location, cancel: base.Cancel) -> base.Source:
    """Return the source of a URL, or of the disk that the node pulls where the location says so."""
    if location.ready_file:
        from cdi_worker.sources.web import nodepull

        return nodepull.NodePullSource(location, cancel)
    from cdi_worker.sources.web import http

    return http.HttpSource(location.endpoint, location.access)
