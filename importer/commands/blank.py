"""The command blank."""

from __future__ import annotations

from typing import Any

import click

from cdi_worker import errors
from cdi_worker.importer import execute
from cdi_worker.importer import request as request_module
from cdi_worker.importer.commands import command, options, output, parameters
from cdi_worker.sources import base


@click.command(cls=command.Command, params=options.of("blank"), example="cdi-worker blank disk.img 10Gi")
@click.argument("target", type=options.TARGET)
@click.argument("size", type=options.SIZE)
@click.pass_obj
def blank(obj: parameters.Context, /, target: str, size: int, **given: Any) -> int:
    """Create a blank disk of SIZE (such as 10Gi) at TARGET. On a device, SIZE bytes are zeroed.

    SIZE is rounded up to whole sectors of 512 bytes.
    """
    if not size:
        raise errors.RequestError("a disk of 0 bytes; give a size such as 10Gi")
    settings = {**options.settings("blank", given), "image_size": size}
    request = request_module.make("none", base.Location(""), target, settings)
    output.result(execute.run(request, cancel=obj.cancel), request, obj)
    return 0
