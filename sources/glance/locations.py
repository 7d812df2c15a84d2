"""The location of an image in OpenStack's image service, Glance."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar, Final

from cdi_worker import errors
from cdi_worker.sources import base, fields

PASSWORD: Final = "password"  # noqa: S105  (the name of a method)
TOKEN: Final = "token"  # noqa: S105  (the name of a method)
APPLICATION: Final = "applicationcredential"
#: The methods by the names of OpenStack's clients and of Forklift; empty: told by what is given.
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Glance(base.Location):
    """The URL of Keystone and the id of an image.

    User and password are those of the access, else ``user_name`` and ``user_password``. ``domain_id`` and
    ``domain_name`` stand for the domain of the user and of the project where these are not given;
    ``default_domain`` is an id and stands for them last. ``interface``: one of INTERFACES.
    """

    variables: ClassVar[Mapping[str, str]] = {"ca_file": "OS_CACERT"}

    image_id: str = fields.field(env="IMPORTER_IMAGE_ID", option="--image-id", help="Id of the image.")
    auth_url: str = fields.field(
        env="OS_AUTH_URL", ambient=True, help="URL of Keystone, for addresses `glance://IMAGE-ID`."
    )
    region: str = fields.field(
        env="OS_REGION_NAME", ambient=True, option="--os-region", help="OpenStack region; default: any."
    )
    interface: str = fields.field(
        default="public",
        env="OS_INTERFACE",
        ambient=True,
        option="--os-interface",
        help=f"Endpoint of the image service to use: {', '.join(INTERFACES)}.",
    )
    auth_type: str = fields.field(
        env="OS_AUTH_TYPE",
        ambient=True,
        help="How to log in: password, token or applicationcredential; needed if several are given.",
        selects=False,
    )
    user_name: str = fields.field(env="OS_USERNAME", ambient=True, help="User name.")
    user_password: str = fields.field(
        env="OS_PASSWORD", ambient=True, help="Password of the user.", secret=True
    )
    user_id: str = fields.field(env="OS_USER_ID", ambient=True, help="Id of the user, instead of a name.")
    token: str = fields.field(
        env="OS_TOKEN", ambient=True, help="Token, instead of a user and a password.", secret=True
    )
    application_id: str = fields.field(
        env="OS_APPLICATION_CREDENTIAL_ID",
        ambient=True,
        help="Id of an application credential.",
        selects=False,
    )
    application_name: str = fields.field(
        env="OS_APPLICATION_CREDENTIAL_NAME",
        ambient=True,
        help="Name of an application credential, with its user.",
        selects=False,
    )
    application_secret: str = fields.field(
        env="OS_APPLICATION_CREDENTIAL_SECRET",
        ambient=True,
        help="Secret of the application credential.",
        secret=True,
    )
    project_id: str = fields.field(env="OS_PROJECT_ID", ambient=True, help="Id of the project.")
    project_name: str = fields.field(env="OS_PROJECT_NAME", ambient=True, help="Name of the project.")
    user_domain_id: str = fields.field(env="OS_USER_DOMAIN_ID", ambient=True, help="Id of the user's domain.")
    user_domain_name: str = fields.field(
        env="OS_USER_DOMAIN_NAME", ambient=True, help="Name of the user's domain."
    )
    project_domain_id: str = fields.field(
        env="OS_PROJECT_DOMAIN_ID", ambient=True, help="Id of the project's domain."
    )
    project_domain_name: str = fields.field(
        env="OS_PROJECT_DOMAIN_NAME", ambient=True, help="Name of the project's domain."
    )
    domain_id: str = fields.field(
        env="OS_DOMAIN_ID", ambient=True, help="Id of the domain of user and project."
    )
    domain_name: str = fields.field(
        env="OS_DOMAIN_NAME", ambient=True, help="Name of the domain of user and project."
    )
    default_domain: str = fields.field(
        env="OS_DEFAULT_DOMAIN", ambient=True, help="Id of the domain where none is given."
    )

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
        """The name of the user."""
        return self.access.user or self.user_name

    @property
    def password(self) -> str:
        """The password of the user."""
        return self.access.password or self.user_password

    def faults(self) -> Iterator[str]:
        if not self.endpoint:
            yield "the URL of Keystone is missing (OS_AUTH_URL)"
        if not self.image_id:
            yield fields.fault(self, "the glance source needs the id of an image ({})", "image_id")
        if self.interface not in INTERFACES:
            hint = errors.supported(self.interface, INTERFACES)
            yield f"unknown interface {self.interface!r}; {hint}"
        if self.auth_type.lower() not in METHODS:
            names = (PASSWORD, TOKEN, APPLICATION)
            hint = errors.supported(self.auth_type, names)
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
