"""The command verify."""

from __future__ import annotations

from typing import Any

import click

from cdi_worker import errors
from cdi_worker.importer import contract
from cdi_worker.importer import request as request_module
from cdi_worker.importer.commands import command, options, output, parameters

EXAMPLES = """\
cdi-worker verify https://example.org/disk.qcow2 disk.img
cdi-worker verify s3://bucket/disk.vmdk /dev/vdb
cdi-worker verify --all vm.ova images/
"""


@click.command(cls=command.SourceCommand, params=options.of("verify"), example=EXAMPLES)
@click.argument("source", type=options.TARGET)
@click.argument("disk_", metavar="DISK", type=options.TARGET)
@parameters.option(
    request_module.SOURCE,
    "--all",
    "every",
    common=True,
    is_flag=True,
    here=True,
    help="Compare all disks of an OVA or a machine with the files of import --all in the folder DISK.",
)
@options.progress
@click.pass_obj
def verify(obj: parameters.Context, /, source: str, disk_: str, **given: Any) -> int:
    """Compare DISK (a file, directory, block device or NBD export) with the disk at SOURCE.

    SOURCE is one of import, in any format. DISK is only read. The exit status is 0 if it is equal, 9 if it
    differs, and another one if that could not be found out.
    """
    request = options.make_request("verify", source, disk_, given, contract.environment())
    if given["every"]:
        options.check_all(request, given)
    with output.progress(given["style"], obj) as reporter:
        if given["every"]:
            from cdi_worker.importer import together

            found = together.verify_all(request, reporter, obj.cancel)
        else:
            from cdi_worker.importer import verification

            found = [verification.verify(request, reporter, obj.cancel)]
    for each in found:
        output.verification(each, obj)
    return 0 if all(each.is_equal for each in found) else errors.Differs.status
