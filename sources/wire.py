"""What every source over a network shares: trust, addresses that may be shown, errors by cause.

No HTTP library is needed for it: to import one takes as long as all the rest of a source.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
import struct
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cdi_worker import errors
from cdi_worker.sources.base import Access

#: Connect and read time-out of one socket operation, in seconds.
TIMEOUT = (15.0, 60.0)
#: Answers that trying again can mend (curl --retry's list, and 425).
TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


def safe_url(url: str) -> str:
    """Return ``url`` without user, password and query values: what may stand in a log or a message."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        # A slash too few before a password, or one inside it, makes a path of it.
        if "@" in url and (not host or (parts.port is None and ":" in host.rpartition("]")[2])):
            return "(malformed URL)"
        query = "…" if parts.query else ""
        return urllib.parse.urlunsplit((parts.scheme, host, parts.path, query, ""))
    except ValueError:
        return "(malformed URL)"


def origin(url: str) -> tuple[str, str, int | None]:
    """Return scheme, host and port (RFC 6454) of ``url``."""
    parts = urllib.parse.urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, (parts.hostname or "").lower(), port


def printable(text: str) -> str:
    """Return what a message may show of a server's words."""
    return "".join(char for char in text[:80] if char.isprintable())


def tls_context(access: Access) -> ssl.SSLContext:
    """Return a context that trusts the system's authorities and those of ``access``."""
    context = ssl.create_default_context()
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
            raise errors.RequestError(f"{path}: no usable PEM certificate: {err}") from err


@contextmanager
def authorities(access: Access) -> Iterator[str]:
    """Yield the path of one PEM file, in memory, of all that ``tls_context`` trusts: for other libraries."""
    _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), access)
    known = ssl.get_default_verify_paths()
    # Debian has a folder, with a link named by a hash for each; others have one file.
    folder = sorted(Path(known.capath).glob("*.[0-9]")) if known.capath else []
    files = [Path(known.cafile)] if known.cafile else folder
    memory = os.memfd_create("authorities")
    try:
        for path in (*files, *map(Path, access.ca_files)):
            os.write(memory, path.read_bytes() + b"\n")
        yield f"/proc/self/fd/{memory}"
    finally:
        os.close(memory)


@contextmanager
def translated(url: str, *, first: bool) -> Iterator[None]:
    """Turn exceptions of the operating system and of TLS into ours; see ``failure``."""
    try:
        yield
    except OSError as err:
        raise failure(url, err, first=first) from err


def failure(url: str, err: Exception, *, first: bool) -> errors.Error:
    """Return the error for an exception of a socket, of TLS, or of a library around them.

    ``first``: nothing has worked yet, so that an unknown name, a refused connection or a failed
    TLS handshake is a mistake to report rather than an outage to sit out.
    """
    cause, final = _cause(err)
    kind = errors.Unreachable if first and final else errors.Transient
    return kind(url=url, reason=cause)


#: Class names and texts of exceptions, the sentence for people, and whether it is final when it is the
#: first thing that happens. The first row that fits counts.
_CAUSES: tuple[tuple[set[str], str, str, bool], ...] = (
    ({"NameResolutionError", "gaierror"}, "", "unknown host", True),
    ({"ProxyError"}, "", "the proxy does not answer or refuses", True),
    ({"ConnectionRefusedError"}, "Connection refused", "connection refused", True),
    (set(), "unreachable|No route to host", "no route to the host", True),
    ({"ReadTimeoutError", "ConnectTimeoutError", "TimeoutError"}, "timed out", "timed out", False),
    (set(), "IncompleteRead|Connection broken", "the connection ended before the promised bytes came", False),
    ({"ConnectionResetError"}, "reset|aborted", "connection reset", False),
)


def _cause(err: BaseException) -> tuple[str, bool]:
    """Return a sentence for people, and whether it is final when it is the first thing that happens."""
    text = " ".join(str(link) for link in _chain(err))
    kinds = {type(link).__name__ for link in _chain(err)}
    if kinds & {"SSLError", "SSLCertVerificationError"}:
        found = re.search(r"certificate verify failed: ([^(]+)", text)
        if found:
            return (
                f"TLS: certificate verify failed: {found[1].strip()}; add the server's CA or allow insecure",
                True,
            )
        return "TLS handshake failed; is this an https server?", True
    for names, pattern, sentence, final in _CAUSES:
        if kinds & names or (pattern and re.search(pattern, text)):
            return sentence, final
    return f"connection failed ({type(err).__name__})", False


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


def shut(sock: Any) -> None:
    """End the reads that other threads wait in.

    A TLS socket's own ``shutdown`` lets go of TLS first: a read under way would go on in the clear, and
    return what is still encrypted as if it were the data. urllib3's TLS within a proxy's TLS is no socket,
    but has one. Raises ``TypeError`` of what has none.

    To close the socket then resets the connection. A server whose window was full would not learn of it
    otherwise, and would keep what it serves, such as a locked disk, until some time-out.
    """
    sock = getattr(sock, "socket", sock)
    with suppress(OSError):
        socket.socket.setsockopt(sock, socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
