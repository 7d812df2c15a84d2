"""The upload source: the bodies of one upload's requests, read once and in order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

from cdi_worker import errors
from cdi_worker.formats import coding, readers
from cdi_worker.sources import base

NAME = "the uploaded stream"
#: Seconds to read the bytes in flight of a connection that another request replaces.
GRACE = 0.5


class Content(Protocol):
    """The body of one request."""

    def readinto(self, into: memoryview, /) -> int:
        """Read 1 to ``len(into)`` bytes; 0 only at the end. Raises the failure of the connection."""

    def interrupt(self) -> None:
        """Abort the read in progress in another thread, and all later reads."""


class Body:
    """The bodies of an upload's requests as one reader. Thread-safe.

    The server thread lends the content of its request; the reading thread reads from it directly, so that
    bytes are neither copied nor queued between connection and reader.
    """

    def __init__(self) -> None:
        self._lent: Content | None = None
        self._reading = False
        self._broken: Exception | None = None
        self._ended = False
        self._failure: errors.Error | None = None
        #: The requests that wait to take over; ``_turn`` is held by the one that has.
        self._successors = 0
        self._turn = threading.Lock()
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        #: With the same lock, for the end of a read only: a read that wakes up the server thread is slower.
        self._read = threading.Condition(lock)
        #: Bytes read so far.
        self.received = 0

    @property
    def is_lent(self) -> bool:
        """Whether a request is being read."""
        return self._lent is not None

    @property
    def is_complete(self) -> bool:
        """Whether the upload has ended or failed."""
        return self._ended or self._failure is not None

    def lend(self, content: Content) -> Exception | None:
        """Wait until ``content`` was read or withdrawn, or the upload ended; return the read error."""
        with self._changed:
            if self._ended:
                return None
            if self._successors:
                return _replaced()
            self._lent, self._broken = content, None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lent is not content)
            return self._broken

    @contextlib.contextmanager
    def take_over(self) -> Iterator[None]:
        """Be the only request in the block: abort the current one, whose client has reconnected."""
        with self._changed:
            self._successors += 1
        # The other request may not have lent its content yet: then it no longer can.
        self.withdraw()
        with self._turn:
            with self._changed:
                self._successors -= 1
            yield

    def withdraw(self) -> None:
        """Stop reading the lent content. Bytes in flight are read for ``GRACE`` seconds."""
        with self._changed:
            content = self._lent
            if content is None or self._changed.wait_for(lambda: self._lent is not content, GRACE):
                return
            content.interrupt()
            self._read.wait_for(lambda: not self._reading)
            self._give_back(content, _replaced())

    def end(self) -> None:
        """Mark the end of the upload and release a waiting ``lend``."""
        with self._changed:
            self._ended = True
            self._lent = None
            self._changed.notify_all()

    def fail(self, failure: errors.Error) -> None:
        """Abort the upload: the reader raises ``failure``."""
        with self._changed:
            self._failure = self._failure or failure
            if self._lent is not None:
                self._lent.interrupt()
            self._changed.notify_all()

    def readinto(self, into: memoryview, /) -> int:
        """Wait for bytes; see ``sources.base.Reader``."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lent or self.is_complete)
                if self._failure is not None:
                    raise self._failure
                if self._lent is None:
                    return 0
                content, self._reading = self._lent, True
            count, broken = 0, None
            try:
                count = content.readinto(into)
            except Exception as err:  # noqa: BLE001  (returned by ``lend``)
                broken = err
            with self._changed:
                self._reading = False
                self.received += count
                if not count and self._failure is None:
                    self._give_back(content, broken)
                self._read.notify_all()
            if count:
                return count

    def _give_back(self, content: Content, broken: Exception | None) -> None:
        if self._lent is content:
            self._lent, self._broken = None, broken
            self._changed.notify_all()

    def close(self) -> None: ...


def _replaced() -> ConnectionError:
    return ConnectionError("another request continues the upload")


class UploadSource(base.Source):
    """An uploaded image: read once and in order, without identity; the size may be unknown.

    ``encoding``: the value of its Content-Encoding header.
    """

    name = NAME

    def __init__(self, body: Body, size: int | None, cancel: base.Cancel, *, encoding: str = "") -> None:
        self._size = size
        self._body = body
        self._encoding = encoding
        self._reader: base.Reader = body
        # Permanently: another attempt cannot request the unread bytes again.
        self._ending = cancel.on_set(lambda: body.fail(errors.Cancelled()))
        self._opened = False

    def open(self, opening: base.Opening) -> base.Facts:
        self._reader = peeked = readers.Peek(self._body, base.HEAD_SIZE)
        coding.check(self._encoding, peeked.head, self.name)
        return base.Facts(name=self.name, size=self._size, head=peeked.head, once=True)

    def stream(self, offset: int = 0) -> base.Reader:
        if offset or self._opened:
            raise errors.NoRanges(url=self.name, reason="a request body is read once")
        self._opened = True
        return self._reader

    def close(self) -> None:
        self._ending.close()
