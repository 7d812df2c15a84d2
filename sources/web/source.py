"""The source of ``IMPORTER_SOURCE=http``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cdi_worker.sources import base
    from cdi_worker.sources.web import locations


def source(location: locations.Http, cancel: base.Cancel) -> base.Source:
    """Return the source for ``IMPORTER_SOURCE=http``: a web server, or node pull."""
    if location.pull_method == "node":
        from cdi_worker.sources.web import nodepull

        return nodepull.NodePullSource(location, cancel)
    from cdi_worker.sources.web import http, pinned

    return http.HttpSource(pinned.Resource(location.endpoint, location.access, cancel=cancel))


def digest(location: locations.Http, cancel: base.Cancel) -> str:
    """Return the strong ETag of a disk, or its version."""
    return source(location, cancel).watch()
