"""Commands with the options that sources declare (``sources.fields``).

These options are created when one of them is given or help is printed: start-up time is part of every import,
and most command lines have none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from cdi_worker import errors

if TYPE_CHECKING:
    from cdi_worker.sources import fields, kind

FILE = click.Path(exists=True, dir_okay=False)


def typed(name: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a click type that parses with ``parse``; help shows it as ``name``."""

    def convert(value: str) -> Any:
        try:
            return parse(value)
        except (errors.RequestError, ValueError) as err:
            raise click.BadParameter(str(err)) from err

    convert.__name__ = name
    return convert


def given(context: click.Context) -> Mapping[str, Any]:
    """Return the values of the late options on the command line, by option."""
    found: Mapping[str, Any] = context.meta.get(_key(context), {})
    return found


class LateOption(click.Option):
    """An option that sources declare. ``kinds``: the names of these sources."""

    def __init__(self, option: str, **settings: Any) -> None:
        super().__init__([option], expose_value=False, callback=_keep, **settings)
        self.option = option
        self.kinds: list[str] = []


class Command(click.Command):
    """A command about a source. ``shown``: the groups of sources whose options the help shows."""

    shown: tuple[str, ...] = ("own", "installed")

    def offer(self, field: fields.Field, default: Any) -> LateOption | None:
        """Return the option of a field, None if this command has none for it."""
        if not field.option:
            return None
        if field.flag:
            return LateOption(field.option, is_flag=True, help=field.help)
        form = FILE if field.file else field.parse if field.parse is str else typed("text", field.parse)
        shown = default if isinstance(default, str) and default else None
        return LateOption(field.option, type=form, default=shown, show_default=True, help=field.help)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for search in ("own", "installed"):
            try:
                return super().parse_args(ctx, list(args))
            except click.NoSuchOption:
                self._extend(search)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for search in self.shown:
            self._extend(search)
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                title = f"Options of {', '.join(param.kinds)}" if isinstance(param, LateOption) else "Options"
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)

    def _extend(self, search: str) -> None:
        """Add the options of our own sources, or of all installed ones."""
        from cdi_worker import sources

        found: Iterable[kind.Kind] = getattr(sources, search)()
        known = {name: param for param in self.params for name in param.opts}
        for each in found:
            for field, default in each.table.values():
                option = known.get(field.option) or self.offer(field, default)
                if isinstance(option, LateOption):
                    if field.option not in known:
                        known[field.option] = option
                        self.params.append(option)
                    if each.name not in option.kinds:
                        option.kinds.append(each.name)


class MountCommand(Command):
    """A command with options for the mounts of sources; their defaults are the paths in a pod."""

    def offer(self, field: fields.Field, default: Any) -> LateOption | None:
        if not field.mount or field.key:
            return None
        return LateOption(field.option, default=field.mount, show_default=True, help=field.help)


class PodGroup(Command, click.Group):
    """The top-level command, which runs a pod's role; it has options for the mounts of sources."""

    # Searching for plug-ins takes longer than everything else in this help.
    shown = ("own",)

    def offer(self, field: fields.Field, default: Any) -> LateOption | None:
        if not field.mount:
            return None
        return LateOption(field.option, default=field.mount, show_default=True, help=field.help)


def _keep(context: click.Context, option: click.Parameter, value: Any) -> Any:
    if isinstance(option, LateOption) and value is not None:
        context.meta.setdefault(_key(context), {})[option.option] = value
    return value


def _key(context: click.Context) -> str:
    # Contexts of sub-commands share ``meta`` with their parents.
    return f"{__name__} {context.command_path}"
