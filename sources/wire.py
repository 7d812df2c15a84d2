"""Parts shared by all network sources: TLS contexts, URLs without secrets, translated errors.

Imports no HTTP library: importing one takes as long as the rest of a source.
"""

from __future__ import annotations

import re
import ssl
import urllib.parse
from collections.abc import Iterator
from contextlib import AbstractContextManager

from cdi_worker import errors, masking
from cdi_worker.sources import certificates, handshakes
from cdi_worker.sources.base import Access

#: Connect and read time-out of one socket operation, in seconds.
TIMEOUT = (15.0, 60.0)
#: Stands for a URL that cannot be shown, because it is not clear which part of it is the password.
HIDDEN = "(malformed URL)"
#: What a URL of the web looks like. A port is a number from 0 to 65535.
WEB = "http(s)://host[:port]/path"
#: HTTP statuses worth a retry (those of curl --retry, and 425).
TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


def timeout(access: Access) -> tuple[float, float]:
    """Return connect and read time-outs in seconds: ``TIMEOUT``, limited by the user's patience."""
    connect, read = TIMEOUT
    return min(connect, access.patience), min(read, access.patience)


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


def tls_context(access: Access) -> ssl.SSLContext:
    """Return a TLS context that trusts the CAs of the system and of ``access``."""
    context = certificates.context()
    context.load_default_certs()
    certificates.trust(context, *access.ca_files)
    if access.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def authorities(access: Access) -> AbstractContextManager[str]:
    """Yield the path of an in-memory PEM file with all CAs of ``tls_context``, for C libraries."""
    system = (path.read_bytes() for path in certificates.system_files())
    return certificates.memory_file(b"\n".join((*system, *certificates.read(access.ca_files))))


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
    return f"; the port expects TLS: use https://{masking.quoted(parts.netloc.rpartition('@')[2])}"


def is_not_tls(err: BaseException) -> bool:
    """Return whether a server without TLS answered the handshake that failed with ``err``."""
    return any(isinstance(link, ssl.SSLError) and _NOT_TLS.search(str(link)) for link in _chain(err))


def failure(url: str, err: Exception, *, first: bool) -> errors.Error:
    """Translate an exception of a socket, of TLS or of an HTTP library.

    ``first``: on the first request an unknown host, a refused connection or a failed TLS handshake is a
    configuration error (``errors.Unreachable``); later it is an outage (``errors.Transient``). A response
    that is not HTTP is ``errors.Malformed``.
    """
    cause, final, remedy = _cause(url, err)
    if first and final:
        return errors.Unreachable(url=url, reason=cause, remedy=remedy)
    kind = errors.Malformed if violation(err) else errors.Transient
    return kind(url=url, reason=cause)


def violation(err: BaseException) -> str:
    """Return what of a response is not HTTP; empty if ``err`` has another cause."""
    for link in _chain(err):
        # The first one is ours (``responses``), the others are classes of http.client.
        kind = type(link).__name__
        if kind in {"Malformed", "Endless"}:
            what, received = getattr(link, "what", ""), getattr(link, "received", None)
            return what if received is None else f"{what} {masking.quoted(received)!r}"
        if kind == "BadStatusLine":
            return f"malformed status line {masking.quoted(str(getattr(link, 'line', '')))!r}"
        if kind == "UnknownProtocol":
            return f"unknown version {masking.quoted(str(link))!r}"
        if kind == "LineTooLong" or _TOO_MANY.search(str(link)):
            return masking.quoted(str(link))
    return ""


#: http.client's own limit (Python 3.13), for the answer of a proxy.
_TOO_MANY = re.compile(r"^got more than \d+ headers")
_ENDLESS = "the server sends interim responses, headers or trailers without end"
#: Class names and text pattern of an exception, its message, and whether it is fatal on the first request.
#: The first matching row counts.
_CAUSES: tuple[tuple[set[str], str, str, bool], ...] = (
    ({"NameResolutionError", "gaierror"}, "", "unknown host", True),
    ({"ConnectionRefusedError"}, "Connection refused", "connection refused", True),
    (set(), "unreachable|No route to host", "no route to the host", True),
    ({"ReadTimeoutError", "ConnectTimeoutError", "TimeoutError", "Slow"}, "timed out", "timed out", False),
    ({"Endless"}, _TOO_MANY.pattern, _ENDLESS, True),
    (set(), "IncompleteRead|Connection broken", "the connection ended before the end of the body", False),
    ({"RemoteDisconnected"}, "", "the server closed the connection without an answer", False),
    # EPIPE: the peer had already closed its end when it reset the connection.
    ({"ConnectionResetError", "BrokenPipeError"}, "reset|aborted", "connection reset", False),
)


def _cause(url: str, err: BaseException) -> tuple[str, bool, errors.Remedy | None]:
    """Return the message, whether the failure is fatal on the first request, and what to do."""
    text = " ".join(str(link) for link in _chain(err))
    kinds = {type(link).__name__ for link in _chain(err)}
    if kinds & {"SSLError", "SSLCertVerificationError"}:
        if "ProxyError" in kinds and is_not_tls(err):
            return "the proxy does not speak TLS: write http:// in its URL", True, None
        reason, remedy = handshake(url, err) or ("TLS handshake failed; is this an https server?", None)
        return reason, True, remedy
    reason, final = f"connection failed ({type(err).__name__})", False
    for names, pattern, sentence, is_final in _CAUSES:
        if kinds & names or (pattern and re.search(pattern, text)):
            reason, final = sentence, is_final
            break
    if not final and (wrong := violation(err)):
        reason = f"the server violates HTTP: {wrong}"
    server = re.search(r"Failed to resolve '([^']+)'", text)
    if server and "://" in url and not url.startswith("http"):
        # An address without a host, such as that of an object store.
        ways: list[errors.Way] = [("check the network", "")]
        if url.startswith("s3://"):
            ways.append(("give another server with --endpoint-url", "command"))
        return f"unknown host {masking.quoted(server[1])}", True, errors.Remedy(ways)
    # http.client's words. Those of the proxy behind the status may be the password that was sent to it.
    refused = re.search(r"Tunnel connection failed: (\d{3})\b", text)
    if refused or "ProxyError" in kinds:
        reason = f"the proxy answers {refused[1]}" if refused else f"the proxy: {reason}"
        return f"{reason}; check the proxy and its URL", True, None
    return reason, final, None


def handshake(url: str, err: BaseException) -> handshakes.Cause | None:
    """Return the cause of a failed TLS handshake; None if it is unknown."""
    if not is_not_tls(err):
        return handshakes.cause(_chain(err))
    parts = urllib.parse.urlsplit(url)
    remedy = None
    if parts.scheme == "https" and parts.path.startswith("/v2/"):
        # The API of a registry, whose name has no http or https.
        remedy = handshakes.PLAIN
    elif parts.scheme == "https":
        remedy = errors.Remedy([(f"use http://{masking.quoted(parts.netloc.rpartition('@')[2])}", "")])
    return handshakes.Cause("the port does not speak TLS", remedy)


def _chain(err: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while err is not None and id(err) not in seen:
        seen.add(id(err))
        yield err
        for item in (getattr(err, "reason", None), *err.args):
            if isinstance(item, BaseException):
                yield from _chain(item)
        err = err.__cause__ or err.__context__
