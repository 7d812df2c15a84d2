"""The role of the importer, from what its environment says to its report."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from cdi_worker import contract, errors, execute, metrics, progress, report, request
from cdi_worker.images.engine import retry
from cdi_worker.sources import base

#: A registry's folder of certificates may hold other files (containers-certs.d(5)).
REGISTRY_CERTIFICATES = (".crt", ".pem")


def read(env: Mapping[str, str], paths: contract.Paths) -> request.Request:
    """Return the request that the environment makes; raises ``RequestError`` with all its faults."""
    reading = contract.Reading(env)
    source = env.get("IMPORTER_SOURCE", "")
    content_type = env.get("IMPORTER_CONTENTTYPE") or "kubevirt"
    is_block = Path(paths.block).exists()
    target = (
        paths.block if is_block else paths.data if content_type == "archive" else f"{paths.data}/disk.img"
    )
    made = request.Request(
        source=source,
        location=_location(reading, paths),
        target=target,
        volume=None if is_block else paths.data,
        content_type=content_type,
        scratch=paths.scratch if Path(paths.scratch).is_dir() else None,
        image_size=reading.quantity("IMPORTER_IMAGE_SIZE"),
        overhead=reading.fraction("FILESYSTEM_OVERHEAD"),
        preallocation=reading.boolean("PREALLOCATION"),
        direct=env.get("CACHE_MODE") == "TRYNONE",
        checksum=env.get("IMPORTER_CHECKSUM") or None,
        owner_uid=env.get("OWNER_UID", ""),
    )
    request.check(made, reading.faults)
    return made


def play(env: Mapping[str, str], paths: contract.Paths, cancel: retry.Cancel) -> report.Report:
    """Import what the environment asks for, and return the report."""
    wanted = read(env, paths)
    with metrics.exposed("importer", wanted.owner_uid, paths.metrics_port) as told:
        result = execute.run(wanted, progress.Several(progress.Lines(sys.stderr), told), cancel)
    return report.complete(
        blank=wanted.source == "none",
        preallocated=result.preallocated,
        labels=result.labels,
        vddk_info=result.vddk_info,
    )


def _location(reading: contract.Reading, paths: contract.Paths) -> base.Location:
    env = reading.env
    certificates: tuple[str, ...] = ()
    secret_headers: tuple[tuple[str, str], ...] = ()
    try:
        endings = REGISTRY_CERTIFICATES if env.get("IMPORTER_SOURCE") == "registry" else ("",)
        certificates = contract.certificate_files(env.get("IMPORTER_CERT_DIR", ""), endings)
        certificates += contract.certificate_files(env.get("IMPORTER_PROXY_CERT_DIR", ""))
        secret_headers = contract.header_files(paths.extra_headers)
    except errors.RequestError as err:
        reading.faults += err.faults
    access = base.Access(
        user=env.get("IMPORTER_ACCESS_KEY_ID", ""),
        password=env.get("IMPORTER_SECRET_KEY", ""),
        session_token=env.get("IMPORTER_SESSION_TOKEN", ""),
        headers=reading.headers() + secret_headers,
        ca_files=certificates,
        insecure=env.get("INSECURE_TLS") == "true",
        http_proxy=reading.either_case("http_proxy"),
        https_proxy=reading.either_case("https_proxy"),
        no_proxy=reading.either_case("no_proxy"),
    )
    return base.Location(
        endpoint=contract.endpoint(env.get("IMPORTER_ENDPOINT", ""), env),
        access=access,
        architecture=env.get("IMPORTER_REGISTRY_IMAGE_ARCHITECTURE", ""),
        credentials_file=env.get("GOOGLE_APPLICATION_CREDENTIALS", ""),
        disk_id=env.get("IMPORTER_DISK_ID", ""),
        uuid=env.get("IMPORTER_UUID", ""),
        backing_file=env.get("IMPORTER_BACKING_FILE", ""),
        thumbprint=env.get("IMPORTER_THUMBPRINT", ""),
        previous=env.get("IMPORTER_PREVIOUS_CHECKPOINT", ""),
        current=env.get("IMPORTER_CURRENT_CHECKPOINT", ""),
        final=env.get("IMPORTER_FINAL_CHECKPOINT") == "true",
        vddk_libdir=paths.vddk_libdir,
        vddk_config=paths.vddk_config if Path(paths.vddk_config).is_file() else "",
        **_node_pull(reading),
    )


def _node_pull(reading: contract.Reading) -> dict[str, str]:
    """Return the hand-shake files of a node pull; none for the usual pull by the pod."""
    env = reading.env
    method = env.get("IMPORTER_PULL_METHOD") or "pod"
    if method not in {"pod", "node"}:
        reading.faults.append(f"IMPORTER_PULL_METHOD={method!r} is neither pod nor node")
    if method != "node":
        return {}
    names = {"ready_file": "IMPORTER_READY_FILE", "done_file": "IMPORTER_DONE_FILE"}
    reading.faults += [f"{name} is needed for a node pull" for name in names.values() if not env.get(name)]
    return {field: env.get(name, "") for field, name in names.items()}
