"""HTTP/1.1 of the upload server: h11 parses the heads, bodies are read directly from the connection."""

from __future__ import annotations

import contextlib
import dataclasses
import email.utils
import http
import re
import time
import urllib.parse
from collections.abc import Mapping
from typing import NamedTuple

import h11

from cdi_worker import errors
from cdi_worker.images.engine import retry
from cdi_worker.importer.upload.connection import BRIEF, QUIET, Connection

TOO_LARGE = "effective image size is larger than the reported available storage"
#: Seconds to read the rest of a body after a refusal: a client that is still sending sees the answer then.
LINGERING = 2.0
#: Bytes of the longest head, and of the longest chunk header or trailer line; the number of trailer lines.
HEAD, LINE, TRAILERS = 64 << 10, 4 << 10, 64
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?")


@dataclasses.dataclass(frozen=True)
class Answer:
    """The response to a request."""

    status: int = 200
    text: str = ""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Refusal(Exception):
    """End a request with a status and the reason, by default its phrase."""

    def __init__(self, status: int, headers: Mapping[str, str] | None = None, reason: str = "") -> None:
        super().__init__(status)
        self.answer = Answer(status, f"{status}: {reason or http.HTTPStatus(status).phrase}", headers or {})


def failed(failure: errors.Error) -> Answer:
    """Return the answer to a request whose upload has failed."""
    is_too_large = isinstance(failure, errors.TooLarge | errors.NoSpace | errors.ScratchTooSmall)
    text = f"{TOO_LARGE}: {failure}" if is_too_large else str(failure)
    is_client_error = is_too_large or isinstance(failure, errors.RequestError | errors.ImageError)
    is_busy = isinstance(failure, errors.TargetBusy)
    return Answer(400 if is_client_error else 503 if is_busy else 500, f"Saving stream failed: {text}")


class Limits(NamedTuple):
    """Limits for a client.

    ``idle``: seconds to send the head. ``patience``: seconds without a byte of the body, or with fewer than
    ``min_speed`` per second.
    """

    idle: float
    patience: float
    min_speed: float = retry.MIN_SPEED


class Request:
    """A request whose head has been received. ``headers``: by their lower-case names.

    ``length``: bytes of the body, None if it is chunked.
    """

    def __init__(self, connection: Connection, head: h11.Request, limits: Limits) -> None:
        self.method = head.method.decode("ascii")
        self.path = urllib.parse.urlsplit(head.target.decode("ascii")).path
        self.headers: dict[str, str] = {}
        for name, value in head.headers:
            key, text = name.decode("ascii"), value.decode("latin-1")
            self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text
        self.client_name = connection.client_name
        self.length: int | None = None
        if "transfer-encoding" not in self.headers:
            self.length = int(self.headers.get("content-length", "0"))
        self.content = Body(connection, self.length, limits)


def authorize(request: Request, client_name: str, *methods: str) -> None:
    """Raise ``Refusal`` unless the method is one of ``methods`` and the client's certificate has the name."""
    if request.method not in methods:
        raise Refusal(404)
    if request.client_name != client_name:
        raise Refusal(401)


class Exchange:
    """One request and its answer. Raises ``OSError`` if the connection is broken."""

    def __init__(self, connection: Connection, limits: Limits) -> None:
        self._connection = connection
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD)
        self._limits = limits
        self._request: Request | None = None
        self._is_head = False

    def receive(self) -> Request | None:
        """Return the request, None if the client closed the connection. Raises ``Refusal`` if malformed."""
        deadline = time.monotonic() + self._limits.idle
        try:
            while (head := self._h11.next_event()) is h11.NEED_DATA:
                self._h11.receive_data(self._connection.some(deadline - time.monotonic()))
        except h11.RemoteProtocolError as err:
            raise Refusal(err.error_status_hint) from err
        if not isinstance(head, h11.Request):
            return None
        self._is_head = head.method == b"HEAD"
        self._connection.put_back(self._h11.trailing_data[0])
        if not head.http_version.startswith(b"1."):
            raise Refusal(505)
        names = {name for name, _ in head.headers}
        if b"transfer-encoding" in names and (b"content-length" in names or head.http_version == b"1.0"):
            # Request smuggling: two servers would read two different requests (RFC 9112, 6.1).
            raise Refusal(400)
        try:
            self._request = Request(self._connection, head, self._limits)
        except ValueError as err:
            raise Refusal(400) from err
        expected = self._request.headers.get("expect", "100-continue")
        if expected.lower() != "100-continue":
            raise Refusal(417)
        return self._request

    def send_continue(self) -> None:
        """Send 100 Continue to a client that waits for it before it sends the body (RFC 9110, 10.1.1)."""
        if self._h11.they_are_waiting_for_100_continue:
            data = self._h11.send(h11.InformationalResponse(status_code=100, headers=[]))
            with contextlib.suppress(OSError):  # reading the body will report it
                self._connection.send(data or b"")

    def answer(self, answer: Answer) -> bool:
        """Send ``answer``; return whether the connection can take another request."""
        request = self._request
        is_complete = request is not None and request.content.at_end
        text = answer.text.encode()
        headers = {"Date": email.utils.formatdate(usegmt=True), **answer.headers}
        if answer.status == http.HTTPStatus.NO_CONTENT:
            text = b""
        else:
            headers |= {"Content-Length": str(len(text)), "Content-Type": "text/plain; charset=utf-8"}
        if self._is_head:
            text = b""
        if not is_complete or self._connection.interrupted:
            headers["Connection"] = "close"
        # Latin-1, as the request was decoded: Upload-Metadata is echoed byte for byte.
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        phrase = http.HTTPStatus(answer.status).phrase.encode()
        events = [
            h11.Response(status_code=answer.status, headers=encoded, reason=phrase),
            h11.Data(data=text),
            h11.EndOfMessage(),
        ]
        self._connection.send(b"".join(self._h11.send(event) or b"" for event in events))
        if not is_complete:
            self._connection.drain(LINGERING)
        return self._h11.our_state is h11.DONE


class Body:
    """The body of a request: of ``length`` bytes, or chunked if it is None (RFC 9112, 7.1).

    Chunk extensions and trailers are ignored.
    """

    def __init__(self, connection: Connection, length: int | None, limits: Limits) -> None:
        self._connection = connection
        self._is_chunked = length is None
        #: Bytes still to be read of it, or of its current chunk.
        self._left = length or 0
        #: Whether the CRLF after a chunk's data is still to be read.
        self._after_data = False
        #: Trailer lines read so far; None before the last chunk.
        self._trailers: int | None = None
        self._failure: OSError | None = None
        self.at_end = length == 0
        self._patience = limits.patience
        self._meter = retry.SpeedMeter(limits.patience, limits.min_speed)

    def interrupt(self) -> None:
        self._connection.interrupt()

    def readinto(self, into: memoryview, /) -> int:
        if self._failure is not None:
            raise self._failure
        return self._meter.read(lambda: self._fill(into))

    def _fill(self, into: memoryview) -> int:
        filled = 0
        latest = time.monotonic() + BRIEF
        while filled < len(into) and not self.at_end and not (filled and time.monotonic() > latest):
            try:
                filled += self._step(into[filled:], QUIET if filled else self._patience)
            except OSError as err:
                if not filled:
                    raise
                # Return the bytes received before the failure; the next call raises it. Silence is none yet.
                self._failure = None if isinstance(err, TimeoutError) else err
                break
        return filled

    def _step(self, into: memoryview, limit: float) -> int:
        """Read some data, or one chunk header or trailer line; return the bytes of data."""
        if self._left:
            count = self._connection.readinto(into[: self._left], limit)
            if not count:
                end = f"{self._left} bytes before the end{' of a chunk' if self._is_chunked else ''}"
                raise ConnectionError(f"the client closed the connection {end}")
            self._left -= count
            self.at_end = not (self._left or self._is_chunked)
            return count
        if self._trailers is not None:
            if self._trailers == TRAILERS:
                raise ConnectionError(f"more than {TRAILERS} trailers")
            self.at_end = not self._connection.line(LINE, limit)
            self._trailers += 1
            return 0
        if self._after_data and self._connection.line(LINE, limit):
            raise ConnectionError("malformed chunk: longer than its header says")
        self._after_data = False
        found = _CHUNK.fullmatch(self._connection.line(LINE, limit))
        if found is None:
            raise ConnectionError("malformed chunk header")
        self._left = int(found[1], 16)
        self._after_data = bool(self._left)
        self._trailers = None if self._left else 0
        return 0
