"""Import a virtual machine's disk from a source to a file or block device, as a raw disk.

>>> import cdi_worker
>>> location = cdi_worker.Location("https://example.org/disk.qcow2")
>>> request = cdi_worker.Request(location=location, target="disk.img")
>>> cdi_worker.run(request)  # doctest: +SKIP

The public API (docs/reference/library.md). Each name is imported when it is first used (PEP 562): the command
line needs few of them, and every module imports this package first.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdi_worker import errors
    from cdi_worker.errors import Error
    from cdi_worker.images.engine.fetch import FetchOptions
    from cdi_worker.importer.execute import run
    from cdi_worker.importer.inspection import Inspection, inspect
    from cdi_worker.importer.plan import Plan, Route
    from cdi_worker.importer.progress import Lines, Meter, NullProgress, Progress
    from cdi_worker.importer.request import Request, Room
    from cdi_worker.importer.result import Result
    from cdi_worker.importer.verification import Difference, Verification, verify
    from cdi_worker.sources import register, unregister
    from cdi_worker.sources.base import (
        Access,
        Cancel,
        Extent,
        Facts,
        Location,
        Opening,
        Provenance,
        RandomReader,
        Reader,
        Source,
        Wire,
    )
    from cdi_worker.sources.fields import field
    from cdi_worker.sources.kind import Kind
    from cdi_worker.version import VERSION as __version__  # noqa: N811 - the customary name

#: The module of each name; empty for a module itself.
_PUBLIC = {
    name: module
    for module, names in {
        "images.engine.fetch": "FetchOptions",
        "images.image": "Facts Provenance Wire",
        "importer.execute": "run",
        "importer.inspection": "Inspection inspect",
        "importer.plan": "Plan Route",
        "importer.progress": "Lines Meter NullProgress Progress",
        "importer.request": "Request Room",
        "importer.result": "Result",
        "importer.verification": "Difference Verification verify",
        "errors": "Error",
        "sources": "register unregister",
        "sources.base": "Access Cancel Extent Location Opening RandomReader Reader Source",
        "sources.fields": "field",
        "sources.kind": "Kind",
        "version": "__version__",
        "": "errors",
    }.items()
    for name in names.split()
}

__all__ = [
    "Access",
    "Cancel",
    "Difference",
    "Error",
    "Extent",
    "Facts",
    "FetchOptions",
    "Inspection",
    "Kind",
    "Lines",
    "Location",
    "Meter",
    "NullProgress",
    "Opening",
    "Plan",
    "Progress",
    "Provenance",
    "RandomReader",
    "Reader",
    "Request",
    "Result",
    "Room",
    "Route",
    "Source",
    "Verification",
    "Wire",
    "__version__",
    "errors",
    "field",
    "inspect",
    "register",
    "run",
    "unregister",
    "verify",
]


# A library prints nothing that its program has not asked for.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not (module := _PUBLIC[name]):
        return importlib.import_module(f"{__name__}.{name}")
    loaded = importlib.import_module(f"{__name__}.{module}")
    return loaded.VERSION if name == "__version__" else getattr(loaded, name)
