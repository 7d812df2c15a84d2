"""How tests read: bytes in small portions, and all or a part of what a source has."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Protocol

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images.engine import fetch
from cdi_worker.sources import base


class Portions(readers.Bytes):
    """Gives at most ``step`` bytes at a time."""

    def __init__(self, data: bytes, step: int) -> None:
        super().__init__(data)
        self._step = step
        self.closed = False

    def readinto(self, into: memoryview, /) -> int:
        return super().readinto(into[: self._step])

    def close(self) -> None:
        self.closed = True


class Reader(Protocol):
    """What ``drained`` needs of one."""

    def readinto(self, into: memoryview, /) -> int: ...


def drained(reader: Reader, step: int = 100_000) -> bytes:
    """Read to the end, which stays the end."""
    found, into = bytearray(), memoryview(bytearray(step))
    while count := reader.readinto(into):
        found += into[:count]
    assert reader.readinto(into) == 0
    return bytes(found)


def part(source: base.RandomReader, offset: int, length: int) -> bytes:
    """Return what comes of a range in one connection."""
    into = bytearray(length)
    count = source.read_range(offset, memoryview(into))
    return bytes(into[:count])


def interrupted(source: base.RandomReader, interrupt: Callable[[], object], content: bytes) -> None:
    """Read, end that after times of many lengths, and check that what came until then is the content.

    It might be what is still encrypted: it would be written to the disk, and counted as done.
    """
    for turn in range(60):
        into = memoryview(bytearray(len(content)))
        timer = threading.Timer(turn / 4000, interrupt)
        timer.start()
        count = 0
        with contextlib.suppress(errors.Transient):
            while count < len(content) and timer.is_alive():
                count += source.read_range(count, into[count:])
        timer.join()
        assert into[:count] == content[:count]


def streamed(source: base.Source) -> bytes:
    """Read everything through the engine: small ranges, in parallel, in order."""
    ranges, size = source.ranges(), source.size
    assert ranges is not None
    assert size is not None
    options = fetch.Options(connections=4, chunk=300_000)
    with contextlib.closing(
        fetch.Fetcher(ranges, size, options, cancel=threading.Event()).stream()
    ) as stream:
        return drained(stream)
