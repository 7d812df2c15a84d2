"""The importer role: read the environment, run the import, report (contract, Importer)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdi_worker import errors, sources
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract, execute, metrics, plan, report
from cdi_worker.importer import request as request_module
from cdi_worker.importer.request import Request, Room
from cdi_worker.sources import base, fields

log = logging.getLogger(__name__)

VARIABLES = (
    contract.Variable("IMPORTER_SOURCE", "kind of source; it selects the role of importer"),
    contract.Variable("IMPORTER_ENDPOINT", "address of the disk; see the page of the source"),
    contract.HEADERS,
    contract.Variable(
        "IMPORTER_CERT_DIR",
        "directory with additional CA certificates (PEM; for registries only `*.crt` and `*.pem`)",
    ),
    contract.Variable(
        "IMPORTER_PROXY_CERT_DIR", "directory with CA certificates of a proxy, trusted likewise"
    ),
)


def read(env: Mapping[str, str], paths: contract.Paths) -> Request:
    """Return the request that the environment makes.

    Raises ``RequestError`` for a malformed environment, with all faults of the request too. One of a
    well-formed environment is left to ``execute.run``, which checks it.
    """
    reading = contract.Reading(env, VARIABLES)
    source = reading.text("IMPORTER_SOURCE")
    own = reading.fields(Request, fields.IMPORTER)
    is_archive = own.get("content_type") == "archive"
    is_block = Path(paths.block).exists()
    target = paths.block if is_block else paths.data if is_archive else f"{paths.data}/disk.img"
    settings = {
        **paths.settings,
        **own,
        "scratch": paths.scratch if Path(paths.scratch).is_dir() else None,
        "room": own.get("room", Room())._replace(mount=None if is_block else paths.data),
    }
    if is_archive and settings.get("existing") == "update":
        settings["existing"] = "remove"
    request = request_module.make(source, _location(sources.find(source), reading, paths), target, settings)
    if request.layers and request.stage.current:
        reading.faults.append(
            "CDI_WORKER_LAYER and IMPORTER_CURRENT_CHECKPOINT exclude each other: a stage in a pod reads "
            "the file of its checkpoint; import the files one after the other"
        )
    if reading.faults:
        request_module.check(request, reading.faults)
    return request


def run(env: Mapping[str, str], paths: contract.Paths, cancel: cancelling.Cancel) -> report.Report:
    """Run the import that the environment requests, and return the report."""
    request = read(env, paths)
    with metrics.expose("importer", request.room.owner, paths.metrics_port) as reporter:
        if request.compares:
            # Imported when used: few pods verify (start-up time).
            from cdi_worker.importer import verification

            found = verification.verify(request, reporter, cancel)
            if not found.is_equal:
                raise errors.Differs(path=found.target, url=found.source, reason=found.difference())
            return report.verified(found.compared)
        result = execute.run(request, reporter, cancel)
    return report.complete(
        blank=result.plan.route is plan.Route.BLANK,
        preallocated=result.preallocated,
        labels=result.labels,
        vddk_info=result.vddk_info,
    )


def _location(kind: sources.kind.Kind, reading: contract.Reading, paths: contract.Paths) -> base.Location:
    certificates: tuple[str, ...] = ()
    secret_headers: tuple[tuple[str, str], ...] = ()
    try:
        endings = kind.location_type.certificates
        certificates = contract.certificate_files(reading.text("IMPORTER_CERT_DIR"), endings)
        certificates += contract.certificate_files(reading.text("IMPORTER_PROXY_CERT_DIR"))
        secret_headers = contract.header_files(paths.extra_headers)
    except errors.RequestError as err:
        reading.faults += err.faults
    access = base.Access(
        headers=reading.headers() + secret_headers,
        ca_files=certificates,
        **reading.fields(base.Access, fields.IMPORTER),
        **paths.access,
    )

    def given(field: fields.Field) -> Any:
        return paths.mounted(field) if field.mount else reading.field(field)

    return kind.fill(reading.text("IMPORTER_ENDPOINT"), access, given).at_stage()
