"""Options, whose values also come from the environment, and their context.

An option is taken from the command line, else from ``CDI_WORKER_`` and its name, else it has its default.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract
from cdi_worker.sources import smallfile

if TYPE_CHECKING:
    from cdi_worker.sources import fields

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
GENERAL = "General options"


class Context:
    """The object that ``cli`` passes to every command.

    ``quiet``: only errors are printed. ``as_json``: results and errors are JSON objects. ``to_stdout``:
    standard output is the disk. ``faults``: of options that only a pod's role reads. ``paths``: for the role,
    and for the programs that controllers start by name.
    """

    verbosity: int = 0
    quiet: bool = False
    as_json: bool = False
    to_stdout: bool = False
    paths: contract.Paths = contract.Paths()

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


class Typed(click.ParamType):  # type: ignore[type-arg]  # not generic in older versions of click
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


class Choice(click.Choice):  # type: ignore[type-arg]  # not generic in older versions of click
    """One of some values; a misspelt one is answered with the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as err:
            hint = errors.did_you_mean(str(value), map(str, self.choices))
            if not hint:
                raise
            raise click.BadParameter(f"{err.message.rstrip('.')}; {hint}", ctx, param) from err


class _Range:
    """A range that help and errors show in words."""

    min: Any
    max: Any

    def _describe_range(self) -> str:
        return f"{self.min} or more" if self.max is None else f"{self.min} to {self.max}"


class Whole(_Range, click.IntRange):
    """An integer in a range."""

    name = "integer"


class Number(_Range, click.FloatRange):
    """A number in a range."""

    name = "number"


class SmallFile(click.Path):
    """The path of a small file, which may be a pipe: ``--password-file <(pass show host)``.

    The content of a pipe is copied to memory, so that it can be read twice, also by libraries.
    """

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = os.fsdecode(super().convert(value, param, ctx))
        if pathlib.Path(path).is_file():
            return path
        try:
            data = smallfile.read(path)
        except errors.RequestError as err:
            raise click.BadParameter(str(err), ctx, param) from err
        memory = os.memfd_create("file")
        os.write(memory, data)
        return f"/proc/self/fd/{memory}"


FILE = SmallFile()
FOLDER = click.Path(exists=True, file_okay=False)


class TypedLines(Typed):
    """A type whose values contain blanks: in a variable, each is a line."""

    def split_envvar_value(self, rv: str) -> list[str]:
        """Return the lines; empty ones, such as the end of a YAML block, do not count."""
        return [line for line in rv.split("\n") if line.strip()]


class Option(click.Option):
    """An option. ``group``: its section in the help. ``common``: whether the short help shows it.

    ``here``: only on the command line.

    ``empty``: whether an empty value is allowed. Else it is an error: a script's variable may not be set,
    and the option may be a requirement. Help shows a default that is not empty.
    """

    def __init__(
        self,
        declarations: list[str],
        group: str = GENERAL,
        *,
        here: bool = False,
        empty: bool = False,
        common: bool = False,
        **settings: Any,
    ) -> None:
        settings.setdefault("show_default", bool(settings.get("default")))
        super().__init__(declarations, allow_from_autoenv=not here, **settings)
        self.group = group
        self.here = here
        self.empty = empty
        self.common = common
        if not here and self.variable != f"{contract.PREFIX}_{(self.name or '').upper()}":
            self.envvar = self.variable

    @property
    def key(self) -> str:
        """The option without its dashes."""
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
        """Convert the value; a fault names the variable that it comes from."""
        try:
            is_given = source(ctx, self.name) is not click.core.ParameterSource.DEFAULT
            if is_given and not self.empty and _is_empty(value):
                raise click.BadParameter("empty; give a value or leave the option out", ctx, self)
            return super().process_value(ctx, value)
        except click.BadParameter as err:
            if ctx.get_parameter_source(self.name or "") is not click.core.ParameterSource.ENVIRONMENT:
                raise
            fault = click.BadParameter(f"{err.message.rstrip('.')} (from {self.variable})", ctx, self)
            obj = ctx.find_object(Context)
            if obj is None or not isinstance(ctx.command, click.Group):
                raise fault from err
            # A command may follow, which does not read this option.
            obj.faults.append(fault.format_message())
            return super().process_value(ctx, self.default)


def _is_empty(value: Any) -> bool:
    """Return whether a value as it was given is empty, or has an empty part."""
    if isinstance(value, list | tuple):
        return not value or any(map(_is_empty, value))
    return isinstance(value, str) and not value.strip()


def source(ctx: click.Context, name: str | None) -> click.core.ParameterSource:
    """Return where the value of an option is from; click 8.4.0 knows it only after the value is processed."""
    return ctx.get_parameter_source(name or "") or click.core.ParameterSource.DEFAULT


def named(variable: str) -> str:
    """Return the option that a variable of ours sets."""
    return f"--{variable.removeprefix(f'{contract.PREFIX}_').replace('_', '-').lower()}"


def option(group: str, *declarations: str, **settings: Any) -> Decorator:
    """Return a decorator like ``click.option`` for an option in the section ``group`` of the help."""
    return click.option(*declarations, cls=Option, group=group, **settings)


def declared(field: fields.Field, default: Any, group: str = "") -> Option:
    """Return the option that a field of a request or an access declares."""
    names = [each for each in (field.option, field.short, field.key_of_option) if each]
    text = field.help
    if field.secret and field.file:
        text = f"File with the {text[:1].lower()}{text[1:].rstrip('.')} (or the variable {field.env})."
    form = _form(field, default)
    return Option(names, group or field.section, **form, common=field.common, help=text)


class SourceOption(Option):
    """The option of a source's ``field``. ``kinds``: these sources, with an example of their use."""

    def __init__(self, field: fields.Field, default: Any) -> None:
        # A name that no option of a command has.
        name = f"source{field.option.replace('-', '_')}"
        super().__init__([field.option, name], **_form(field, default), help=field.help)
        self.kinds: dict[str, str] = {}

    def get_default(self, ctx: click.Context, call: bool = True) -> Any:
        """Return the default for the help only: the location has it, after the variables of its tools."""
        return None if call else super().get_default(ctx, call=False)


def _form(field: fields.Field, default: Any) -> dict[str, Any]:
    """Return the settings of ``click.Option`` for a field: its type, its metavar and its default."""
    if field.flag or field.sets:
        return {"is_flag": True}
    is_number = field.parse in {int, float}
    has_bounds = is_number and (field.least, field.most) != (None, None)
    form: Any = field.parse if is_number else str
    if field.choices:
        form = Choice(field.choices)
    elif field.file:
        form = FILE
    elif field.folder:
        form = FOLDER
    elif has_bounds:
        number: Any = Whole if field.parse is int else Number
        form = number(field.least, field.most)
    elif field.lines:
        form = TypedLines("text", field.parse)
    elif field.parse is not str and not is_number:
        form = Typed("text", field.parse)
    shown = (default or None) if isinstance(default, str | int | float) else None
    if isinstance(shown, float) and shown.is_integer():
        shown = int(shown)
    return {"type": form, "multiple": field.lines, "metavar": field.form or None, "default": shown}


def of_sources(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options of sources among those of a command, by option."""
    found = {}
    for name, value in given.items():
        if name.startswith("source__") and value not in {None, ()}:
            text = "\n".join(value) if isinstance(value, tuple) else value
            found[name.removeprefix("source").replace("_", "-")] = text
    return found
