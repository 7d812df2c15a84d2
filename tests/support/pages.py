"""What the misbehaving server serves at a path, and the requests it received."""

from __future__ import annotations

import base64
import dataclasses
import time
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True)
class Page:
    """The response for a path; byte counts refer to the body of one response unless stated otherwise."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    content_type: str = "application/octet-stream"
    etag: str | None = '"one"'
    modified: str | None = "Mon, 02 Nov 2026 10:00:00 GMT"
    #: Whether Range is honoured, and whether Accept-Ranges claims so (by default, the truth).
    ranges: bool = True
    claims_ranges: bool | None = None
    #: How the end of the body is marked: ``length``, ``chunked`` or ``close``.
    framing: str = "length"
    #: Status of HEAD.
    head: int = 200
    #: ``user:password`` that is required.
    password: str | None = None
    #: Redirect targets, used in turn.
    to: tuple[str, ...] = ()
    #: Content-Range of a 206; may use {first}, {last} and {total}.
    content_range: str = "bytes {first}-{last}/{total}"
    #: Returns where the bytes of a 206 begin, for the first byte requested and the number of the request.
    lie: Callable[[int, int], int] | None = None
    #: Returns other bytes for those of a response from an offset.
    damage: Callable[[int, bytes], bytes] | None = None
    #: Ranges behind byte 0: reset after this many bytes / shorter than requested, as their header says.
    cut_range: int | None = None
    short_range: int | None = None
    #: Content-Length exceeds the bytes sent by this many (then the connection closes).
    missing: int = 0
    #: This many bytes follow the end given by Content-Length.
    extra: int = 0
    #: Reset the connection after this many bytes of a response / at this byte of the whole body.
    cut: int | None = None
    cut_at: int | None = None
    #: Stop sending after this many bytes / at this byte of the whole body, but keep the connection
    #: open; ``silent``: send no status either.
    stall: int | None = None
    stall_at: int | None = None
    silent: bool = False
    #: Seconds before the status.
    delay: float = 0.0
    #: Bytes to send at a time, and seconds to wait after each.
    drip: tuple[int, float] | None = None
    #: Sent before the status, after the last chunk of a chunked body, and after the body: some bytes, and how
    #: often; None: until the client disconnects.
    before: tuple[bytes, int | None] = (b"", 0)
    trailers: tuple[bytes, int | None] = (b"", 0)
    tail: tuple[bytes, int | None] = (b"", 0)

    def refusal(self, headers: Mapping[str, str]) -> Page | None:
        """Return the error page for a request that may not have the page, else None."""
        if self.password is not None:
            expected = "Basic " + base64.b64encode(self.password.encode()).decode()
            if headers.get("authorization") != expected:
                asking = {"WWW-Authenticate": 'Basic realm="private"'}
                return Page(b"who?", status=401, headers=asking, head=401)
        if headers.get("if-match", self.etag) != self.etag:
            return Page(b"another", status=412, head=412)
        return None

    def span(self, headers: Mapping[str, str]) -> tuple[int, int] | None:
        """Return the first and last byte of the requested range, or None for the whole body."""
        unit, _, spec = headers.get("range", "").partition("=")
        if unit != "bytes" or not self.ranges or self.status != 200 or self.to:
            return None
        if headers.get("if-range", self.etag) not in (self.etag, self.modified):
            return None
        first, _, last = spec.partition("-")
        size = len(self.body)
        if not first:
            return max(0, size - int(last)), size - 1
        end = min(int(last), size - 1) if last else size - 1
        if int(first) and self.short_range is not None:
            end = min(end, int(first) + self.short_range - 1)
        return int(first), end


@dataclasses.dataclass
class Request:
    """A received request; header names in lower case. ``sent``: bytes of the body sent so far.

    ``begun``, ``ended``: when it was received and answered (``time.monotonic``).
    """

    method: str
    path: str
    headers: dict[str, str]
    status: int = 0
    sent: int = 0
    begun: float = dataclasses.field(default_factory=time.monotonic)
    ended: float = 0.0
