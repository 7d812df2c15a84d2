"""The command digest."""

from __future__ import annotations

from typing import Any

import click

from cdi_worker import masking, sources
from cdi_worker.importer import contract
from cdi_worker.importer import request as request_module
from cdi_worker.importer.commands import command, options, output, parameters
from cdi_worker.sources import watched


@click.command(
    cls=command.SourceCommand,
    params=options.of("digest"),
    example="cdi-worker digest docker://quay.io/containerdisks/fedora:latest",
)
@click.argument("source", type=options.TARGET)
@parameters.option(
    request_module.SOURCE,
    "--checksum-file",
    common=True,
    metavar="URL",
    help="Print the checksum of SOURCE in this file, such as SHA256SUMS (URL or path).",
)
@click.pass_obj
def digest(obj: parameters.Context, /, source: str, **given: Any) -> int:
    """Print an id of the current version of SOURCE, to notice a new one.

    The digest of a container image's manifest, the strong ETag of a file on a web server, the version of an
    object in S3, its generation in Google Cloud Storage, the hash of an image in Glance. With
    --checksum-file, the checksum that the file lists for SOURCE.
    """
    kind = sources.find(given["kind"]) if given["kind"] else sources.of(source)
    location = options.make_location(kind, source, given, contract.environment())
    sums = given["checksum_file"] or ""
    found = watched.digest(kind, location, sums, request_module.CONNECT_PATIENCE, obj.cancel)
    if obj.as_json:
        output.as_json({"source": location.endpoint, "digest": found})
    else:
        output.say(masking.mask(found))
    return 0
