"""Options of the sub-commands, and the request that they make."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

from cdi_worker import contract, errors, request, sources, units
from cdi_worker.commands import late
from cdi_worker.images.engine import fetch
from cdi_worker.sources import base, fields

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


SIZE = late.typed("size", units.parse_quantity)
FRACTION = late.typed("fraction", contract.parse_overhead)
HEADER = late.typed("header", contract.parse_header)


def stall_option(what: str) -> Decorator:
    """Return the option that says for how long to wait for ``what``."""
    return click.option(
        "--stall-timeout",
        "stall",
        type=click.FloatRange(min=1),
        default=180.0,
        show_default=True,
        help=f"Give up after so many seconds without {what}.",
    )


_SOURCE: tuple[Decorator, ...] = (
    click.option(
        "--source", "kind", help="Kind of source, where the address does not tell (http, s3, vddk, …)."
    ),
    click.option("--user", default="", help="User or access key."),
    click.option(
        "--password-file",
        type=late.FILE,
        help="File with the password or secret key (else IMPORTER_SECRET_KEY).",
    ),
    click.option(
        "--session-token-file",
        type=late.FILE,
        help="File with the token of temporary S3 keys (else IMPORTER_SESSION_TOKEN).",
    ),
    click.option(
        "--header", "headers", type=HEADER, multiple=True, help="HTTP header 'Name: value'; may be repeated."
    ),
    click.option("--header-dir", help="Folder of secret HTTP headers, one to a file."),
    click.option(
        "--ca-file",
        "ca_files",
        type=late.FILE,
        multiple=True,
        help="PEM file of another authority to trust.",
    ),
    click.option("--ca-dir", help="Folder of such PEM files."),
    click.option("--insecure", is_flag=True, help="Do not verify certificates."),
    click.option(
        "--connections",
        type=click.IntRange(1, 64),
        default=6,
        show_default=True,
        help="Parallel connections.",
    ),
    stall_option("a byte"),
)
_DISK: tuple[Decorator, ...] = (
    click.option("--size", type=SIZE, help="Size the disk shall have at least, such as 10Gi."),
    click.option("--overhead", type=FRACTION, help="Part of the file system to leave free, such as 0.06."),
    click.option(
        "--content-type",
        type=click.Choice(request.CONTENT_TYPES),
        default="kubevirt",
        show_default=True,
        help="A disk, or a tar archive to unpack into the folder TARGET.",
    ),
    click.option(
        "--scratch", type=click.Path(exists=True, file_okay=False), help="Folder for what cannot be streamed."
    ),
    click.option("--checksum", help="ALGORITHM:HEX of the bytes as served (md5, sha1, sha256, sha512)."),
)
_WRITING: tuple[Decorator, ...] = (
    click.option("--preallocate", is_flag=True, help="Give storage to every byte of the disk."),
    click.option("--direct", is_flag=True, help="Keep out of the page cache (O_DIRECT)."),
)
_OUTPUT: tuple[Decorator, ...] = (click.option("--json", "as_json", is_flag=True, help="Print JSON."),)
_UPLOAD: tuple[Decorator, ...] = (
    click.option("--token-file", type=late.FILE, help="File with a token for CDI's upload proxy."),
    click.option("--ca-file", type=late.FILE, default="", help="PEM file of the authority to trust."),
    click.option("--cert", "certificate", type=late.FILE, default="", help="Client certificate (PEM)."),
    click.option(
        "--key", type=late.FILE, default="", help="Its key (PEM) [default: the certificate's file]."
    ),
    click.option("--insecure", is_flag=True, help="Do not verify certificates."),
    click.option("--checksum", default="", help="ALGORITHM:HEX of the file, verified before success."),
    stall_option("progress"),
)


def upload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a command that sends a file to an upload server."""
    return _add(command, _UPLOAD)


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a command that asks a source something."""
    return _add(command, _SOURCE)


def read_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a command that looks at a source."""
    return _add(command, _SOURCE + _DISK + _OUTPUT)


def import_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a command that moves a disk."""
    return _add(command, _SOURCE + _DISK + _WRITING + _OUTPUT)


def blank_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a command that needs no source."""
    return _add(command, _WRITING + _OUTPUT)


def _add(command: Callable[..., Any], options: tuple[Decorator, ...]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command


def make_request(
    address: str, target: str, given: Mapping[str, Any], env: Mapping[str, str]
) -> request.Request:
    """Return the request of a command line, which ``execute`` checks."""
    kind = source_kind(address, given["kind"])
    is_archive = given["content_type"] == "archive"
    if target and not is_archive and Path(target).is_dir():
        target = f"{target}/disk.img"
    return request.Request(
        source=kind.name,
        location=make_location(kind, address, given, env),
        target=target,
        content_type=given["content_type"],
        scratch=given["scratch"],
        image_size=given["size"],
        overhead=given["overhead"] or Fraction(0),
        preallocation=given.get("preallocate", False),
        direct=given.get("direct", False),
        checksum=given["checksum"],
        connect_patience=min(request.CONNECT_PATIENCE, given["stall"]),
        fetch=fetch.Options(connections=given["connections"], no_progress=given["stall"]),
    )


def source_kind(address: str, name: str | None) -> sources.kind.Kind:
    """Return the kind of source called ``name``, else the one that ``address`` names."""
    if name:
        return sources.find(name)
    return sources.find_scheme("" if Path(address).exists() else urllib.parse.urlsplit(address).scheme)


def make_location(
    kind: sources.kind.Kind, address: str, given: Mapping[str, Any], env: Mapping[str, str]
) -> base.Location:
    """Return where the command under way says that a disk is, and how to get there."""
    reading = contract.Reading(env)
    said = late.given(click.get_current_context())
    access = base.Access(
        user=given["user"] or env.get("IMPORTER_ACCESS_KEY_ID", ""),
        password=read_secret(given["password_file"]) or env.get("IMPORTER_SECRET_KEY", ""),
        session_token=read_secret(given["session_token_file"]) or env.get("IMPORTER_SESSION_TOKEN", ""),
        headers=given["headers"] + contract.header_files(given["header_dir"] or ""),
        ca_files=given["ca_files"] + contract.certificate_files(given["ca_dir"] or ""),
        insecure=given["insecure"],
        connections=given["connections"],
        patience=given["stall"],
        **reading.proxies(),
    )

    def value(field: fields.Field) -> Any:
        return said.get(field.option, reading.field(field) if field.ambient else None)

    location = kind.fill(address, access, value)
    if reading.faults:
        raise errors.RequestError(*reading.faults)
    return location


def read_secret(path: str | None) -> str:
    """Return what a file holds but for the end of its line; empty without a file."""
    if path is None:
        return ""
    try:
        return Path(path).read_text(encoding="utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError) as err:
        raise errors.RequestError(f"{path}: unreadable password file") from err
