"""The sub-commands about a disk: import, inspect, digest, blank and upload."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click

from cdi_worker import contract, errors, execute, request, sources, survey, units
from cdi_worker.commands import late, options, output
from cdi_worker.images.engine import retry
from cdi_worker.sources import base

if TYPE_CHECKING:
    from cdi_worker.commands import group

#: The first character keeps click from filling the lines.
IMPORT_EXAMPLES = """\b
Examples:
  cdi-worker import https://example.org/disk.qcow2 disk.img
  cdi-worker import s3://bucket/disk.vmdk /dev/vdb
  cdi-worker import docker://quay.io/org/disk:latest /var/lib/images/
"""
#: What CDI keeps for the file system when nobody says otherwise.
USUAL_OVERHEAD = Fraction("0.06")

progress_option = click.option(
    "--progress",
    "style",
    type=click.Choice(output.STYLES),
    default="auto",
    show_default=True,
    help="auto: a bar on a terminal, lines elsewhere.",
)


@click.command("import", cls=late.Command, epilog=IMPORT_EXAMPLES)
@click.argument("source")
@click.argument("target", type=click.Path())
@options.import_options
@click.option("--dry-run", is_flag=True, help="Look, plan, print the plan; change nothing.")
@click.option("--sha256", "digest", is_flag=True, help="Read the finished disk back and print its SHA-256.")
@progress_option
@click.pass_obj
def import_(obj: group.Context, /, source: str, target: str, **given: Any) -> int:
    """Import the disk at SOURCE (an address or a path) onto TARGET (a file or block device)."""
    wanted = options.make_request(source, target, given, contract.environment())
    if given["dry_run"]:
        return output.inspection(execute.inspect(wanted, obj.cancel), wanted, as_json=given["as_json"])
    with output.progress(given["style"], as_json=given["as_json"]) as shown:
        result = execute.run(wanted, shown, obj.cancel)
    output.result(result, as_json=given["as_json"], digest=given["digest"])
    return 0


@click.command(cls=late.Command)
@click.argument("source")
@options.read_options
@click.pass_obj
def inspect(obj: group.Context, /, source: str, **given: Any) -> int:
    """Tell what is at SOURCE, the volume it needs and the route it would take, from under 1 MiB of it."""
    if given["overhead"] is None:
        given["overhead"] = USUAL_OVERHEAD
    wanted = options.make_request(source, "", given, contract.environment())
    return output.inspection(execute.inspect(wanted, obj.cancel), wanted, as_json=given["as_json"])


@click.command(cls=late.Command)
@click.argument("source")
@options.source_options
@click.pass_obj
def digest(obj: group.Context, /, source: str, **given: Any) -> int:
    """Print the manifest digest of the image at SOURCE (docker://…), for who watches a tag."""
    from cdi_worker.sources.registry import source as registry

    location = options.make_location(sources.find("registry"), source, given, contract.environment())
    found = retry.patiently(
        lambda: registry.digest(location, obj.cancel), request.CONNECT_PATIENCE, obj.cancel
    )
    click.echo(found)
    return 0


@click.command()
@click.argument("target", type=click.Path())
@click.argument("size", type=options.SIZE)
@options.blank_options
@click.pass_obj
def blank(
    obj: group.Context, /, target: str, size: int, *, preallocate: bool, direct: bool, as_json: bool
) -> int:
    """Make a blank disk of SIZE (such as 10Gi) at TARGET, or zero a device with --preallocate."""
    size = -(-size // units.MIB) * units.MIB
    wanted = request.Request(
        source="none",
        location=base.Location(""),
        target=target,
        image_size=size,
        preallocation=preallocate,
        direct=direct,
    )
    room = survey.room(wanted)
    if room.usable < size:
        # A pod makes the largest disk that fits; who names a size here wants that size.
        raise errors.TooLarge(virtual_size=size, available=room.available)
    output.result(execute.run(wanted, cancel=obj.cancel), as_json=as_json, digest=False)
    return 0


@click.command()
@click.argument("file", type=late.FILE)
@click.argument("url")
@options.upload_options
@progress_option
@click.pass_obj
def upload(
    obj: group.Context, /, file: str, url: str, token_file: str | None, style: str, **given: Any
) -> int:
    r"""Upload the image FILE to the upload server at URL, or through CDI's upload proxy.

    \b
    cdi-worker upload disk.qcow2 https://cdi-uploadproxy.example.org --token-file token
    """
    from cdi_worker.send import file as upload_file

    token = options.read_secret(token_file)
    with output.progress(style, as_json=False) as shown:
        upload_file.send(upload_file.Settings(file, url, token=token, **given), shown, obj.cancel)
    return 0
