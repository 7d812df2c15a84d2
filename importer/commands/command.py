"""Commands: their options are also read from the environment and a file, and declared by sources.

Options that sources declare (``sources.fields``) are added before a command line is parsed, if it has one of
them, or when help is printed: start-up time is part of every import, and most command lines have none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import click

from cdi_worker import errors
from cdi_worker.importer import contract
from cdi_worker.importer.commands import config_file, parameters

if TYPE_CHECKING:
    from click import shell_completion

    from cdi_worker.sources import fields, kind


OPTIONS_OF = "Options of "
#: Topics of help: the options of a pod's role, and only the commands.
POD = "pod"
BARE = "bare"
_TOPIC = f"{__name__}.topic"


def choose(context: click.Context, *topic: str) -> None:
    """Choose what help shows: the options of a kind of source, or a topic of the top-level command.

    Raises ``click.UsageError``.
    """
    name = topic[0] if topic else ""
    command = context.command
    if isinstance(command, PodGroup):
        known = ["", POD, BARE]
    else:
        known = ["", *command.kinds()] if isinstance(command, SourceCommand) else [""]
    if len(topic) > 1 or name not in known:
        hint = errors.supported(name, known[1:]) if known[1:] else "it has no kinds of source"
        raise click.UsageError(f"no help on {' '.join(topic)!r}; {hint}", context)
    # Contexts of sub-commands share ``meta`` with their parents.
    context.meta[_TOPIC] = command, name


def _chosen(context: click.Context) -> str:
    command, name = context.meta.get(_TOPIC, (None, ""))
    return name if command is context.command else ""


# -- options of every command ------------------------------------------------------------------


def _set_config(context: click.Context, _option: click.Parameter, path: str | None) -> None:
    obj = context.find_object(parameters.Context)
    if obj is None:
        return
    if path or obj.config is None:
        try:
            obj.config, obj.unreadable = config_file.read(path or "", obj.env), None
        except errors.RequestError as err:
            # A shell that asks for completions must get nothing else. A pod's role reports it.
            obj.config, obj.unreadable = config_file.Config(), err
    if obj.unreadable and not (context.resilient_parsing or isinstance(context.command, PodGroup)):
        raise obj.unreadable
    command = context.command
    if not isinstance(command, Command):
        return
    added = command.extend({f"--{key}" for key in obj.config.values(command.name or "")})
    context.default_map, unknown = command.configured(obj.config)
    for each in added:
        # None of them is on the command line, which is parsed.
        each.handle_parse_result(context, {}, [])
    root = context.find_root().command
    if isinstance(root, PodGroup) and command is not root and not context.resilient_parsing:
        names = {"", *root.list_commands(context)}
        # The keys of other commands are checked when these run: loading all commands takes time.
        if unknown or not {*obj.config.sections} <= names:
            root.check_keys(obj.config)
        if faults := tuple(root.variable_faults(obj.env, command)):
            raise errors.RequestError(*faults)


def _set_verbosity(context: click.Context, _option: click.Parameter, level: int | None) -> None:
    obj = context.find_object(parameters.Context)
    if obj is not None and level is not None and not context.resilient_parsing:
        obj.log(level)


def _set_quiet(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    obj = context.find_object(parameters.Context)
    if obj is not None and wanted and not context.resilient_parsing:
        obj.quiet = True
        obj.log()


def _set_json(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    obj = context.find_object(parameters.Context)
    if obj is not None and wanted:
        obj.as_json = True


def _common() -> list[parameters.Option]:
    return [
        parameters.Option(
            ["--verbosity", "--v", "-v"],
            type=int,
            metavar="[LEVEL]",
            expose_value=False,
            callback=_set_verbosity,
            help="Log level: 1 info, 4 debug; -v alone is 1.",
        ),
        parameters.Option(
            ["--quiet", "-q"],
            is_flag=True,
            expose_value=False,
            callback=_set_quiet,
            help="Print errors only: no progress, no summary, no warnings.",
        ),
        parameters.Option(
            ["--config"],
            metavar="FILE",
            is_eager=True,
            expose_value=False,
            callback=_set_config,
            help="Configuration file (TOML) [default: cdi-worker/config.toml in ~/.config or /etc/xdg].",
        ),
    ]


def _json() -> parameters.Option:
    return parameters.Option(
        ["--json", "as_json"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_set_json,
        help="Print the result, or the error, as JSON on standard output.",
    )


class Command(click.Command):
    """A command whose options can be set in the environment and in a file. ``example``: for its help."""

    #: The sources whose options it has: none, or by the groups of ``cdi_worker.sources``.
    searches: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *arguments: Any, example: str = "", **settings: Any) -> None:
        own = {
            "auto_envvar_prefix": contract.PREFIX,
            "help_option_names": ["-h", "--help"],
            "max_content_width": 100,
        }
        settings["context_settings"] = {**own, **settings.get("context_settings", {})}
        super().__init__(*arguments, **settings)
        self.example = example
        self.params += [*_common(), *([] if isinstance(self, click.Group) else [_json()])]

    def configured(self, found: config_file.Config) -> tuple[dict[str, Any], set[str]]:
        """Return the values of a configuration file by parameter, and the keys without one."""
        values = found.values(self.name or "")
        made = {}
        for each in self.options:
            if not each.here and each.key in values:
                value = values.pop(each.key)
                made[each.name or ""] = (value,) if each.multiple and isinstance(value, str) else value
        return made, {*values}

    @property
    def options(self) -> list[parameters.Option]:
        """The options, with those of sources that were added so far."""
        return [param for param in self.params if isinstance(param, parameters.Option)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if {"-h", "--help"} & {*args[:1]} and len(args) == 2:
            # ``import --help s3``
            choose(ctx, args[1])
            args = args[:1]
        self.extend({*self._named(args), *map(parameters.named, contract.own(contract.environment()))}, args)
        return super().parse_args(ctx, args)

    def _named(self, args: Iterable[str]) -> Iterator[str]:
        """Yield the options in ``args`` that this command does not have (a group: before its command)."""
        known = {name: each for each in self.params if isinstance(each, click.Option) for name in each.opts}
        rest = iter(args)
        for each in rest:
            name, equals, _ = each.partition("=")
            if each == "--" or (isinstance(self, click.Group) and not each.startswith("-")):
                return
            if name in known and not (equals or known[name].is_flag):
                next(rest, None)
            elif name not in known and name.startswith("--"):
                yield name

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[shell_completion.CompletionItem]:
        """Return completions, also of the options of sources."""
        self.complete()
        return super().shell_complete(ctx, incomplete)

    def extend(self, _names: Collection[str], _args: Iterable[str] = ()) -> list[parameters.Option]:
        """Add options of sources until ``names`` are there, first of the kind in ``args``; return them."""
        return []

    def complete(self) -> None:
        """Add the options of all sources."""
        self.extend({""})

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.complete()
        for title, example, records in self.shown(ctx):
            with formatter.section(title):
                formatter.write_dl(records)
                if example:
                    formatter.write_paragraph()
                    formatter.write_text(f"Example: {example}")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.example:
            with formatter.section("Examples" if "\n" in self.example else "Example"):
                for line in self.example.splitlines():
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")
        super().format_epilog(ctx, formatter)

    def shown(self, ctx: click.Context) -> list[tuple[str, str, list[tuple[str, str]]]]:
        """Return the sections that the help of a terminal shows."""
        return self.sections(ctx)

    def sections(self, ctx: click.Context, of: str = "") -> list[tuple[str, str, list[tuple[str, str]]]]:
        """Return the sections of the help: title, example, and the options with their texts.

        ``of``: a kind of source; of other kinds, there is nothing.
        """
        found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
        order = sorted(self.get_params(ctx), key=_place)
        for param in order:
            if not isinstance(param, click.Option) or not (record := param.get_help_record(ctx)):
                continue
            title, example = getattr(param, "group", parameters.GENERAL), ""
            if isinstance(param, parameters.SourceOption) and param.kinds:
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
    """A command about a source: it has the options of all sources."""

    searches: ClassVar[tuple[str, ...]] = ("own", "third_party")
    #: Whether the options of a source are shown with its example.
    has_examples: ClassVar[bool] = True
    #: Whether the options of all sources were added.
    is_complete = False

    def kinds(self) -> dict[str, str]:
        """Return the kinds of source that the command has options for, with an example of their use."""
        self.complete()
        options = (each for each in self.params if isinstance(each, parameters.SourceOption))
        return {kind: example for option in options for kind, example in option.kinds.items()}

    def shown(self, ctx: click.Context) -> list[tuple[str, str, list[tuple[str, str]]]]:
        kind = _chosen(ctx)
        found = self.sections(ctx, of=kind)
        own = [each for each in found if not each[0].startswith(OPTIONS_OF)]
        if not (kind or self.has_examples):
            return found
        if not kind:
            rows = [(name, example) for name, example in self.kinds().items() if example]
            title = f"Kinds of source, each with options of its own (cdi-worker help {self.name} KIND)"
            return [*own, (title, "", rows)]
        return [each for each in found if each not in own]

    def offers(self, _kind: kind.Kind) -> bool:
        """Return whether this command has the options of a source."""
        return True

    def offer(self, field: fields.Field, default: Any) -> parameters.SourceOption | None:
        """Return the option of a field, None if this command has none for it."""
        if not field.option:
            return None
        if field.flag:
            return parameters.SourceOption(field.option, is_flag=True, help=field.help)
        if field.lines:
            lines = parameters.TypedLines("text", field.parse)
            return parameters.SourceOption(field.option, type=lines, multiple=True, help=field.help)
        form = (
            parameters.FILE
            if field.file
            else field.parse
            if field.parse is str
            else parameters.Typed("text", field.parse)
        )
        shown = default if isinstance(default, str) and default else None
        return parameters.SourceOption(field.option, type=form, default=shown, help=field.help)

    def extend(self, names: Collection[str], args: Iterable[str] = ()) -> list[parameters.Option]:
        searches = self._searches(args)
        added: list[parameters.Option] = []
        while not self.is_complete and {*names} - {name for param in self.params for name in param.opts}:
            kinds = next(searches, None)
            self.is_complete = kinds is None
            added += self._add(kinds or ())
        return added

    def _searches(self, args: Iterable[str]) -> Iterator[Iterable[kind.Kind]]:
        """Yield the kinds of source that ``args`` name, by a URL or by name; all of ours; third parties'."""
        from cdi_worker import sources

        if not {"-h", "--help"} & {*args}:
            # Help has the kinds in the order of all.
            words = {word for each in args for word in (each.partition(":")[0], each.rpartition("=")[2])}
            yield (each for each in sources.own() if words & {each.name, *each.schemes})
        yield from (getattr(sources, search)() for search in self.searches)

    def _add(self, kinds: Iterable[kind.Kind]) -> Iterator[parameters.Option]:
        """Add the options of ``kinds``, and yield those that the command did not have."""
        known = {name: param for param in self.params for name in param.opts}
        for each in filter(self.offers, kinds):
            for field, default in each.table.values():
                option = known.get(field.option) or self.offer(field, default)
                if isinstance(option, parameters.SourceOption):
                    if field.option not in known:
                        known[field.option] = option
                        self.params.append(option)
                        yield option
                    option.kinds.setdefault(each.name, each.example if self.has_examples else "")


class DigestCommand(SourceCommand):
    """A command about the digest of a source."""

    has_examples = False
    #: The digest of a container image is that of the index, for all architectures; a digest has no stages.
    excluded: ClassVar[frozenset[str]] = frozenset(
        {"--architecture", "--previous-checkpoint", "--current-checkpoint", "--final-checkpoint"}
    )

    def offers(self, kind: kind.Kind) -> bool:
        return bool(kind.digests)

    def offer(self, field: fields.Field, default: Any) -> parameters.SourceOption | None:
        return None if field.option in self.excluded else super().offer(field, default)


class MountCommand(SourceCommand):
    """A command with options for the mounts of sources; their defaults are the paths in a pod."""

    has_examples = False

    def offers(self, kind: kind.Kind) -> bool:
        """Return whether a DataVolume can name this kind of source."""
        return any(field.key for field, _ in kind.table.values())

    def offer(self, field: fields.Field, default: Any) -> parameters.SourceOption | None:
        if not field.mount or field.key:
            return None
        return parameters.SourceOption(field.option, default=field.mount, help=field.help)


class PodGroup(SourceCommand, click.Group):
    """The top-level command, which runs a pod's role; it has options for the mounts of sources."""

    # Searching for plug-ins takes longer than everything else in this help.
    searches = ("own",)
    has_examples = False

    def offer(self, field: fields.Field, default: Any) -> parameters.SourceOption | None:
        if not field.mount:
            return None
        form = "FILE" if field.file else None
        return parameters.SourceOption(field.option, default=field.mount, metavar=form, help=field.help)

    def check_keys(self, found: config_file.Config) -> None:
        """Raise ``errors.RequestError`` if the configuration file has keys that no command has."""
        known: dict[str, set[str]] = {"": {each.key for each in self.options if not each.here}}
        context = click.Context(self)
        for name in self.list_commands(context):
            command = self.get_command(context, name)
            if isinstance(command, Command):
                command.complete()
                known[name] = {each.key for each in command.options if not each.here}
        known[""] |= {key for keys in known.values() for key in keys}
        faults = []
        for section, values in found.sections.items():
            if section not in known:
                hint = errors.did_you_mean(section, known)
                faults.append(f"[{section}] is not a command{'; ' if hint else ''}{hint}")
                continue
            keys = {key.replace("_", "-") for key in values}
            faults += [_stranger(key, section, known[section]) for key in sorted(keys - known[section])]
        if faults:
            raise errors.RequestError(*(f"{found.path}: {fault}" for fault in faults))

    def variable_faults(self, env: Mapping[str, str], of: Command) -> Iterator[str]:
        """Yield the faults of our own variables, as ``contract.own_faults``.

        ``of``: the command that runs, which may be given the variables of others; this group: a pod's role.
        """
        known = {each.variable for each in of.options if not each.here}
        if all(name in known and env[name].strip() for name in contract.own(env)):
            return
        # Misspelt variables, and those that only sources read.
        from cdi_worker import sources
        from cdi_worker.importer.roles import importer

        commands: list[Command] = [self]
        if of is not self:
            context = click.Context(self)
            found = (self.get_command(context, name) for name in self.list_commands(context))
            commands += [each for each in found if isinstance(each, Command)]
        options = []
        for each in commands:
            each.complete()
            options += [option for option in each.options if not option.here]
        known = {option.variable for option in options}
        known |= {each.name for each in importer.VARIABLES if each.name.startswith(contract.PREFIX)}
        for search in (sources.own, sources.third_party):
            fields = (field for kind in search() for field, _ in kind.table.values())
            known |= {name for field in fields for name in (field.env, *field.more) if name}
        here = {option.variable: option.key for option in of.options if option.here}
        for name in [name for name in contract.own(env) if name in here]:
            yield f"{name}: this is an option only; unset it, and give --{here[name]}"
        rest = {name: value for name, value in env.items() if name not in here}
        yield from contract.own_faults(rest, known, {each.variable for each in options if each.empty})

    def shown(self, ctx: click.Context) -> list[tuple[str, str, list[tuple[str, str]]]]:
        general = [each for each in self.sections(ctx) if each[0] == parameters.GENERAL]
        return {BARE: [], POD: self.sections(ctx)}.get(_chosen(ctx), general)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)


def _stranger(key: str, section: str, known: set[str]) -> str:
    hint = errors.did_you_mean(key, known)
    return f"{key!r} is not an option{f' of {section}' if section else ''}{'; ' if hint else ''}{hint}"
