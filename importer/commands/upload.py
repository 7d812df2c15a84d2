"""The command upload."""

from __future__ import annotations

from typing import Any

import click

from cdi_worker.importer import contract
from cdi_worker.importer import request as request_module
from cdi_worker.importer.commands import command, options, output, parameters
from cdi_worker.importer.send import file as upload_file
from cdi_worker.sources import base, fields

EXAMPLES = """\
cdi-worker upload disk.qcow2 https://proxy.example.org --token-file token
cdi-worker upload disk.raw https://host:8443 --cert my.pem --ca-file ca.pem
"""


@click.command(cls=command.Command, params=options.of("upload"), example=EXAMPLES)
@click.argument("file", type=options.TARGET)
@click.argument("url")
@parameters.option(
    request_module.SOURCE,
    "--checksum",
    help="Checksum ALGORITHM:HEX of the file, verified during the upload.",
)
@parameters.option(
    base.ACCESS, "--token-file", type=parameters.FILE, help="File with a token for CDI's upload proxy."
)
@parameters.option(base.ACCESS, "--cert", type=parameters.FILE, help="Client certificate (PEM).")
@parameters.option(
    base.ACCESS,
    "--key",
    type=parameters.FILE,
    help="Key of the client certificate (PEM), if it is not in the file of --cert.",
)
@options.progress
@click.pass_obj
def upload(obj: parameters.Context, /, file: str, url: str, **given: Any) -> int:
    """Upload the image FILE to the upload server or CDI upload proxy at URL."""
    access = base.Access(
        ca_files=options.certificates(given),
        insecure=given["insecure"],
        **contract.Reading(contract.environment()).fields(base.Access, base.PROXIES),
        **options.limits("upload", given),
    )
    settings = upload_file.Settings(
        file,
        url,
        token=options.read_secret(given["token_file"], fields.token) if given["token_file"] else "",
        access=access,
        certificate=given["cert"],
        key=given["key"],
        checksum=given["checksum"],
    )
    with output.progress(given["style"], obj) as reporter:
        done = upload_file.send(settings, reporter, obj.cancel)
    output.uploaded(done, obj)
    return 0
