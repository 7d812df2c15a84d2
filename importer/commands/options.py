"""The options of the sub-commands, and the import request made from them.

What a request or an access declares (``sources.fields``) is an option of each command that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click
from click import core

from cdi_worker import errors, sources, units
from cdi_worker.images import targets
from cdi_worker.importer import contract, request
from cdi_worker.importer.commands import output, parameters
from cdi_worker.sources import base, fields, smallfile

if TYPE_CHECKING:
    from fractions import Fraction

SIZE = parameters.Typed("size", units.parse_quantity)
#: A path that cannot be read or written is reported when it is opened (exit status 6).
TARGET = click.Path(readable=False)
#: The sections of the help, in their order.
SECTIONS = (
    request.SOURCE,
    base.ACCESS,
    base.TRANSFER,
    request.SIGNATURE,
    request.DISK,
    request.WRITING,
    request.OUTPUT,
)


def of(verb: str, group: str = "") -> list[click.Parameter]:
    """Return the options that a request and an access declare for a command; ``group``: as one section."""
    found = [
        (field, default)
        for owner in (request.Request, base.Access)
        for _, field, default in fields.declared(owner)
        if field.option and verb in field.verbs
    ]
    found.sort(key=lambda each: SECTIONS.index(each[0].section))
    return [parameters.declared(field, default, group) for field, default in found]


progress = parameters.option(
    request.OUTPUT,
    "--progress",
    "style",
    type=parameters.Choice(output.STYLES),
    default="auto",
    help="How to show progress; auto: a bar on a terminal, else lines.",
)


def settings(verb: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the options of a command set, by field of a request. Raises ``errors.RequestError``."""
    if given.get("force") and given.get("update"):
        raise errors.RequestError("--force replaces an existing disk, --update changes it; give one of them")
    return fields.values(request.Request, lambda field: _value(verb, field, given))


def limits(verb: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the options of a command set for all servers, by field of ``base.Access``."""
    return fields.values(
        base.Access, lambda field: _value(verb, field, given) if field.section == base.TRANSFER else None
    )


def refuse_in_front(ctx: click.Context) -> None:
    """Raise ``click.UsageError`` for a demand in front of a command, which has its own."""
    for name, field, _ in fields.declared(request.Request) if ctx.invoked_subcommand else ():
        given = parameters.source(ctx, field.key_of_option)
        if name == "demand" and given is core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"write {field.option} after the command {ctx.invoked_subcommand}", ctx)


def _value(verb: str, field: fields.Field, given: Mapping[str, Any]) -> Any:
    return given.get(field.key_of_option) if field.option and verb in field.verbs else None


def make_request(
    verb: str, address: str, target: str, given: Mapping[str, Any], env: Mapping[str, str]
) -> request.Request:
    """Return the request of a command line, which begins with ``verb``."""
    kind = sources.find(given["kind"]) if given["kind"] else sources.of(address)
    values = settings(verb, given)
    location = make_location(kind, address, given, env)
    values["to"] = export_location(target, location.access, given)
    disk = target if given.get("every") else request.disk_path(target, values)
    return request.make(kind.name, location, disk, values)


def export_location(target: str, access: base.Access, given: Mapping[str, Any]) -> base.Location | None:
    """Return the location of an NBD export as the target, with certificates; None for other targets."""
    if not targets.is_export(target):
        return None
    values = parameters.of_sources(given) if target.startswith("nbds:") else {}
    login = base.Access(
        ca_files=access.ca_files,
        insecure=access.insecure,
        connections=access.connections,
        patience=access.patience,
    )
    return sources.find("nbd").fill(
        target, login, lambda field: values.get(field.option) if field.file else None
    )


def check_all(made: request.Request, given: Mapping[str, Any]) -> None:
    """Raise ``errors.RequestError`` for options of one disk beside ``--all``."""
    others = {"--disk": made.disk, "--size": made.image_size, "--content-type": made.is_archive}
    others |= {"--format": bool(made.format)}
    others |= {"--layer": bool(made.layers), "--dry-run": given.get("dry_run")}
    faults = [f"{option} cannot be used with --all" for option, value in others.items() if value]
    if not targets.is_folder(made.target):
        faults.append(f"{made.target}: --all needs a folder")
    if faults:
        raise errors.RequestError(*faults)


def overhead(given: Mapping[str, Any]) -> Fraction | int:
    """Return the overhead of the volume that a report names: by default that of CDI."""
    return contract.parse_overhead("0.06") if given["overhead"] is None else given["overhead"]


def make_location(
    kind: sources.kind.Kind, address: str, given: Mapping[str, Any], env: Mapping[str, str]
) -> base.Location:
    """Return the location of the source from the options of the current command and the environment."""
    reading = contract.Reading(env)
    values = parameters.of_sources(given)
    # As the tools of this kind of source do, such as AWS_CA_BUNDLE.
    own = {
        name: fields.named(fields.secret, env.get(variable, ""), variable)
        for name, variable in kind.location_type.variables.items()
    }
    bundles = [path for path in own.pop("ca_file", "").split(":") if path]
    login = {
        name: read_secret(text, field.parse) if field.file else fields.named(field.parse, text, field.option)
        for name, field, _ in fields.declared(base.Access)
        if field.secret and field.env and (text := given.get(field.key_of_option))
    }
    access = base.Access(
        headers=given["header"] + contract.header_files(given["header_dir"] or ""),
        ca_files=(*certificates(given), *bundles),
        insecure=given["insecure"],
        **own
        | reading.fields(base.Access, fields.COMMANDS)
        | {each: text for each, text in login.items() if text},
        **limits("import", given),
    )

    if access.user and not (access.password or given.get("password_file")):
        reason = "--user without a password; give it with --password-file, or IMPORTER_SECRET_KEY"
        raise errors.RequestError(reason)

    def value(field: fields.Field) -> Any:
        return values.get(field.option, reading.field(field) if field.ambient else None)

    location = kind.fill(address, access, value)
    if reading.faults:
        raise errors.RequestError(*reading.faults)
    return location


def certificates(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the certificate files of --ca-file and --ca-dir."""
    return (*given["ca_file"], *contract.certificate_files(given["ca_dir"] or ""))


def read_secret(path: str, parse: Callable[[str], str] = fields.secret) -> str:
    """Return the secret in a file, converted by ``parse``. Raises ``errors.RequestError``."""
    try:
        text = smallfile.read(path).decode()
    except UnicodeDecodeError as err:
        raise errors.RequestError(f"{path}: is not UTF-8 text") from err
    return fields.named(parse, text, path)
