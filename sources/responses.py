"""HTTP responses with limits for interim responses, head and trailers, which http.client does not have.

It skips 100 Continue any number of times, and takes other interim responses (RFC 9110, 15.2) such as 103
Early Hints for the final one. The overrides are of private methods, because ``begin`` has no hook.
"""

from __future__ import annotations

import http.client
import io
import time
from typing import Any, BinaryIO, ClassVar, Final

from cdi_worker.images.engine import retry
from cdi_worker.sources import sockets

#: Bytes of a head with all interim responses before it, or of the trailers. Headers need a few KiB.
LARGEST = 256 << 10
SWITCHING_PROTOCOLS = 101
#: Bytes of one read of a body that is kept.
_PART: Final = 64 << 10


class Endless(http.client.HTTPException):
    """A head or trailers without an end."""


class TooLong(http.client.HTTPException):
    """A body beyond the limit of ``Bounded``."""


class Response(http.client.HTTPResponse):
    """A response; interim responses before it and trailers after it are skipped, up to a limit.

    A socket with a timeout also limits the time: a head or trailers may take twice as long. A body with fewer
    than ``slowest`` bytes per second, on average over the timeout, is a ``TimeoutError``.
    """

    def __init__(self, sock: Any, *args: Any, slowest: float = retry.SLOWEST, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._timeout: float | None = sock.gettimeout()
        self._slowest = slowest
        self._body = _Body()
        if isinstance(self.fp, io.BufferedReader):
            self.fp = io.BufferedReader(_Metered(self.fp.detach(), self._body))
        self._plain = self.fp
        self._receiver = sockets.Receiver(sock)
        self._is_drained = False
        # For CONNECT, http.client reads the head from here without ``begin``.
        self._limit()

    def begin(self) -> None:
        try:
            super().begin()
        finally:
            self._unlimit()

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

    def reset(self) -> None:
        """Let ``fp`` read what is left, after ``receive``."""
        self._receiver.reset()

    def _read_status(self) -> tuple[str, int, str]:
        while True:
            version, status, reason = super()._read_status()  # type: ignore[misc]  # private to typeshed
            if not 100 <= status < 200 or status == SWITCHING_PROTOCOLS:
                return version, status, reason
            http.client.parse_headers(self.fp)

    def _read_next_chunk_size(self) -> int:
        size: int = super()._read_next_chunk_size()  # type: ignore[misc]  # private to typeshed
        if size < 0:
            # http.client reads such a chunk to the end of the connection, into memory.
            raise ValueError("a chunk of a negative size")
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
        self._body.meter = None if self._timeout is None else retry.Meter(self._timeout, self._slowest)


class Bounded(Response):
    """A response for libraries that keep a whole body in memory: ``read`` returns ``most`` bytes in total.

    Bytes that ``readinto`` returns do not count: their reader has a buffer.
    """

    most: ClassVar[int]
    _kept = 0

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


class _Body:
    """Measures the reads of a body.

    It has no reference to the response. With such a cycle, an unused response would only close its socket
    when garbage is collected, not at once.
    """

    def __init__(self) -> None:
        #: None while the head is read: it has its own limit, and a server may need long to begin.
        self.meter: retry.Meter | None = None

    def count(self, count: int, began: float) -> None:
        """Add a read that has begun at a time (``time.monotonic``). Raises ``retry.Slow``."""
        if count and self.meter is not None:
            self.meter.count(count, time.monotonic() - began)


class _Metered(io.RawIOBase):
    """A socket's reads, measured by ``body``."""

    def __init__(self, raw: io.RawIOBase, body: _Body) -> None:
        self._raw: Any = raw
        self._body = body

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(self._raw.fileno())

    def readinto(self, into: Any, /) -> int:
        began = time.monotonic()
        count: int = self._raw.readinto(into)
        self._body.count(count, began)
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
