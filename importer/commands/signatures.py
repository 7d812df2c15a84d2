"""The options that demand a signature: of commands, and of a pod's role."""

from __future__ import annotations

import os
from typing import Any, Final

import click
from click import core

from cdi_worker.importer import contract
from cdi_worker.importer.commands import parameters

SIGNATURE = "Signature"


def _option(*names: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return names, settings


#: The options but for the policy, whose default is another one in a pod: names, and settings.
_OPTIONS: Final = (
    _option(
        "--checksum-file",
        metavar="URL",
        help="File with the checksum of the disk, such as SHA256SUMS: URL or path.",
    ),
    _option(
        "--map",
        metavar="URL",
        help="Map of the disk with checksums, as bmaptool writes it: URL or path.",
    ),
    _option(
        "--signed-by",
        metavar="FILE",
        help="Public keys, in a file or a folder: import only what one of them has signed. "
        "PEM for images in a registry; OpenPGP or minisign for --checksum-file and --map.",
    ),
    _option(
        "--certificate-identity",
        "identity",
        metavar="TEXT",
        help="Signer in the certificate of a signature without a key: mail address or URL.",
    ),
    _option(
        "--certificate-oidc-issuer",
        "issuer",
        metavar="URL",
        help="Who has identified the signer of --certificate-identity.",
    ),
    _option(
        "--trusted-root",
        metavar="FILE",
        help="Sigstore's trusted_root.json: the authorities and logs for --certificate-identity.",
    ),
    _option(
        "--signature-annotation",
        "annotations",
        type=parameters.TypedLines("annotation", contract.parse_annotation),
        multiple=True,
        metavar="KEY=VALUE",
        help="Annotation that must have been signed, too; may be repeated.",
    ),
)


def options(group: str, policy: str = "") -> tuple[parameters.Decorator, ...]:
    """Return the options in the section ``group`` of the help. ``policy``: its default path."""
    return (
        *(parameters.option(group, *names, **settings) for names, settings in _OPTIONS),
        parameters.option(
            group,
            "--signature-policy",
            "policy",
            default=policy or None,
            metavar="FILE",
            help="policy.json of the containers tools: what to accept, by registry and repository.",
        ),
    )


def take_pod(ctx: click.Context, given: dict[str, Any]) -> None:
    """Leave out of the values of a pod's options a policy that is not mounted where it is by default.

    One that is named must exist. Raises ``click.UsageError`` for an option in front of a command, which has
    its own.
    """
    source = {name: ctx.get_parameter_source(name) for name in parameters.DEMAND}
    if ctx.invoked_subcommand is not None:
        for name, origin in source.items():
            if origin is core.ParameterSource.COMMANDLINE:
                option = next(each.opts[0] for each in ctx.command.params if each.name == name)
                raise click.UsageError(f"write {option} after the command {ctx.invoked_subcommand}", ctx)
    if source["policy"] is core.ParameterSource.DEFAULT and not _is_mounted(given["policy"]):
        given["policy"] = None


def _is_mounted(path: str) -> bool:
    """Return whether there is a file; one that this user may not look at is there: reading it will fail."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
