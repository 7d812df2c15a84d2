"""The commands of Forklift's populator pods, which CDI's controllers start (contract, Populators)."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from cdi_worker import contract, errors, execute, metrics, progress, request
from cdi_worker.sources import base
from cdi_worker.sources.glance import locations as glance
from cdi_worker.sources.ovirt import locations as ovirt

if TYPE_CHECKING:
    from cdi_worker.commands import group

log = logging.getLogger(__name__)

#: Variables of the Secret, and the fields of ``Glance`` that they fill.
OPENSTACK: Final = {
    "authType": "auth_type",
    "userID": "user_id",
    "token": "token",
    "applicationCredentialID": "application_id",
    "applicationCredentialName": "application_name",
    "applicationCredentialSecret": "application_secret",
    "projectName": "project_name",
    "projectID": "project_id",
    "userDomainName": "user_domain_name",
    "userDomainID": "user_domain_id",
    "projectDomainName": "project_domain_name",
    "projectDomainID": "project_domain_id",
    "domainName": "domain_name",
    "domainID": "domain_id",
    "defaultDomain": "default_domain",
    "regionName": "region",
    "availability": "interface",
}


def _options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options that both populators have. Go's flag package accepts one dash, too."""
    more = (
        click.option(
            "--volume-path", "-volume-path", "target", required=True, help="Disk or device to fill."
        ),
        click.option("--owner-uid", "-owner-uid", default="", help="Label of the progress metric."),
        click.option("--pvc-size", "-pvc-size", "size", type=click.IntRange(0), help="Bytes of the volume."),
        click.option(
            "--secret-name", "-secret-name", default="", help="Secret of the environment; for the log."
        ),
        click.option("--cr-name", "-cr-name", default="", hidden=True),
        click.option("--cr-namespace", "-cr-namespace", default="", hidden=True),
        click.option("--scratch-dir", default="", help="Scratch space, if there is any."),
        click.option("--v", "-v", "verbosity", type=int, default=1, hidden=True),
        click.option("--alsologtostderr", "--logtostderr", is_flag=True, expose_value=False, hidden=True),
        click.option("--metrics-port", type=click.IntRange(0, 65535), default=contract.Paths().metrics_port),
    )
    for option in reversed(more):
        command = option(command)
    return command


@click.command("openstack-populator", hidden=True)
@click.option("--endpoint", "-endpoint", required=True, help="URL of Keystone.")
@click.option("--image-id", "-image-id", required=True, help="Id of the image in Glance.")
@_options
@click.pass_obj
def openstack(obj: group.Context, /, endpoint: str, image_id: str, **settings: Any) -> int:
    """Fill a volume with an image of OpenStack, as Forklift's populator."""
    env = contract.environment()
    with _access(env) as access:
        given = {field: value for name, field in OPENSTACK.items() if (value := env.get(name))}
        location = glance.Glance(endpoint, access, image_id=image_id, **given)
        return _populate(obj, "openstack-populator", "glance", location, settings)


@click.command("ovirt-populator", hidden=True)
@click.option("--engine-url", "-engine-url", required=True, help="URL of the engine.")
@click.option("--disk-id", "-disk-id", required=True, help="Id of the disk.")
@_options
@click.pass_obj
def engine(obj: group.Context, /, engine_url: str, disk_id: str, **settings: Any) -> int:
    """Fill a volume with a disk of oVirt, as Forklift's populator."""
    env = contract.environment()
    with _access(env, user="user") as access:
        location = ovirt.Imageio(_api(engine_url), access, disk_id=disk_id)
        return _populate(obj, "ovirt-populator", "imageio", location, settings)


def _api(url: str) -> str:
    """Return the URL of the engine's API; Forklift passes the engine's own."""
    return f"{url.rstrip('/')}/ovirt-engine/api" if urllib.parse.urlsplit(url).path in {"", "/"} else url


def _populate(
    obj: group.Context, role: str, source: str, location: base.Location, settings: Mapping[str, Any]
) -> int:
    """Run the import; a failure is raised, and the pod is started again."""
    obj.set_up_logging(max(1, settings["verbosity"]))
    target = settings["target"]
    log.info("populate target=%r size=%r secret=%r", target, settings["size"], settings["secret_name"])
    wanted = request.Request(
        source=source,
        location=location,
        target=target,
        volume=None if Path(target).is_block_device() else str(Path(target).parent),
        scratch=settings["scratch_dir"] or None,
        owner_uid=settings["owner_uid"],
        existing="remove",
        permissions=contract.FILE_MODE,
        wait=contract.WAIT,
    )
    try:
        with metrics.exposed(role, wanted.owner_uid, settings["metrics_port"]) as meter:
            execute.run(wanted, progress.Several(progress.Lines(sys.stderr), meter), obj.cancel)
    except errors.Error as err:
        log.error("failed: %s", err)  # noqa: TRY400  (one line for the reader of the pod's log)
        log.debug("trace", exc_info=True)
        # Kubernetes starts the pod again after any failure, whatever its status.
        return 1
    return 0


@contextlib.contextmanager
def _access(env: Mapping[str, str], user: str = "username") -> Iterator[base.Access]:
    """Yield the access that the Secret in the environment describes."""
    reading = contract.Reading(env)
    insecure, proxies = env.get("insecureSkipVerify", "").lower() == "true", reading.proxies()
    with contextlib.ExitStack() as stack:
        files: tuple[str, ...] = ()
        if text := env.get("cacert", "").strip():
            # In memory: the pod's root file system may be read-only.
            file = stack.enter_context(open(os.memfd_create("cacert"), "wb", buffering=0))
            file.write(text.encode("utf-8", "surrogateescape") + b"\n")
            files = (f"/proc/self/fd/{file.fileno()}",)
        yield base.Access(
            user=env.get(user, ""),
            password=env.get("password", ""),
            ca_files=files,
            insecure=insecure,
            **proxies,
        )
