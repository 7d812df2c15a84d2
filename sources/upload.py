"""A request body: bytes that a client sends once, in order."""

from __future__ import annotations

import threading
from typing import Protocol, Self

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.sources import base

HEAD_SIZE = 256 * 1024
NAME = "the uploaded stream"
#: Seconds to read what is on the way from a connection that is wanted no more.
GRACE = 0.5


class Content(Protocol):
    """What one request brings."""

    def readinto(self, into: memoryview, /) -> int:
        """Read 1 to ``len(into)`` bytes; 0 only at the end. Raises what breaks it."""

    def interrupt(self) -> None:
        """End the read under way in another thread, and all later ones."""


class Body:
    """What the requests of one upload bring, for the thread that writes the disk.

    Whoever serves a request lends its content. The reader takes from that itself, so that no byte is
    copied, or waits, between the connection and the reader's memory.
    """

    def __init__(self) -> None:
        self._lent: Content | None = None
        self._reading = False
        self._broken: Exception | None = None
        self._ended = False
        self._failure: errors.Error | None = None
        self._changed = threading.Condition()
        #: Bytes that were read so far.
        self.received = 0

    @property
    def is_lent(self) -> bool:
        """Whether a request brings bytes now."""
        return self._lent is not None

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is to come."""
        return self._ended or self._failure is not None

    def lend(self, content: Content) -> Exception | None:
        """Wait until all of it was read, or nobody reads any more; return what broke it."""
        with self._changed:
            if self._ended:
                return None
            self._lent, self._broken = content, None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lent is not content)
            return self._broken

    def withdraw(self) -> None:
        """Take back what is lent, and wait until it is. What has arrived of it is read if that goes fast."""
        with self._changed:
            content = self._lent
            if content is None or self._changed.wait_for(lambda: self._lent is not content, GRACE):
                return
            content.interrupt()
            self._changed.wait_for(lambda: not self._reading)
            self._give_back(content, ConnectionError("another request goes on with the upload"))

    def end(self) -> None:
        """Nothing more will be lent, and whoever still lends need not wait."""
        with self._changed:
            self._ended = True
            self._lent = None
            self._changed.notify_all()

    def fail(self, failure: errors.Error) -> None:
        """Nothing more is wanted, or will come: the reader is told so."""
        with self._changed:
            self._failure = self._failure or failure
            if self._lent is not None:
                self._lent.interrupt()
            self._changed.notify_all()

    def stop(self) -> None:
        """End the read under way, and all later ones."""
        self.fail(errors.Cancelled())

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
            except Exception as err:  # noqa: BLE001  (whoever has lent it is told)
                broken = err
            with self._changed:
                self._reading = False
                self.received += count
                if not count and self._failure is None:
                    self._give_back(content, broken)
                self._changed.notify_all()
            if count:
                return count

    def _give_back(self, content: Content, broken: Exception | None) -> None:
        if self._lent is content:
            self._lent, self._broken = None, broken
            self._changed.notify_all()

    def close(self) -> None: ...


class UploadSource(base.Source):
    """What a client sends: forward-only, without identity, perhaps of unknown size."""

    once = True

    def __init__(self, body: Body, size: int | None, cancel: base.Cancel) -> None:
        self.name = NAME
        self.size = size
        self._body = body
        self._reader: base.Reader = body
        # For good: what one attempt leaves unread, no other one can ask for again.
        self._ending = cancel.on_set(body.stop)
        self._opened = False

    def __enter__(self) -> Self:
        self._reader = peeked = readers.Peek(self._body, HEAD_SIZE)
        self.head = peeked.head
        return self

    def stream(self, offset: int = 0) -> base.Reader:
        if offset or self._opened:
            raise errors.NoRanges(url=self.name, reason="a request body is read once")
        self._opened = True
        return self._reader

    def close(self) -> None:
        self._ending.close()
