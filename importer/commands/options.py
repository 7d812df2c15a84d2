"""Options of the sub-commands, and the import request made from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from cdi_worker import errors, sources, units
from cdi_worker.images import targets
from cdi_worker.importer import contract, request
from cdi_worker.importer.commands import output, parameters, signatures
from cdi_worker.sources import base, fields

SIZE = parameters.Typed("size", units.parse_quantity)
FRACTION = parameters.Typed("fraction", contract.parse_overhead)
HEADER = parameters.TypedLines("header", contract.parse_header)
LAYER = parameters.TypedLines("text", str)
#: Whether it can be written is found out when it is opened (exit status 6).
TARGET = click.Path(readable=False)
FOLDER = click.Path(exists=True, file_okay=False)

#: The sections of the help.
SOURCE, ACCESS, TRANSFER = "Source", "Credentials and TLS", "Transfer"
DISK, WRITING, OUTPUT = "Disk", "Writing", "Output"


speed_option = parameters.speed(TRANSFER)
direct_option = parameters.option(WRITING, "--direct", is_flag=True, help="Bypass the page cache (O_DIRECT).")
force_option = parameters.option(
    WRITING,
    "--force",
    is_flag=True,
    help="Replace an existing file, or what a device holds, with the complete disk.",
)
update_option = parameters.option(
    WRITING,
    "--update",
    is_flag=True,
    help="Change an existing disk in place: compare all of it, and write only what differs.",
)
have_option = parameters.option(
    WRITING,
    "--have",
    default="",
    metavar="URL",
    help="Map of the disk that --update changes: what it says is not read. URL or path.",
)
wait_option = parameters.option(
    WRITING,
    "--wait",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Wait so long for another run that writes to TARGET.",
)
format_option = parameters.option(
    WRITING,
    "--format",
    "-O",
    metavar="FORMAT",
    help="Format of the file: raw, or qcow2[,cluster_size=…,compression_type=…,preallocation=…].",
)
backing_option = parameters.option(
    WRITING,
    "--backing",
    type=click.Path(exists=True, dir_okay=False),
    help="The qcow2 file is an overlay of this file, with what differs from it.",
)
state_option = parameters.option(
    WRITING, "--state", type=FOLDER, help="Folder for the journal of a TARGET behind NBD."
)
scratch_option = parameters.option(
    WRITING, "--scratch", type=FOLDER, help="Folder for images that cannot be streamed."
)
connections_option = parameters.connections(TRANSFER, "Maximum number of parallel connections.")
insecure_option = parameters.option(
    ACCESS, "--insecure", is_flag=True, help="Do not verify TLS certificates."
)
progress_option = parameters.option(
    OUTPUT,
    "--progress",
    "style",
    type=parameters.Choice(output.STYLES),
    default="auto",
    help="How to show progress; auto: a bar on a terminal, else lines.",
)


def _kinds(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the kinds of sources that a shell offers."""
    return [each.name for each in sources.own() if each.name.startswith(incomplete)]


_LOGIN: tuple[parameters.Decorator, ...] = (
    parameters.option(ACCESS, "--user", default="", help="User or access key."),
    parameters.option(
        ACCESS,
        "--password-file",
        type=parameters.FILE,
        help="File with the password or secret key [default: IMPORTER_SECRET_KEY].",
    ),
)
_TRUST: tuple[parameters.Decorator, ...] = (
    parameters.option(
        ACCESS,
        "--ca-file",
        "ca_files",
        type=parameters.FILE,
        multiple=True,
        help="PEM file with more CA certificates to trust; may be repeated.",
    ),
    parameters.option(
        ACCESS,
        "--ca-dir",
        metavar="DIRECTORY",
        help="Folder of PEM files with CA certificates to trust.",
    ),
    insecure_option,
)
_KIND: tuple[parameters.Decorator, ...] = (
    parameters.option(
        SOURCE,
        "--source",
        "kind",
        shell_complete=_kinds,
        help="Kind of source (http, s3, vddk, …) [default: from the URL].",
    ),
)
_SECRETS: tuple[parameters.Decorator, ...] = (
    parameters.option(
        ACCESS,
        "--session-token-file",
        type=parameters.FILE,
        help="File with the token of temporary S3 keys [default: IMPORTER_SESSION_TOKEN].",
    ),
    parameters.option(
        ACCESS,
        "--header",
        "headers",
        type=HEADER,
        multiple=True,
        help="HTTP header 'Name: value'; may be repeated.",
    ),
    parameters.option(
        ACCESS, "--header-dir", metavar="DIRECTORY", help="Folder of secret HTTP headers, one per file."
    ),
)
_SOURCE: tuple[parameters.Decorator, ...] = (
    *_KIND,
    parameters.option(
        SOURCE,
        "--content-type",
        type=parameters.Choice(request.CONTENT_TYPES),
        default="kubevirt",
        help="kubevirt: a disk; archive: a tar archive, which is unpacked into a folder.",
    ),
    parameters.option(
        SOURCE,
        "--layer",
        "layers",
        type=LAYER,
        multiple=True,
        metavar="URL",
        help="qcow2 file with what changed since SOURCE, or since the layer before; repeated, oldest first.",
    ),
    parameters.option(
        SOURCE,
        "--checksum",
        help="Checksum ALGORITHM:HEX of the bytes as served (md5, sha1, sha256, sha512).",
    ),
    parameters.option(
        SOURCE,
        "--disk",
        default="",
        help="Disk of an OVA (file name, id or number) or OCI archive (name, title) [default: the only one].",
    ),
    *_LOGIN,
    *_SECRETS,
    *_TRUST,
    connections_option,
    parameters.stall(TRANSFER, "data"),
    speed_option,
    *signatures.options(signatures.SIGNATURE),
)
_OVERHEAD: tuple[parameters.Decorator, ...] = (
    parameters.option(
        DISK,
        "--overhead",
        type=FRACTION,
        help="Fraction of the file system to leave free, such as 0.06.",
    ),
)
_WRITING: tuple[parameters.Decorator, ...] = (
    parameters.option(
        WRITING,
        "--preallocate",
        "preallocation",
        is_flag=True,
        help="Allocate storage for every byte of the disk.",
    ),
    direct_option,
    force_option,
    wait_option,
    state_option,
    format_option,
    parameters.option(WRITING, "--compress", is_flag=True, help="Write compressed clusters (qcow2)."),
    backing_option,
)
NO_MAP = "--write-map: no map is written, because nothing is imported with --dry-run"
NO_REPORT = "--report: no report is written, because nothing is imported with --dry-run"


def _report(text: str) -> parameters.Decorator:
    return parameters.option(OUTPUT, "--report", default="", metavar="FILE", help=text)


report_option = _report("Write what an auditor keeps: an in-toto statement; - is standard output.")
#: Of a command that prints something else.
report_file_option = _report("Write what an auditor keeps: an in-toto statement.")


def _every(text: str) -> parameters.Decorator:
    return parameters.option(SOURCE, "--all", "every", is_flag=True, here=True, help=text)


_IMPORT: tuple[parameters.Decorator, ...] = (
    _every("Import all disks of an OVA to files in the folder TARGET, in one pass."),
    parameters.option(
        DISK,
        "--size",
        type=SIZE,
        help="Size of the disk, such as 10Gi, rounded up to 512 bytes; a smaller image is grown.",
    ),
    *_OVERHEAD,
    scratch_option,
    *_WRITING,
    update_option,
    have_option,
    parameters.option(
        OUTPUT,
        "--dry-run",
        is_flag=True,
        here=True,
        help="Contact the source and print the plan; write nothing.",
    ),
    parameters.option(
        OUTPUT,
        "--verify",
        "read_back",
        is_flag=True,
        help="Read the disk back from storage, compare it with what was received, and print its SHA-256.",
    ),
    parameters.option(
        OUTPUT,
        "--write-map",
        default="",
        metavar="FILE",
        help="Write the block map of the disk (bmap), with checksums; - is standard output.",
    ),
    report_option,
    progress_option,
)
_VERIFY: tuple[parameters.Decorator, ...] = (
    _every("Compare all disks of an OVA with the files that import --all wrote to the folder DISK."),
    scratch_option,
    format_option,
    backing_option,
    parameters.option(
        DISK,
        "--sample",
        "amount",
        metavar="AMOUNT",
        help="Compare only 5% or 10Gi of the disk: its ends, the starts of partitions, random pieces.",
    ),
    parameters.option(
        DISK,
        "--seed",
        type=click.IntRange(0),
        metavar="NUMBER",
        help="Repeat the --sample that was printed with this seed.",
    ),
    progress_option,
)
_MAP: tuple[parameters.Decorator, ...] = (
    format_option,
    backing_option,
    parameters.option(
        OUTPUT,
        "--output",
        "-o",
        "output_",
        default=targets.STDOUT,
        here=True,
        metavar="FILE",
        help="Where to write the map; - is standard output.",
    ),
    progress_option,
)
_DIGEST: tuple[parameters.Decorator, ...] = (
    *_KIND,
    parameters.option(
        SOURCE,
        "--checksum-file",
        metavar="URL",
        help="Print the checksum of SOURCE in this file, such as SHA256SUMS (URL or path).",
    ),
    *_LOGIN,
    *_SECRETS,
    *_TRUST,
)
_UPLOAD: tuple[parameters.Decorator, ...] = (
    parameters.option(
        SOURCE, "--checksum", help="Checksum ALGORITHM:HEX of the file, verified during the upload."
    ),
    parameters.option(
        ACCESS, "--token-file", type=parameters.FILE, help="File with a token for CDI's upload proxy."
    ),
    parameters.option(
        ACCESS, "--cert", "certificate", type=parameters.FILE, help="Client certificate (PEM)."
    ),
    parameters.option(
        ACCESS,
        "--key",
        type=parameters.FILE,
        help="Key of the client certificate (PEM), if it is not in the file of --cert.",
    ),
    *_TRUST,
    parameters.stall(TRANSFER, "progress"),
    progress_option,
)


upload_options = parameters.added(*_UPLOAD)
digest_options = parameters.added(*_DIGEST)
inspect_options = parameters.added(*_SOURCE, *_OVERHEAD)
import_options = parameters.added(*_SOURCE, *_IMPORT)
verify_options = parameters.added(*_SOURCE, *_VERIFY)
map_options = parameters.added(*_MAP)
blank_options = parameters.added(*_WRITING, report_option)


def make_request(
    address: str, target: str, given: Mapping[str, Any], env: Mapping[str, str]
) -> request.Request:
    """Return the request of a command line."""
    kind, settings = source_kind(address, given["kind"]), parameters.settings(given)
    location = make_location(kind, address, given, env)
    made = request.make(kind.name, location, request.disk_path(target, settings), settings)
    return dataclasses.replace(made, to=export_location(target, location.access))


def export_location(target: str, access: base.Access) -> base.Location | None:
    """Return the location of an NBD export as the target, with certificates; None for other targets."""
    if not targets.is_export(target):
        return None
    values = parameters.given(click.get_current_context()) if target.startswith("nbds:") else {}
    login = base.Access(
        ca_files=access.ca_files,
        insecure=access.insecure,
        connections=access.connections,
        patience=access.patience,
    )
    return sources.find("nbd").fill(
        target, login, lambda field: values.get(field.option) if field.file else None
    )


def source_kind(address: str, name: str | None) -> sources.kind.Kind:
    """Return the kind of source called ``name``, else the one for the scheme of ``address``."""
    if name:
        return sources.find(name)
    return sources.of(address)


def make_location(
    kind: sources.kind.Kind, address: str, given: Mapping[str, Any], env: Mapping[str, str]
) -> base.Location:
    """Return the location of the source from the options of the current command and the environment."""
    reading = contract.Reading(env, contract.CREDENTIALS)
    values = parameters.given(click.get_current_context())
    # As the tools of this kind of source do, such as AWS_CA_BUNDLE.
    own = {name: env.get(variable, "") for name, variable in kind.location_type.variables.items()}
    access = parameters.settings(given).access(
        user=given["user"] or reading.text("IMPORTER_ACCESS_KEY_ID") or own.get("user", ""),
        password=read_secret(given["password_file"])
        or reading.text("IMPORTER_SECRET_KEY")
        or own.get("password", ""),
        session_token=read_secret(given.get("session_token_file")) or reading.text("IMPORTER_SESSION_TOKEN"),
        headers=given.get("headers", ()) + contract.header_files(given.get("header_dir") or ""),
        ca_files=given["ca_files"]
        + contract.certificate_files(given["ca_dir"] or "")
        + tuple(path for path in own.get("ca_file", "").split(":") if path),
        insecure=given["insecure"],
        **reading.proxies(),
    )

    def value(field: fields.Field) -> Any:
        return values.get(field.option, reading.field(field) if field.ambient else None)

    location = kind.fill(address, access, value)
    if reading.faults:
        raise errors.RequestError(*reading.faults)
    return location


def upload_access(ca_files: tuple[str, ...], ca_dir: str | None, insecure: bool) -> base.Access:
    """Return the certificates and proxies of an upload, as those of an import."""
    files = ca_files + contract.certificate_files(ca_dir or "")
    proxies = contract.Reading(contract.environment()).proxies()
    return parameters.settings({}).access(ca_files=files, insecure=insecure, **proxies)


def read_secret(path: str | None) -> str:
    """Return the content of a file without its line end; empty without a file."""
    if path is None:
        return ""
    try:
        return Path(path).read_text(encoding="utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError) as err:
        raise errors.RequestError(f"{path}: cannot read the password file") from err
