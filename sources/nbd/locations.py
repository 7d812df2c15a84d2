"""The location of an NBD export (doc/uri.md of the NBD project)."""

from __future__ import annotations

import dataclasses
import os
import urllib.parse
from collections.abc import Iterator

from cdi_worker import errors
from cdi_worker.sources import fields, staged

#: The port that IANA assigned to NBD.
PORT = 10809
#: The longest name of an export or a bitmap, in bytes (doc/proto.md, Values).
LONGEST_NAME = 4096


@dataclasses.dataclass(frozen=True)
class Address:
    """An NBD address. ``socket``: path of a unix socket, empty for a ``host``."""

    host: str = ""
    port: int = PORT
    socket: str = ""
    export: str = ""
    tls: bool = False

    @property
    def server(self) -> tuple[str, int]:
        """What is the same for two addresses of one server, with and without TLS."""
        return (os.path.realpath(self.socket), 0) if self.socket else (self.host, self.port)

    @property
    def name(self) -> str:
        """The address as a URL, for messages. It contains no secret."""
        export = urllib.parse.quote(self.export)
        if self.socket:
            return f"nbd+unix:///{export}?socket={urllib.parse.quote(self.socket)}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == PORT else f":{self.port}"
        return f"nbd{'s' if self.tls else ''}://{host}{port}/{export}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nbd(staged.Staged):
    """The URL of an export.

    The previous checkpoint of a delta is a dirty bitmap of QEMU, or ``bitmap`` names it. ``certificate`` and
    ``key``: PEM files of the client.
    """

    bitmap: str = fields.field(
        env="IMPORTER_BITMAP",
        option="--bitmap",
        help="Dirty bitmap with the changes since the previous checkpoint; default: the checkpoint's name.",
    )
    certificate: str = fields.field(
        option="--cert",
        help="Client certificate (PEM).",
        mount="/nbd-client/tls.crt",
        file=True,
        selects=False,
    )
    key: str = fields.field(
        option="--key",
        help="Key of the client certificate (PEM), if it is not in the file of --cert.",
        mount="/nbd-client/tls.key",
        file=True,
        selects=False,
    )

    @property
    def changes(self) -> str:
        """The name of the bitmap with the changes; empty for a full copy."""
        return (self.bitmap or self.previous) if self.previous else ""

    def faults(self) -> Iterator[str]:
        yield from staged.Staged.faults(self)
        if self.bitmap and not self.previous:
            yield fields.fault(self, "a dirty bitmap without a previous checkpoint; use {}", "previous")
        if len(f"qemu:dirty-bitmap:{self.changes}".encode()) > LONGEST_NAME:
            yield f"the name of the dirty bitmap has more than {LONGEST_NAME} bytes"
        if self.key and not self.certificate:
            yield "a key without a client certificate"
        if not self.endpoint:
            return
        try:
            found = parse(self.endpoint)
        except errors.RequestError as err:
            yield from err.faults
            return
        if self.certificate and not found.tls:
            yield f"{found.name}: a client certificate is only sent over TLS; use nbds://"

    def reads(self, path: str) -> bool:
        try:
            ours, other = parse(self.endpoint), parse(path)
        except errors.RequestError:
            return False
        return ours.export == other.export and ours.server == other.server


def parse(url: str) -> Address:
    """Return the address of ``nbd://``, ``nbds://`` or ``nbd+unix://``. Raises ``errors.RequestError``."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = PORT if parts.port is None else parts.port
        query = urllib.parse.parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        export = urllib.parse.unquote(parts.path.removeprefix("/"), errors="strict")
    except ValueError as err:
        raise errors.RequestError("malformed NBD address; expected nbd://host[:port]/export") from err
    if parts.scheme not in {"nbd", "nbds", "nbd+unix"}:
        raise errors.RequestError("an NBD address begins with nbd://, nbds:// or nbd+unix://")
    if "@" in parts.netloc:
        raise errors.RequestError(
            "an NBD address must not have a user name; clients are known by certificates"
        )
    if "\0" in export or len(export.encode()) > LONGEST_NAME:
        raise errors.RequestError(f"the name of an NBD export has at most {LONGEST_NAME} bytes, and no NUL")
    known = {"socket"} if parts.scheme == "nbd+unix" else set()
    if unknown := sorted(set(query) - known):
        raise errors.RequestError(f"unsupported part of an NBD address: {', '.join(unknown)}")
    if parts.scheme == "nbd+unix":
        sockets = query.get("socket", [])
        if parts.netloc or len(sockets) != 1 or not sockets[0] or "\0" in sockets[0]:
            raise errors.RequestError("the address of a unix socket is nbd+unix:///EXPORT?socket=PATH")
        return Address(socket=sockets[0], export=export)
    if not parts.hostname:
        raise errors.RequestError(f"an NBD address needs a host: {parts.scheme}://HOST/EXPORT")
    return Address(parts.hostname, port, export=export, tls=parts.scheme == "nbds")
