"""Import a virtual machine's disk from a source to a file or block device, as a raw disk.

>>> import cdi_worker
>>> request = cdi_worker.Request(
...     source="http", location=cdi_worker.Location("https://example.org/disk.qcow2"), target="disk.img"
... )
>>> cdi_worker.run(request)  # doctest: +SKIP

The public API (docs/reference/library.md). Names are imported when used, so that the lower packages can
import ``errors`` while this package is still being imported.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from cdi_worker import lazy

if TYPE_CHECKING:
    from cdi_worker import errors
    from cdi_worker.errors import Error
    from cdi_worker.formats.bmap import Map
    from cdi_worker.images.engine.fetch import Options as FetchOptions
    from cdi_worker.importer.execute import run
    from cdi_worker.importer.inspection import Inspection, inspect
    from cdi_worker.importer.mapped import create as create_map
    from cdi_worker.importer.mapped import verify as verify_map
    from cdi_worker.importer.plan import Plan, Route
    from cdi_worker.importer.progress import Lines, Meter, NullProgress, Progress
    from cdi_worker.importer.request import Request
    from cdi_worker.importer.result import Result
    from cdi_worker.importer.sampling import Sample
    from cdi_worker.importer.settings import Room
    from cdi_worker.importer.verification import Difference, Verification, verify
    from cdi_worker.sources import register, unregister
    from cdi_worker.sources.base import (
        Access,
        Cancel,
        Extent,
        Facts,
        Location,
        Opening,
        RandomReader,
        Reader,
        Source,
        Wire,
    )
    from cdi_worker.sources.fields import field
    from cdi_worker.sources.kind import Kind
    from cdi_worker.version import VERSION as __version__  # noqa: N811 - the customary name

_PUBLIC: lazy.Table[str, Any] = lazy.Table(
    {
        "Access": "cdi_worker.sources.base:Access",
        "Error": "cdi_worker.errors:Error",
        "Facts": "cdi_worker.images.image:Facts",
        "FetchOptions": "cdi_worker.images.engine.fetch:Options",
        "Inspection": "cdi_worker.importer.inspection:Inspection",
        "Kind": "cdi_worker.sources.kind:Kind",
        "Lines": "cdi_worker.importer.progress:Lines",
        "Location": "cdi_worker.sources.base:Location",
        "Map": "cdi_worker.formats.bmap:Map",
        "Meter": "cdi_worker.importer.progress:Meter",
        "NullProgress": "cdi_worker.importer.progress:NullProgress",
        "Opening": "cdi_worker.sources.base:Opening",
        "Plan": "cdi_worker.importer.plan:Plan",
        "Progress": "cdi_worker.importer.progress:Progress",
        "Request": "cdi_worker.importer.request:Request",
        "Result": "cdi_worker.importer.result:Result",
        "Room": "cdi_worker.importer.settings:Room",
        "Route": "cdi_worker.importer.plan:Route",
        "Sample": "cdi_worker.importer.sampling:Sample",
        "Source": "cdi_worker.sources.base:Source",
        "Verification": "cdi_worker.importer.verification:Verification",
        "Wire": "cdi_worker.images.image:Wire",
        "field": "cdi_worker.sources.fields:field",
        "create_map": "cdi_worker.importer.mapped:create",
        "inspect": "cdi_worker.importer.inspection:inspect",
        "register": "cdi_worker.sources:register",
        "run": "cdi_worker.importer.execute:run",
        "unregister": "cdi_worker.sources:unregister",
        "verify_map": "cdi_worker.importer.mapped:verify",
        "verify": "cdi_worker.importer.verification:verify",
        "Cancel": "cdi_worker.sources.base:Cancel",
        "Difference": "cdi_worker.importer.verification:Difference",
        "Extent": "cdi_worker.sources.base:Extent",
        "RandomReader": "cdi_worker.sources.base:RandomReader",
        "Reader": "cdi_worker.sources.base:Reader",
        "__version__": "cdi_worker.version:VERSION",
        "errors": "cdi_worker.errors",
    }
)

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
    "Map",
    "Meter",
    "NullProgress",
    "Opening",
    "Plan",
    "Progress",
    "RandomReader",
    "Reader",
    "Request",
    "Result",
    "Room",
    "Route",
    "Sample",
    "Source",
    "Verification",
    "Wire",
    "__version__",
    "create_map",
    "errors",
    "field",
    "inspect",
    "register",
    "run",
    "unregister",
    "verify",
    "verify_map",
]


# A library prints nothing that its program has not asked for.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _PUBLIC[name]
