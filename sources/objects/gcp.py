"""Google Cloud credentials, from a file or ambient, and their access tokens."""

from __future__ import annotations

import contextlib
import logging
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import requests
import urllib3.exceptions

from cdi_worker import errors, masking
from cdi_worker.formats import smalljson
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base, handshakes, smallfile, wire
from cdi_worker.sources.objects import buckets, locations
from cdi_worker.sources.web import pinned, session


@contextlib.contextmanager
def import_libraries() -> Iterator[None]:
    """Import Google's libraries in the block, without their warnings. Raises ``MissingExtra``."""
    package = "google-cloud-storage"
    with errors.optional("the gcs source", package=package, extra="gcs"), warnings.catch_warnings():
        # They warn about Python versions that they will drop.
        warnings.simplefilter("ignore", FutureWarning)
        yield


with import_libraries():
    from google import auth
    from google.auth import aws, exceptions, identity_pool
    from google.oauth2 import credentials, service_account

log = logging.getLogger(__name__)

#: Fields of a credentials file.
SECRETS = ("private_key", "client_secret", "refresh_token")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
SCOPES = ("https://www.googleapis.com/auth/devstorage.read_only",)


def is_google(url: str) -> bool:
    """Return whether ``url`` is a Google API, which may receive tokens of ambient credentials."""
    scheme, host, _ = wire.origin(url)
    return scheme == "https" and host.endswith(".googleapis.com")


def refuse_plaintext(url: str, access: base.Access) -> None:
    """Refuse to send tokens over plain http to another machine, unless insecure connections are allowed."""
    scheme, host, _ = wire.origin(url)
    if scheme == "http" and host not in LOOPBACK and not access.insecure:
        ways = (("use https", ""), ("leave out the file (emulators need none)", ""), *handshakes.PLAIN)
        reason = f"{url}: http would send the credentials unencrypted"
        raise errors.RequestError(reason, remedy=errors.Remedy(ways))


class Keys(buckets.Keys):
    """Google credentials and their tokens. ``cancel`` aborts the wait for a token. Thread-safe."""

    def __init__(self, location: locations.Gcs, cancel: cancelling.Cancel) -> None:
        self._cancel = cancel
        self._access = location.access
        self._connection: requests.Session | None = None
        self._lock = threading.Lock()
        super().__init__(_load(location.credentials_file, self) if location.credentials_file else None)

    def _find(self) -> Any:
        """Return the credentials of the environment, of gcloud or of the machine, or None."""
        transport: Any = self._transport
        try:
            with _translate_errors():
                return cancelling.run_apart(
                    lambda: auth.default(scopes=SCOPES, request=transport)[0], self._cancel
                )
        except exceptions.DefaultCredentialsError as err:
            log.info("no ambient credentials: %s", err)
        return None

    def authorization(self) -> pinned.Authorization:
        """Return what adds a token to requests, if there are credentials."""
        return self._authorize if self else pinned.NO_AUTH

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Add a token to ``request``; renew it shortly before it expires."""
        what = (self._transport, request.method, request.url, request.headers)
        with self._lock, _translate_errors():
            cancelling.run_apart(lambda: self._keys.before_request(*what), self._cancel)
            masking.register(self, str(self._keys.token or ""))
        return request

    def renew(self) -> bool:
        """Discard the token, so that the next request gets a new one. Return False without credentials."""
        with self._lock:
            if self:
                self._keys.token = None
        return bool(self)

    def close(self) -> None:
        """Close the connections to the token service."""
        if self._connection is not None:
            self._connection.close()

    def _transport(
        self, url: str, method: str = "GET", body: Any = None, headers: Any = None, **_: object
    ) -> types.SimpleNamespace:
        """Send a request of Google's library over our connections.

        ``google.auth.transport.Request``; returns its ``Response``.
        """
        self._connection = self._connection or session.new_session(self._access, self._cancel)
        what = (self._connection, self._access, method, url)
        try:
            answer, data = session.exchange(*what, data=body, headers=headers)
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as err:
            raise exceptions.TransportError(err) from err
        return types.SimpleNamespace(status=answer.status_code, headers=answer.headers, data=data)


def _load(path: str, owner: object) -> Any:
    """Load a credentials file: service account, authorized user or external account.

    An external account with an executable source is refused: it would run a program.
    """
    try:
        info = smalljson.parse(smallfile.read(path))
        masking.register(owner, *(str(info.get(name, "")) for name in SECRETS))
        kind, origin = info.get("type"), info.get("credential_source", {})
        if kind == "service_account":
            return service_account.Credentials.from_service_account_info(info, scopes=SCOPES)
        if kind == "authorized_user":
            return credentials.Credentials.from_authorized_user_info(info, scopes=SCOPES)
        if kind == "external_account" and "executable" not in origin:
            for name in ("token_url", "service_account_impersonation_url"):
                # Another server could ask for any file of this pod, or for a response of the metadata server.
                # Google's documentation requires this check for untrusted files.
                if (url := info.get(name)) and not is_google(url):
                    raise errors.RequestError(f"{path}: {name} is not at https://*.googleapis.com")
            module = aws if "environment_id" in origin else identity_pool
            return module.Credentials.from_info(info, scopes=SCOPES)
    except (ValueError, AttributeError, TypeError) as err:
        # The text of the error may hold parts of the file.
        raise errors.RequestError(f"{path}: not a usable Google credentials file") from err
    shown = masking.quoted(str(kind), 40)
    raise errors.RequestError(f"{path}: Google credentials of type {shown!r} are not supported")


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except exceptions.DefaultCredentialsError:
        raise
    except exceptions.TransportError as err:
        raise wire.failure("Google's token service", err, first=False) from err
    except exceptions.GoogleAuthError as err:
        message = masking.quoted(str(err.args[0] if err.args else type(err).__name__))
        if err.retryable:
            raise errors.Transient(url="Google's token service", reason=message) from err
        raise errors.Unreachable(url="Google credentials", reason=message) from err
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as err:
        # The library trusts the shape of the answers.
        reason = "unexpected response of the token service"
        raise errors.Unreachable(url="Google credentials", reason=reason) from err
