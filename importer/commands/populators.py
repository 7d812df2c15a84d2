"""The commands of Forklift's populator pods, which CDI's controllers start (contract, Populators)."""

from __future__ import annotations

import contextlib
import logging
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click

from cdi_worker import errors
from cdi_worker.importer import contract, execute, metrics
from cdi_worker.importer import request as request_module
from cdi_worker.importer.commands import parameters
from cdi_worker.importer.request import Request, Room
from cdi_worker.sources import base, certificates, fields
from cdi_worker.sources.glance import locations as glance
from cdi_worker.sources.ovirt import locations as ovirt

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
VARIABLES: Final = (
    contract.Variable("username", "user of OpenStack", parse=fields.secret),
    contract.Variable("user", "user of oVirt", parse=fields.secret),
    contract.Variable("password", "password", parse=fields.secret),
    contract.Variable("cacert", "CA certificates (PEM text)"),
    contract.Variable("insecureSkipVerify", "`true`: do not verify certificates", "false"),
)
#: The settings of a remedy, and the keys of the Secret that have them.
NAMES: Final = (("ca_files", "cacert"), ("insecure", "insecureSkipVerify"))
#: Makes the location of a disk from the login, the environment, and the populator's own arguments.
Locate = Callable[..., base.Location]
#: What Go's strconv.ParseBool reads as true, in small letters.
TRUE: Final = frozenset({"1", "t", "true"})


def _option(name: str, *more: str, **settings: Any) -> click.Option:
    """Return an option that may have one dash, as Go's flag package accepts it."""
    return click.Option([f"--{name}", f"-{name}", *more], **settings)


#: The options that both populators have.
COMMON: Final = (
    _option("volume-path", "target", required=True, help="Disk or device to fill."),
    _option("owner-uid", default="", help="Label of the progress metric."),
    _option(
        "pvc-size",
        "size",
        type=parameters.Whole(0),
        help="Bytes of the claim. A larger disk is refused, unless the target is a device that can hold it.",
    ),
    _option("secret-name", default="", help="Secret of the environment; for the log."),
    _option("cr-name", default="", hidden=True),
    _option("cr-namespace", default="", hidden=True),
    click.Option(["--scratch-dir"], default="", help="Scratch space, if there is any."),
    _option("v", "verbosity", type=int, default=1, hidden=True),
    click.Option(["--alsologtostderr", "--logtostderr"], is_flag=True, expose_value=False, hidden=True),
    click.Option(["--metrics-port"], type=parameters.Whole(0, 65535), default=contract.Paths().metrics_port),
)


def _populator(name: str, source: str, user: str, **own: str) -> Callable[[Locate], click.Command]:
    """Return a decorator that makes the command of a populator from a function that locates the disk.

    ``user``: the variable with the name of the user. ``own``: its own arguments, and their help.
    """

    def decorate(locate: Locate) -> click.Command:
        def run(obj: parameters.Context, /, **given: Any) -> int:
            obj.set_up_logging(max(1, given["verbosity"]))
            env = contract.environment()
            try:
                with _access(env, user, obj.paths.access) as access:
                    location = locate(access, env, **{each: given[each] for each in own})
                    request = _request(source, location, obj.paths.settings, given)
                    with metrics.expose(name, request.room.owner, given["metrics_port"]) as reporter:
                        execute.run(request, reporter, obj.cancel)
            except errors.Error as err:
                secret = given["secret_name"]
                names = {field: f"{key} in the Secret {secret}".rstrip() for field, key in NAMES}
                text = err.message(names)
                log.error("failed: %s", text)  # noqa: TRY400  (one line for the reader of the pod's log)
                log.debug("trace", exc_info=True)
                # Kubernetes starts the pod again after any failure, whatever its status.
                return 1
            return 0

        mine = [_option(each.replace("_", "-"), required=True, help=text) for each, text in own.items()]
        command = click.command(name, hidden=True, help=locate.__doc__, params=[*mine, *COMMON])
        return command(click.pass_obj(run))

    return decorate


@_populator(
    "openstack-populator", "glance", "username", endpoint="URL of Keystone.", image_id="Id of the image."
)
def openstack(access: base.Access, env: Mapping[str, str], endpoint: str, image_id: str) -> glance.Glance:
    """Fill a volume with an image of OpenStack, as Forklift's populator."""
    return glance.Glance(endpoint, access, image_id=image_id, **login(env))


def login(env: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of ``Glance`` that the Secret in the environment fills."""
    return {
        field: fields.named(fields.token if field == "token" else fields.secret, value, name)
        for name, field in OPENSTACK.items()
        if (value := env.get(name))
    }


@_populator("ovirt-populator", "imageio", "user", engine_url="URL of the engine.", disk_id="Id of the disk.")
def engine(access: base.Access, _env: Mapping[str, str], engine_url: str, disk_id: str) -> ovirt.Imageio:
    """Fill a volume with a disk of oVirt, as Forklift's populator."""
    # Forklift passes the URL without the path of the API.
    if base.is_web(engine_url) and urllib.parse.urlsplit(engine_url).path in {"", "/"}:
        engine_url = f"{engine_url.rstrip('/')}/ovirt-engine/api"
    return ovirt.Imageio(engine_url, access, disk_id=disk_id)


def _request(
    source: str, location: base.Location, settings: Mapping[str, Any], given: Mapping[str, Any]
) -> Request:
    target, size = given["target"], given["size"]
    log.info("populate target=%r size=%r secret=%r", target, size, given["secret_name"])
    if not Path(target).is_absolute():
        # What this program prints is its log, and a success there fills no volume.
        raise errors.RequestError(f"--volume-path {target!r}: is not an absolute path")
    if settings.get("existing") == contract.COMPARE:
        raise errors.RequestError(contract.NOT_VERIFIED)
    mount = None if Path(target).is_block_device() else str(Path(target).parent)
    room = Room(limit=size or None, mount=mount, owner=given["owner_uid"])
    own = {"layers": (), "room": room, "scratch": given["scratch_dir"] or None}
    return request_module.make(source, location, target, {**settings, **own})


@contextlib.contextmanager
def _access(env: Mapping[str, str], user: str, limits: Mapping[str, Any]) -> Iterator[base.Access]:
    """Yield the access that the Secret in the environment describes, with ``limits``, other fields of it."""
    reading = contract.Reading(env, VARIABLES)
    insecure = reading.text("insecureSkipVerify").strip().lower() in TRUE
    with contextlib.ExitStack() as stack:
        files: tuple[str, ...] = ()
        if (text := reading.text("cacert").strip()) and not insecure:
            # A file in memory: the root file system of the pod may be read-only.
            usable = certificates.usable(text.encode("utf-8", "surrogateescape"), "cacert of the Secret")
            files = (stack.enter_context(certificates.memory_file(usable)),)
        login: dict[str, Any] = {"user": reading.text(user), "password": reading.text("password")}
        if reading.faults:
            raise errors.RequestError(*reading.faults)
        proxies = reading.fields(base.Access, base.PROXIES)
        yield base.Access(**login, ca_files=files, insecure=insecure, **proxies, **limits)
