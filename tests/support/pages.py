"""What the misbehaving server has at a path, and what it was asked for."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Page:
    """What a path answers, and how, in bytes of one answer's body unless said otherwise."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    content_type: str = "application/octet-stream"
    etag: str | None = '"one"'
    modified: str | None = "Mon, 02 Nov 2026 10:00:00 GMT"
    #: Whether a Range is honoured, and whether Accept-Ranges says so (by default: the truth).
    ranges: bool = True
    claims_ranges: bool | None = None
    #: How the end of the body is told: ``length``, ``chunked`` or ``close``.
    framing: str = "length"
    #: Status of HEAD.
    head: int = 200
    #: ``user:password`` that is asked for.
    password: str | None = None
    #: Where to go instead, in turn: one redirect after the other leads elsewhere.
    to: tuple[str, ...] = ()
    #: Content-Range of a 206; may use {first}, {last} and {total}.
    content_range: str = "bytes {first}-{last}/{total}"
    #: The bytes of a 206 are those from this much further on.
    shift: int = 0
    #: Content-Length promises this many bytes more than come (then the connection ends).
    missing: int = 0
    #: This many bytes come after Content-Length has been served.
    extra: int = 0
    #: Reset the connection after so many bytes of an answer / on reaching this byte of the whole body.
    cut: int | None = None
    cut_at: int | None = None
    #: Send nothing more after so many bytes / on reaching this byte of the whole body, but keep the
    #: connection; ``silent``: not even a status.
    stall: int | None = None
    stall_at: int | None = None
    silent: bool = False
    #: Bytes at a time, and seconds to wait after each.
    drip: tuple[int, float] | None = None

    def refusal(self, headers: Mapping[str, str]) -> Page | None:
        """Return the answer to a request that may not have the page."""
        if self.password is not None:
            wanted = "Basic " + base64.b64encode(self.password.encode()).decode()
            if headers.get("authorization") != wanted:
                asking = {"WWW-Authenticate": 'Basic realm="private"'}
                return Page(b"who?", status=401, headers=asking, head=401)
        if headers.get("if-match", self.etag) != self.etag:
            return Page(b"another", status=412, head=412)
        return None

    def span(self, headers: Mapping[str, str]) -> tuple[int, int] | None:
        """Return the first and last byte that a Range asks for, None for everything."""
        unit, _, spec = headers.get("range", "").partition("=")
        if unit != "bytes" or not self.ranges or self.status != 200 or self.to:
            return None
        if headers.get("if-range", self.etag) not in (self.etag, self.modified):
            return None
        first, _, last = spec.partition("-")
        size = len(self.body)
        if not first:
            return max(0, size - int(last)), size - 1
        return int(first), min(int(last), size - 1) if last else size - 1


@dataclasses.dataclass
class Seen:
    """A request that arrived; names of headers in lower case. ``sent``: bytes of the body so far."""

    method: str
    path: str
    headers: dict[str, str]
    status: int = 0
    sent: int = 0
