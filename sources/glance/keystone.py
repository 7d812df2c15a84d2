"""Tokens and the service catalog of OpenStack's identity service, Keystone, by keystoneauth1."""

from __future__ import annotations

import contextlib
import logging
import threading
import types
from collections.abc import Iterator
from typing import Any, Final

import requests

from cdi_worker import errors, masking
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import wire
from cdi_worker.sources.glance import locations
from cdi_worker.sources.web import session

with errors.optional("the glance source", package="keystoneauth1", extra="glance"):
    from keystoneauth1 import exceptions
    from keystoneauth1 import session as keystone_session
    from keystoneauth1.identity import generic, v3

log = logging.getLogger(__name__)

#: Bytes of a response. The catalog of a large cloud has some hundred KiB.
LARGEST_ANSWER: Final = 8 << 20


class Keystone:
    """A login. Thread-safe."""

    def __init__(self, location: locations.Glance, cancel: cancelling.Cancel) -> None:
        self.name = wire.safe_url(location.endpoint)
        self._location = location
        self._connection = session.new_session(location.access, cancel)
        self._lock = threading.Lock()
        self._auth = _plugin(location)
        self._answered = False
        # All that it uses of a requests session; ours has our connections, proxies and limits.
        transport: Any = types.SimpleNamespace(request=self._request)
        # Retries are ours: patience, and a message that says what was tried. Without ``auth``: to log in for
        # a version document that needs a login, the library would wait for its own lock for ever.
        self._session = keystone_session.Session(
            session=transport,
            verify=not location.access.insecure,
            user_agent=session.USER_AGENT,
            redirect=0,
        )

    def token(self) -> str:
        """Return a valid token; log in if there is none or it is about to expire."""
        with self._lock, self._translate_errors():
            token = str(self._auth.get_token(self._session))
        masking.register(self, token)
        return token

    def renew(self, refused: str) -> bool:
        """Forget the token ``refused``; return whether a new one can be had."""
        if self._location.method == locations.TOKEN:
            # A token cannot outlive itself: one made with it expires at the same time.
            return False
        with self._lock, self._translate_errors():
            if self._auth.get_token(self._session) == refused:
                log.info("renewing the token keystone=%r", self.name)
                self._auth.invalidate()
        return True

    def image_service(self) -> str:
        """Return the URL of the image service, without the version."""
        where = {"interface": self._location.interface, "region_name": self._location.region or None}
        with self._lock, self._translate_errors():
            try:
                found = self._auth.get_endpoint(
                    self._session, service_type="image", skip_discovery=True, **where
                )
            except exceptions.CatalogException:
                found = None
        if not found:
            region = f" in region {self._location.region!r}" if self._location.region else ""
            reason = f"the catalog has no {self._location.interface} endpoint of an image service{region}"
            advice = "check region and interface, and that the login has a project"
            raise errors.Unreachable(url=self.name, reason=f"{reason}; {advice}")
        return str(found).rstrip("/").removesuffix("/v2")

    def close(self) -> None:
        """Close all connections."""
        self._connection.close()

    def _request(self, method: str, url: str, **given: Any) -> requests.Response:
        with session.translate_errors(self.name, first=not self._answered):
            what = (self._connection, self._location.access, method, url)
            answer, data = session.exchange(*what, limit=LARGEST_ANSWER, **given)
        if len(data) > LARGEST_ANSWER:
            reason = f"login: the answer is longer than {LARGEST_ANSWER} bytes"
            raise errors.Unreachable(url=self.name, reason=reason)
        self._answered = True
        answer._content = data  # noqa: SLF001  (requests has no other way to set a body)
        return answer

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (exceptions.Unauthorized, exceptions.Forbidden) as err:
            reason = "login refused; check user, password, domains and project"
            raise errors.Unreachable(url=self.name, reason=reason) from err
        except exceptions.HttpError as err:
            status = err.http_status or 0
            text = f"login: {masking.quoted(str(err.message or 'failed'))} (HTTP {status})"
            if status in wire.TRANSIENT_STATUS:
                retry_after = getattr(err, "retry_after", None) or None
                raise errors.Transient(url=self.name, reason=text, retry_after=retry_after) from err
            raise errors.Unreachable(url=self.name, reason=f"{text}; check the URL of Keystone") from err
        except exceptions.MissingAuthPlugin as err:
            reason = "the server lists its versions only after a login; check the URL of Keystone"
            raise errors.Unreachable(url=self.name, reason=reason) from err
        except exceptions.ClientException as err:
            text = masking.quoted(str(err) or type(err).__name__)
            reason = f"login: {text}; check the URL of Keystone"
            raise errors.Unreachable(url=self.name, reason=reason) from err
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as err:
            # The library trusts the shape of the answers.
            reason = "the answer is not one of Keystone's; check the URL"
            raise errors.Unreachable(url=self.name, reason=reason) from err


def _plugin(location: locations.Glance) -> Any:
    """Return keystoneauth1's plug-in for the login."""
    scope: dict[str, Any] = _named("project", location.project_id, location.project_name)
    if location.project_name and not location.project_id:
        scope |= _domain(location, location.project_domain_id, location.project_domain_name, "project_domain")
    elif not location.project_id:
        scope |= _named("domain", location.domain_id, location.domain_name)
    user: dict[str, Any] = {"user_id": location.user_id or None, "username": location.user or None}
    if location.user and not location.user_id:
        user |= _domain(location, location.user_domain_id, location.user_domain_name, "user_domain")
    if location.method == locations.APPLICATION:
        # It has a project of its own; another scope is refused.
        return v3.ApplicationCredential(
            location.endpoint.rstrip("/").removesuffix("/v3") + "/v3",
            application_credential_id=location.application_id or None,
            application_credential_name=location.application_name or None,
            application_credential_secret=location.application_secret,
            **({} if location.application_id else user),
        )
    if location.method == locations.TOKEN:
        return generic.Token(location.endpoint, token=location.token, **scope)
    return generic.Password(location.endpoint, password=location.password, **user, **scope)


def _domain(location: locations.Glance, id_: str, name: str, prefix: str) -> dict[str, Any]:
    """Return the domain of the user or of the project: its own, else the common one, else the default."""
    if not id_ and not name:
        id_, name = location.domain_id, location.domain_name
    return _named(prefix, id_ if id_ or name else location.default_domain, name)


def _named(what: str, id_: str, name: str) -> dict[str, str | None]:
    return {f"{what}_id": id_ or None, f"{what}_name": name or None}
