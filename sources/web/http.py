"""The HTTP source: one URL, whose redirects are followed once."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from typing import Any, NamedTuple

import requests

from cdi_worker import errors
from cdi_worker.formats import coding, readers, remembered
from cdi_worker.images.engine import seams
from cdi_worker.images.engine.pace import Pace
from cdi_worker.sources import base
from cdi_worker.sources.web import connections, pinned

log = logging.getLogger(__name__)

#: Bytes of the first request: enough to detect the format inside a compressed image. qemu-img puts the first
#: L2 table of a qcow2 image behind the first 256 KiB; by itself it would take two requests.
HEAD_SIZE = 320 * 1024
#: 19 digits hold every file size; ``int`` raises for thousands of digits.
CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")
LENGTH = re.compile(r"[0-9]{1,19}")


#: Headers that name one version of an object, for servers whose ETag is weak or missing.
VERSION_HEADERS = ("x-amz-version-id", "x-goog-generation", "x-ms-version-id")


class Version(NamedTuple):
    """ETag, version id, modification time and size in a response.

    ``etag``: strong or weak (RFC 9110, 8.8.1). ``encoding``: the Content-Encoding.
    """

    etag: str | None
    modified: str | None
    size: int | None
    encoding: str = ""
    version: str | None = None

    @property
    def strong(self) -> str | None:
        """The validator that is enough by itself: a strong ETag or a version id."""
        if self.etag and not self.etag.startswith("W/"):
            return f"etag {self.etag}"
        return f"version {self.version}" if self.version else None

    @property
    def digest(self) -> str:
        """The version id or the strong ETag; empty if there is neither."""
        text = f"version:{self.version}" if self.version else f"etag:{self.etag}" if self.strong else ""
        # RFC 9110, 8.8.3 allows no blanks in it.
        return "".join(text.split())

    @property
    def identity(self) -> str | None:
        """The identity of the object; None if there is no validator."""
        if self.strong:
            return f"{self.strong} size {self.size}"
        if self.size is None or not (self.etag or self.modified):
            return None
        parts = {"etag": self.etag, "modified": self.modified, "size": self.size}
        return " ".join(f"{name} {value}" for name, value in parts.items() if value is not None)

    def difference(self, other: Version) -> tuple[str, object, object] | None:
        """Return name, own and other value of the first difference between what both state, or None.

        Replicas and the edges of a CDN have other modification times for the same object: only a weak
        validator needs them.
        """
        is_same = self.strong is not None and self.strong == other.strong
        for name in ("size",) if is_same else ("size", "etag", "version", "modified"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None and theirs is not None and mine != theirs:
                return name, mine, theirs
        return None


class HttpSource(base.Source):
    """An object on a web server.

    The first request is a range request for the first bytes. Its response shows size, identity, format and
    whether ranges work. A server without ranges sends the whole object, which becomes the first stream.
    """

    #: Bytes of the first request.
    head_size = HEAD_SIZE
    pace: Pace

    def __init__(self, resource: pinned.Resource) -> None:
        self._resource = resource
        self.name = self._resource.name
        self.pace = Pace()
        self._version: Version | None = None
        self._has_ranges = False
        self._first: readers.Peek | None = None

    def open(self, opening: base.Opening) -> base.Facts:
        return self._facts(*self._first_answer(opening))

    def _facts(self, version: Version, head: bytes, **stated: Any) -> base.Facts:
        """Return the facts in the first response; those ``stated`` elsewhere take precedence."""
        weak = version.strong is None
        served = {"size": version.size, "identity": version.identity, "weak": weak, "digest": version.digest}
        return base.Facts(name=self.name, head=head, **{**served, **stated})

    @property
    def ranges(self) -> base.RandomReader | None:
        return self if self._has_ranges else None

    def close(self) -> None:
        """Close all connections, also those that other threads are reading from."""
        self._resource.close()

    def stream(self, offset: int = 0) -> base.Reader:
        if offset == 0 and self._first is not None:
            first, self._first = self._first, None
            return first
        if offset and not self._has_ranges:
            raise errors.NoRanges(url=self.name, reason="the server does not support ranges")
        response = self._resource.get(f"bytes={offset}-" if offset else None)
        if response.status_code != (206 if offset else 200):
            self._raise_status(response)
        if offset:
            self._check_range(response, offset)
        else:
            self._check_version(response, _length(response))
        return _HttpStream(self._resource, response)

    def open_range(self, start: int, end: int, /) -> base.Reader:
        """Send a request for a range; see ``formats.readers.RequestReader``."""
        response = self._resource.get(f"bytes={start}-{end - 1}")
        if response.status_code != 206:
            self._raise_status(response)
        return _Range(self._resource, response, self._check_range(response, start))

    def read_range(self, offset: int, into: memoryview, /) -> int:
        """Read a range by one request; see ``sources.base.RandomReader``."""
        with contextlib.closing(self.open_range(offset, offset + len(into))) as answer:
            return answer.readinto(into)

    def _first_answer(self, opening: base.Opening, size: int | None = None) -> tuple[Version, bytes]:
        """Send the first request; return the version and the first bytes of the object.

        Raises ``errors.SourceChanged`` unless it has ``size`` bytes, if that is known already.
        """
        response = self._resource.get(f"bytes=0-{self.head_size - 1}")
        if response.status_code in {400, 405, 416, 501}:
            # An empty object has no first byte; some servers refuse all ranges.
            self._resource.drop(response)
            response = self._resource.get(None)
        if response.status_code == 206:
            version, head = self._open_ranges(response, opening)
        elif response.status_code == 200:
            version, head = self._open_stream(response)
        else:
            raise self._resource.failure(response)
        stated = (version.size, version.identity, version.strong is None, self._has_ranges)
        log.info("source url=%r size=%r identity=%r weak=%r ranges=%r", self.name, *stated)
        if size is not None and version.size != size:
            raise errors.SourceChanged(url=self.name, what="size", before=size, now=version.size)
        return version, head

    def _open_ranges(self, response: requests.Response, opening: base.Opening) -> tuple[Version, bytes]:
        """Return the version and the first bytes of an object of which the server sent a range."""
        found = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if not found or int(found[1]) != 0 or found[3] == "*":
            self._resource.drop(response)
            return self._open_stream(self._resource.get(None))
        size = int(found[3])
        self._version = version = _version(response, size)
        self._has_ranges = True
        self.pace.answered(connections.waiting_time(response))
        if opening.whole and not opening.engine.given_up:
            # For the requests after the head, whose own connection is reused.
            options = opening.engine.options
            requests_left = -((self.head_size - size) // options.chunk)
            wanted = min(self.pace.enough(options.connections), requests_left)
            self._resource.connect_early(response, wanted - 1)
        head = bytearray(min(self.head_size, size))
        with contextlib.closing(_Range(self._resource, response, int(found[2]) + 1)) as answer:
            begun = time.monotonic()
            filled = answer.readinto(memoryview(head))
            self.pace.received(filled, time.monotonic() - begun)
        first = bytes(head[:filled])
        known = remembered.Remembered(first)
        rest = seams.Seams(self, len(head), name=self.name, head=first, known=known, pace=self.pace)
        try:
            while filled < len(head):
                filled += rest.read_range(filled, memoryview(head)[filled:])
        except errors.NoRanges as err:
            log.warning("reading one ordered stream reason=%s", err)
            return self._open_stream(self._resource.get(None))
        self._check_coding(version, bytes(head))
        return version, bytes(head)

    def _open_stream(self, response: requests.Response) -> tuple[Version, bytes]:
        """Return the version and the first bytes of an object that is sent as a whole."""
        if response.status_code != 200:
            raise self._resource.failure(response)
        self._has_ranges = False
        self._version = version = _version(response, _length(response))
        if version.size is None and "Transfer-Encoding" not in response.headers:
            # RFC 9112, 8: only a format or a checksum shows whether such a body is complete.
            what = "a connection that ends early looks like the end; give a checksum"
            log.warning("no length url=%r: %s", self.name, what)
        first = readers.Peek(_HttpStream(self._resource, response), self.head_size)
        self._check_coding(version, first.head)
        self._first = first
        return version, first.head

    def _check_coding(self, version: Version, head: bytes) -> None:
        """Raise ``errors.Unsupported`` for a content coding that is not undone."""
        coding.check(version.encoding, head, self.name)

    def _raise_status(self, response: requests.Response) -> None:
        """Raise the error for a response that is not the requested range."""
        if response.status_code == 200:
            self._resource.drop(response)
            self._check_version(response, _length(response))
            raise errors.NoRanges(url=self.name, reason="the server sent the whole object instead of a range")
        if response.status_code == 416:
            self._resource.drop(response)
            self._check_version(response, None)
            raise errors.NoRanges(url=self.name, reason="server answers 416 to a range within the object")
        failure = self._resource.failure(response)
        if isinstance(failure, errors.Unreachable) and self._resource.was_redirected(response):
            # The target of the redirect has expired; the original URL may redirect to another one.
            self._resource.unpin()
            failure = errors.Transient(url=self.name, reason=failure.fields["reason"])
        raise failure

    def _check_range(self, response: requests.Response, offset: int) -> int:
        """Check the Content-Range of a 206 response; return its length in bytes."""
        found = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if not found:
            self._resource.drop(response)
            raise errors.WrongRanges(url=self.name, reason="206 response without a valid Content-Range")
        start, end = int(found[1]), int(found[2])
        self._check_version(response, None if found[3] == "*" else int(found[3]))
        if start != offset or end < start:
            self._resource.drop(response)
            reason = f"requested byte {offset}, received bytes {start}-{end}"
            raise errors.WrongRanges(url=self.name, reason=reason)
        return end - start + 1

    def _check_version(self, response: requests.Response, size: int | None) -> None:
        now = _version(response, size)
        known = self._version
        if known is None:
            return
        was, is_ = coding.normal(known.encoding), coding.normal(now.encoding)
        if response.status_code < 300 and was != is_:
            # Their bytes cannot be compared.
            self._resource.drop(response)
            reason = f"responses with different content encodings: {was} and {is_}; correct the server"
            raise errors.SourceError(reason=f"{self.name}: {reason}")
        if changed := known.difference(now):
            self._resource.drop(response)
            what, before, after = changed
            raise errors.SourceChanged(url=self.name, what=what, before=before, now=after)


class _HttpStream:
    """The body of one response as a reader."""

    def __init__(self, resource: pinned.Resource, response: requests.Response) -> None:
        self._resource = resource
        self._response = response

    def readinto(self, into: memoryview, /) -> int:
        with self._resource.read_from(self._response):
            return connections.read(self._response.raw, into)

    def close(self) -> None:
        self._resource.drop(self._response)


class _Range(_HttpStream):
    """The body of a range response, which has ``left`` bytes more."""

    def __init__(self, resource: pinned.Resource, response: requests.Response, left: int) -> None:
        super().__init__(resource, response)
        self._left = left

    def readinto(self, into: memoryview, /) -> int:
        """Read until ``into`` is full or the response ends or breaks; return the number of bytes."""
        into = into[: self._left]
        done = 0
        broken: errors.Transient | None = None
        try:
            # One block for all reads: each returns what has arrived.
            with self._resource.read_from(self._response):
                while done < len(into) and (count := connections.read(self._response.raw, into[done:])):
                    done += count
        except errors.Transient as err:
            # The bytes read are valid; the engine continues after them.
            broken = err
        if not done:
            if isinstance(broken, errors.Malformed):
                raise broken
            reason = broken.fields["reason"] if broken else "empty response"
            raise errors.CutShort(url=self._resource.name, reason=reason) from broken
        self._left -= done
        if not self._left and self._response.raw.length_remaining is None:
            # Read the end of a body without a length: else its connection cannot be used again. The range is
            # complete, even if the connection breaks here.
            with contextlib.suppress(errors.Transient):
                if super().readinto(memoryview(bytearray(1))):
                    reason = "a response longer than its range"
                    raise errors.WrongRanges(url=self._resource.name, reason=reason)
        return done


def _length(response: requests.Response) -> int | None:
    value = response.headers.get("Content-Length", "")
    return int(value) if LENGTH.fullmatch(value) else None


def _version(response: requests.Response, size: int | None) -> Version:
    headers = response.headers
    found = (headers.get(name) for name in VERSION_HEADERS)
    # Amazon's version id of objects in buckets without versions is "null".
    version = next((value for value in found if value and value != "null"), None)
    encoding = headers.get("Content-Encoding", "")
    return Version(headers.get("ETag"), headers.get("Last-Modified"), size, encoding, version)
