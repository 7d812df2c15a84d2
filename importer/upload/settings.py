"""The settings of an upload server, read from its environment (contract, Upload server)."""

from __future__ import annotations

import dataclasses
import datetime as dt
import pathlib
from collections.abc import Mapping

from cdi_worker import errors
from cdi_worker.images import targets
from cdi_worker.importer import contract, execute
from cdi_worker.importer import request as request_module
from cdi_worker.importer.progress import NullProgress
from cdi_worker.importer.request import Request
from cdi_worker.importer.settings import Room
from cdi_worker.importer.upload import tls as upload_tls
from cdi_worker.sources import base

VARIABLES = (
    contract.Variable("UPLOAD_IMAGE_SIZE", "requested size, as `IMPORTER_IMAGE_SIZE`"),
    *contract.WRITING,
    contract.Variable(
        "DESTINATION",
        "file or device to write; otherwise `/dev/cdi-block-volume` if it exists, else `/data/disk.img`",
    ),
    contract.Variable("LISTEN_ADDRESS", "address to listen on; `0.0.0.0`: all, also of IPv6", "0.0.0.0"),
    contract.Variable("LISTEN_PORT", "port to listen on", "8443"),
    contract.Variable(
        "TLS_CERT_FILE", "certificate of the server (PEM); it selects this role", required=True
    ),
    contract.Variable("TLS_KEY_FILE", "key of the server (PEM)", required=True),
    contract.Variable("TLS_MIN_VERSION", "`VersionTLS10` to `VersionTLS13`", "VersionTLS12"),
    contract.Variable("TLS_CIPHERS", "OpenSSL or Go names, separated by commas; not for TLS 1.3"),
    contract.Variable("CLIENT_CERT_FILE", "CA that signs the certificates of clients (PEM)", required=True),
    contract.Variable(
        "CLIENT_NAME", "common name that clients must have; it selects this role", required=True
    ),
    contract.Variable(
        "DEADLINE",
        "time (RFC 3339) after which a server without an upload exits; otherwise it waits for ever",
    ),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an upload server.

    ``request``: the one that each upload completes with its own headers. ``deadline``: None waits forever.
    ``idle``: seconds that a connection may be idle, or take to send the headers of a request.
    """

    host: str
    port: int
    tls: upload_tls.Server
    client_name: str
    request: Request
    deadline: dt.datetime | None = None
    idle: float = 30.0


def read(env: Mapping[str, str], paths: contract.Paths) -> Settings:
    """Return the settings. Raises ``RequestError`` that lists all faults of the environment."""
    reading = contract.Reading(env, VARIABLES)
    faults = reading.faults
    tls = upload_tls.Server(
        certificate=reading.text("TLS_CERT_FILE"),
        key=reading.text("TLS_KEY_FILE"),
        client_authority=reading.text("CLIENT_CERT_FILE"),
        ciphers=reading.text("TLS_CIPHERS"),
        minimum=reading.text("TLS_MIN_VERSION"),
    )
    target = _target(reading.text("DESTINATION"), paths)
    if target == targets.STDOUT:
        # A disk in the log of a pod would be a success that fills no volume.
        faults.append("DESTINATION='-' is not a file or a device")
    import_settings = paths.settings._replace(
        layers=(),
        scratch=paths.scratch if pathlib.Path(paths.scratch).is_dir() else None,
        room=Room(
            size=reading.quantity("UPLOAD_IMAGE_SIZE"),
            overhead=reading.fraction("FILESYSTEM_OVERHEAD"),
            mount=paths.data if target == f"{paths.data}/disk.img" else None,
        ),
        preallocation=reading.boolean("PREALLOCATION"),
        existing="remove",
    )
    settings = Settings(
        host=reading.text("LISTEN_ADDRESS"),
        port=_port(reading.text("LISTEN_PORT"), faults),
        tls=tls,
        client_name=reading.text("CLIENT_NAME"),
        deadline=_deadline(reading.text("DEADLINE"), faults),
        request=request_module.make("upload", base.Location("upload"), target, import_settings),
    )
    if faults:
        raise errors.RequestError(*faults)
    # Each upload would be refused; this pod says so before one begins.
    reason = f"an upload has none, and one is demanded; {base.UNVERIFIABLE}"
    paths.settings.refuse_demand("upload server", reason)
    execute.audited(settings.request, NullProgress())
    return settings


def _target(named: str, paths: contract.Paths) -> str:
    is_block = pathlib.Path(paths.block).exists()
    return named or (paths.block if is_block else f"{paths.data}/disk.img")


def _port(text: str, faults: list[str]) -> int:
    if text.isascii() and text.isdigit() and int(text) < 1 << 16:
        return int(text)
    faults.append(f"LISTEN_PORT={text!r} is not a port number (0 to 65535)")
    return 0


def _deadline(text: str, faults: list[str]) -> dt.datetime | None:
    if not text:
        return None
    try:
        deadline = dt.datetime.fromisoformat(text)
    except ValueError:
        deadline = None
    if deadline is None or deadline.tzinfo is None:
        faults.append(f"DEADLINE={text!r} is not an RFC 3339 time such as 2026-11-20T10:00:00Z")
        return None
    return deadline
