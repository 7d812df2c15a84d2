"""What every source over HTTP shares: trust, proxies, credentials by origin, errors by cause."""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import ssl
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import requests
import urllib3
import urllib3.exceptions

from importer import errors
from sources import connections
from sources.base import Access

USER_AGENT = "cdi-worker/0.1"
#: Connect and read time-out of one socket operation, in seconds.
TIMEOUT = (15.0, 60.0)
MAX_REDIRECTS = 10
LARGEST_ERROR = 64 * 1024
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


def on_the_wire(text: str) -> str:
    """Return ``text`` so that it is sent as UTF-8: http.client sends each character as one byte."""
    return text.encode("utf-8", "surrogateescape").decode("latin-1")


def ascii_address(received: str) -> str:
    """Return an address of a header, where each character is one byte, with all but ASCII percent-encoded."""
    return re.sub(r"[^!-~]", lambda found: f"%{ord(found[0]):02X}", received)


def timeout(access: Access) -> tuple[float, float]:
    """Return the time-outs of a request: TIMEOUT, but none is longer than the user's patience."""
    connect, read = TIMEOUT
    return min(connect, access.patience), min(read, access.patience)


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


class _Session(requests.Session):
    """A session that sees no redirects.

    Also when it is not to follow one, requests reads all of its body, to any length, and decodes it.
    """

    def get_redirect_target(self, resp: requests.Response) -> None:
        return None


def new_session(access: Access) -> requests.Session:
    """Return a session that takes nothing from the process's environment: no netrc, no proxies."""
    session = _Session()
    session.trust_env = False
    session.verify = not access.insecure
    if access.insecure:
        # Who asks for it knows; a warning for each connection tells nothing new.
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    session.headers.clear()
    session.headers.update({"User-Agent": USER_AGENT, "Accept": "*/*", "Accept-Encoding": "identity"})
    adapter = connections.Adapter(functools.cache(lambda: tls_context(access)), access.connections)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    return session


def proxies(access: Access, url: str) -> dict[str, str]:
    """Return the proxy for ``url`` as requests wants it; empty when there is none."""
    scheme, host, port = origin(url)
    proxy = access.https_proxy if scheme == "https" else access.http_proxy
    if not proxy or _bypasses_proxy(access.no_proxy, host, port):
        return {}
    return {scheme: proxy}


def _bypasses_proxy(no_proxy: str, host: str, port: int | None) -> bool:
    """Tell whether ``no_proxy`` names the host: names and suffixes, ``*``, addresses and networks."""
    if urllib.request.proxy_bypass_environment(f"{host}:{port}", {"no": no_proxy}):  # type: ignore[attr-defined]
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for entry in no_proxy.split(","):
        try:
            if address in ipaddress.ip_network(entry.strip(), strict=False):
                return True
        except ValueError:
            continue
    return False


def retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header (RFC 9110, 10.2.3: seconds or a date)."""
    if not value:
        return None
    if value.strip().isascii() and value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None


def status_error(url: str, response: requests.Response) -> errors.Error:
    """Return the error that stands for an answer that is not the bytes asked for."""
    status, reason = response.status_code, printable(response.reason or "")
    said = f"server answers {status} {reason}".rstrip()
    if status in TRANSIENT_STATUS:
        return errors.Transient(
            url=url, reason=said, retry_after=retry_after(response.headers.get("Retry-After"))
        )
    advice = {
        401: "; check user and password",
        403: "; check the credentials and the permissions of the object",
        404: "; check the address",
        407: "; the proxy wants credentials",
        410: "; the object is gone for good",
    }.get(status, "")
    return errors.Unreachable(url=url, reason=said + advice)


def body(response: requests.Response, limit: int) -> bytes:
    """Return the body of a small answer, or its first ``limit`` bytes and one more if it is larger.

    Reads until nothing comes: only then urllib3 says that a connection has ended too early.
    """
    data = b""
    while len(data) <= limit and (piece := response.raw.read(limit + 1 - len(data), decode_content=True)):
        data += piece
    return data


def error_text(response: requests.Response) -> str:
    """Return the beginning of an answer that tells of an error; empty when it breaks off."""
    try:
        return str(response.raw.read(LARGEST_ERROR, decode_content=True).decode(errors="replace"))
    except (urllib3.exceptions.HTTPError, OSError):
        return ""


@contextmanager
def translated(url: str, *, first: bool) -> Iterator[None]:
    """Turn exceptions of requests and urllib3 into ours.

    ``first``: nothing has worked yet, so that an unknown name, a refused connection or a failed
    TLS handshake is a mistake to report rather than an outage to sit out.
    """
    try:
        yield
    except (requests.exceptions.InvalidURL, requests.exceptions.MissingSchema) as err:
        raise errors.RequestError(f"{url}: malformed URL") from err
    except (requests.exceptions.InvalidHeader, UnicodeEncodeError) as err:
        raise errors.RequestError("malformed header") from err
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError) as err:
        cause, final = _cause(err)
        if first and final:
            raise errors.Unreachable(url=url, reason=cause) from err
        raise errors.Transient(url=url, reason=cause) from err


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


def printable(text: str) -> str:
    """Return what a message may show of a server's words."""
    return "".join(char for char in text[:80] if char.isprintable())
