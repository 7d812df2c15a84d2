"""The settings of an upload server, read from its environment (contract, Upload server)."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import pathlib
from collections.abc import Mapping

from cdi_worker import errors
from cdi_worker.images import targets
from cdi_worker.importer import contract
from cdi_worker.importer import request as request_module
from cdi_worker.importer.request import Request, Room
from cdi_worker.importer.upload import tls as upload_tls
from cdi_worker.sources import base, fields

VARIABLES = (
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


@dataclasses.dataclass(frozen=True)
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
    usual = paths.block if pathlib.Path(paths.block).exists() else f"{paths.data}/disk.img"
    target = reading.text("DESTINATION") or usual
    if target == targets.STDOUT:
        # A disk in the log of a pod would be a success that fills no volume.
        faults.append("DESTINATION='-' is not a file or a device")
    own = reading.fields(Request, fields.UPLOAD_SERVER)
    mount = paths.data if target == f"{paths.data}/disk.img" else None
    import_settings = {
        **paths.settings,
        **own,
        "layers": (),
        "scratch": paths.scratch if pathlib.Path(paths.scratch).is_dir() else None,
        "room": own.get("room", Room())._replace(mount=mount),
        "existing": "remove",
    }
    port = reading.text("LISTEN_PORT")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        faults.append(f"LISTEN_PORT={port!r} is not a port number (0 to 65535)")
        port = "0"
    deadline, text = None, reading.text("DEADLINE")
    with contextlib.suppress(ValueError):
        deadline = dt.datetime.fromisoformat(text)
    if text and (deadline is None or deadline.tzinfo is None):
        faults.append(f"DEADLINE={text!r} is not an RFC 3339 time such as 2026-11-20T10:00:00Z")
    location = base.Location("upload", base.Access(**paths.access))
    settings = Settings(
        host=reading.text("LISTEN_ADDRESS"),
        port=int(port),
        tls=tls,
        client_name=reading.text("CLIENT_NAME"),
        deadline=deadline,
        request=request_module.make("upload", location, target, import_settings),
    )
    if faults:
        raise errors.RequestError(*faults)
    # Each upload would be refused; this pod says so before one begins.
    reason = f"an upload has none, and one is demanded; {base.UNVERIFIABLE}"
    paths.refuse_demand("upload server", reason)
    return settings
