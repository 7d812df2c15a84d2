"""A disk on a misbehaving HTTP server, and the source that reads it."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.web import http, pinned
from tests.support import misbehave, reading

DATA = bytes(range(256)) * 4096
GOOD = misbehave.Page(DATA)


def changed(**faults: Any) -> misbehave.Page:
    """Return the good page with some fields replaced."""
    return dataclasses.replace(GOOD, **faults)


def refused(url: str, access: base.Access | None = None) -> None:
    """Open and close the source, for tests that expect an error."""
    with opened(url, access):
        pass


def source(
    url: str, access: base.Access | None = None, cancel: base.Cancel = cancelling.NEVER
) -> http.HttpSource:
    """Return the source of a URL."""
    return http.HttpSource(pinned.Resource(url, access or base.Access(), cancel=cancel))


def opened(
    url: str, access: base.Access | None = None, cancel: base.Cancel = cancelling.NEVER
) -> contextlib.AbstractContextManager[base.Image]:
    """Open the source of a URL; close it after the block."""
    return base.open_image(source(url, access, cancel))


def whole(image: base.Image, offset: int = 0) -> bytes:
    """Return the disk from ``offset`` to its end."""
    return reading.read_all(image.source.stream(offset))
