"""The bytes of a stream that have passed and can still be read: the last ones, and what was kept."""

from __future__ import annotations

import bisect
import collections
import threading
from typing import Protocol

from images import ahead, directio
from importer import errors

#: Bytes kept in memory; more go to scratch.
MEMORY = 64 << 20

#: Chunks within reach besides the newest. QEMU puts compressed data at most a few clusters before the
#: table that maps it.
RECENT = 2


class Spill(Protocol):
    """See ``scratch.spill.Spill``."""

    def write(self, offset: int, data: memoryview, /) -> None: ...

    def read(self, offset: int, length: int, /) -> bytes: ...


class Chunk:
    """``view``: the bytes from ``start`` on, in a buffer that goes back when its last user has."""

    def __init__(self, pool: directio.BufferPool, start: int) -> None:
        self.start = start
        self._pool = pool
        self._buffer = pool.take()
        self.view = self._buffer.view
        self._users = 1
        self._lock = threading.Lock()

    @property
    def end(self) -> int:
        return self.start + len(self.view)

    def fill(self, reader: ahead.Source) -> bool:
        """Read into the whole buffer; return whether the reader went on for so long."""
        filled = 0
        while filled < len(self.view):
            count = reader.readinto(self.view[filled:])
            if not count:
                self.view = self.view[:filled]
                return False
            filled += count
        return True

    def hold(self) -> None:
        with self._lock:
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            unused = not self._users
        if unused:
            self._pool.give(self._buffer)


class Passed:
    """Reads what has passed. ``spill`` None: there is no scratch."""

    def __init__(self, spill: Spill | None) -> None:
        self._spill = spill
        self._recent: collections.deque[Chunk] = collections.deque()
        self._room = MEMORY
        # Of what was kept, ascending: beginnings, ends, and the bytes unless they are in scratch.
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._bytes: list[bytes | None] = []

    def add(self, chunk: Chunk) -> None:
        """Take over the newest bytes; the oldest of the last few go."""
        self._recent.append(chunk)
        if len(self._recent) > RECENT + 1:
            self._recent.popleft().release()

    def keep(self, start: int, end: int) -> None:
        """Keep bytes of the newest chunk."""
        chunk = self._recent[-1]
        data = chunk.view[start - chunk.start : end - chunk.start]
        fits = len(data) <= self._room
        if fits:
            self._room -= len(data)
        elif self._spill is not None:
            self._spill.write(start, data)
        else:
            reason = f"more than {MEMORY >> 20} MiB of the image come before what tells their place"
            raise errors.ScratchRequired(reason=reason)
        self._starts.append(start)
        self._ends.append(end)
        self._bytes.append(bytes(data) if fits else None)

    def forget(self) -> None:
        """Let go of what was kept."""
        self._room = MEMORY
        for column in (self._starts, self._ends, self._bytes):
            column.clear()

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes that passed and are still there; fewer only at the end of the file."""
        parts: list[bytes] = []
        while length:
            part = self._part(offset, length)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return b"".join(parts)

    def _part(self, offset: int, length: int) -> bytes:
        for chunk in self._recent:
            if chunk.start <= offset < chunk.end:
                return bytes(chunk.view[offset - chunk.start :][:length])
        if offset >= self._recent[-1].end:
            return b""
        index = bisect.bisect_right(self._starts, offset) - 1
        if index < 0 or offset >= self._ends[index]:
            reason = f"the bytes at {offset} of the image are needed after they were let go"
            raise errors.ScratchRequired(reason=reason)
        start, kept = self._starts[index], self._bytes[index]
        length = min(length, self._ends[index] - offset)
        if kept is not None:
            return kept[offset - start :][:length]
        return self._spill.read(offset, length) if self._spill is not None else b""
