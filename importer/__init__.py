"""Bring a virtual machine's disk from wherever it is to where it will run.

>>> import cdi_worker
>>> request = cdi_worker.Request(
...     source="http", location=cdi_worker.Location("https://example.org/disk.qcow2"), target="disk.img"
... )
>>> cdi_worker.run(request)  # doctest: +SKIP

Everything public is here (docs/library.md). Names are looked up when used, so that the lower folders
may import ``errors`` while this package is still being imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdi_worker.errors import Error
    from cdi_worker.execute import Inspection, Result, inspect, run
    from cdi_worker.images.engine.fetch import Options as FetchOptions
    from cdi_worker.plan import Plan, Route
    from cdi_worker.progress import NullProgress, Progress
    from cdi_worker.request import Request
    from cdi_worker.sources.base import Access, Location, Source

_HOMES = {
    "Access": "cdi_worker.sources.base",
    "Error": "cdi_worker.errors",
    "FetchOptions": "cdi_worker.images.engine.fetch",
    "Inspection": "cdi_worker.execute",
    "Location": "cdi_worker.sources.base",
    "NullProgress": "cdi_worker.progress",
    "Plan": "cdi_worker.plan",
    "Progress": "cdi_worker.progress",
    "Request": "cdi_worker.request",
    "Result": "cdi_worker.execute",
    "Route": "cdi_worker.plan",
    "Source": "cdi_worker.sources.base",
    "inspect": "cdi_worker.execute",
    "run": "cdi_worker.execute",
}

__all__ = [
    "Access",
    "Error",
    "FetchOptions",
    "Inspection",
    "Location",
    "NullProgress",
    "Plan",
    "Progress",
    "Request",
    "Result",
    "Route",
    "Source",
    "inspect",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "FetchOptions":
        return importlib.import_module(_HOMES[name]).Options
    return getattr(importlib.import_module(_HOMES[name]), name)
