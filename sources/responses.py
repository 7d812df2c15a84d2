"""HTTP responses with limits for interim responses, head and trailers, which http.client does not have.

It skips 100 Continue any number of times, and takes other interim responses (RFC 9110, 15.2) such as 103
Early Hints for the final one. The overrides are of private methods, because ``begin`` has no hook.
"""

from __future__ import annotations

import email.message
import http.client
import io
import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, ClassVar, Final

from cdi_worker import masking
from cdi_worker.images.engine import retry
from cdi_worker.sources import sockets

log = logging.getLogger(__name__)

#: Bytes of a head with all interim responses before it, or of the trailers. Headers need a few KiB.
LARGEST = 256 << 10
#: Bytes of one read of a body that is kept.
_PART: Final = 64 << 10


#: Headers of a response that its line in the log has.
SHOWN: Final = ("content-range", "content-length", "etag", "retry-after")
#: Bytes of the longest header of a chunk, with its extensions, and of the longest body and chunk.
LONGEST_LINE: Final = 64 << 10
_MOST_BYTES: Final = (1 << 63) - 1
#: Bytes of chunks that are received together.
_CHUNKS: Final = 256 << 10
_LENGTH: Final = re.compile(r"0*([0-9]{1,19})")
_CHUNK: Final = re.compile(rb"[ \t]*([0-9A-Fa-f]{1,16})[ \t]*(?:;.*)?\r?\n", re.DOTALL)
#: The header of a chunk as almost all servers write it, and its beginning.
_PLAIN: Final = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_BEGUN: Final = re.compile(rb"[0-9A-Fa-f]{0,8}\r?")
#: Statuses of responses without a body.
_EMPTY: Final = frozenset({204, 304})


def log_answer(
    method: str,
    url: str,
    status: int,
    headers: Mapping[str, str] | email.message.Message,
    byte_range: str | bytes | None = None,
) -> None:
    """Log a request and its answer (log level 4). ``url``: without secrets."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    shown = {"range": byte_range, **{name: headers.get(name) for name in SHOWN}}
    more = "".join(f" {name}={masking.quoted(value)!r}" for name, value in shown.items() if value)
    log.debug("%s %s: %d%s", method, url, status, more)


class Malformed(http.client.HTTPException):
    """A response that is not HTTP (RFC 9112): ``what`` is wrong, and what was ``received`` instead."""

    def __init__(self, what: str, received: str | None = None) -> None:
        self.what, self.received = what, received
        super().__init__(what if received is None else f"{what} {received!r}")


class Endless(Malformed):
    """A head or trailers without an end."""


class TooLong(http.client.HTTPException):
    """A body beyond the limit of ``Bounded``."""


class Response(http.client.HTTPResponse):
    """A response; interim responses before it and trailers after it are skipped, up to a limit.

    A socket with a timeout also limits the time: a head or trailers may take twice as long. A body with fewer
    than ``min_speed`` bytes per second, on average over the timeout, is a ``TimeoutError``.
    """

    def __init__(self, sock: Any, *args: Any, min_speed: float = retry.MIN_SPEED, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._timeout: float | None = sock.gettimeout()
        self._min_speed = min_speed
        self._body = _Metered(self.fp.detach())
        self._plain = io.BufferedReader(self._body)
        self._receiver = sockets.Receiver(sock)
        self._is_drained = False
        self._chunks: _Chunks | None = None
        # For CONNECT, http.client reads the head from here without ``begin``.
        self._limit()

    def begin(self) -> None:
        try:
            super().begin()
        finally:
            self._unlimit()
        if self._method != "HEAD" and self.status not in _EMPTY:  # type: ignore[attr-defined]  # private
            self._check_framing()
            self._chunks = _Chunks() if self.chunked else None

    def receive(self, into: memoryview) -> int:
        """Read 1 to ``len(into)`` bytes of a body that has more, past the buffer of ``fp``; 0 at the end."""
        if self._is_drained:
            began = time.monotonic()
            count = self._receiver.readinto(into)
            self._body.count(count, began)
        else:
            # With bytes in its buffer, a longer ``readinto1`` reads the socket too, and a reset loses them.
            self._is_drained = len(into) >= io.DEFAULT_BUFFER_SIZE
            count = self.fp.readinto1(into[: io.DEFAULT_BUFFER_SIZE])
        if self.length is not None:
            self.length -= count
        return count

    def receive_chunks(self, into: memoryview) -> int:
        """Read 1 to ``len(into)`` bytes of a chunked body; 0: ``fp`` reads what follows, after ``reset``."""
        chunks = self._chunks
        if chunks is None:
            return 0
        while not (count := chunks.take(into)):
            if not (chunks.expects_more and chunks.add(self._receive_into)):
                self.chunk_left, self._chunks = chunks.left, None
                self._body.received = chunks.rest
                break
        return count

    def _receive_into(self, into: memoryview) -> int:
        if self._is_drained:
            began = time.monotonic()
            # The end of the body is not known.
            count = self._receiver.readinto(into, waits=False)
            self._body.count(count, began)
            return count
        self._is_drained = True
        data = self.fp.read1(io.DEFAULT_BUFFER_SIZE)
        into[: len(data)] = data
        return len(data)

    def reset(self) -> None:
        """Let ``fp`` read what is left, after ``receive``."""
        self._receiver.reset()

    def _read_status(self) -> tuple[str, int, str]:
        while True:
            version, status, reason = super()._read_status()  # type: ignore[misc]  # private to typeshed
            if not 100 <= status < 200 or status == http.HTTPStatus.SWITCHING_PROTOCOLS:
                return version, status, reason
            http.client.parse_headers(self.fp)

    def _check_framing(self) -> None:
        """Raise ``Malformed`` if the end of the body is not known (RFC 9112, 6.3).

        http.client reads until the connection ends then, also through the headers of chunks.
        """
        encoding = ", ".join(self.headers.get_all("Transfer-Encoding", [])).strip()
        if not self.chunked and encoding.lower() == "chunked":
            # With a blank behind it.
            self.chunked, self.chunk_left, self.length = True, None, None
        if not self.chunked and encoding.lower() not in {"", "identity"}:
            raise Malformed("unsupported Transfer-Encoding", encoding)
        stated = ", ".join(self.headers.get_all("Content-Length", []))
        if self.chunked or not stated:
            return
        # A list of equal lengths is one (RFC 9110, 8.6).
        length, *others = {value.strip() for value in stated.split(",")}
        found = None if others else _LENGTH.fullmatch(length)
        if found is None or int(found[1]) > _MOST_BYTES:
            raise Malformed("malformed Content-Length", stated)
        del self.headers["Content-Length"]
        self.headers["Content-Length"] = found[1]
        self.length = int(found[1])

    def _get_chunk_left(self) -> int | None:
        if self.chunk_left == 0:
            # http.client skips any two bytes.
            if self._safe_read(2) != b"\r\n":  # type: ignore[attr-defined]  # private to typeshed
                raise Malformed("a chunk is longer than its header says")
            self.chunk_left = None
        left: int | None = super()._get_chunk_left()  # type: ignore[misc]  # private to typeshed
        return left

    def _read_next_chunk_size(self) -> int:
        line = self.fp.readline(LONGEST_LINE + 1)
        if len(line) > LONGEST_LINE:
            raise Malformed("a chunk header without end")
        if not line.endswith(b"\n"):
            # The connection was cut.
            raise http.client.IncompleteRead(b"")
        found = _CHUNK.fullmatch(line)
        size = int(found[1], 16) if found else -1
        if not 0 <= size <= _MOST_BYTES:
            raise Malformed("malformed chunk header", line.rstrip(b"\r\n").decode("latin-1"))
        return size

    def _read_and_discard_trailer(self) -> None:
        self._plain = self.fp
        self._limit()
        try:
            super()._read_and_discard_trailer()  # type: ignore[misc]  # private to typeshed
        finally:
            self._unlimit()

    def _limit(self) -> None:
        self._body.meter = None
        self.fp: Any = _Lines(self._plain, None if self._timeout is None else 2 * self._timeout)

    def _unlimit(self) -> None:
        # None: http.client has closed the response.
        if self.fp is not None:
            self.fp = self._plain
        self._body.meter = None if self._timeout is None else retry.SpeedMeter(self._timeout, self._min_speed)


class Bounded(Response):
    """A response for libraries that keep a whole body in memory: ``read`` returns ``most`` bytes in total.

    Bytes that ``readinto`` returns do not count: their reader has a buffer.
    """

    most: ClassVar[int]
    _kept = 0

    def begin(self) -> None:
        super().begin()
        # The libraries that use it keep the address to themselves.
        log_answer(self._method or "", "", self.status, self.headers)  # type: ignore[attr-defined]  # private

    def read(self, amt: int | None = None) -> bytes:
        """Read a body as ``http.client`` does. Raises ``TooLong``."""
        if self.length is not None and self.length > self.most - self._kept and amt is None:
            raise self._too_long()
        parts = []
        while amt is None or amt > 0:
            part = super().read(_PART if amt is None else min(amt, _PART))
            if not part:
                break
            parts.append(part)
            amt = None if amt is None else amt - len(part)
            self._kept += len(part)
            if self._kept > self.most:
                raise self._too_long()
        if amt is None and self.length:
            # Only a read without a size reports it.
            raise http.client.IncompleteRead(b"", self.length)
        return b"".join(parts)

    def _too_long(self) -> TooLong:
        return TooLong(f"the response has more than {self.most >> 20} MiB")


class _Chunks:
    """The content of many chunks at once: http.client reads one record of TLS, or what is left of a chunk.

    ``left``: bytes of the chunk that has begun; 0: its end follows; None: a header.
    """

    def __init__(self) -> None:
        self.left: int | None = None
        self._view = memoryview(b"")
        self._start = self._end = 0

    @property
    def rest(self) -> bytes:
        """The bytes that were received and not taken."""
        return bytes(self._view[self._start : self._end])

    @property
    def expects_more(self) -> bool:
        """Whether what was received begins a plain chunk: the last one and unusual ones are not."""
        rest = self.rest
        if self.left == 0 and not rest.startswith(b"\r\n"):
            return b"\r\n".startswith(rest)
        return bool(self.left) or _BEGUN.fullmatch(rest, 2 if self.left == 0 else 0) is not None

    def add(self, receive: Callable[[memoryview], int]) -> int:
        """Receive more; return how many bytes."""
        rest = self.rest
        if not self._view:
            self._view = memoryview(bytearray(_CHUNKS))
        self._start, self._end = 0, len(rest)
        self._view[: len(rest)] = rest
        count = receive(self._view[len(rest) :])
        self._end += count
        return count

    def take(self, into: memoryview) -> int:
        """Take the content of plain chunks that has been received; return how many bytes."""
        done = 0
        while done < len(into):
            if not self.left:
                at = self._start if self.left is None else self._start + 2
                header = _PLAIN.match(self._view, at, self._end)
                size = int(header[1], 16) if header else 0
                if header is None or not size or bytes(self._view[self._start : at]) not in {b"", b"\r\n"}:
                    break
                self._start, self.left = header.end(), size
            count = min(self.left, self._end - self._start, len(into) - done)
            if not count:
                break
            into[done : done + count] = self._view[self._start : self._start + count]
            self._start += count
            self.left -= count
            done += count
        return done


class _Metered(io.RawIOBase):
    """A socket, whose reads are measured. ``received``: bytes of it that were received apart.

    It has no reference to the response. With such a cycle, an unused response would only close its socket
    when garbage is collected, not at once.
    """

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw: Any = raw
        #: None while the head is read: it has its own limit, and a server may need long to begin.
        self.meter: retry.SpeedMeter | None = None
        self.received = b""

    def count(self, count: int, began: float) -> None:
        """Add a read that has begun at a time (``time.monotonic``). Raises ``retry.Slow``."""
        if count and self.meter is not None:
            self.meter.count(count, time.monotonic() - began)

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(self._raw.fileno())

    def readinto(self, into: Any, /) -> int:
        if self.received:
            part = self.received[: len(into)]
            self.received = self.received[len(part) :]
            into[: len(part)] = part
            return len(part)
        began = time.monotonic()
        count: int = self._raw.readinto(into)
        self.count(count, began)
        return count

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _Lines:
    """Lines of at most ``LARGEST`` bytes in total, that arrive within ``seconds``."""

    def __init__(self, plain: BinaryIO, seconds: float | None) -> None:
        self._plain: Any = plain
        self._left = LARGEST
        self._end = None if seconds is None else time.monotonic() + seconds

    def readline(self, limit: int) -> bytes:
        line = b""
        while len(line) < limit and not line.endswith(b"\n"):
            if self._end is not None and time.monotonic() > self._end:
                raise TimeoutError("timed out")
            # One read of the socket: a whole line of single bytes would take as many timeouts.
            held = self._plain.peek(1)
            if not held:
                break
            part = self._plain.readline(min(limit - len(line), len(held)))
            line += part
            self._left -= len(part)
            if self._left < 0:
                raise Endless("interim responses, headers or trailers without end")
        return line

    def flush(self) -> None:
        self._plain.flush()

    def close(self) -> None:
        self._plain.close()

    @property
    def closed(self) -> bool:
        return bool(self._plain.closed)
