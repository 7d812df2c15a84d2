"""Commands: their options are also read from the environment, and declared by sources.

A command line is parsed with the options of the source that it names, if these are all that it has, and
otherwise with those of all sources: start-up time is part of every import.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from cdi_worker import errors, sources
from cdi_worker.importer import contract
from cdi_worker.importer.commands import parameters
from cdi_worker.sources import fields

if TYPE_CHECKING:
    from cdi_worker.sources import kind


#: A section of the help: its title, an example, and the options with their texts.
Section: TypeAlias = tuple[str, str, list[tuple[str, str]]]
HELP = ("-h", "--help")
#: The topic of help with all options, and the option that selects it.
ALL, HELP_ALL = "all", "--help-all"
OPTIONS_OF = "Options of "
#: Unicode's hyphen at which no line ends.
NO_BREAK = "\N{NON-BREAKING HYPHEN}"
_TOPIC = f"{__name__}.topic"


def choose(context: click.Context, *topic: str) -> None:
    """Choose what help shows: nothing, or one of the command's topics. Raises ``click.UsageError``."""
    name = topic[0] if topic else ""
    command = context.command
    known = command.topics(context) if isinstance(command, Command) else []
    if len(topic) > 1 or name not in {"", *known}:
        hint = errors.supported(name, known) if known else "it has no topics"
        raise click.UsageError(f"no help on {' '.join(topic)!r}; {hint}", context)
    # Contexts of sub-commands share ``meta`` with their parents.
    context.meta[_TOPIC] = command, name


def chosen(context: click.Context) -> str:
    """Return the topic that was chosen for the command; empty: none."""
    command, name = context.meta.get(_TOPIC, (None, ""))
    return name if command is context.command else ""


def _set(context: click.Context, option: click.Parameter, value: int | None) -> None:
    """Set what a general option says in the object of all commands."""
    obj = context.find_object(parameters.Context)
    if obj is None or not value or context.resilient_parsing:
        return
    if option.name == "as_json":
        obj.as_json = True
        return
    obj.quiet = obj.quiet or option.name == "quiet"
    obj.log(value if option.name == "verbosity" else 0)


class Command(click.Command):
    """A command whose options can also be set in the environment. ``example``: for its help."""

    def __init__(self, *arguments: Any, example: str = "", **settings: Any) -> None:
        settings["context_settings"] = {
            "auto_envvar_prefix": contract.PREFIX,
            "help_option_names": [*HELP],
            "max_content_width": 100,
        }
        super().__init__(*arguments, **settings)
        self.example = example
        option = functools.partial(parameters.Option, expose_value=False, callback=_set)
        text = "Log level: 1 info, 4 debug; -v alone is 1."
        self.params.append(option(["--verbosity", "--v", "-v"], type=int, metavar="[LEVEL]", help=text))
        text = "Print errors only: no progress, no summary, no warnings."
        self.params.append(option(["--quiet", "-q"], is_flag=True, help=text))
        if not isinstance(self, click.Group):
            text = "Print the result, or the error, as JSON."
            self.params.append(
                option(["--json", "as_json"], is_flag=True, is_eager=True, common=True, help=text)
            )

    @property
    def options(self) -> list[parameters.Option]:
        """The options, with those of all sources."""
        return [
            each
            for each in self.get_params(click.Context(self, **self.context_settings))
            if isinstance(each, parameters.Option)
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if {*HELP} & {*args[:1]} and len(args) == 2:
            # ``import --help s3``
            choose(ctx, args[1])
            args = args[:1]
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError:
            # A misspelt or empty variable explains what is missing or malformed.
            self._check_variables(ctx)
            raise
        self._check_variables(ctx)
        return rest

    def _check_variables(self, ctx: click.Context) -> None:
        """Raise ``errors.RequestError`` for faults of our own variables. A pod's role reports its own."""
        obj, root = ctx.find_object(parameters.Context), ctx.find_root().command
        if obj is None or self is root or not isinstance(root, Command) or ctx.resilient_parsing:
            return
        if faults := tuple(root.variable_faults(obj.env, ctx)):
            raise errors.RequestError(*faults)

    def variable_faults(self, _env: Mapping[str, str], _ctx: click.Context) -> Iterator[str]:
        """Yield the faults of our own variables, if this is the top-level command."""
        return iter(())

    def topics(self, _ctx: click.Context) -> list[str]:
        """Return what ``choose`` may choose."""
        return []

    def get_help(self, ctx: click.Context) -> str:
        return super().get_help(ctx).replace(NO_BREAK, "-")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, example, records in self.shown(ctx):
            with formatter.section(title):
                # A path is not broken at its hyphens.
                formatter.write_dl([(name, text.replace("-", NO_BREAK)) for name, text in records])
                if example:
                    formatter.write_paragraph()
                    formatter.write_text(f"Example: {example}")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.example:
            with formatter.section("Examples" if "\n" in self.example else "Example"):
                for line in self.example.splitlines():
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")
        super().format_epilog(ctx, formatter)

    def shown(self, ctx: click.Context) -> list[Section]:
        """Return the sections that the help of a terminal shows."""
        return self.sections(ctx)

    def sections(self, ctx: click.Context, of: str = "", *, common: bool = False) -> list[Section]:
        """Return the sections of the help; ``of``: without the options of other kinds of source.

        ``common``: only the common options.
        """
        found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
        for param in sorted(self.get_params(ctx), key=_place):
            if not isinstance(param, click.Option) or not (record := param.get_help_record(ctx)):
                continue
            if common and not getattr(param, "common", True):
                continue
            title, example = getattr(param, "group", parameters.GENERAL), ""
            if isinstance(param, parameters.SourceOption):
                if of and of not in param.kinds:
                    continue
                title = f"{OPTIONS_OF}{of or ', '.join(param.kinds)}"
                one = of or next(iter(param.kinds))
                example = param.kinds[one] if of or len(param.kinds) == 1 else ""
            found.setdefault(title, (example, []))[1].append(record)
        return [(title, example, records) for title, (example, records) in found.items()]


def _place(param: click.Parameter) -> int:
    """Return the place of an option in the help: general options after the command's own, sources last."""
    if isinstance(param, parameters.SourceOption):
        return 2
    return 1 if getattr(param, "group", parameters.GENERAL) == parameters.GENERAL else 0


class SourceCommand(Command):
    """A command about a source, with the options that sources declare for it (``sources.fields``).

    Its help shows the common options. The others are topics: the sections, and the kinds of source.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        if isinstance(self, click.Group):
            return

        def complete(_context: click.Context, _option: click.Parameter, incomplete: str) -> list[str]:
            return [each.name for each in sources.own() if each.name.startswith(incomplete)]

        option = parameters.Option(
            ["--source", "kind"],
            "Source",
            common=True,
            shell_complete=complete,
            help="Kind of source, such as vddk [default: from the URL].",
        )
        self.params.insert(0, option)
        option = parameters.Option(
            [HELP_ALL],
            here=True,
            is_flag=True,
            is_eager=True,
            expose_value=False,
            common=True,
            callback=_show_all,
            help="Show all options and exit.",
        )
        self.params.append(option)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        few = self.few_params(ctx, args)
        if few is not None:
            wanted = {each.partition("=")[0] for each in self.own_arguments(args)}
            wanted = {each for each in wanted if each.startswith("--")} - {"--"}
            wanted |= {parameters.named(variable) for variable in contract.own(contract.environment())}
            if wanted <= {name for each in few for name in (*each.opts, *each.secondary_opts)}:
                ctx.meta[_key(ctx)] = few
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return few parameters if these are all that the command line has, else all."""
        if ctx.command is not self and ctx.parent is not None:
            # For the usage of a sub-command, click asks for those of the command above it.
            ctx = ctx.parent
        return self.all_params(ctx) if has_all_options(ctx) else ctx.meta[_key(ctx)]

    def own_arguments(self, args: list[str]) -> list[str]:
        """Return the arguments that are not those of a sub-command."""
        return args

    def few_params(self, ctx: click.Context, args: list[str]) -> list[click.Parameter] | None:
        """Return the parameters, with those of the sources that arguments name, by a URL or by name.

        None: all are needed, as in help.
        """
        if ctx.resilient_parsing or {*HELP, HELP_ALL} & {*args}:
            return None
        words = {word for each in args for word in (each.partition(":")[0], each.rpartition("=")[2])}
        return self.params_of(ctx, (each for each in sources.own() if words & {each.name, *each.schemes}))

    def all_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with those of all sources."""
        return self.params_of(ctx, sources.every())

    def params_of(self, ctx: click.Context, kinds: Iterable[kind.Kind]) -> list[click.Parameter]:
        """Return the parameters, with those of these sources."""
        own = super().get_params(ctx)
        known = {name for param in own for name in param.opts}
        found: dict[str, parameters.SourceOption] = {}
        for each in kinds:
            for field, default in each.table.values():
                is_offered = self.name in field.verbs and (each.digests or self.name != "digest")
                if field.option and field.option not in known and is_offered:
                    option = found.setdefault(field.option, parameters.SourceOption(field, default))
                    option.kinds[each.name] = self._example_of(each) if self.name in fields.READ else ""
        return [*own, *found.values()]

    def _example_of(self, made: kind.Kind) -> str:
        """Return the example of an import as one of this command, which may have no target."""
        example = made.example.replace(" import ", f" {self.name} ", 1)
        return example.rpartition(" ")[0] if self.name == "inspect" else example

    def kinds(self, ctx: click.Context) -> list[str]:
        """Return the kinds of source that the command has options for."""
        options = (each for each in self.get_params(ctx) if isinstance(each, parameters.SourceOption))
        return [*dict.fromkeys(kind for option in options for kind in option.kinds)]

    def topics(self, ctx: click.Context) -> list[str]:
        return [ALL, *self._own_topics(ctx), *self.kinds(ctx)]

    def _own_topics(self, ctx: click.Context) -> list[str]:
        return [_topic_of(each) for each in self.sections(ctx) if not each[0].startswith(OPTIONS_OF)]

    def shown(self, ctx: click.Context) -> list[Section]:
        topic, kinds = chosen(ctx), self.kinds(ctx)
        if topic in kinds:
            return [each for each in self.sections(ctx, of=topic) if _topic_of(each) == topic]
        if topic:
            return [each for each in self.sections(ctx) if topic in {ALL, _topic_of(each)}]
        common = [record for *_, records in self.sections(ctx, common=True) for record in records]
        more = [("options", ", ".join(self._own_topics(ctx))), ("kinds of source", ", ".join(kinds))]
        return [
            ("Common options", "", common),
            (f"More, with cdi-worker help {self.name} TOPIC", "", more),
        ]


def _topic_of(section: Section) -> str:
    """Return the topic of a section: the kind of source, or the first word of its title."""
    return section[0].removeprefix(OPTIONS_OF).partition(" ")[0].lower()


def _show_all(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        choose(ctx, ALL)
        click.echo(ctx.get_help())
        ctx.exit()


def _key(ctx: click.Context) -> str:
    # Contexts of sub-commands share ``meta`` with their parents.
    return f"{__name__} {ctx.info_name}"


def has_all_options(ctx: click.Context) -> bool:
    """Return whether the command has all options that it can have, not only those of the named sources."""
    return _key(ctx) not in ctx.meta
