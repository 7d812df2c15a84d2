"""The commands help and version, which other programs have too."""

from __future__ import annotations

import click

from cdi_worker import errors
from cdi_worker.importer.commands import command, group


@click.command("help", cls=click.Command, hidden=True, short_help="Show help.")
@click.argument("topic", nargs=-1, metavar="[COMMAND [KIND]]")
@click.pass_context
def help_(ctx: click.Context, /, topic: tuple[str, ...]) -> None:
    """Show the help of a command, or its options for one kind of source: cdi-worker help import s3."""
    name, *rest = topic or ("",)
    parent = ctx.parent or ctx
    if name in {"", command.POD}:
        command.choose(parent, name)
        click.echo(parent.get_help())
        return
    if name not in group.COMMANDS:
        raise click.UsageError(f"No such command '{name}'; {errors.supported(name, group.VISIBLE)}")
    asked = click.Context(group.COMMANDS[name], info_name=name, parent=parent)
    command.choose(asked, *rest)
    click.echo(asked.get_help())


@click.command(cls=click.Command, hidden=True, short_help="Show the version.")
def version() -> None:
    """Show the version."""
    from cdi_worker.version import VERSION

    click.echo(f"cdi-worker, version {VERSION}")
