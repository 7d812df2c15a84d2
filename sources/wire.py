"""Parts shared by all network sources: TLS contexts, URLs without secrets, translated errors.

Imports no HTTP library: importing one takes as long as the rest of a source.
"""

from __future__ import annotations

import os
import re
import ssl
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cdi_worker import errors, masking
from cdi_worker.sources import handshakes, sockets
from cdi_worker.sources.base import Access

if TYPE_CHECKING:
    from cdi_worker.remedy import Remedy

#: Connect and read time-out of one socket operation, in seconds.
TIMEOUT = (15.0, 60.0)
#: Stands for a URL that cannot be shown, because it is not clear which part of it is the password.
HIDDEN = "(malformed URL)"
#: HTTP statuses worth a retry (those of curl --retry, and 425).
TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


def safe_url(url: str) -> str:
    """Return ``url`` without user, password and query values, for logs and messages."""
    if not set(url) & set("@?#"):
        return url
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in masking.PATHS:
            return url
        info, _, host = parts.netloc.rpartition("@")
        if info and "@" in parts.path.partition("@sha")[0]:
            # Perhaps a slash in the password: then the host is a part of it.
            return f"{parts.scheme}://…"
        # With a missing slash after the scheme, or a slash in the password, the password parses as path.
        if "@" in url and (not host or (parts.port is None and ":" in host.rpartition("]")[2])):
            return HIDDEN
        query = "…" if parts.query else ""
        return urllib.parse.urlunsplit((parts.scheme, host, parts.path, query, ""))
    except ValueError:
        return HIDDEN


def malformed(url: str, expected: str = "scheme://host/path") -> errors.RequestError:
    """Return the error for a URL that cannot be parsed. It does not contain a password."""
    shown = safe_url(url)
    if shown != HIDDEN:
        return errors.RequestError(f"{shown}: malformed URL; expected {expected}")
    advice = "write %2F for a slash and %40 for an @ in user and password" if "@" in url else ""
    return errors.RequestError(f"malformed URL; expected {expected}{'; ' if advice else ''}{advice}")


def origin(url: str) -> tuple[str, str, int | None]:
    """Return scheme, host and port (RFC 6454) of ``url``."""
    parts = urllib.parse.urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, (parts.hostname or "").lower(), port


def printable(text: str) -> str:
    """Return the first 80 characters of a server's message, masked and without control characters."""
    return "".join(char for char in masking.mask(text)[:80] if char.isprintable())


def tls_context(access: Access) -> ssl.SSLContext:
    """Return a TLS context that trusts the CAs of the system and of ``access``."""
    context = sockets.separated(ssl.create_default_context())
    _trust(context, access)
    if access.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _trust(context: ssl.SSLContext, access: Access) -> None:
    for path in access.ca_files:
        try:
            context.load_verify_locations(cafile=path)
        except (OSError, ssl.SSLError) as err:
            raise errors.RequestError(f"{path}: not a valid PEM certificate: {err}") from err


@contextmanager
def authorities(access: Access) -> Iterator[str]:
    """Yield the path of an in-memory PEM file with all CAs of ``tls_context``, for C libraries."""
    _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), access)
    known = ssl.get_default_verify_paths()
    # Debian has a folder of links named by hash; other distributions have one file.
    folder = sorted(Path(known.capath).glob("*.[0-9]")) if known.capath else []
    files = [Path(known.cafile)] if known.cafile else folder
    memory = os.memfd_create("authorities")
    try:
        for path in (*files, *map(Path, access.ca_files)):
            os.write(memory, path.read_bytes() + b"\n")
        yield f"/proc/self/fd/{memory}"
    finally:
        os.close(memory)


#: What servers answer to plain http at a TLS port: nginx, Go's net/http, Apache, Tomcat, Python's cheroot.
_EXPECTS_TLS = re.compile(
    "plain HTTP request was sent to HTTPS port|sent an HTTP request to an HTTPS server"
    "|speaking plain HTTP to an SSL-enabled|host and port requires TLS|server only speaks HTTPS",
    re.IGNORECASE,
)
#: OpenSSL's reasons for bytes that are not TLS; since OpenSSL 3.2 it is mostly the second one.
_NOT_TLS = re.compile(r"\[SSL(: (WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|HTTP_REQUEST)\]|\] record layer)")


def advice(url: str, answer: str) -> str:
    """Return what to do if ``answer``, to plain http, says that the port expects TLS; else empty."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or not _EXPECTS_TLS.search(answer):
        return ""
    return f"; the port expects TLS: use https://{printable(parts.netloc.rpartition('@')[2])}"


def is_not_tls(err: BaseException) -> bool:
    """Return whether a server without TLS answered the handshake that failed with ``err``."""
    return any(isinstance(link, ssl.SSLError) and _NOT_TLS.search(str(link)) for link in _chain(err))


@contextmanager
def translated(url: str, *, first: bool) -> Iterator[None]:
    """Translate exceptions of the operating system and of TLS; see ``failure``."""
    try:
        yield
    except OSError as err:
        raise failure(url, err, first=first) from err


def failure(url: str, err: Exception, *, first: bool) -> errors.Error:
    """Translate an exception of a socket, of TLS or of an HTTP library.

    ``first``: on the first request an unknown host, a refused connection or a failed TLS handshake is a
    configuration error (``errors.Unreachable``); later it is an outage (``errors.Transient``).
    """
    cause, final, remedy = _cause(url, err)
    if first and final:
        return errors.Unreachable(url=url, reason=cause, remedy=remedy)
    return errors.Transient(url=url, reason=cause)


#: Class names and text pattern of an exception, its message, and whether it is fatal on the first request.
#: The first matching row counts.
_CAUSES: tuple[tuple[set[str], str, str, bool], ...] = (
    ({"NameResolutionError", "gaierror"}, "", "unknown host", True),
    ({"ConnectionRefusedError"}, "Connection refused", "connection refused", True),
    (set(), "unreachable|No route to host", "no route to the host", True),
    ({"ReadTimeoutError", "ConnectTimeoutError", "TimeoutError", "Slow"}, "timed out", "timed out", False),
    # The second is http.client's own limit (Python 3.13), for the answer of a proxy.
    (
        {"Endless"},
        "got more than \\d+ headers",
        "the server sends interim responses, headers or trailers without end",
        True,
    ),
    (set(), "IncompleteRead|Connection broken", "the connection ended before the end of the body", False),
    # EPIPE: the peer had already closed its end when it reset the connection.
    ({"ConnectionResetError", "BrokenPipeError"}, "reset|aborted", "connection reset", False),
)


def _cause(url: str, err: BaseException) -> tuple[str, bool, Remedy | None]:
    """Return the message, whether the failure is fatal on the first request, and what to do."""
    text = " ".join(str(link) for link in _chain(err))
    kinds = {type(link).__name__ for link in _chain(err)}
    if kinds & {"SSLError", "SSLCertVerificationError"}:
        if "ProxyError" in kinds and is_not_tls(err):
            return "the proxy does not speak TLS: write http:// in its URL", True, None
        reason, remedy = handshake(url, err) or ("TLS handshake failed; is this an https server?", None)
        return reason, True, remedy
    reason, final = _known(kinds, text) or (f"connection failed ({type(err).__name__})", False)
    if "ProxyError" in kinds:
        # http.client's words. Those of the proxy behind the status may be the password that was sent to it.
        refused = re.search(r"Tunnel connection failed: (\d{3})\b", text)
        reason = f"the proxy answers {refused[1]}" if refused else f"the proxy: {reason}"
        return f"{reason}; check the proxy and its URL", True, None
    return reason, final, None


def _known(kinds: set[str], text: str) -> tuple[str, bool] | None:
    for names, pattern, sentence, final in _CAUSES:
        if kinds & names or (pattern and re.search(pattern, text)):
            return sentence, final
    return None


def handshake(url: str, err: BaseException) -> handshakes.Cause | None:
    """Return the cause of a failed TLS handshake; None if it is unknown."""
    if is_not_tls(err):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "https":
            return handshakes.without_tls(None)
        if parts.path.startswith("/v2/"):
            # The API of a registry, whose name has no http or https.
            return handshakes.without_tls(handshakes.PLAIN)
        return handshakes.without_tls(handshakes.other_scheme(printable(parts.netloc.rpartition("@")[2])))
    return handshakes.cause(_chain(err))


def _chain(err: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while err is not None and id(err) not in seen:
        seen.add(id(err))
        yield err
        reason = getattr(err, "reason", None)
        inner = [item for item in err.args if isinstance(item, BaseException)]
        if isinstance(reason, BaseException):
            yield from _chain(reason)
        for item in inner:
            yield from _chain(item)
        err = err.__cause__ or err.__context__
