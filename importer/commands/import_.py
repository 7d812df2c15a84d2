"""The command import."""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

from cdi_worker import errors
from cdi_worker.images import targets
from cdi_worker.importer import contract
from cdi_worker.importer import request as request_module
from cdi_worker.importer.commands import command, options, output, parameters
from cdi_worker.sources.local import locations

log = logging.getLogger(__name__)

EXAMPLES = """\
cdi-worker import https://example.org/disk.qcow2 disk.img
cdi-worker import docker://quay.io/org/disk:latest /dev/vdb
ssh host cat disk.qcow2 | cdi-worker import - disk.img
cdi-worker import https://example.org/disk.raw.xz - | ssh host 'cat >/dev/vdb'
"""


@click.command("import", cls=command.SourceCommand, params=options.of("import"), example=EXAMPLES)
@click.argument("source", type=options.TARGET)
@click.argument("target", type=options.TARGET)
@parameters.option(
    request_module.SOURCE,
    "--all",
    "every",
    common=True,
    is_flag=True,
    here=True,
    help="Import all disks of an OVA or a machine to a folder.",
)
@parameters.option(
    request_module.OUTPUT,
    "--dry-run",
    common=True,
    is_flag=True,
    here=True,
    help="Contact the source and print the plan; write nothing.",
)
@options.progress
@click.pass_obj
def import_(obj: parameters.Context, /, source: str, target: str, **given: Any) -> int:
    """Import the disk at SOURCE (a URL or path, - for standard input) to TARGET (a file, directory, block
    device or NBD export, - for standard output).
    """
    obj.to_stdout = target == targets.STDOUT and not given["dry_run"]
    if obj.to_stdout and given["verify"]:
        raise errors.RequestError("--verify reads the disk back, which standard output does not allow")
    if given["verify"] and given["content_type"] == "archive":
        raise errors.RequestError("--verify reads the disk back, and an archive is not a disk")
    request = options.make_request("import", source, target, given, contract.environment())
    if given["every"]:
        options.check_all(request, given)
    elif given["dry_run"]:
        from cdi_worker.importer import inspection

        found = inspection.inspect(request, obj.cancel, overhead=options.overhead(given))
        return output.inspection(found, obj)
    elif source == locations.STDIN and not given["kind"] and not sys.stdin.isatty():
        log.warning("standard input can be read only once: an interrupted import starts over")
    with output.progress(given["style"], obj) as reporter:
        if given["every"]:
            from cdi_worker.importer import together

            results = together.run_all(request, reporter, obj.cancel)
        else:
            from cdi_worker.importer import execute

            results = [execute.run(request, reporter, obj.cancel)]
    for result in results:
        output.result(result, request, obj)
    return 0
