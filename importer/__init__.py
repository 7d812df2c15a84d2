"""Bring a virtual machine's disk from wherever it is to where it will run.

>>> import importer
>>> request = importer.Request(
...     source="http", location=importer.Location("https://example.org/disk.qcow2"), target="disk.img"
... )
>>> importer.run(request)  # doctest: +SKIP

Everything public is here (docs/library.md). Names are looked up when used, so that the lower folders
may import ``importer.errors`` while this package is still being imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from images.fetch import Options as FetchOptions
    from importer.errors import Error
    from importer.execute import Inspection, Result, inspect, run
    from importer.plan import Plan, Route
    from importer.progress import NullProgress, Progress
    from importer.request import Request
    from sources.base import Access, Location, Source

_HOMES = {
    "Access": "sources.base",
    "Error": "importer.errors",
    "FetchOptions": "images.fetch",
    "Inspection": "importer.execute",
    "Location": "sources.base",
    "NullProgress": "importer.progress",
    "Plan": "importer.plan",
    "Progress": "importer.progress",
    "Request": "importer.request",
    "Result": "importer.execute",
    "Route": "importer.plan",
    "Source": "sources.base",
    "inspect": "importer.execute",
    "run": "importer.execute",
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
