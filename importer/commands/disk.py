"""The sub-commands import, verify, map, inspect, digest, blank and upload."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from cdi_worker import errors
from cdi_worker.images import targets
from cdi_worker.images.engine import retry
from cdi_worker.importer import contract, execute, inspection
from cdi_worker.importer import request as request_module
from cdi_worker.importer.commands import command, options, output, parameters
from cdi_worker.importer.request import Request
from cdi_worker.sources import base
from cdi_worker.sources.local import locations

if TYPE_CHECKING:
    from fractions import Fraction

log = logging.getLogger(__name__)

IMPORT_EXAMPLES = """\
cdi-worker import https://example.org/disk.qcow2 disk.img
cdi-worker import s3://bucket/disk.vmdk /dev/vdb
cdi-worker import docker://quay.io/org/disk:latest /var/lib/images/
ssh host cat disk.qcow2 | cdi-worker import - disk.img
cdi-worker import https://example.org/disk.raw.xz - | ssh host 'cat >/dev/vdb'
"""
UPLOAD_EXAMPLES = """\
cdi-worker upload disk.qcow2 https://proxy.example.org --token-file token
cdi-worker upload disk.raw https://host:8443 --cert my.pem --ca-file ca.pem
"""
VERIFY_EXAMPLES = """\
cdi-worker verify https://example.org/disk.qcow2 disk.img
cdi-worker verify --sample 5% s3://bucket/disk.vmdk /dev/vdb
cdi-worker verify --all vm.ova images/
cdi-worker verify --map disk.bmap disk.img
"""
#: CDI's default overhead of a file system.
DEFAULT_OVERHEAD = "0.06"


@click.command(
    "import",
    cls=command.SourceCommand,
    example=IMPORT_EXAMPLES,
    short_help="Write the disk at a URL or path to a file or device.",
)
@click.argument("source", type=options.TARGET)
@click.argument("target", type=options.TARGET)
@options.import_options
@click.pass_obj
def import_(obj: parameters.Context, /, source: str, target: str, **given: Any) -> int:
    """Import the disk at SOURCE (a URL or path) to TARGET (a file, directory, block device or NBD export).

    A SOURCE of - is standard input, a TARGET of - is standard output, which gets the raw disk and nothing
    else.
    """
    obj.to_stdout = target == targets.STDOUT and not given["dry_run"]
    if obj.to_stdout and given["read_back"]:
        raise errors.RequestError("--verify reads the disk back, which standard output does not allow")
    if given["read_back"] and given["content_type"] == "archive":
        raise errors.RequestError("--verify reads the disk back, and an archive is not a disk")
    request = options.make_request(source, target, given, contract.environment())
    if given["every"]:
        return _import_all(obj, dataclasses.replace(request, target=target), given)
    if given["dry_run"]:
        if given["report"]:
            log.warning(options.NO_REPORT)
        if given["write_map"]:
            log.warning(options.NO_MAP)
        found = inspection.inspect(request, obj.cancel, overhead=_overhead(given))
        return output.inspection(found, obj)
    if source == locations.STDIN and not given["kind"] and not sys.stdin.isatty():
        log.warning("standard input can be read only once: an interrupted import starts over")
    _prepare(obj, request)
    with output.progress(given["style"], obj) as reporter:
        result = execute.run(request, reporter, obj.cancel)
    output.result(result, request, obj)
    return 0


def _overhead(given: Mapping[str, Any]) -> Fraction | int:
    """Return the overhead of the volume that a report names."""
    return contract.parse_overhead(DEFAULT_OVERHEAD) if given["overhead"] is None else given["overhead"]


def _prepare(obj: parameters.Context, request: Request) -> None:
    """Print the summary on standard error, if standard output gets the report or the map."""
    if targets.STDOUT in (request.report, request.write_map):
        obj.to_stdout = True


def _import_all(obj: parameters.Context, request: Request, given: Mapping[str, Any]) -> int:
    """Import all disks of an OVA to a folder, and print the result of each."""
    _check_all(request, given)
    _prepare(obj, request)
    # Imported when used: few imports are of several disks (start-up time).
    from cdi_worker.importer import together

    with output.progress(given["style"], obj) as reporter:
        results = together.run_all(request, reporter, obj.cancel)
    for result in results:
        output.result(result, request, obj)
    return 0


def _check_all(request: Request, given: Mapping[str, Any]) -> None:
    """Raise ``errors.RequestError`` for options of one disk beside ``--all``."""
    others = {"--disk": request.disk, "--size": request.image_size, "--content-type": request.is_archive}
    others |= {"--format": bool(request.format or request.compress or request.backing)}
    others |= {"--map": bool(request.demand.map), "--have": bool(request.have)}
    others |= {"--layer": bool(request.layers), "--dry-run": given.get("dry_run")}
    others |= {"--write-map": bool(request.write_map)}
    faults = [f"{option} cannot be used with --all" for option, value in others.items() if value]
    if not targets.is_folder(request.target):
        faults.append(f"{request.target}: --all needs a folder")
    if faults:
        raise errors.RequestError(*faults)


@click.command(
    cls=command.SourceCommand,
    example=VERIFY_EXAMPLES,
    short_help="Compare a disk with the disk at a URL or path.",
)
@click.argument("source", type=options.TARGET)
@click.argument("disk_", metavar="DISK", type=options.TARGET, required=False)
@options.verify_options
@click.pass_obj
def verify(
    obj: parameters.Context,
    /,
    source: str,
    disk_: str | None,
    *,
    amount: str | None,
    seed: int | None,
    **given: Any,
) -> int:
    """Compare DISK (a file, directory, block device or NBD export) with the disk at SOURCE.

    SOURCE is one of import, in any format. Without it, DISK is compared with the checksums of --map. DISK is
    only read. The exit status is 0 if it is equal, 9 if it differs, and another one if that could not be
    found out.
    """
    # Imported when used: what follows an import needs none of it (start-up time).
    from cdi_worker.importer import mapped, sampling, verification

    if seed is not None and amount is None:
        raise errors.RequestError("--seed repeats a sample; give its --sample too")
    given["sample"] = None if amount is None else sampling.Sample.parse(amount, seed)
    if disk_ is None:
        _check_map_options(given)
        source, disk_, run = given["map"], source, mapped.verify
    else:
        run = verification.verify
    request = options.make_request(source, disk_, given, contract.environment())
    if given["every"]:
        request = dataclasses.replace(request, target=disk_)
        _check_all(request, given)
    with output.progress(given["style"], obj) as reporter:
        if given["every"]:
            from cdi_worker.importer import together

            found = together.verify_all(request, reporter, obj.cancel)
        else:
            found = [run(request, reporter, obj.cancel)]
    for each in found:
        output.verification(each, obj)
    return 0 if all(each.is_equal for each in found) else errors.Differs.status


def _check_map_options(given: Mapping[str, Any]) -> None:
    """Raise an error for options with which a disk cannot be compared with its map, without a source."""
    if not given["map"]:
        raise click.UsageError("Missing argument 'DISK'; or give a --map to verify a disk without SOURCE.")
    others = {"--layer": given["layers"], "--disk": given["disk"], "--all": given["every"]}
    others |= {name: given[name[2:].replace("-", "_")] for name in ("--checksum", "--checksum-file")}
    if faults := [f"{name} needs a SOURCE" for name, value in others.items() if value]:
        raise errors.RequestError(*faults)


@click.command(
    "map",
    cls=command.Command,
    example="cdi-worker map -o disk.bmap disk.img",
    short_help="Write the block map of a disk.",
)
@click.argument("disk_", metavar="DISK", type=options.TARGET)
@options.map_options
@click.pass_obj
def map_(obj: parameters.Context, /, disk_: str, *, output_: str, style: str, **given: Any) -> int:
    """Write the block map of DISK (a file, a directory with disk.img, a block device, or an NBD export).

    The map has a SHA-256 of each MiB with data, in the format of bmaptool (bmap 2.0). DISK is only read.
    """
    # Imported when used (start-up time).
    from cdi_worker.formats import bmap
    from cdi_worker.importer import mapped
    from cdi_worker.importer.report import file

    settings = parameters.settings(given)
    path = request_module.disk_path(disk_, settings)
    request = request_module.make("none", base.Location(""), path, settings)
    written = file.File(output_, "--output", request.target, request.backing)
    obj.to_stdout = output_ == targets.STDOUT
    with output.progress(style, obj) as reporter:
        found = mapped.create(request, reporter, obj.cancel)
    written.write(bmap.write(found), "write the map")
    output.map_of(request.target, output_, found, obj)
    return 0


@click.command(
    cls=command.SourceCommand,
    example="cdi-worker inspect https://example.org/disk.qcow2",
    short_help="Show format, sizes and route of a disk.",
)
@click.argument("source", type=options.TARGET)
@options.inspect_options
@click.pass_obj
def inspect(obj: parameters.Context, /, source: str, **given: Any) -> int:
    """Show format, sizes and planned route of SOURCE (a URL or path), reading little of it."""
    given["overhead"] = _overhead(given)
    request = options.make_request(source, "", given, contract.environment())
    return output.inspection(inspection.inspect(request, obj.cancel), obj)


@click.command(
    cls=command.DigestCommand,
    example="cdi-worker digest docker://quay.io/containerdisks/fedora:latest",
    short_help="Print a digest that changes with the disk.",
)
@click.argument("source", type=options.TARGET)
@options.digest_options
@click.pass_obj
def digest(obj: parameters.Context, /, source: str, **given: Any) -> int:
    """Print a digest of SOURCE, to detect that it has changed.

    The digest of a container image's manifest, the strong ETag of a file on a web server, the version of an
    object in S3, its generation in Google Cloud Storage, the hash of an image in Glance. With
    --checksum-file, the checksum that the file lists for SOURCE.
    """
    from cdi_worker.sources import watched

    kind = options.source_kind(source, given["kind"])
    location = options.make_location(kind, source, given, contract.environment())
    sums = given["checksum_file"] or ""
    found = retry.patiently(
        lambda: watched.digest(kind, location, sums, obj.cancel), request_module.CONNECT_PATIENCE, obj.cancel
    )
    output.value(obj, "digest", found, source=location.endpoint)
    return 0


@click.command(
    cls=command.Command,
    example="cdi-worker blank disk.img 10Gi",
    short_help="Create an empty disk.",
)
@click.argument("target", type=options.TARGET)
@click.argument("size", type=options.SIZE)
@options.blank_options
@click.pass_obj
def blank(obj: parameters.Context, /, target: str, size: int, **given: Any) -> int:
    """Create a blank disk of SIZE (such as 10Gi) at TARGET. On a device, SIZE bytes are zeroed.

    SIZE is rounded up to whole sectors of 512 bytes.
    """
    if not size:
        raise errors.RequestError("a disk of 0 bytes; give a size such as 10Gi")
    settings = parameters.settings({**given, "size": size})
    request = request_module.make("none", base.Location(""), target, settings)
    _prepare(obj, request)
    output.result(execute.run(request, cancel=obj.cancel), request, obj)
    return 0


@click.command(
    cls=command.Command,
    example=UPLOAD_EXAMPLES,
    short_help="Send an image to an upload server.",
)
@click.argument("file", type=options.TARGET)
@click.argument("url")
@options.upload_options
@click.pass_obj
def upload(
    obj: parameters.Context, /, file: str, url: str, token_file: str | None, style: str, **given: Any
) -> int:
    """Upload the image FILE to the upload server or CDI upload proxy at URL."""
    from cdi_worker.importer.send import file as upload_file

    access = options.upload_access(given.pop("ca_files"), given.pop("ca_dir"), given.pop("insecure"))
    token = options.read_secret(token_file)
    settings = upload_file.Settings(file, url, token=token, access=access, **given)
    with output.progress(style, obj) as reporter:
        done = upload_file.send(settings, reporter, obj.cancel)
    output.uploaded(done, obj)
    return 0
