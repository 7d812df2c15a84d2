"""The importer role: read the environment, run the import, report (contract, Importer)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdi_worker import errors, sources
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract, execute, metrics, plan, progress, report
from cdi_worker.importer import request as request_module
from cdi_worker.importer.request import Request
from cdi_worker.importer.settings import Room
from cdi_worker.sources import base, fields

log = logging.getLogger(__name__)

VARIABLES = (
    contract.Variable("IMPORTER_SOURCE", "kind of source; it selects the role of importer"),
    contract.Variable("IMPORTER_ENDPOINT", "address of the disk; see the page of the source"),
    contract.Variable(
        "IMPORTER_CONTENTTYPE",
        "`kubevirt`: a disk; `archive`: a tar archive, unpacked into a file system",
        "kubevirt",
    ),
    contract.Variable(
        "IMPORTER_IMAGE_SIZE",
        "requested size as a Kubernetes quantity: `10Gi`, `500M`, `1e9`; otherwise the size of the image",
    ),
    contract.Variable(
        "IMPORTER_CHECKSUM",
        "`md5`, `sha1`, `sha256` or `sha512`, a colon, and the checksum of the bytes as served",
    ),
    contract.Variable(
        "CDI_WORKER_DISK",
        "disk of an OVA (file name, id or number) or OCI archive (name or title), if it has several",
    ),
    *contract.CREDENTIALS,
    contract.HEADERS,
    contract.Variable(
        "IMPORTER_CERT_DIR",
        "directory with additional CA certificates (PEM; for registries only `*.crt` and `*.pem`)",
    ),
    contract.Variable(
        "IMPORTER_PROXY_CERT_DIR", "directory with CA certificates of a proxy, trusted likewise"
    ),
    contract.Variable("INSECURE_TLS", "`true`: do not verify certificates", "false"),
    contract.Variable("CACHE_MODE", "`TRYNONE`: bypass the page cache (O_DIRECT)"),
    contract.OWNER,
    *contract.WRITING,
    *contract.PROXIES,
)


def read(env: Mapping[str, str], paths: contract.Paths) -> Request:
    """Return the request that the environment makes.

    Raises ``RequestError`` for a malformed environment, with all faults of the request too. One of a
    well-formed environment is left to ``execute.run``, which checks it.
    """
    reading = contract.Reading(env, VARIABLES)
    source = reading.text("IMPORTER_SOURCE")
    content_type = reading.text("IMPORTER_CONTENTTYPE")
    is_archive = content_type == "archive"
    is_block = Path(paths.block).exists()
    target = paths.block if is_block else paths.data if is_archive else f"{paths.data}/disk.img"
    settings = paths.settings._replace(
        content_type=content_type,
        scratch=paths.scratch if Path(paths.scratch).is_dir() else None,
        room=Room(
            size=reading.quantity("IMPORTER_IMAGE_SIZE"),
            overhead=reading.fraction("FILESYSTEM_OVERHEAD"),
            mount=None if is_block else paths.data,
            owner=reading.text("OWNER_UID"),
        ),
        preallocation=reading.boolean("PREALLOCATION"),
        direct=reading.text("CACHE_MODE") == "TRYNONE" or paths.settings.direct,
        checksum=reading.text("IMPORTER_CHECKSUM") or None,
        disk=reading.text("CDI_WORKER_DISK"),
        existing="remove" if is_archive else paths.settings.existing,
    )
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
    with metrics.exposed("importer", request.room.owner, paths.metrics_port) as reporter:
        if paths.settings.verify:
            return _verified(request, reporter, cancel)
        result = execute.run(request, reporter, cancel)
    return report.complete(
        blank=result.plan.route is plan.Route.BLANK,
        preallocated=result.preallocated,
        labels=result.labels,
        vddk_info=result.vddk_info,
    )


def _verified(request: Request, reporter: progress.Progress, cancel: cancelling.Cancel) -> report.Report:
    """Compare the disk on the volume. Raises ``errors.Differs``."""
    # Imported when used: few pods verify (start-up time).
    from cdi_worker.importer import verification

    found = verification.verify(request, reporter, cancel)
    if not found.is_equal:
        raise errors.Differs(path=found.target, url=found.source, reason=found.difference())
    return report.verified(found.compared)


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
    access = paths.settings.access(
        user=reading.text("IMPORTER_ACCESS_KEY_ID"),
        password=reading.text("IMPORTER_SECRET_KEY"),
        session_token=reading.text("IMPORTER_SESSION_TOKEN"),
        headers=reading.headers() + secret_headers,
        ca_files=certificates,
        insecure=reading.text("INSECURE_TLS") == "true",
        **reading.proxies(),
    )

    def given(field: fields.Field) -> Any:
        return paths.mounted(field) if field.mount else reading.field(field)

    return kind.fill(reading.text("IMPORTER_ENDPOINT"), access, given).at_stage()
