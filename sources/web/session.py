"""Shared parts of the HTTP sources: sessions, proxies, small responses, translated exceptions."""

from __future__ import annotations

import functools
import re
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import requests
import urllib3
import urllib3.exceptions

from cdi_worker import errors, masking
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import responses, wire
from cdi_worker.sources.base import Access
from cdi_worker.sources.web import connections, proxies

USER_AGENT = "cdi-worker/0.1"
MAX_REDIRECTS = 10
MALFORMED = "malformed header: it, or a credential, has a line break or a character that is not Latin-1"
LARGEST_ERROR = 64 * 1024
#: Bytes of the answer of a token service, which has a few KiB.
LARGEST_ANSWER = 1 << 20
#: Seconds for the body of a small response: a document, an error.
SMALL_TIME = 60.0


def on_the_wire(text: str) -> str:
    """Encode ``text`` so that it is sent as UTF-8: http.client encodes headers as Latin-1."""
    return text.encode("utf-8", "surrogateescape").decode("latin-1")


def ascii_address(received: str) -> str:
    """Percent-encode the non-ASCII bytes of a URL from a header, which http.client decodes as Latin-1."""
    return re.sub(r"[^!-~]", lambda found: f"%{ord(found[0]):02X}", received)


class _Session(requests.Session):
    """A session that ignores redirects.

    Even with ``allow_redirects=False`` requests reads and decodes the whole body of a redirect, unlimited.
    """

    def get_redirect_target(self, resp: requests.Response) -> None: ...


def new_session(
    access: Access, cancel: cancelling.Cancel, context: ssl.SSLContext | None = None
) -> requests.Session:
    """Return a session that uses no settings of the environment (.netrc, proxies).

    ``cancel`` aborts its connects and its waits for responses. ``context``: of TLS; None: that of ``access``.
    """
    session = _Session()
    session.trust_env = False
    session.verify = not access.insecure
    session.headers.clear()
    session.headers.update({"User-Agent": USER_AGENT, "Accept": "*/*", "Accept-Encoding": "identity"})
    adapter = connections.Adapter(
        functools.cache(lambda: context or wire.tls_context(access)),
        access.connections,
        cancel,
        access.min_speed,
    )
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    return session


def proxy(access: Access, url: str) -> dict[str, str]:
    """Return the proxy for ``url`` as the ``proxies`` argument of requests; empty for none."""
    found = proxies.find(access, url)
    return {wire.origin(url)[0]: found} if found else {}


def retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header (RFC 9110, 10.2.3: seconds or a date)."""
    text = (value or "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None


def status_error(url: str, response: requests.Response, text: str = "") -> errors.Error:
    """Return the error for the status of a failed response. ``text``: its body, if it was read already."""
    status, reason = response.status_code, masking.quoted(response.reason or "")
    message = f"server answers {status} {reason}".rstrip()
    if status in wire.TRANSIENT_STATUS:
        delay = retry_after(response.headers.get("Retry-After"))
        return errors.Transient(url=url, reason=message, retry_after=delay)
    sent = response.request.url or ""
    if status == 400 and sent.startswith("http:"):
        message += wire.advice(sent, text or error_text(response))
    is_sent = "Authorization" in response.request.headers
    advice = {
        401: "; check user and password" if is_sent else "",
        403: "; check the credentials and the permissions of the object",
        404: "; check the URL",
        407: "; the proxy requires credentials",
        410: "; the object was removed permanently",
    }.get(status, "")
    ask = status == 401 and not is_sent
    remedy = errors.Remedy([("log in", "user and password")]) if ask else None
    return errors.Unreachable(url=url, reason=message + advice, remedy=remedy)


def body(response: requests.Response, limit: int, seconds: float = SMALL_TIME) -> bytes:
    """Return the body of a small response; of a larger one, the first ``limit`` + 1 bytes.

    Reads until an empty result: only then urllib3 reports a connection that ended too early. Raises
    ``TimeoutError`` after ``seconds``: the time-out of the socket starts again with every byte.
    """
    data, end = b"", time.monotonic() + seconds
    while len(data) <= limit and (piece := response.raw.read1(limit + 1 - len(data), decode_content=True)):
        data += piece
        if time.monotonic() > end:
            raise TimeoutError("timed out")
    return data


def ask(
    connection: requests.Session, access: Access, method: str, url: str, **given: Any
) -> requests.Response:
    """Send a request with our proxies and time-outs; return the response, whose body is not read yet.

    Without redirects: they would send credentials to another server. The secrets of the request, and those
    that the server sets for later ones, are masked.
    """
    given = {"timeout": wire.timeout(access), **given, "stream": True, "allow_redirects": False}
    masking.register(connection, *masking.form(given.get("data")))
    answer = connection.request(method, url, proxies=proxy(access, url), **given)
    sent = [(name, value) for name, value in answer.request.headers.items() if isinstance(value, str)]
    cookies = (cookie.value or "" for cookie in answer.cookies)
    masking.register(connection, *masking.credentials(sent), *cookies)
    byte_range = answer.request.headers.get("Range")
    responses.log_answer(method, wire.safe_url(url), answer.status_code, answer.headers, byte_range)
    return answer


def exchange(
    connection: requests.Session,
    access: Access,
    method: str,
    url: str,
    limit: int = LARGEST_ANSWER,
    **given: Any,
) -> tuple[requests.Response, bytes]:
    """Send a request of a library as ``ask``; return the response and its body, see ``body``."""
    with ask(connection, access, method, url, **given) as answer:
        return answer, body(answer, limit)


def error_text(response: requests.Response) -> str:
    """Return the beginning of the body of an error response; empty if the connection breaks."""
    try:
        return body(response, LARGEST_ERROR).decode(errors="replace")
    except (urllib3.exceptions.HTTPError, OSError):
        return ""


@contextmanager
def translate_errors(url: str, *, first: bool) -> Iterator[None]:
    """Translate exceptions of requests and urllib3; see ``wire.failure``."""
    try:
        yield
    except (
        requests.exceptions.InvalidURL,
        requests.exceptions.MissingSchema,
        # A label of the host is empty or too long.
        urllib3.exceptions.LocationParseError,
    ) as err:
        raise wire.malformed(url, wire.WEB) from err
    except (requests.exceptions.InvalidHeader, UnicodeEncodeError) as err:
        raise errors.RequestError(MALFORMED) from err
    except ValueError as err:
        # http.client's: its text is the header, which may be a credential.
        if not str(err).startswith("Invalid header"):
            raise
        raise errors.RequestError(MALFORMED) from None
    except connections.InternalAddress as err:
        raise errors.Unreachable(url=url, reason=str(err)) from err
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError) as err:
        raise wire.failure(url, err, first=first) from err
