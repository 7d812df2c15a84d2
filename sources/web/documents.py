"""Small documents on a web server."""

from __future__ import annotations

from cdi_worker.sources import base
from cdi_worker.sources.web import pinned, session


def read(url: str, access: base.Access, limit: int, cancel: base.Cancel) -> bytes:
    """Return the body at ``url``; of a longer one the first ``limit`` + 1 bytes."""
    resource = pinned.Resource(url, access, cancel=cancel)
    try:
        response = resource.get(None)
        if response.status_code != 200:
            raise resource.failure(response)
        with session.translated(resource.name, first=False):
            return session.body(response, limit)
    finally:
        resource.close()
