"""Read ahead in a separate thread."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Iterator
from typing import Final, Generic, Self, TypeVar

from cdi_worker.formats import readers
from cdi_worker.images import directio
from cdi_worker.images.engine import cancelling

#: Measured on ext4 and a loop device: 1 MiB needs more calls, 4 MiB does not fit into the CPU cache.
CHUNK: Final = 2 << 20
#: Queued items, so that short stalls of one side do not stop the other.
DEPTH: Final = 2

T = TypeVar("T")


class Ahead(Generic[T]):
    """Iterate over ``items`` in a thread, from the start of the ``with`` block, and yield them to the caller.

    Leaving the block before the end sets ``scope``, which must end the read in progress in ``items``. An
    error of ``items`` is raised after the items before it.
    """

    def __init__(self, items: Iterator[T], scope: cancelling.Cancel) -> None:
        self._items = items
        self._scope = scope
        self._made: collections.deque[T] = collections.deque()
        self._ended = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)

    def __enter__(self) -> Self:
        self._registration = self._scope.notifying(self._changed)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            ended = self._ended
        if not ended:
            self._scope.set("left before the end")
        self._registration.close()
        self._thread.join()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._made or self._ended)
            if not self._made:
                if self._failure is not None:
                    raise self._failure
                raise StopIteration
            self._changed.notify()
            return self._made.popleft()

    def _run(self) -> None:
        try:
            for item in self._items:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._made) < DEPTH or self._scope.is_set())
                    self._made.append(item)
                    self._changed.notify()
        except BaseException as err:  # noqa: BLE001 - raised again in the caller's thread
            self._failure = err
        with self._changed:
            self._ended = True
            self._changed.notify()


def buffers(size: int = CHUNK) -> Iterator[memoryview]:
    """Yield aligned buffers for the items of an ``Ahead``; a buffer is reused when its item has been used."""
    return itertools.cycle([directio.Buffer(size).view for _ in range(DEPTH + 2)])


def pieces(reader: readers.Reader, scope: cancelling.Cancel) -> Iterator[memoryview]:
    """Yield all bytes of a reader, CHUNK bytes at a time, for an ``Ahead``."""
    for buffer in buffers():
        filled = 0
        while filled < len(buffer):
            scope.check()
            count = reader.readinto(buffer[filled:])
            if not count:
                break
            filled += count
        if filled:
            yield buffer[:filled]
        if filled < len(buffer):
            return


class AheadReader:
    """Read another reader ahead until ``close``, which closes that reader too."""

    def __init__(self, reader: readers.Reader, scope: cancelling.Cancel) -> None:
        self._reader = reader
        self._ahead = Ahead(pieces(reader, scope), scope)
        self._ahead.__enter__()
        self._piece = memoryview(b"")

    def readinto(self, into: memoryview, /) -> int:
        if not self._piece:
            self._piece = next(self._ahead, self._piece)
        count = min(len(into), len(self._piece))
        into[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        return count

    def close(self) -> None:
        self._ahead.__exit__()
        self._reader.close()
