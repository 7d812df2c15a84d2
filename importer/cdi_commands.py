"""The programs of CDI's importer image that are no imports, with their own flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from images import retry
from importer import contract, request

if TYPE_CHECKING:
    from importer import commands

#: Where a pod has its account (Kubernetes, "Accessing the Kubernetes API from a Pod").
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


@click.command("cdi-source-update-poller", hidden=True)
@click.option("-ns", "namespace", required=True, help="Namespace of the DataImportCron.")
@click.option("-cron", "name", required=True, help="Its name.")
@click.option("-url", "url", required=True, help="The image to watch (docker://…).")
@click.option("-certdir", "certificates", default="", help="Folder of authorities to trust.")
@click.option("--account", default=ACCOUNT, help="Folder of the pod's credentials.")
@click.pass_obj
def poll(obj: commands.Context, /, url: str, certificates: str, **cron: str) -> int:
    """Tell a DataImportCron of an image's digest."""
    from importer import dataimportcron
    from sources import registry

    env = contract.environment()
    watched = dataimportcron.Cron(env=env, **cron)
    location = dataimportcron.location(env, url, certificates)
    digest = retry.patiently(
        lambda: registry.digest(location, obj.cancel), request.CONNECT_PATIENCE, obj.cancel
    )
    click.echo(f"{'wanted' if watched.note(digest) else 'known'}: {digest}")
    return 0


@click.command("cdi-image-size-detection", hidden=True)
@click.option("-image-path", "path", required=True, help="The disk.")
@click.option("--termination-log", default=contract.Paths().termination_log)
def measure(path: str, termination_log: str) -> int:
    """Leave the size of a disk in the termination log."""
    from importer import dataimportcron

    click.echo(dataimportcron.measure(path, termination_log))
    return 0


COMMANDS = (poll, measure)
