"""A disk on an HTTP server of any faults, and the source that reads it."""

from __future__ import annotations

import dataclasses
from typing import Any

from cdi_worker.sources import base
from cdi_worker.sources.web import http
from tests.support import misbehave, reading

DATA = bytes(range(256)) * 4096
GOOD = misbehave.Page(DATA)


def changed(**faults: Any) -> misbehave.Page:
    return dataclasses.replace(GOOD, **faults)


def refused(url: str, access: base.Access | None = None) -> None:
    with opened(url, access):
        pass


def opened(url: str, access: base.Access | None = None) -> http.HttpSource:
    return http.HttpSource(url, access or base.Access())


def whole(source: base.Source, offset: int = 0) -> bytes:
    return reading.drained(source.stream(offset))
