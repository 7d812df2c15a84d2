"""Registry authentication: user and password, Docker configuration files, bearer tokens.

Distribution specification, "Token Authentication"; RFC 9110, 11.6.1 for challenges.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import logging
import re
import threading
from collections.abc import Mapping
from typing import Any

import requests

from cdi_worker import errors, masking
from cdi_worker.formats import smalljson
from cdi_worker.sources import base, handshakes, smallfile, wire
from cdi_worker.sources import fields as location_fields
from cdi_worker.sources import reference as oci_reference
from cdi_worker.sources.web import session

log = logging.getLogger(__name__)

CLIENT_ID = "cdi-worker"
# Possessive quantifiers: no quadratic backtracking in a hostile header of 64 KiB.
_SCHEME = re.compile(r"[\s,]*+([A-Za-z][A-Za-z0-9-]*+)(?:\s++|$)")
_PARAMETER = re.compile(r'[\s,]*+([A-Za-z0-9_-]++)\s*+=\s*+(?:"((?:[^"\\]|\\.)*+)"|([^\s,"]++))')


@dataclasses.dataclass(frozen=True)
class Credentials:
    """Registry credentials. ``identity``: a refresh token in place of user and password."""

    user: str = dataclasses.field(default="", repr=False)
    password: str = dataclasses.field(default="", repr=False)
    identity: str = dataclasses.field(default="", repr=False)

    def basic(self) -> str:
        """Return the value of a Basic Authorization header; empty without user and password."""
        if not self.user or not self.password:
            return ""
        login = f"{self.user}:{self.password}".encode("utf-8", "surrogateescape")
        return "Basic " + base64.b64encode(login).decode()


def credentials(access: base.Access, auth_file: str, reference: oci_reference.Reference) -> Credentials:
    """Return user and password if given, else the credentials in the Docker configuration file."""
    if access.user or access.password or not auth_file:
        return Credentials(access.user, access.password)
    try:
        document = smalljson.parse(smallfile.read(auth_file))
    except ValueError as err:
        raise errors.RequestError(f"{auth_file}: not a readable Docker configuration file") from err
    if not isinstance(document, dict):
        raise errors.RequestError(f"{auth_file}: not a Docker configuration file")
    return from_docker(document, reference, auth_file)


def from_docker(document: Mapping[str, Any], reference: oci_reference.Reference, name: str) -> Credentials:
    """Return the credentials of a Docker ``config.json`` (or a ``.dockercfg``) for a reference.

    The key of an entry is a host, a URL or a namespace below a host (containers-auth.json(5)); the longest
    match wins. Credential helpers are programs and are not run.
    """
    entries = document.get("auths", document if "credHelpers" not in document else {})
    wanted = reference.name
    fitting = {}
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        prefix = _normal(key)
        if isinstance(entry, dict) and (wanted == prefix or wanted.startswith(f"{prefix}/")):
            fitting[prefix] = entry
    if fitting and (found := _entry(fitting[max(fitting, key=len)], name)):
        return found
    helpers = document.get("credHelpers")
    if document.get("credsStore") or (isinstance(helpers, dict) and reference.host in helpers):
        log.warning("credential helpers are not supported file=%r host=%r", name, reference.host)
    return Credentials()


class Authorizer:
    """The Authorization header for one repository, renewed on each challenge. Thread-safe."""

    def __init__(
        self, repository: str, login: Credentials, access: base.Access, connection: requests.Session
    ) -> None:
        self._scope = f"repository:{repository}:pull"
        self._credentials = login
        masking.register(self, *masking.login(login.user, login.password), login.identity)
        self._access = access
        self._session = connection
        self._lock = threading.Lock()
        self._answered = False
        self.header = ""

    def renew(self, challenges: str, refused: str, url: str) -> bool:
        """Create a new header for the ``challenges`` of ``url``. Return False without usable credentials.

        ``refused``: the header of the failed request. If another thread has replaced it, there is nothing
        to do.
        """
        with self._lock:
            if self.header != refused:
                return True
            offered = parse_challenges(challenges)
            if "bearer" in offered:
                self.header = "Bearer " + self._token(offered["bearer"], url)
                masking.register(self, self.header.removeprefix("Bearer "))
                return True
            if "basic" in offered and (basic := self._credentials.basic()) and basic != refused:
                self._refuse_plaintext(url, url)
                self.header = basic
                return True
            return False

    def _token(self, challenge: Mapping[str, str], url: str) -> str:
        realm, service = challenge.get("realm", ""), challenge.get("service", "")
        name = wire.safe_url(realm)
        if not realm.startswith(("https://", "http://")):
            raise errors.Unreachable(url=url, reason="the token challenge has no valid realm")
        if self._credentials != Credentials():
            self._refuse_plaintext(url, realm)
        form = {"service": service} if service else {}
        form["scope"] = self._scope
        login, basic = self._credentials, self._credentials.basic()
        method, given = "GET", dict[str, Any](params=form)
        if login.identity:
            form |= {"grant_type": "refresh_token", "client_id": CLIENT_ID, "refresh_token": login.identity}
            method, given = "POST", {"data": form}
        elif basic:
            form["account"] = login.user
            given["headers"] = {"Authorization": basic}
        with (
            session.translate_errors(name, first=not self._answered),
            session.ask(self._session, self._access, method, realm, **given) as answer,
        ):
            if answer.status_code != 200:
                raise session.status_error(name, answer)
            data = session.body(answer, session.LARGEST_ANSWER)
        self._answered = True
        log.debug("token realm=%r scope=%r", name, self._scope)
        try:
            document = smalljson.parse(data) if len(data) <= session.LARGEST_ANSWER else None
        except ValueError:
            document = None
        if isinstance(document, dict):
            token = document.get("token") or document.get("access_token")
            if isinstance(token, str) and token.isascii() and token.isprintable():
                return token
        raise errors.Unreachable(url=name, reason="the token server's response has no token")

    def _refuse_plaintext(self, url: str, destination: str) -> None:
        """Refuse to send credentials over plain http, unless insecure connections are allowed."""
        if destination.startswith("http://") and not self._access.insecure:
            reason = f"{wire.safe_url(destination)} would receive the credentials unencrypted"
            raise errors.Unreachable(url=url, reason=reason, remedy=handshakes.PLAIN)


def parse_challenges(header: str) -> dict[str, dict[str, str]]:
    """Return the parameters of each scheme (in lower case) that a WWW-Authenticate header offers."""
    offered: dict[str, dict[str, str]] = {}
    at, parameters = 0, dict[str, str]()
    while at < len(header):
        if found := _PARAMETER.match(header, at):
            value = found[3] if found[2] is None else re.sub(r"\\(.)", r"\1", found[2])
            parameters[found[1].lower()] = value
        elif found := _SCHEME.match(header, at):
            parameters = offered.setdefault(found[1].lower(), {})
        else:
            break
        at = found.end()
    return offered


def _normal(key: str) -> str:
    """Return host and path of a key. ``https://index.docker.io/v1/`` means all of Docker Hub."""
    prefix = re.sub(r"^https?://", "", key).rstrip("/")
    prefix = re.sub(r"/v[12]$", "", prefix)
    host, slash, path = prefix.partition("/")
    host = oci_reference.HUB if host in oci_reference.HUB_NAMES else host
    return f"{host}{slash}{path}"


def _entry(entry: Mapping[str, Any], name: str) -> Credentials | None:
    """Return the credentials of one entry, or None. ``auth``: user and password in base64."""
    identity = entry.get("identitytoken")
    if isinstance(identity, str) and identity:
        return Credentials(identity=location_fields.named(location_fields.token, identity, name))
    user, password = entry.get("username"), entry.get("password")
    packed = entry.get("auth")
    if isinstance(packed, str) and packed:
        try:
            user, _, password = base64.b64decode(packed, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError) as err:
            raise errors.RequestError(f"{name}: an auth entry is not base64 of user:password") from err
    if isinstance(user, str) and isinstance(password, str) and user:
        login = (location_fields.named(location_fields.secret, each, name) for each in (user, password))
        return Credentials(*login)
    return None
