"""The Reader interface, and the readers without a format of their own."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

from cdi_worker import errors


class Reader(Protocol):
    """A blocking stream of bytes, used by one thread at a time."""

    def readinto(self, into: memoryview, /) -> int:
        """Read 1 to ``len(into)`` bytes; return 0 only at the end. Raises ``errors.Error``."""

    def close(self) -> None: ...


@runtime_checkable
class RandomReader(Protocol):
    """Random access to the bytes of a source. Thread-safe."""

    def read_range(self, offset: int, into: memoryview, /) -> int:
        """Read up to ``len(into)`` bytes from ``offset``; return fewer if the connection ended early.

        Raises ``errors.Transient`` if a retry may help, ``errors.NoRanges`` if only an ordered stream may
        work, and any other ``errors.Error`` if the source cannot be read any more.
        """


@runtime_checkable
class RequestReader(RandomReader, Protocol):
    """A source of which one request serves several consecutive reads."""

    def open_range(self, start: int, end: int, /) -> Reader:
        """Send a request for the bytes from ``start`` to ``end``; return a reader of the response.

        Raises as ``read_range``; so does the reader, where the response ends too early.
        """


class BytesReader:
    """Read bytes in memory."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._rest = memoryview(data)

    def readinto(self, into: memoryview, /) -> int:
        count = min(len(into), len(self._rest))
        into[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        self._rest = memoryview(b"")


class RunsReader:
    """Read the bytes of runs, in order: a length in bytes for zeros, a memoryview for data."""

    def __init__(self, runs: Iterator[int | memoryview]) -> None:
        self._runs = runs
        self._zeros = 0
        self._data = BytesReader(b"")

    def readinto(self, into: memoryview, /) -> int:
        while len(into):
            if count := min(self._zeros, len(into)):
                into[:count] = bytes(count)
                self._zeros -= count
                return count
            if count := self._data.readinto(into):
                return count
            if (run := next(self._runs, None)) is None:
                break
            if isinstance(run, int):
                self._zeros = run
            else:
                self._data = BytesReader(run)
        return 0

    def close(self) -> None:
        """Do nothing: the caller closes the source of the runs."""


class RangesReader:
    """Read ranges, one after the other, from ``start`` to ``end``. Closing it closes nothing.

    ``read_range``: see ``RandomReader``.
    """

    def __init__(self, read_range: Callable[[int, memoryview], int], start: int, end: int) -> None:
        self._read_range = read_range
        self._at = start
        self._end = end

    def readinto(self, into: memoryview, /) -> int:
        wanted = into[: max(0, self._end - self._at)]
        count = self._read_range(self._at, wanted) if len(wanted) else 0
        self._at += count
        return count

    def close(self) -> None:
        """Do nothing: the caller closes the source of the ranges."""


class Wrapper:
    """A reader of the bytes of ``reader``, which it closes."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def close(self) -> None:
        self._reader.close()


class LimitedReader(Wrapper):
    """Read at most ``limit`` bytes, against decompression bombs.

    Raises ``errors.TooLarge`` if ``reader`` has more.
    """

    def __init__(self, reader: Reader, limit: int) -> None:
        super().__init__(reader)
        self._limit = limit
        self._left = limit

    def readinto(self, into: memoryview, /) -> int:
        if self._left == 0:
            if self._reader.readinto(memoryview(bytearray(1))):
                raise errors.TooLarge(virtual_size=self._limit + 1, available=self._limit)
            return 0
        count = self._reader.readinto(into[: self._left])
        self._left -= count
        return count


class WatchedReader(Wrapper):
    """Call ``see`` with all bytes that are read."""

    def __init__(self, reader: Reader, see: Callable[[memoryview], object]) -> None:
        super().__init__(reader)
        self._see = see

    def readinto(self, into: memoryview, /) -> int:
        count = self._reader.readinto(into)
        self._see(into[:count])
        return count


class RawIO(io.RawIOBase):
    """Adapt a reader for ``io.BufferedReader``. Closing it leaves the reader open."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def readable(self) -> bool:
        return True

    def readinto(self, into: memoryview, /) -> int:  # type: ignore[override] # BufferedReader passes one
        return self._reader.readinto(into)


class SeekableIO(io.RawIOBase):
    """Adapt ``read(offset, length)``, random access to ``size`` bytes, for ``io.BufferedReader``."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read_at = read
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, into: memoryview, /) -> int:  # type: ignore[override] # BufferedReader passes one
        count = max(0, min(len(into), self._size - self._at))
        if count:
            into[:count] = self._read_at(self._at, count)
            self._at += count
        return count


def fill(reader: Reader, into: memoryview) -> int:
    """Read until ``into`` is full or the reader ends; return the number of bytes read."""
    count = 0
    while count < len(into) and (got := reader.readinto(into[count:])):
        count += got
    return count


def sample(reader: Reader, size: int) -> bytes:
    """Return up to ``size`` first bytes of a reader; ``errors.Truncated`` ends the sample early."""
    view, count = memoryview(bytearray(size)), 0
    with contextlib.suppress(errors.Truncated):
        while count < size and (got := reader.readinto(view[count:])):
            count += got
    return bytes(view[:count])


class Peek(Wrapper):
    """Read up to ``size`` bytes into ``head``, then read the stream from its start."""

    def __init__(self, reader: Reader, size: int) -> None:
        super().__init__(reader)
        self.head = b""
        self.extend(size)

    def extend(self, size: int) -> None:
        """Read ``head`` up to ``size`` bytes, before the stream is read; it may have more already."""
        more = memoryview(bytearray(max(0, size - len(self.head))))
        self.head += bytes(more[: fill(self._reader, more)])
        self._replay = BytesReader(self.head)

    def readinto(self, into: memoryview, /) -> int:
        return self._replay.readinto(into) or self._reader.readinto(into)
