"""The top-level command: the table of sub-commands; without one, the contract's role."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import click

from cdi_worker import errors, lazy
from cdi_worker.importer import contract
from cdi_worker.importer.commands import command, parameters, signatures
from cdi_worker.importer.roles import run

log = logging.getLogger(__name__)

POD = contract.Paths()
EPILOG = """cdi-worker help COMMAND shows its options, help pod those of a pod's role. Nearly all can be
set by CDI_WORKER_NAME or in a configuration file."""
#: Helper programs that CDI's controllers start from the image by name.
PROGRAMS = frozenset(
    {"cdi-source-update-poller", "cdi-image-size-detection", "openstack-populator", "ovirt-populator"}
)
#: Imported when used: a pod's role needs none of them (start-up time).
COMMANDS: lazy.Table[str, click.Command] = lazy.Table(
    {
        "import": "cdi_worker.importer.commands.disk:import_",
        "verify": "cdi_worker.importer.commands.disk:verify",
        "map": "cdi_worker.importer.commands.disk:map_",
        "inspect": "cdi_worker.importer.commands.disk:inspect",
        "digest": "cdi_worker.importer.commands.disk:digest",
        "blank": "cdi_worker.importer.commands.disk:blank",
        "upload": "cdi_worker.importer.commands.disk:upload",
        "doctor": "cdi_worker.importer.commands.doctor:doctor",
        "manifest": "cdi_worker.importer.kubernetes.commands:manifest",
        "run": "cdi_worker.importer.kubernetes.commands:run",
        "help": "cdi_worker.importer.commands.about:help_",
        "version": "cdi_worker.importer.commands.about:version",
        "cdi-source-update-poller": "cdi_worker.importer.commands.cron:poll",
        "cdi-image-size-detection": "cdi_worker.importer.commands.cron:measure",
        "openstack-populator": "cdi_worker.importer.commands.populators:openstack",
        "ovirt-populator": "cdi_worker.importer.commands.populators:engine",
    }
)

#: Those that help lists.
VISIBLE = tuple(name for name in COMMANDS if name not in {*PROGRAMS, "help", "version"})


class _Group(command.PodGroup):
    """The sub-commands, each imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        with lazy.start():
            return COMMANDS.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the nearest command; click looks only among commands that are imported already."""
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            hint = errors.did_you_mean(args[0], set(COMMANDS) - PROGRAMS)
            if hint:
                ctx.fail(f"No such command '{args[0]}'; {hint}")
        return super().resolve_command(ctx, args)


def _print_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from cdi_worker.version import VERSION

    click.echo(f"cdi-worker, version {VERSION}")
    context.exit()


#: The section of the help with what only pods need.
ROLE = "Options of a pod's role (without a command)"


def _faults(ctx: click.Context) -> tuple[str, ...]:
    """Return the faults of the variables and the file that set options of a pod's role."""
    obj = ctx.find_object(parameters.Context)
    if obj is None or obj.config is None or not isinstance(ctx.command, command.PodGroup):
        return ()
    found = [*(obj.unreadable.faults if obj.unreadable else ()), *obj.faults]
    found += ctx.command.variable_faults(obj.env, ctx.command)
    if obj.config.path:
        try:
            ctx.command.check_keys(obj.config)
        except errors.RequestError as err:
            found += err.faults
    return tuple(found)


def _places() -> Iterator[parameters.Decorator]:
    """Yield the options for the paths of a pod."""
    for name, default, form, text in (
        ("--data-dir", POD.data, "DIRECTORY", "File-system volume of the pod."),
        ("--block-device", POD.block, "DEVICE", "Block volume of the pod."),
        ("--scratch-dir", POD.scratch, "DIRECTORY", "Scratch volume of the pod."),
        ("--termination-log", POD.termination_log, "FILE", "File for the termination message."),
        ("--extra-headers-dir", POD.extra_headers, "DIRECTORY", "Folder of secret HTTP headers."),
    ):
        yield parameters.option(ROLE, name, default=default, metavar=form, help=text)


@click.group(cls=_Group, invoke_without_command=True, subcommand_metavar="COMMAND [ARGS]...", epilog=EPILOG)
@parameters.option(
    parameters.GENERAL,
    "--version",
    here=True,
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.option("--alsologtostderr", "--logtostderr", is_flag=True, hidden=True)
@click.option("--stderrthreshold", hidden=True)
@parameters.added(*_places())
@parameters.option(
    ROLE,
    "--metrics-port",
    type=click.IntRange(0, 65535),
    default=POD.metrics_port,
    metavar="PORT",
    help="Port of /metrics in a pod's role; 0: no metrics.",
)
@parameters.option(
    ROLE,
    "--strict-exit-status",
    is_flag=True,
    help="Give a pod's role the exit statuses of commands, for Jobs, which do not read the message.",
)
@parameters.option(
    ROLE,
    "--retries",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="NUMBER",
    help="How often a pod's role repeats a failed import before it exits, for Jobs.",
)
@parameters.connections(ROLE, "Maximum number of parallel connections of the importer.")
@parameters.stall(ROLE, "data from the source")
@parameters.speed(ROLE)
@parameters.option(
    ROLE, "--direct", is_flag=True, help="Bypass the page cache (O_DIRECT), as CACHE_MODE=TRYNONE."
)
@parameters.option(
    ROLE,
    "--read-back",
    is_flag=True,
    help="Read an imported disk back from storage, compare it with what was received, and log its SHA-256.",
)
@parameters.option(
    ROLE,
    "--update",
    is_flag=True,
    help="Change a disk on the volume in place: compare all of it, and write only what differs.",
)
@parameters.option(
    ROLE,
    "--verify",
    is_flag=True,
    help="Compare the disk on the volume with the source, instead of importing it.",
)
@parameters.option(
    ROLE,
    "--layer",
    "layers",
    type=parameters.TypedLines("text", str),
    multiple=True,
    metavar="URL",
    help="qcow2 file with what changed since IMPORTER_ENDPOINT, or since the layer before; repeated.",
)
@parameters.option(
    ROLE,
    "--report",
    default="",
    metavar="FILE",
    help="File for what an auditor keeps of an import: an in-toto statement; - is standard output.",
)
@parameters.added(*signatures.options(ROLE, POD.signature_policy))
@click.pass_context
def cli(
    ctx: click.Context,
    /,
    metrics_port: int,
    *,
    strict_exit_status: bool,
    retries: int,
    **given: Any,
) -> int | None:
    """Write a virtual machine's disk, from any source, to a file or device.

    Without a command, run the role of a pod that the environment selects.
    """
    signatures.take_pod(ctx, given)
    ctx.obj.settings = settings = parameters.settings(given, POD.settings)
    if ctx.invoked_subcommand is not None:
        ctx.obj.log()
        if ctx.obj.config is not None and ctx.obj.config.skipped:
            log.warning("%s: permission denied; read without it", ctx.obj.config.skipped)
        if ctx.invoked_subcommand in PROGRAMS and (faults := _faults(ctx)):
            raise errors.RequestError(*faults)
        return None
    ctx.obj.log(1)
    where = contract.Paths(
        data=given["data_dir"],
        block=given["block_device"],
        scratch=given["scratch_dir"],
        termination_log=given["termination_log"],
        extra_headers=given["extra_headers_dir"],
        metrics_port=metrics_port,
        mounts=parameters.given(ctx),
        settings=settings,
    )
    env = contract.environment()
    role = contract.role(env)
    if role is None:
        command.choose(ctx, command.BARE)
        click.echo(ctx.get_help())
        return 2
    faults = _faults(ctx)
    return run.run(
        role, env, where, ctx.obj.cancel, strict=strict_exit_status, retries=retries, faults=faults
    )
