"""Ordered bytes onto a target: one thread reads, the caller's writes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol, Self

from images import cancelling, directio, target_base
from importer import errors

#: Measured onto ext4 and a loop device: 1 MiB costs more calls, 4 MiB leave the processor's cache.
CHUNK: Final = 2 << 20
#: One being filled, one being written, two between them for the moments when one side stalls.
MEMORY: Final = 4 * CHUNK
#: Shorter runs of zeros are written: a call of the kernel for each costs more than their bytes.
SHORTEST_ZERO: Final = 64 << 10


class Reader(Protocol):
    """Ordered bytes. A ``readinto`` that blocks must come back when the caller cancels."""

    def readinto(self, into: memoryview, /) -> int: ...


def copy_ordered(
    reader: Reader,
    target: target_base.Target,
    *,
    limit: int,
    cancel: cancelling.Cancel,
    advance: Callable[[int], object] = lambda _: None,
    give_up: Callable[[], None] = lambda: None,
) -> int:
    """Write everything that comes, zeros as zeros, and return how many bytes it was.

    Raises ``errors.TooLarge`` as soon as more than ``limit`` bytes come, before the piece that goes
    over is written. The reader stays the caller's to close. ``give_up`` is called where the read that is
    under way is wanted no more: it ends that soon.
    """
    total = 0
    with _Filler(reader, cancel, give_up) as filler:
        while filled := filler.next():
            buffer, length = filled
            if cancel.is_set():
                raise errors.Cancelled
            if total + length > limit:
                raise errors.TooLarge(virtual_size=total + length, available=limit)
            place(target, total, buffer.view[:length])
            filler.pool.give(buffer)
            total += length
            advance(length)
    return total


def place(target: target_base.Target, offset: int, data: memoryview) -> None:
    """Write bytes at an offset, runs of zeros as zeros."""
    for start, end, zero in directio.data_runs(data, SHORTEST_ZERO):
        if zero:
            target.zero(offset + start, end - start)
        else:
            target.write(offset + start, data[start:end])


class _Filler:
    """Reads ahead into a pool's buffers until the end, a failure or ``__exit__``."""

    def __init__(self, reader: Reader, cancel: cancelling.Cancel, give_up: Callable[[], None]) -> None:
        self.pool = directio.BufferPool(MEMORY, CHUNK)
        self._reader = reader
        self._cancel = cancel
        self._give_up = give_up
        self._ended = False
        self._filled: queue.SimpleQueue[tuple[directio.Buffer, int] | BaseException | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.close()
        if not self._ended:
            self._give_up()
        self._thread.join()

    def next(self) -> tuple[directio.Buffer, int] | None:
        """Return the next buffer and how much of it is filled, None at the end."""
        filled = self._filled.get()
        self._ended = not isinstance(filled, tuple)
        if isinstance(filled, BaseException):
            raise filled
        return filled

    def _run(self) -> None:
        try:
            length = CHUNK
            while length == CHUNK:
                buffer = self.pool.take()
                length = self._fill(buffer)
                if length:
                    self._filled.put((buffer, length))
            self._filled.put(None)
        except BaseException as err:  # noqa: BLE001 - whatever it is belongs to the caller's thread
            self._filled.put(err)

    def _fill(self, buffer: directio.Buffer) -> int:
        filled = 0
        while filled < buffer.size:
            if self._cancel.is_set() or self.pool.closed:
                raise errors.Cancelled
            count = self._reader.readinto(buffer.view[filled:])
            if count == 0:
                break
            filled += count
        return filled
