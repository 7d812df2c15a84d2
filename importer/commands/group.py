"""The top-level command: the table of sub-commands; without one, the contract's role."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import click

from cdi_worker import collector, errors, sources
from cdi_worker.importer import commands, contract
from cdi_worker.importer.commands import command, parameters
from cdi_worker.importer.roles import run
from cdi_worker.sources import fields

POD = contract.Paths()
#: A topic of help besides ``fields.POD``, the options of a pod's role: only the commands.
BARE = "bare"
#: The section of the help with what only pods need.
ROLE = "Options of a pod's role (without a command)"
#: The options for a pod's mounts, by field of ``contract.Paths``, with their texts.
PLACES = {
    "data": ("--data-dir", "DIRECTORY", "File-system volume of the pod."),
    "block": ("--block-device", "DEVICE", "Block volume of the pod."),
    "scratch": ("--scratch-dir", "DIRECTORY", "Scratch volume of the pod."),
    "termination_log": ("--termination-log", "FILE", "File for the termination message."),
    "extra_headers": ("--extra-headers-dir", "DIRECTORY", "Folder of secret HTTP headers."),
}
EPILOG = """cdi-worker help COMMAND shows its options, help pod those of a pod's role. Nearly all can be
set by CDI_WORKER_NAME."""
#: Helper programs that CDI's controllers start from the image by name, and their ``MODULE:VARIABLE``.
PROGRAMS = {
    "cdi-source-update-poller": "cron:poll",
    "cdi-image-size-detection": "cron:measure",
    "openstack-populator": "populators:openstack",
    "ovirt-populator": "populators:engine",
}
#: The commands that help lists, with their texts.
VISIBLE = {
    "import": "Write the disk at a URL or path to a file or device.",
    "verify": "Compare a disk with the disk at a URL or path.",
    "inspect": "Show format, sizes and route of a disk.",
    "digest": "Print an id of the current version of a disk.",
    "blank": "Create an empty disk.",
    "upload": "Send an image to an upload server.",
    "doctor": "Show what works on this machine.",
    "manifest": "Print DataVolumes as Kubernetes objects.",
}
COMMANDS = (*VISIBLE, "help", "version", *sorted(PROGRAMS))


@click.command("help", cls=click.Command, hidden=True)
@click.argument("topic", nargs=-1, metavar="[COMMAND [TOPIC]]")
@click.pass_context
def help_(ctx: click.Context, /, topic: tuple[str, ...]) -> None:
    """Show the help of a command, or its options on one topic: cdi-worker help import s3."""
    name, *rest = topic or ("",)
    parent = ctx.parent or ctx
    if name in {"", fields.POD}:
        whole = click.Context(parent.command, info_name=parent.info_name, **cli.context_settings)
        command.choose(whole, name)
        click.echo(whole.get_help())
        return
    if name not in COMMANDS:
        raise click.UsageError(f"No such command '{name}'; {errors.supported(name, VISIBLE)}")
    made = command_of(name)
    asked = click.Context(made, info_name=name, parent=parent, **made.context_settings)
    command.choose(asked, *rest)
    click.echo(asked.get_help())


@click.command(cls=click.Command, hidden=True)
def version() -> None:
    """Show the version."""
    from cdi_worker.version import VERSION

    click.echo(f"cdi-worker, version {VERSION}")


def command_of(name: str) -> click.Command:
    """Import the module of a command, and return the command: a pod's role needs none of them."""
    places = {"help": "group:help_", "version": "group:version", "import": "import_:import_", **PROGRAMS}
    module, _, variable = places.get(name, f"{name}:{name}").partition(":")
    found: click.Command = getattr(importlib.import_module(f"{commands.__name__}.{module}"), variable)
    return found


class _Group(command.SourceCommand, click.Group):
    """The sub-commands, each imported when it is used; without one, a pod's role.

    The role has the options that a request declares for pods, and those for the mounts of sources. Few pods
    are given any of them: their declarations are loaded when one is (start-up time).
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        with collector.pause():
            found = command_of(cmd_name)
        found.short_help = VISIBLE.get(cmd_name)
        return found

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, without importing them, and the options."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VISIBLE.items()))
        super().format_options(ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the nearest command; click looks only among commands that are imported already."""
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            hint = errors.did_you_mean(args[0], set(COMMANDS) - PROGRAMS.keys())
            if hint:
                ctx.fail(f"No such command '{args[0]}'; {hint}")
        return super().resolve_command(ctx, args)

    def own_arguments(self, args: list[str]) -> list[str]:
        return [*itertools.takewhile(lambda each: each not in COMMANDS, args)]

    def few_params(self, ctx: click.Context, _args: list[str]) -> list[click.Parameter]:
        return self.params_of(ctx, ())

    def all_params(self, ctx: click.Context) -> list[click.Parameter]:
        from cdi_worker.importer.commands import options

        mounts: dict[str, parameters.SourceOption] = {}
        # Searching for plug-ins takes longer than everything else in this help.
        for each in sources.own():
            for field, _ in each.table.values():
                if field.mount:
                    # Its file need not exist.
                    form = field._replace(file=False, form="FILE" if field.file else "")
                    option = mounts.setdefault(field.option, parameters.SourceOption(form, field.mount))
                    option.kinds[each.name] = ""
        own = self.params_of(ctx, ())
        return [*own, *options.of(fields.POD, group=ROLE), *mounts.values()]

    def variable_faults(self, env: Mapping[str, str], ctx: click.Context) -> Iterator[str]:
        """Yield the faults of our own variables, as ``contract.own_faults``, and of files that others name.

        ``ctx``: of the command that runs, which may be given the variables of others; of this group: a pod's
        role.
        """
        yield from contract.file_faults(env)
        running = [each for each in ctx.command.get_params(ctx) if isinstance(each, parameters.Option)]
        known = {each.variable for each in running if not each.here}
        if all(name in known and env[name].strip() for name in contract.own(env)):
            return
        # Misspelt variables, and those that only sources read.
        from cdi_worker.importer import request

        others = map(command_of, COMMANDS) if ctx.command is not self else ()
        known_commands = [each for each in (self, *others) if isinstance(each, command.Command)]
        options = [option for each in known_commands for option in each.options if not option.here]
        known = {each.variable for each in options}
        known |= {field.env for _, field, _ in fields.declared(request.Request)}
        of_sources = (field for kind in sources.every() for field, _ in kind.table.values())
        known |= {name for field in of_sources for name in (field.env, *field.more) if name}
        here = {each.variable: each.key for each in running if each.here}
        for name in [name for name in contract.own(env) if name in here]:
            yield f"{name}: this is an option only; unset it, and give --{here[name]}"
        rest = {name: value for name, value in env.items() if name not in here}
        yield from contract.own_faults(rest, known, {each.variable for each in options if each.empty})

    def topics(self, _ctx: click.Context) -> list[str]:
        return [fields.POD, BARE]

    def shown(self, ctx: click.Context) -> list[command.Section]:
        topic = command.chosen(ctx)
        found = self.sections(ctx) if topic != BARE else []
        return [each for each in found if topic == fields.POD or each[0] == parameters.GENERAL]


def _print_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        context.invoke(version)
        context.exit()


def _faults(ctx: click.Context) -> tuple[str, ...]:
    """Return the faults of the variables that set options of a pod's role."""
    return (*ctx.obj.faults, *cli.variable_faults(ctx.obj.env, ctx))


@click.group(
    cls=_Group,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    epilog=EPILOG,
    params=[
        parameters.Option([option, name], ROLE, default=getattr(POD, name), metavar=form, help=text)
        for name, (option, form, text) in PLACES.items()
    ],
)
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
@parameters.option(
    ROLE,
    "--metrics-port",
    type=parameters.Whole(0, 65535),
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
    type=parameters.Whole(0),
    default=0,
    show_default=True,
    metavar="NUMBER",
    help="How often a pod's role repeats a failed import before it exits, for Jobs.",
)
@click.pass_context
def cli(
    ctx: click.Context, /, metrics_port: int, *, strict_exit_status: bool, retries: int, **given: Any
) -> int | None:
    """Write a virtual machine's disk, from any source, to a file or device.

    Without a command, run the role of a pod that the environment selects.
    """
    places = {name: given[name] for name in PLACES}
    ctx.obj.paths = contract.Paths(**places, metrics_port=metrics_port, mounts=parameters.of_sources(given))
    if command.has_all_options(ctx):
        from cdi_worker.importer.commands import options

        options.refuse_in_front(ctx)
        settings = {**POD.settings, **options.settings(fields.POD, given)}
        ctx.obj.paths = ctx.obj.paths._replace(settings=settings, access=options.limits(fields.POD, given))
    if ctx.invoked_subcommand is not None:
        ctx.obj.log()
        if ctx.invoked_subcommand in PROGRAMS and (faults := _faults(ctx)):
            raise errors.RequestError(*faults)
        return None
    ctx.obj.log(1)
    env = contract.environment()
    role = contract.role(env)
    if role is None:
        command.choose(ctx, BARE)
        click.echo(ctx.get_help())
        return 2
    faults = _faults(ctx)
    return run.run(
        role, env, ctx.obj.paths, ctx.obj.cancel, strict=strict_exit_status, retries=retries, faults=faults
    )
