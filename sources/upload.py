"""A request body: bytes that a client sends once, in order."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Self

from importer import errors
from sources import base

#: Bytes that may wait: what arrives while one piece is written.
LIMIT = 8 << 20
HEAD_SIZE = 256 * 1024
NAME = "the uploaded stream"


class Body:
    """Bytes on their way from the thread of a server to the one that writes the disk.

    ``on_room``: called, from the reading thread, when ``put`` has refused and may be called again.
    """

    def __init__(self, on_room: Callable[[], object] = lambda: None) -> None:
        self._on_room = on_room
        self._pieces: collections.deque[memoryview] = collections.deque()
        self._waiting = 0
        self._full = False
        self._ended = False
        self._closed = False
        self._failure: errors.Error | None = None
        self._changed = threading.Condition()
        #: Bytes that were put so far.
        self.received = 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is to be put."""
        return self._ended or self._failure is not None

    def put(self, data: bytes) -> bool:
        """Take ``data``; False: wait for ``on_room`` before the next. Never blocks."""
        with self._changed:
            self.received += len(data)
            if self._closed or not data:
                return True
            self._pieces.append(memoryview(data))
            self._waiting += len(data)
            self._full = self._waiting >= LIMIT
            self._changed.notify()
            return not self._full

    def end(self) -> None:
        """Everything has been put."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def fail(self, failure: errors.Error) -> None:
        """Nothing more will come; the reader is told why, and not given what still waits."""
        with self._changed:
            self._failure = failure
            self._pieces.clear()
            self._changed.notify()

    def readinto(self, into: memoryview, /) -> int:
        """Wait for bytes; see ``sources.base.Reader``."""
        with self._changed:
            self._changed.wait_for(lambda: self._pieces or self._ended or self._failure)
            if self._failure is not None:
                raise self._failure
            if not self._pieces:
                return 0
            piece = self._pieces[0]
            count = min(len(piece), len(into))
            if count == len(piece):
                self._pieces.popleft()
            else:
                self._pieces[0] = piece[count:]
            self._waiting -= count
            has_room = self._full and self._waiting <= LIMIT // 2
            if has_room:
                self._full = False
        # Outside the lock: nobody else takes a piece apart.
        into[:count] = piece[:count]
        if has_room:
            self._on_room()
        return count

    def close(self) -> None:
        """Let go of what waits; what is put later is dropped."""
        with self._changed:
            self._closed, self._full = True, False
            self._pieces.clear()
        self._on_room()


class UploadSource(base.Source):
    """What a client sends: forward-only, without identity, perhaps of unknown size."""

    def __init__(self, body: base.Reader, size: int | None) -> None:
        self.name = NAME
        self.size = size
        self._body = body
        self._opened = False

    def __enter__(self) -> Self:
        head = bytearray(HEAD_SIZE)
        view = memoryview(head)
        filled = 0
        while filled < HEAD_SIZE and (count := self._body.readinto(view[filled:])):
            filled += count
        self.head = bytes(view[:filled])
        return self

    def close(self) -> None:
        self._body.close()

    def stream(self, offset: int = 0) -> base.Reader:
        if offset or self._opened:
            raise errors.NoRanges(url=self.name, reason="a request body is read once")
        self._opened = True
        return _Stream(memoryview(self.head), self._body)


class _Stream:
    """The head again, then the rest. The body stays its source's to close."""

    def __init__(self, head: memoryview, rest: base.Reader) -> None:
        self._head = head
        self._rest = rest

    def readinto(self, into: memoryview, /) -> int:
        if not self._head:
            return self._rest.readinto(into)
        count = min(len(into), len(self._head))
        into[:count] = self._head[:count]
        self._head = self._head[count:]
        return count

    def close(self) -> None: ...
