"""HTTP and HTTPS: one address, followed once through its redirects and pinned for the run."""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
import urllib.parse
from typing import Self

import requests
import requests.auth

from importer import errors
from sources import base, session

log = logging.getLogger(__name__)

#: What the first request asks for: enough to see inside a compressed image.
HEAD_SIZE = 256 * 1024
#: One read of the response's body; the work in Python is for each of these.
READ_SIZE = 512 * 1024
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """What an answer says of the object's identity. Only what both sides know is compared."""

    etag: str | None
    modified: str | None
    size: int | None

    def difference(self, other: Version) -> tuple[str, object, object] | None:
        """Return name, ours and theirs of the first value that differs, or None."""
        for name in ("size", "etag", "modified"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None and theirs is not None and mine != theirs:
                return name, mine, theirs
        return None


def source(location: base.Location, cancel: base.Cancel) -> HttpSource:
    """Return the source for ``IMPORTER_SOURCE=http``, by node pull where the location says so."""
    if location.ready_file:
        from sources import nodepull  # noqa: PLC0415: it builds on this module

        return nodepull.NodePullSource(location, cancel)
    return HttpSource(location.endpoint, location.access)


class HttpSource(base.Source):
    """An object on a web server.

    The first request asks for the first bytes as a range: its answer tells size, identity, whether
    ranges work, and what the object is. A server without ranges answers with the whole object,
    which then serves as the first stream.
    """

    def __init__(self, url: str, access: base.Access) -> None:
        parts = _checked(url)
        if parts.username is not None and not access.user:
            user, password = (urllib.parse.unquote(item or "") for item in (parts.username, parts.password))
            access = dataclasses.replace(access, user=user, password=password)
        self._url = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))
        self._access = access
        self.name = session.safe_url(url)
        self._session = session.new_session(access)
        self._pinned = self._url
        self._version: Version | None = None
        self._has_ranges = False
        self._first: _HttpStream | None = None
        self._live: set[requests.Response] = set()
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        response = self._get(f"bytes=0-{HEAD_SIZE - 1}")
        if response.status_code in {400, 405, 416, 501}:
            # An empty object has no first byte, and some servers refuse any range.
            self._drop(response)
            response = self._get(None)
        if response.status_code == 206:
            self._open_ranges(response)
        elif response.status_code == 200:
            self._open_stream(response)
        else:
            self._drop(response)
            raise session.status_error(self.name, response)
        log.info(
            "source url=%r size=%r identity=%r ranges=%r", self.name, self.size, self.identity, self._has_ranges
        )
        return self

    def close(self) -> None:
        """End all connections, also those that other threads are reading from."""
        self._closed = True
        with self._lock:
            live, self._live = self._live, set()
        for response in live:
            _shut(response)
        self._session.close()

    def ranges(self) -> base.RandomReader | None:
        return self if self._has_ranges else None

    def stream(self, offset: int = 0) -> base.Reader:
        if offset == 0 and self._first is not None:
            first, self._first = self._first, None
            return first
        if offset and not self._has_ranges:
            raise errors.NoRanges(url=self.name, reason="no ranges offered")
        response = self._get(f"bytes={offset}-" if offset else None)
        if offset and response.status_code == 206:
            self._check_range(response, offset)
        elif response.status_code != 200 or offset:
            self._drop(response)
            self._raise_status(response)
        self._check_version(response, _length(response) if not offset else None)
        return _HttpStream(self, response)

    def read_range(self, offset: int, into: memoryview, /) -> int:
        """Read one range with one request; see ``sources.base.RandomReader``."""
        response = self._get(f"bytes={offset}-{offset + len(into) - 1}")
        if response.status_code != 206:
            self._drop(response)
            self._raise_status(response)
        length = min(self._check_range(response, offset), len(into))
        reader = _HttpStream(self, response)
        done = 0
        try:
            while done < length:
                count = reader.readinto(into[done:length])
                if not count:
                    break
                done += count
        except errors.Transient:
            # What came is good; the engine asks again from there.
            if not done:
                raise
        finally:
            reader.close()
        if not done:
            raise errors.Transient(url=self.name, reason="an empty answer")
        return done

    # -- the first answer ---------------------------------------------------------------------

    def _open_ranges(self, response: requests.Response) -> None:
        found = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if not found or int(found[1]) != 0 or found[3] == "*":
            self._drop(response)
            self._open_stream(self._get(None))
            return
        self.size = int(found[3])
        self._version = _version(response, self.size)
        self.identity = _identity(self._version)
        self._has_ranges = True
        head = bytearray(min(HEAD_SIZE, self.size))
        reader = _HttpStream(self, response)
        filled = _fill(reader, memoryview(head))
        reader.close()
        self.head = bytes(head[:filled])
        if filled < len(head):
            raise errors.Transient(url=self.name, reason="short answer to the first range")

    def _open_stream(self, response: requests.Response) -> None:
        if response.status_code != 200:
            self._drop(response)
            raise session.status_error(self.name, response)
        self.size = _length(response)
        self._version = _version(response, self.size)
        self.identity = _identity(self._version)
        reader = _HttpStream(self, response)
        head = bytearray(HEAD_SIZE)
        self.head = bytes(head[: _fill(reader, memoryview(head))])
        reader.replay = self.head
        self._first = reader

    # -- requests -------------------------------------------------------------------------------

    def _get(self, byte_range: str | None) -> requests.Response:
        """Send a GET to the pinned place, follow redirects, pin where they end."""
        url = self._pinned
        for _ in range(session.MAX_REDIRECTS + 1):
            response = self._send(url, byte_range)
            location = response.headers.get("Location")
            if response.status_code not in {301, 302, 303, 307, 308} or not location:
                break
            self._drop(response)
            url = urllib.parse.urljoin(url, location)
            if urllib.parse.urlsplit(url).scheme not in {"http", "https"}:
                raise errors.Unreachable(url=self.name, reason="redirected to something that is not http")
        else:
            raise errors.Unreachable(url=self.name, reason=f"more than {session.MAX_REDIRECTS} redirects")
        if response.status_code < 300:
            self._pinned = url
        return response

    def _send(self, url: str, byte_range: str | None) -> requests.Response:
        headers = {"Range": byte_range} if byte_range else {}
        auth: requests.auth.AuthBase = _NO_AUTH
        if session.origin(url) == session.origin(self._url):
            headers.update(self._access.headers)
            if self._access.user and self._access.password:
                auth = requests.auth.HTTPBasicAuth(self._access.user, self._access.password)
        try:
            with session.translated(self.name, first=self._version is None):
                response = self._session.get(
                    url,
                    headers=headers,
                    auth=auth,
                    stream=True,
                    allow_redirects=False,
                    proxies=session.proxies(self._access, url),
                    timeout=session.TIMEOUT,
                )
        except errors.Transient:
            self._unpin()
            raise
        response.raw.decode_content = False
        with self._lock:
            self._live.add(response)
        if self._closed:
            self._drop(response)
            raise errors.Cancelled
        return response

    def _unpin(self) -> bool:
        """Forget where the redirects led, so that the next request is led anew."""
        moved, self._pinned = self._pinned != self._url, self._url
        return moved

    def _raise_status(self, response: requests.Response) -> None:
        """Raise for an answer, in the middle of a transfer, that is not the range asked for."""
        if response.status_code == 200:
            self._check_version(response, _length(response))
            raise errors.NoRanges(url=self.name, reason="the whole object came instead of a range")
        if response.status_code == 416:
            self._check_version(response, None)
            raise errors.NoRanges(url=self.name, reason="server answers 416 to a range within the object")
        failure = session.status_error(self.name, response)
        if not isinstance(failure, errors.Transient) and self._unpin():
            # The place the redirect named has expired or gone; the address itself may name another.
            failure = errors.Transient(url=self.name, reason=failure.fields["reason"])
        raise failure

    def _check_range(self, response: requests.Response, offset: int) -> int:
        """Check what a 206 says it holds; return its length in bytes."""
        found = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if not found:
            self._drop(response)
            raise errors.NoRanges(url=self.name, reason="206 without a usable Content-Range")
        start, end = int(found[1]), int(found[2])
        self._check_version(response, None if found[3] == "*" else int(found[3]))
        if start != offset or end < start:
            self._drop(response)
            raise errors.NoRanges(url=self.name, reason=f"asked for byte {offset}, got bytes {start}-{end}")
        return end - start + 1

    def _check_version(self, response: requests.Response, size: int | None) -> None:
        changed = self._version and self._version.difference(_version(response, size))
        if changed:
            self._drop(response)
            what, before, now = changed
            raise errors.SourceChanged(url=self.name, what=what, before=before, now=now)

    def _drop(self, response: requests.Response) -> None:
        with self._lock:
            self._live.discard(response)
        response.close()


class _HttpStream:
    """The body of one response as a reader."""

    def __init__(self, source: HttpSource, response: requests.Response) -> None:
        self._source = source
        self._response = response
        #: Bytes already read from the body, given out first.
        self.replay = b""

    def readinto(self, into: memoryview, /) -> int:
        if self.replay:
            count = min(len(into), len(self.replay))
            into[:count] = self.replay[:count]
            self.replay = self.replay[count:]
            return count
        with session.translated(self._source.name, first=False):
            return int(self._response.raw.readinto(into[:READ_SIZE]))

    def close(self) -> None:
        self._source._drop(self._response)  # noqa: SLF001: one noun in two classes


class _NoAuth(requests.auth.AuthBase):
    """Says that there are no credentials, so that requests does not look for any."""

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        return request


_NO_AUTH = _NoAuth()


def _checked(url: str) -> urllib.parse.SplitResult:
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port
    except ValueError as err:
        raise errors.RequestError(f"{session.safe_url(url)}: malformed URL: {err}") from err
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise errors.RequestError(f"{session.safe_url(url)}: malformed URL: wants http(s)://host/path")
    return parts


def _length(response: requests.Response) -> int | None:
    value = response.headers.get("Content-Length", "")
    return int(value) if value.isascii() and value.isdigit() else None


def _version(response: requests.Response, size: int | None) -> Version:
    return Version(response.headers.get("ETag"), response.headers.get("Last-Modified"), size)


def _identity(version: Version) -> str | None:
    """Return what names these very bytes: a strong ETag, else date and size; None where unknown."""
    if version.etag and not version.etag.startswith("W/"):
        return f"etag {version.etag} size {version.size}"
    if version.modified and version.size is not None:
        return f"modified {version.modified} size {version.size}"
    return None


def _fill(reader: base.Reader, into: memoryview) -> int:
    done = 0
    while done < len(into):
        count = reader.readinto(into[done:])
        if not count:
            break
        done += count
    return done


def _shut(response: requests.Response) -> None:
    try:
        response.raw.shutdown()
    except (AttributeError, ValueError, OSError):
        # Already at its end, or (a proxy's tunnel) without the means: its time-out ends it.
        response.close()
