"""The command line: sub-commands for people, the contract's roles without one."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import click

from images import retry
from importer import (
    cdi_commands,
    contract,
    datavolume_commands,
    errors,
    execute,
    options,
    output,
    pod,
    request,
    survey,
    units,
)
from sources import base

POD = contract.Paths()
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


@dataclasses.dataclass
class Context:
    """What ``cli`` hands to every command."""

    cancel: threading.Event
    set_up_logging: Callable[[int], None]


def _tell_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from importlib import metadata

    try:
        version = metadata.version("cdi-worker")
    except metadata.PackageNotFoundError:
        # A checkout runs as it is.
        version = "unknown (not installed)"
    click.echo(f"cdi-worker, version {version}")
    context.exit()


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_tell_version,
    help="Show the version and exit.",
)
@click.option(
    "--v", "-v", "verbosity", type=int, default=0, help="How much to log: 1 what happens, 4 everything."
)
@click.option("--alsologtostderr", "--logtostderr", is_flag=True, hidden=True)
@click.option("--stderrthreshold", hidden=True)
@click.option("--data-dir", default=POD.data, show_default=True, help="File-system volume of the pod.")
@click.option("--block-device", default=POD.block, show_default=True, help="Block volume of the pod.")
@click.option("--scratch-dir", default=POD.scratch, show_default=True, help="Scratch volume of the pod.")
@click.option(
    "--termination-log",
    default=POD.termination_log,
    show_default=True,
    help="Where the outcome goes.",
)
@click.option(
    "--extra-headers-dir",
    default=POD.extra_headers,
    show_default=True,
    help="Secret HTTP headers.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    default=POD.metrics_port,
    show_default=True,
    help="Where a pod's role serves /metrics; 0: nowhere.",
)
@click.option(
    "--vddk-libdir", default=POD.vddk_libdir, show_default=True, help="Folder of VMware's VDDK library."
)
@click.option("--vddk-config", default=POD.vddk_config, show_default=True, help="Its configuration file.")
@click.option(
    "--strict-exit-status",
    is_flag=True,
    help="Let a pod's role fail as commands do, for a Job that reads no message.",
)
@click.pass_context
def cli(
    ctx: click.Context, /, verbosity: int, metrics_port: int, *, strict_exit_status: bool, **paths: str
) -> int | None:
    """Bring a virtual machine's disk from wherever it is to a file or block device, as a raw disk.

    Without a command the role (importer, upload server, clone source) comes from the environment, as
    CDI's controllers set it.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj.set_up_logging(verbosity)
        return None
    ctx.obj.set_up_logging(max(1, verbosity))
    where = contract.Paths(
        data=paths["data_dir"],
        block=paths["block_device"],
        scratch=paths["scratch_dir"],
        termination_log=paths["termination_log"],
        extra_headers=paths["extra_headers_dir"],
        metrics_port=metrics_port,
        vddk_libdir=paths["vddk_libdir"],
        vddk_config=paths["vddk_config"],
    )
    env = contract.environment()
    role = contract.role(env)
    if role is None:
        click.echo(ctx.get_help())
        return 2
    return pod.run(role, env, where, ctx.obj.cancel, strict=strict_exit_status)


@cli.command("import", epilog=IMPORT_EXAMPLES)
@click.argument("source")
@click.argument("target", type=click.Path())
@options.import_options
@click.option("--dry-run", is_flag=True, help="Look, plan, print the plan; change nothing.")
@click.option("--sha256", "digest", is_flag=True, help="Read the finished disk back and print its SHA-256.")
@progress_option
@click.pass_obj
def import_(obj: Context, /, source: str, target: str, **given: Any) -> int:
    """Import the disk at SOURCE (an address or a path) onto TARGET (a file or block device)."""
    wanted = options.make_request(source, target, given, contract.environment())
    if given["dry_run"]:
        return output.inspection(execute.inspect(wanted, obj.cancel), wanted, as_json=given["as_json"])
    with output.progress(given["style"], as_json=given["as_json"]) as shown:
        result = execute.run(wanted, shown, obj.cancel)
    output.result(result, as_json=given["as_json"], digest=given["digest"])
    return 0


@cli.command()
@click.argument("source")
@options.read_options
@click.pass_obj
def inspect(obj: Context, /, source: str, **given: Any) -> int:
    """Tell what is at SOURCE, the volume it needs and the route it would take, from under 1 MiB of it."""
    if given["overhead"] is None:
        given["overhead"] = USUAL_OVERHEAD
    wanted = options.make_request(source, "", given, contract.environment())
    return output.inspection(execute.inspect(wanted, obj.cancel), wanted, as_json=given["as_json"])


@cli.command()
@click.argument("source")
@options.source_options
@click.pass_obj
def digest(obj: Context, /, source: str, **given: Any) -> int:
    """Print the manifest digest of the image at SOURCE (docker://…), for who watches a tag."""
    from sources import registry

    location = options.make_location(source, given, contract.environment())
    found = retry.patiently(
        lambda: registry.digest(location, obj.cancel), request.CONNECT_PATIENCE, obj.cancel
    )
    click.echo(found)
    return 0


@cli.command()
@click.argument("target", type=click.Path())
@click.argument("size", type=options.SIZE)
@options.blank_options
@click.pass_obj
def blank(obj: Context, /, target: str, size: int, *, preallocate: bool, direct: bool, as_json: bool) -> int:
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


@cli.command()
@click.argument("file", type=options.FILE)
@click.argument("url")
@options.upload_options
@progress_option
@click.pass_obj
def upload(obj: Context, /, file: str, url: str, token_file: str | None, style: str, **given: Any) -> int:
    r"""Upload the image FILE to the upload server at URL, or through CDI's upload proxy.

    \b
    cdi-worker upload disk.qcow2 https://cdi-uploadproxy.example.org --token-file token
    """
    from importer import upload_file

    token = options.read_secret(token_file)
    with output.progress(style, as_json=False) as shown:
        upload_file.send(upload_file.Wanted(file, url, token=token, **given), shown, obj.cancel)
    return 0


for command in (datavolume_commands.manifest, datavolume_commands.run, *cdi_commands.PROGRAMS):
    cli.add_command(command)
#: Names by which CDI's controllers start the image for what is no role of the contract.
PROGRAMS = frozenset(str(program.name) for program in cdi_commands.PROGRAMS)
