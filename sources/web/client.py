"""An HTTP client on urllib3: sessions, requests and responses. It follows no redirect and keeps no cookie."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import urllib3
import urllib3.util

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import wire
from cdi_worker.sources.base import Access
from cdi_worker.sources.web import connections, proxies

USER_AGENT = "cdi-worker/0.1"


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """A request. ``url``: as it is sent, percent-encoded and with an ASCII host."""

    method: str
    url: str
    headers: dict[str, str]
    body: bytes | str | None = None

    def header(self, name: str) -> str:
        """Return a header; empty if there is none."""
        return next((value for key, value in self.headers.items() if key.lower() == name.lower()), "")


#: Adds credentials to a request.
Auth = Callable[[Request], None]


def no_auth(_request: Request) -> None:
    """Add no credentials."""


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """Adds a header with credentials; none if its value is empty."""

    name: str
    value: str = dataclasses.field(repr=False)

    def __call__(self, request: Request) -> None:
        if self.value:
            request.headers[self.name] = self.value


class Response:
    """A response. Its body is read from ``raw``, urllib3's response. ``seconds``: until its head came."""

    def __init__(self, request: Request, raw: Any, seconds: float = 0.0) -> None:
        self.request = request
        self.raw = raw
        self.seconds = seconds
        self.status_code: int = raw.status
        self.reason: str = raw.reason or ""
        self.headers = raw.headers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, unless the body was read to its end."""
        self.raw.close()
        self.raw.release_conn()


class Session:
    """Connections with the proxies, the CAs and the time-outs of ``access``. Thread-safe.

    ``cancel`` aborts its connects and its waits for responses.
    """

    def __init__(self, access: Access, cancel: cancelling.Cancel) -> None:
        self._access = access
        # Loading the system's CAs takes 20 ms, which plain http does not need.
        context = functools.cache(lambda: wire.tls_context(access))
        self._pools = connections.Pools(context, access.connections, cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | str | None = None,
        auth: Auth = no_auth,
    ) -> Response:
        """Send a request and return its response, whose body is not read yet; the caller closes it.

        Raises the exceptions of urllib3 and of the operating system, see ``session.translated``.
        """
        common = {"User-Agent": USER_AGENT, "Accept": "*/*", "Accept-Encoding": "identity"}
        request = Request(method, _sent(url), _merged(common, headers or {}), body)
        auth(request)
        # urllib3 refuses most of them, with the value in its message.
        if any(set(f"{name}{value}") & {"\r", "\n"} for name, value in request.headers.items()):
            raise errors.RequestError("malformed header")
        began = time.monotonic()
        connect, read = wire.TIMEOUT
        raw = self._pools.manager(proxies.find(self._access, url)).urlopen(
            method,
            request.url,
            body=body,
            headers=request.headers,
            redirect=False,
            retries=False,
            timeout=urllib3.Timeout(min(connect, self._access.patience), min(read, self._access.patience)),
            preload_content=False,
            decode_content=False,
        )
        return Response(request, raw, time.monotonic() - began)

    def close(self) -> None:
        """Close all connections that are not in use; those in use are closed when they are released."""
        self._pools.close()


def _merged(common: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return ``own`` headers, and the ``common`` ones that they do not replace."""
    given = {name.lower() for name in own}
    return {**{name: value for name, value in common.items() if name.lower() not in given}, **own}


def _sent(url: str) -> str:
    """Return a URL as urllib3 sends it. Raises ``urllib3.exceptions.LocationParseError``."""
    return urllib3.util.parse_url(url).url
