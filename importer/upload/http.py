"""HTTP/1.1 of the upload server: heads through h11, bodies straight from the connection."""

from __future__ import annotations

import contextlib
import dataclasses
import email.utils
import http
import re
import time
import urllib.parse
from collections.abc import Mapping

import h11

from cdi_worker import errors
from cdi_worker.upload.connection import QUIET, Connection

TOO_LARGE = "effective image size is larger than the reported available storage"
#: Seconds of a body that is read on, for its client to see the refusal.
LINGERING = 2.0
#: The longest head, and the longest line before a chunk or of the trailers, in bytes; how many of those.
HEAD, LINE, TRAILERS = 64 << 10, 4 << 10, 64
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?")


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What is said to a request."""

    status: int = 200
    text: str = ""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Refusal(Exception):
    """Ends a request with a status and nothing else to say."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.answer = Answer(status, f"{status}: {http.HTTPStatus(status).phrase}")


def failed(failure: errors.Error) -> Answer:
    """Return the answer that tells a client what went wrong."""
    is_too_large = isinstance(failure, errors.TooLarge | errors.NoSpace | errors.ScratchTooSmall)
    said = f"{TOO_LARGE}: {failure}" if is_too_large else str(failure)
    is_clients = is_too_large or isinstance(failure, errors.RequestError)
    return Answer(400 if is_clients else 500, f"Saving stream failed: {said}")


class Request:
    """A request whose head has come. ``headers``: by their names in small letters.

    ``length`` of the body in bytes; None: as many as come.
    """

    def __init__(self, connection: Connection, head: h11.Request, patience: float) -> None:
        self.method = head.method.decode("ascii")
        self.path = urllib.parse.urlsplit(head.target.decode("ascii")).path
        self.headers: dict[str, str] = {}
        for name, value in head.headers:
            key, text = name.decode("ascii"), value.decode("latin-1")
            self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text
        self.client_name = connection.client_name
        self.length: int | None = None
        self.content: Chunked | Sized
        if "transfer-encoding" in self.headers:
            self.content = Chunked(connection, patience)
        else:
            self.length = int(self.headers.get("content-length", "0"))
            self.content = Sized(connection, self.length, patience)


def authorize(request: Request, client_name: str, *methods: str) -> None:
    """Raise ``Refusal`` if the method is not one of ``methods`` or the client has another name."""
    if request.method not in methods:
        raise Refusal(404)
    if request.client_name != client_name:
        raise Refusal(401)


class Exchange:
    """One request and its answer. ``idle``: seconds for its head; ``patience``: without a byte of its body.

    Raises ``OSError`` where the connection is of no more use.
    """

    def __init__(self, connection: Connection, idle: float, patience: float) -> None:
        self._connection = connection
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD)
        self._idle = idle
        self._patience = patience
        self._request: Request | None = None
        self._is_head = False

    def receive(self) -> Request | None:
        """Wait for the request; None: the client has closed. Raises ``Refusal`` of what is none."""
        try:
            head = self._head()
        except h11.RemoteProtocolError as err:
            raise Refusal(err.error_status_hint) from err
        if head is None:
            return None
        if not head.http_version.startswith(b"1."):
            raise Refusal(505)
        names = {name for name, _ in head.headers}
        if b"transfer-encoding" in names and (b"content-length" in names or head.http_version == b"1.0"):
            # Whoever says so may want two servers to read two different requests (RFC 9112, 6.1).
            raise Refusal(400)
        try:
            self._request = Request(self._connection, head, self._patience)
        except ValueError as err:
            raise Refusal(400) from err
        expected = self._request.headers.get("expect", "100-continue")
        if expected.lower() != "100-continue":
            raise Refusal(417)
        return self._request

    def _head(self) -> h11.Request | None:
        deadline = time.monotonic() + self._idle
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            self._h11.receive_data(self._connection.some(deadline - time.monotonic()))
        if not isinstance(event, h11.Request):
            return None
        self._is_head = event.method == b"HEAD"
        self._connection.put_back(self._h11.trailing_data[0])
        return event

    def say_continue(self) -> None:
        """Ask a client that waits for it (RFC 9110, 10.1.1) to send the body."""
        if self._h11.they_are_waiting_for_100_continue:
            said = self._h11.send(h11.InformationalResponse(status_code=100, headers=[]))
            with contextlib.suppress(OSError):  # that it has gone will show in the body
                self._connection.send(said or b"")

    def answer(self, said: Answer) -> bool:
        """Send it; False: the connection ends with it."""
        request = self._request
        whole = request is not None and request.content.at_end
        text = said.text.encode()
        headers = {"Date": email.utils.formatdate(usegmt=True), **said.headers}
        if said.status == http.HTTPStatus.NO_CONTENT:
            text = b""
        else:
            headers |= {"Content-Length": str(len(text)), "Content-Type": "text/plain; charset=utf-8"}
        if self._is_head:
            text = b""
        if not whole or self._connection.interrupted:
            headers["Connection"] = "close"
        # Words of the client come back as they were.
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        phrase = http.HTTPStatus(said.status).phrase.encode()
        events = [
            h11.Response(status_code=said.status, headers=encoded, reason=phrase),
            h11.Data(data=text),
            h11.EndOfMessage(),
        ]
        self._connection.send(b"".join(self._h11.send(event) or b"" for event in events))
        if not whole:
            self._connection.drain(LINGERING)
        return self._h11.our_state is h11.DONE


class Sized:
    """A body of so many bytes."""

    def __init__(self, connection: Connection, length: int, patience: float) -> None:
        self._connection = connection
        self._left = length
        self._patience = patience

    @property
    def at_end(self) -> bool:
        return not self._left

    def readinto(self, into: memoryview, /) -> int:
        if not self._left:
            return 0
        count = self._connection.readinto(into[: self._left], self._patience)
        if not count:
            raise ConnectionError(f"the client has gone {self._left} bytes before the end")
        self._left -= count
        return count

    def interrupt(self) -> None:
        self._connection.interrupt()


class Chunked:
    """A body in chunks (RFC 9112, 7.1). What is said beside their lengths is passed over."""

    def __init__(self, connection: Connection, patience: float) -> None:
        self._connection = connection
        self._patience = patience
        self._left = 0
        self._behind = False
        self._trailers: int | None = None
        self._failure: OSError | None = None
        self.at_end = False

    def readinto(self, into: memoryview, /) -> int:
        if self._failure is not None:
            raise self._failure
        filled = 0
        while filled < len(into) and not self.at_end:
            try:
                count = self._step(into[filled:], QUIET if filled else self._patience)
            except TimeoutError:
                if filled:
                    break
                raise
            except OSError as err:
                if not filled:
                    raise
                # What came before it is good.
                self._failure = err
                break
            filled += count
        return filled

    def interrupt(self) -> None:
        self._connection.interrupt()

    def _step(self, into: memoryview, limit: float) -> int:
        """Read some of a chunk, or what stands between two or behind the last: that is 0 bytes of content."""
        if self._trailers is not None:
            self._end(self._trailers, limit)
            return 0
        if not self._left:
            self._begin(limit)
            return 0
        count = self._connection.readinto(into[: self._left], limit)
        if not count:
            raise ConnectionError("the client has gone within a chunk")
        self._left -= count
        return count

    def _begin(self, limit: float) -> None:
        """Read what stands before a chunk, and behind the one before."""
        if self._behind and self._connection.line(LINE, limit):
            raise ConnectionError("a chunk is longer than it says")
        self._behind = False
        found = _CHUNK.fullmatch(self._connection.line(LINE, limit))
        if found is None:
            raise ConnectionError("a chunk of no length")
        self._left = int(found[1], 16)
        self._behind = bool(self._left)
        self._trailers = None if self._left else 0

    def _end(self, trailers: int, limit: float) -> None:
        """Read one line behind the last chunk, where so many have come."""
        if trailers == TRAILERS:
            raise ConnectionError(f"more than {TRAILERS} trailers")
        self.at_end = not self._connection.line(LINE, limit)
        self._trailers = trailers + 1
