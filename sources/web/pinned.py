"""One HTTP resource: its redirects are followed once, later requests go to their target."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import ssl
import threading
import urllib.parse
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeAlias

import requests
import requests.auth

from cdi_worker import errors, masking
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base, sockets, wire
from cdi_worker.sources.web import session

log = logging.getLogger(__name__)

REDIRECTS = frozenset({301, 302, 303, 307, 308})
#: Adds credentials to a request.
Authorization: TypeAlias = Callable[[requests.PreparedRequest], requests.PreparedRequest]


class Resource:
    """A URL and its connections. Thread-safe.

    Credentials and secret headers are only sent to the origin of the URL, not to another redirect target.
    ``name``: the URL without secrets. ``connection``: a session to share, which stays open. ``cancel``
    aborts requests and reads, and refuses new ones while it is set. ``context``: of TLS, if it is not that of
    ``access``.
    """

    #: What a status means on this kind of server.
    reasons: ClassVar[Mapping[int, str]] = {}

    def __init__(
        self,
        url: str,
        access: base.Access,
        connection: requests.Session | None = None,
        *,
        cancel: cancelling.Cancel,
        context: ssl.SSLContext | None = None,
    ) -> None:
        parts = parse(url)
        if parts.username is not None and not access.user:
            user, password = (urllib.parse.unquote(item or "") for item in (parts.username, parts.password))
            access = dataclasses.replace(access, user=user, password=password)
        self.url = urllib.parse.urlunsplit(
            parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="")
        )
        self.access = access
        self.name = wire.safe_url(url)
        masking.register(self, *masking.address(url))
        self._session = connection or session.new_session(access, cancel, context)
        self._is_shared = connection is not None
        self._cancel = cancel
        self._pinned = self.url
        self._answered = False
        #: The open responses, and those of them that a thread is reading from.
        self._answers: dict[requests.Response, cancelling.Registration] = {}
        self._being_read: set[requests.Response] = set()
        self._from_redirect: weakref.WeakSet[requests.Response] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def timeout(self) -> tuple[float, float]:
        """Connect and read time-outs in seconds."""
        return wire.timeout(self.access)

    def get(self, byte_range: str | None, method: str = "GET") -> requests.Response:
        """Send a request to the pinned URL, follow redirects and pin their target.

        The caller releases the response with ``drop``.
        """
        url = self._pinned
        for _ in range(session.MAX_REDIRECTS + 1):
            response = self.send(method, url, {"Range": byte_range} if byte_range else {})
            location = session.ascii_address(response.headers.get("Location", ""))
            if response.status_code not in REDIRECTS or not location:
                break
            self.drop(response)
            url = self._redirect_target(url, location)
        else:
            raise errors.Unreachable(url=self.name, reason=f"more than {session.MAX_REDIRECTS} redirects")
        if url != self.url:
            self._from_redirect.add(response)
        if response.status_code < 300:
            self._pinned = url
            self._answered = True
        return response

    def _redirect_target(self, url: str, location: str) -> str:
        """Return the target of a redirect from ``url``."""
        try:
            there = urllib.parse.urljoin(url, location)
            parts = parse(there)
        except (ValueError, errors.RequestError) as err:
            reason = "redirects to a URL that is not http or https"
            raise errors.Unreachable(url=self.name, reason=reason) from err
        masking.register(self, *masking.address(there), *masking.repeated(there))
        if parts.scheme == "http" and url.startswith("https:"):
            # Mirrors do this; a checksum protects the content.
            what = "the content can be changed on the way"
            log.warning("redirected from https to %s: %s", wire.safe_url(there), what)
        return there

    def send(self, method: str, url: str, headers: dict[str, str]) -> requests.Response:
        """Send one request. Only the origin receives credentials and secret headers."""
        auth: Authorization = NO_AUTH
        if wire.origin(url) == wire.origin(self.url):
            extra = {name: session.on_the_wire(value) for name, value in self.access.headers}
            headers = {**headers, **extra}
            auth = self.authorization()
        try:
            with session.translate_errors(self.name, first=not self._answered):
                how = {"headers": headers, "auth": auth, "timeout": self.timeout}
                response = session.ask(self._session, self.access, method, url, **how)
        except errors.Transient:
            self.unpin()
            raise
        response.raw.decode_content = False
        with self._lock:
            self._answers[response] = self._cancel.on_set(functools.partial(_shut, response))
        if self._closed:
            self.drop(response)
            raise errors.Cancelled
        return response

    def connect_early(self, response: requests.Response, count: int) -> None:
        """Open connections for the requests that follow ``response``, of which no byte is read yet."""
        url = response.request.url or ""
        if count > 0 and not session.proxy(self.access, url):
            adapter: Any = self._session.get_adapter(url)
            connect, _ = self.timeout
            adapter.connect_early(response, count, verify=self._session.verify, timeout=connect)

    def authorization(self) -> Authorization:
        """Return what adds the credentials to requests to the origin."""
        if self.access.user and self.access.password:
            # RFC 7617, 2.1: most servers expect UTF-8, as curl and Go send it.
            user, password = self.access.user, self.access.password
            return requests.auth.HTTPBasicAuth(session.on_the_wire(user), session.on_the_wire(password))
        return NO_AUTH

    def body(self, response: requests.Response, limit: int) -> bytes:
        """Return the body of a small response, as ``session.body``, and release it. Raises ``failure``."""
        if response.status_code != 200:
            raise self.failure(response)
        try:
            with session.translate_errors(self.name, first=False):
                return session.body(response, limit)
        finally:
            self.drop(response)

    def failure(self, response: requests.Response) -> errors.Error:
        """Release a failed response; return the error for it. With renewed credentials it is tried again."""
        try:
            plain = session.status_error(self.name, response)
        finally:
            self.drop(response)
        if isinstance(plain, errors.Transient):
            return plain
        if response.status_code == 401 and self.renew(response):
            return errors.Transient(url=self.name, reason="the token is no longer accepted")
        reason = self.reasons.get(response.status_code)
        return plain if reason is None else errors.Unreachable(url=self.name, reason=reason)

    def renew(self, refused: requests.Response) -> bool:
        """Renew the credentials that were refused; return whether a request with others is worth a try."""
        return False

    def unpin(self) -> None:
        """Forget the target of the redirects: the next request follows them again."""
        self._pinned = self.url

    def was_redirected(self, response: requests.Response) -> bool:
        """Return whether a response came from the target of a redirect."""
        return response in self._from_redirect

    def drop(self, response: requests.Response) -> None:
        """Release a response, read or not. Safe to call twice, also after ``close``."""
        with self._lock:
            ending = self._answers.pop(response, None)
        if ending is not None:
            ending.close()
            response.close()

    @contextlib.contextmanager
    def read_from(self, response: requests.Response) -> Iterator[None]:
        """Read from a response in the block, whose exceptions are translated.

        Raises ``Cancelled`` if the read was aborted.
        """
        ending = self._answers.get(response)
        if ending is None:
            raise errors.Transient(url=self.name, reason="closed")
        self._being_read.add(response)
        try:
            with session.translate_errors(self.name, first=False):
                yield
        finally:
            self._being_read.discard(response)
            if self._closed:
                self.drop(response)
            if self._closed or ending.was_called:
                raise errors.Cancelled

    def close(self) -> None:
        """Close all responses, and all connections that are not shared.

        Reads in other threads are aborted, and these threads close theirs.
        """
        self._closed = True
        for response in list(self._answers):
            if response in self._being_read:
                _shut(response)
            else:
                self.drop(response)
        if not self._is_shared:
            self._session.close()


class Header(requests.auth.AuthBase):
    """Credentials in a header; empty: none."""

    def __init__(self, name: str, value: str) -> None:
        self._name = name
        self._value = value

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._value:
            request.headers[self._name] = self._value
        return request


#: No credentials. Without it requests would search .netrc.
NO_AUTH = Header("", "")


def parse(url: str) -> urllib.parse.SplitResult:
    """Parse an http(s) URL. Raises ``RequestError``."""
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port
    except ValueError as err:
        raise wire.malformed(url, wire.WEB) from err
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise wire.malformed(url, wire.WEB)
    return parts


def _shut(response: requests.Response) -> None:
    connection: Any = response.raw.connection
    # A finished response has no connection, or one without a socket.
    with contextlib.suppress(AttributeError, TypeError):
        sockets.shut(connection.answering)
