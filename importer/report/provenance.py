"""The provenance of a disk: a statement for auditors of what was asked, and of what was found and written.

in-toto Statement v1 (https://in-toto.io/Statement/v1) with SLSA Provenance v1 (https://slsa.dev/provenance/v1):
an import is the build of a disk from a source. It is not signed here. Fields that are not part of the
specification have the prefix that it demands of extensions.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from cdi_worker import masking, version
from cdi_worker.importer import plan
from cdi_worker.importer.report import file
from cdi_worker.importer.request import Request
from cdi_worker.importer.result import Result
from cdi_worker.sources import wire

STATEMENT: Final = "https://in-toto.io/Statement/v1"
PREDICATE: Final = "https://slsa.dev/provenance/v1"
#: What ``externalParameters`` mean; it changes with them.
BUILD_TYPE: Final = "urn:cdi-worker:import:v1"
BUILDER: Final = "urn:cdi-worker"
#: The source whose bytes a client sends, the source of a clone too: they have no address.
UPLOAD: Final = "upload"


class Report:
    """The report of one import, written when the disk is complete; a failed import leaves its file as it is.

    Raises ``errors.RequestError`` if the file cannot be written, before anything is imported.
    """

    def __init__(self, path: str, request: Request) -> None:
        self._request = request
        self._started = _now()
        self._file = file.File(path, "--report", request.target)

    def write(self, results: Sequence[Result]) -> None:
        """Write the report of finished imports. Raises ``errors.TargetError``; the disks stay."""
        text = json.dumps(masking.masked(statement(self._request, results, self._started)), indent=2) + "\n"
        self._file.write(text.encode(), "the disk is complete, its report is not")


def statement(request: Request, results: Sequence[Result], started: str = "") -> dict[str, Any]:
    """Return the statement about finished imports of one request. ``started``: when, as RFC 3339 has it.

    Its subject is empty if the SHA-256 of the disk is not known: then it is not to be signed.
    """
    metadata = {"startedOn": started} if started else {}
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": each.target, "digest": {"sha256": each.sha256}} for each in results if each.sha256
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": _asked(request),
                "internalParameters": {},
                "resolvedDependencies": _dependencies(request, results),
            },
            "runDetails": {
                "builder": {"id": BUILDER, "version": {version.NAME: version.VERSION}},
                "metadata": {**metadata, "finishedOn": _now()},
                "cdiWorker_disks": [_disk(each) for each in results],
            },
        },
    }


def _asked(request: Request) -> dict[str, object]:
    """Return what was asked, without what only the server of the source may see."""
    fields = {
        "source": request.source,
        "address": "" if request.source == UPLOAD else _safe(request.location.endpoint),
        "layers": [_safe(each.endpoint) for each in request.layers],
        "target": request.target,
        "format": request.format,
        "compress": request.compress or None,
        "backing": request.backing,
        "contentType": request.content_type,
        "size": request.size,
        "checksum": request.checksum,
        "disk": request.disk,
        "existing": request.existing,
        "preallocation": request.preallocation,
        "insecure": request.location.access.insecure,
        "stage": request.stage._asdict() if request.stage.current else None,
        "demand": {name: value for name, value in _demanded(request) if value},
    }
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}


def _demanded(request: Request) -> Iterator[tuple[str, object]]:
    for name, value in request.demand._asdict().items():
        yield name, _safe(value) if isinstance(value, str) else value


def _safe(address: str) -> str:
    """Return an address without secrets; a path is one already."""
    return wire.safe_url(address) if "://" in address else address


def _dependencies(request: Request, results: Sequence[Result]) -> list[dict[str, object]]:
    """Return the sources, with the digests that their bytes were verified against."""
    found: list[dict[str, object]] = []
    for each in results:
        origin = f"{BUILDER}:{UPLOAD}" if request.source == UPLOAD else each.origin
        if each.plan.route is plan.Route.BLANK:
            # Made of nothing.
            continue
        for name, digest in each.verified.items():
            digests = dict(one.split(":") for one in digest.split(","))
            uri = _safe(request.demand.map or "") if name == "map" else origin
            found.append({"name": name, "uri": uri, "digest": digests})
        if not each.verified and origin:
            found.append({"name": "file", "uri": origin})
        found += [{"name": "layer", "uri": name} for name, _ in each.layers if name != each.origin]
    # The disks of one package share it.
    return [each for number, each in enumerate(found) if each not in found[:number]]


def _disk(done: Result) -> Mapping[str, object]:
    return {
        **done.as_fields(),
        "sha256": done.sha256 or None,
        "served": {"identity": done.identity, "size": done.served, "verified": dict(done.verified)},
        "signatures": [dataclasses.asdict(each) for each in done.signatures],
    }


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
