"""Options, whose values also come from the environment and the configuration file, and their context.

An option is taken from the command line, else from ``CDI_WORKER_`` and its name, else from the configuration
file (``commands.config_file``), else it has its default.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract
from cdi_worker.importer.commands import config_file
from cdi_worker.importer.settings import DEFAULT, Room, Settings

if TYPE_CHECKING:
    _Choice = click.Choice[str]
    _ParamType = click.ParamType[Any]
    _Path = click.Path[Any]
else:
    # Not generic in older versions of click.
    _Choice = click.Choice
    _Path = click.Path
    _ParamType = click.ParamType

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
GENERAL = "General options"
_SETTINGS = frozenset(Settings._fields)
#: The options that demand a signature, by the fields of ``sources.trust.Demand``.
DEMAND = ("signed_by", "identity", "issuer", "trusted_root", "annotations", "policy", "checksum_file", "map")


class Context:
    """The object that ``cli`` passes to every command.

    ``quiet``: only errors are printed. ``as_json``: results and errors are JSON objects. ``to_stdout``:
    standard output is the disk. ``config``: None until the top-level command has read it; ``unreadable``:
    why it could not. ``faults``: of options that only a pod's role reads. ``settings``: what an
    administrator has set, for the roles of a pod and for the programs that controllers start by name.
    """

    verbosity: int = 0
    quiet: bool = False
    as_json: bool = False
    to_stdout: bool = False
    config: config_file.Config | None = None
    unreadable: errors.RequestError | None = None
    settings: Settings = contract.POD

    def __init__(
        self, cancel: cancelling.Cancel, set_up_logging: Callable[[int], None], env: Mapping[str, str]
    ) -> None:
        self.cancel = cancel
        self.set_up_logging = set_up_logging
        self.env = env
        self.faults: list[str] = []

    def log(self, verbosity: int = 0) -> None:
        """Set up logging for the largest ``verbosity`` so far."""
        self.verbosity = max(self.verbosity, verbosity)
        self.set_up_logging(self.verbosity or (-1 if self.quiet else 0))


class Typed(_ParamType):
    """A type that parses with ``parse``; help shows it as ``name``."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except (errors.RequestError, ValueError) as err:
            raise click.BadParameter(str(err), ctx, param) from err


class Choice(_Choice):
    """One of some values; a misspelt one is answered with the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as err:
            hint = errors.did_you_mean(str(value), map(str, self.choices))
            if not hint:
                raise
            raise click.BadParameter(f"{err.message.rstrip('.')}; {hint}", ctx, param) from err


class File(_Path):
    """The path of a small file, which may be a pipe: ``--password-file <(pass show host)``.

    What a pipe brings is kept in memory, for all that read the file, also twice, and for libraries.
    """

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if pathlib.Path(path).is_file():
            return path
        from cdi_worker.sources import smallfile

        try:
            data = smallfile.read(path)
        except errors.RequestError as err:
            raise click.BadParameter(str(err), ctx, param) from err
        memory = os.memfd_create("file")
        os.write(memory, data)
        return f"/proc/self/fd/{memory}"


FILE = File()


class TypedLines(Typed):
    """A type whose values contain blanks: in a variable, each is a line."""

    envvar_list_splitter = "\n"

    def split_envvar_value(self, rv: str) -> list[str]:
        """Return the lines; empty ones, such as the end of a YAML block, do not count."""
        return [line for line in rv.split("\n") if line.strip()]


class Option(click.Option):
    """An option. ``group``: its section in the help. ``here``: only on the command line.

    ``empty``: whether an empty value means something. It is an error otherwise, wherever it comes from: it is
    what a script has whose variable is not set, and the option may be a demand. Help shows a default that is
    not empty.
    """

    def __init__(
        self,
        declarations: list[str],
        group: str = GENERAL,
        *,
        here: bool = False,
        empty: bool = False,
        **settings: Any,
    ) -> None:
        settings.setdefault("show_default", bool(settings.get("default")))
        super().__init__(declarations, allow_from_autoenv=not here, **settings)
        self.group = group
        self.here = here
        self.empty = empty
        if not here and self.variable != f"{contract.PREFIX}_{(self.name or '').upper()}":
            self.envvar = self.variable

    @property
    def key(self) -> str:
        """The option without its dashes: its key in the configuration file."""
        return max(self.opts, key=lambda option: option.startswith("--")).lstrip("-")

    @property
    def variable(self) -> str:
        """The variable that sets it."""
        return f"{contract.PREFIX}_{self.key.replace('-', '_').upper()}"

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value of the variable, unless Kubernetes has set it for a Service."""
        value = super().resolve_envvar_value(ctx)
        return None if value is None or self.variable not in contract.environment() else value

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """Convert the value; a fault names the variable or the file that it comes from."""
        try:
            self._check_given(ctx, value)
            return super().process_value(ctx, value)
        except click.BadParameter as err:
            place = origin(ctx, self)
            if not place:
                raise
            fault = click.BadParameter(f"{err.message.rstrip('.')} (from {place})", ctx, self)
            obj = ctx.find_object(Context)
            if obj is None or not isinstance(ctx.command, click.Group):
                raise fault from err
            # A command may follow, which does not read this option.
            obj.faults.append(fault.format_message())
            return super().process_value(ctx, self.default)

    def _check_given(self, ctx: click.Context, value: Any) -> None:
        """Raise ``click.BadParameter`` for a given value that is empty, or of another type of a file."""
        if ctx.get_parameter_source(self.name or "") is click.core.ParameterSource.DEFAULT:
            return
        if not self.empty and _is_empty(value):
            raise click.BadParameter("empty; give a value or leave the option out", ctx, self)
        if isinstance(value, list | tuple) and not self.multiple and self.nargs == 1:
            raise click.BadParameter("an array; give one value", ctx, self)
        if isinstance(value, bool) and not self.is_flag:
            raise click.BadParameter(f"{str(value).lower()} is no value of it", ctx, self)


def _is_empty(value: Any) -> bool:
    """Return whether a value as it was given is empty, or has an empty part."""
    if isinstance(value, list | tuple):
        return not value or any(map(_is_empty, value))
    return isinstance(value, str) and not value.strip()


def origin(ctx: click.Context, option: Option) -> str:
    """Return the variable or the file that sets ``option``; empty for the command line and the default."""
    found = ctx.get_parameter_source(option.name or "")
    if found is click.core.ParameterSource.ENVIRONMENT:
        return option.variable
    obj = ctx.find_object(Context)
    if found is click.core.ParameterSource.DEFAULT_MAP and obj is not None and obj.config is not None:
        return obj.config.path
    return ""


def settings(given: Mapping[str, Any], default: Settings = DEFAULT) -> Settings:
    """Return the settings that the options of a command make; those that it does not have as in ``default``.

    Raises ``errors.RequestError``.
    """
    if given.get("force") and given.get("update"):
        raise errors.RequestError("--force replaces an existing disk, --update changes it; give one of them")
    values = {name: value for name, value in given.items() if name in _SETTINGS and value is not None}
    if given.get("overhead") is not None:
        values["room"] = Room(overhead=given["overhead"])
    return default._replace(
        **values,
        demand={name: given[name] for name in DEMAND if given.get(name) not in {None, ()}},
        existing="update" if given.get("update") else "replace" if given.get("force") else default.existing,
    )


def named(variable: str) -> str:
    """Return the option that a variable of ours sets."""
    return f"--{variable.removeprefix(f'{contract.PREFIX}_').replace('_', '-').lower()}"


def option(group: str, *declarations: str, **settings: Any) -> Decorator:
    """Return a decorator like ``click.option`` for an option in the section ``group`` of the help."""
    return click.option(*declarations, cls=Option, group=group, **settings)


def added(*options: Decorator) -> Decorator:
    """Return a decorator that adds ``options`` to a command, in this order."""
    return lambda command: functools.reduce(lambda made, each: each(made), reversed(options), command)


def connections(group: str, text: str) -> Decorator:
    """Return the option for the number of connections."""
    return option(
        group,
        "--connections",
        type=click.IntRange(1, 64),
        default=DEFAULT.connections,
        metavar="NUMBER",
        help=text,
    )


def stall(group: str, what: str) -> Decorator:
    """Return the option for the seconds to wait without ``what``."""
    return option(
        group,
        "--stall-timeout",
        "stall",
        type=click.FloatRange(min=1),
        default=DEFAULT.stall,
        metavar="SECONDS",
        help=f"Fail after so long without {what}.",
    )


def speed(group: str) -> Decorator:
    """Return the option for the slowest speed that counts."""
    return option(
        group,
        "--speed-limit",
        "slowest",
        type=click.FloatRange(min=0),
        default=DEFAULT.slowest,
        metavar="BYTES",
        help="Fewer per second, on average over --stall-timeout, count as none; 0: every byte counts.",
    )


class SourceOption(Option):
    """An option that sources declare. ``kinds``: these sources, with an example of their use."""

    def __init__(self, option: str, **settings: Any) -> None:
        super().__init__([option], expose_value=False, callback=_keep, **settings)
        self.option = option
        self.kinds: dict[str, str] = {}


def given(context: click.Context) -> Mapping[str, Any]:
    """Return the values of the options of sources that were given, by option."""
    found: Mapping[str, Any] = context.meta.get(_key(context), {})
    return found


def _keep(context: click.Context, option: click.Parameter, value: Any) -> Any:
    if isinstance(option, SourceOption) and option.multiple:
        value = "\n".join(value) or None
    if isinstance(option, SourceOption) and value is not None:
        context.meta.setdefault(_key(context), {})[option.option] = value
    return value


def _key(context: click.Context) -> str:
    # Contexts of sub-commands share ``meta`` with their parents.
    return f"{__name__} {context.command_path}"
