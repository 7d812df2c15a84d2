"""The command inspect."""

from __future__ import annotations

from typing import Any

import click

from cdi_worker.importer import contract
from cdi_worker.importer.commands import command, options, output, parameters


@click.command(
    cls=command.SourceCommand,
    params=options.of("inspect"),
    example="cdi-worker inspect https://example.org/disk.qcow2",
)
@click.argument("source", type=options.TARGET)
@click.pass_obj
def inspect(obj: parameters.Context, /, source: str, **given: Any) -> int:
    """Show format, sizes and planned route of SOURCE (a URL or path), reading little of it."""
    from cdi_worker.importer import inspection

    given["overhead"] = options.overhead(given)
    request = options.make_request("inspect", source, "", given, contract.environment())
    return output.inspection(inspection.inspect(request, obj.cancel), obj)
