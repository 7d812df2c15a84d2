"""The command ``config``: the options in force, and where each comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import click

from cdi_worker import errors, masking
from cdi_worker.importer.commands import command, output, parameters
from cdi_worker.importer.commands import context as shared

#: The name of the options of a pod's role, which belong to no command.
ROLE = "(role)"
#: Options whose values may be secret.
SECRET = frozenset({"header"})


class Row(NamedTuple):
    """An option in force. ``origin``: a variable, a file, or ``default``."""

    command: str
    option: str
    value: Any
    origin: str


@click.command(
    cls=command.Command,
    example="CDI_WORKER_CONNECTIONS=8 cdi-worker config import",
    short_help="Show the options in force, and where they come from.",
)
@click.argument("wanted", metavar="[COMMAND]", required=False)
@click.pass_context
def config(ctx: click.Context, /, wanted: str | None) -> None:
    """Show the options in force for COMMAND, or for all commands, and where each comes from.

    An option on the command line is used first, then its variable, the configuration file, and its default.
    """
    obj = ctx.find_object(shared.Context)
    root = ctx.find_root()
    group = root.command
    if obj is None or obj.config is None or not isinstance(group, command.PodGroup):
        raise AssertionError(wanted)
    group.check_keys(obj.config)
    names = [name for name in group.list_commands(root) if name != "config"]
    if wanted is not None and wanted not in names:
        shown = [name for name in names if any(rows(root, name))]
        hint = errors.supported(wanted, shown)
        raise errors.RequestError(f"{wanted!r} is not a command; {hint}")
    found = [row for name in names if wanted in {None, name} for row in rows(root, name)]
    if wanted is None:
        found = [*_rows(root, group, ROLE), *found]
    _print(obj, found)


def rows(root: click.Context, name: str) -> Iterator[Row]:
    """Yield the options of a command, with those of sources."""
    group = root.command
    made = group.get_command(root, name) if isinstance(group, click.Group) else None
    if isinstance(made, command.Command) and not made.hidden:
        made.complete()
        with click.Context(made, info_name=name, parent=root, **made.context_settings) as context:
            yield from _rows(context, made, name)


def _rows(context: click.Context, made: command.Command, name: str) -> Iterator[Row]:
    obj = context.find_object(shared.Context)
    made.complete()
    if obj is not None and obj.config is not None:
        context.default_map, _ = made.configured(obj.config)
    for option in made.options:
        if option.here or option.hidden:
            continue
        value, source = option.consume_value(context, {})
        context.set_parameter_source(option.name or "", source)
        if source is click.core.ParameterSource.DEFAULT:
            value = option.get_default(context)
        shown = _plain(value)
        if option.key in SECRET and shown:
            shown = masking.MASK
        yield Row(name, option.key, shown, parameters.origin(context, option) or "default")


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; None for an option that is not set."""
    if isinstance(value, tuple | list):
        return [str(each) for each in value]
    return value if isinstance(value, str | int | float | bool) else None


def _print(obj: shared.Context, found: list[Row]) -> None:
    path = obj.config.path if obj.config is not None else ""
    if obj.as_json:
        commands: dict[str, dict[str, Any]] = {}
        for row in found:
            commands.setdefault(row.command, {})[row.option] = {"value": row.value, "from": row.origin}
        output.as_json({"file": path or None, "options": commands})
        return
    output.say(f"configuration file: {path or 'none'}")
    widths = [
        max((len(text(row)) for row in found), default=0)
        for text in (lambda row: row.option, lambda row: _shown(row.value))
    ]
    last = ""
    for row in found:
        if row.command != last:
            output.say(f"\n{row.command}")
            last = row.command
        shown = _shown(row.value)
        output.say(
            masking.mask(f"  {row.option:<{widths[0]}}  {shown:<{min(widths[1], 40)}}  {row.origin}".rstrip())
        )


def _shown(value: Any) -> str:
    """Return a value as it would be written in the file or in a variable."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value in (None, "", []) else str(value)
