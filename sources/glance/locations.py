"""The location of an image in OpenStack's image service, Glance."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

from cdi_worker import errors
from cdi_worker.sources import base, fields

PASSWORD: Final = "password"  # noqa: S105  (the name of a method)
TOKEN: Final = "token"  # noqa: S105  (the name of a method)
APPLICATION: Final = "applicationcredential"
#: The methods by the names of OpenStack's clients and of Forklift; empty: inferred from the credentials.
METHODS: Final = {
    "": "",
    "password": PASSWORD,
    "v3password": PASSWORD,
    "token": TOKEN,
    "v3token": TOKEN,
    "applicationcredential": APPLICATION,
    "v3applicationcredential": APPLICATION,
}
INTERFACES: Final = ("public", "internal", "admin")


def _openstack(variable: str, meaning: str, **more: Any) -> Any:
    """Return a field that the variable of OpenStack's clients sets."""
    return fields.field(env=variable, help=meaning, ambient=True, **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glance(base.Location):
    """The URL of Keystone and the id of an image.

    ``domain_id`` and ``domain_name`` are the domain of the user and of the project where these are not given,
    else the id ``default_domain`` is. ``interface``: one of INTERFACES.
    """

    variables: ClassVar[Mapping[str, str]] = {"ca_file": "OS_CACERT"}

    image_id: str = fields.field(env="IMPORTER_IMAGE_ID", option="--image-id", help="Id of the image.")
    auth_url: str = _openstack("OS_AUTH_URL", "URL of Keystone, for addresses `glance://IMAGE-ID`.")
    region: str = _openstack("OS_REGION_NAME", "OpenStack region; default: any.", option="--os-region")
    interface: str = _openstack(
        "OS_INTERFACE",
        f"Endpoint of the image service to use: {', '.join(INTERFACES)}.",
        default="public",
        option="--os-interface",
    )
    auth_type: str = _openstack(
        "OS_AUTH_TYPE",
        "How to log in: password, token or applicationcredential; needed if several are given.",
        selects=False,
    )
    user_name: str = _openstack("OS_USERNAME", "User name.")
    user_password: str = _openstack("OS_PASSWORD", "Password of the user.", secret=True, parse=fields.secret)
    user_id: str = _openstack("OS_USER_ID", "Id of the user, instead of a name.")
    token: str = _openstack(
        "OS_TOKEN", "Token, instead of a user and a password.", secret=True, parse=fields.token
    )
    application_id: str = _openstack(
        "OS_APPLICATION_CREDENTIAL_ID", "Id of an application credential.", selects=False
    )
    application_name: str = _openstack(
        "OS_APPLICATION_CREDENTIAL_NAME", "Name of an application credential, with its user.", selects=False
    )
    application_secret: str = _openstack(
        "OS_APPLICATION_CREDENTIAL_SECRET",
        "Secret of the application credential.",
        secret=True,
        parse=fields.secret,
    )
    project_id: str = _openstack("OS_PROJECT_ID", "Id of the project.")
    project_name: str = _openstack("OS_PROJECT_NAME", "Name of the project.")
    user_domain_id: str = _openstack("OS_USER_DOMAIN_ID", "Id of the user's domain.")
    user_domain_name: str = _openstack("OS_USER_DOMAIN_NAME", "Name of the user's domain.")
    project_domain_id: str = _openstack("OS_PROJECT_DOMAIN_ID", "Id of the project's domain.")
    project_domain_name: str = _openstack("OS_PROJECT_DOMAIN_NAME", "Name of the project's domain.")
    domain_id: str = _openstack("OS_DOMAIN_ID", "Id of the domain of user and project.")
    domain_name: str = _openstack("OS_DOMAIN_NAME", "Name of the domain of user and project.")
    default_domain: str = _openstack("OS_DEFAULT_DOMAIN", "Id of the domain where none is given.")

    def __post_init__(self) -> None:
        if self.endpoint.startswith("glance:"):
            object.__setattr__(self, "image_id", self.endpoint.removeprefix("glance:").strip("/"))
            object.__setattr__(self, "endpoint", self.auth_url)

    @property
    def method(self) -> str:
        """How to log in: PASSWORD, TOKEN or APPLICATION."""
        if chosen := METHODS.get(self.auth_type.lower(), ""):
            return chosen
        if self.application_id or self.application_name:
            return APPLICATION
        return TOKEN if self.token else PASSWORD

    @property
    def user(self) -> str:
        return self.access.user or self.user_name

    @property
    def password(self) -> str:
        return self.access.password or self.user_password

    def faults(self) -> Iterator[str]:
        if not self.endpoint:
            yield "the URL of Keystone is missing (OS_AUTH_URL)"
        if not self.image_id:
            yield fields.fault(self, "the glance source needs the id of an image ({})", "image_id")
        if self.interface not in INTERFACES:
            yield f"unknown interface {self.interface!r}; {errors.supported(self.interface, INTERFACES)}"
        if self.auth_type.lower() not in METHODS:
            hint = errors.supported(self.auth_type, (PASSWORD, TOKEN, APPLICATION))
            yield f"authentication type {self.auth_type!r} is not supported; {hint}"
            return
        has_user = bool(self.user or self.user_id)
        if self.method == PASSWORD and not (has_user and self.password):
            yield "OpenStack needs a user and a password, a token, or an application credential"
        if self.method == TOKEN and not self.token:
            yield "authentication type token: no token given"
        if self.method == APPLICATION:
            if not self.application_secret:
                yield "the secret of the application credential is missing"
            if not self.application_id and not (self.application_name and has_user):
                yield "an application credential needs its id, or its name and the user"
