"""Read sources and streams in tests."""

from __future__ import annotations

import contextlib
import threading
from typing import Protocol

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images.engine import cancelling, fetch
from cdi_worker.sources import base


class ShortReads(readers.BytesReader):
    """Bytes that are read at most ``step`` at a time; ``closed`` records a close."""

    def __init__(self, data: bytes, step: int) -> None:
        super().__init__(data)
        self._step = step
        self.closed = False

    def readinto(self, into: memoryview, /) -> int:
        """Read at most ``step`` bytes."""
        return super().readinto(into[: self._step])

    def close(self) -> None:
        """Record the close."""
        self.closed = True


class Reader(Protocol):
    """The part of a reader that ``read_all`` uses."""

    def readinto(self, into: memoryview, /) -> int:
        """Read the next bytes; return how many, 0 at the end."""


def read_all(reader: Reader, step: int = 100_000) -> bytes:
    """Read to the end, and check that the end stays the end."""
    found, into = bytearray(), memoryview(bytearray(step))
    while count := reader.readinto(into):
        found += into[:count]
    assert reader.readinto(into) == 0
    return bytes(found)


def read_range(source: base.RandomReader, offset: int, length: int) -> bytes:
    """Return what one ``read_range`` yields."""
    into = bytearray(length)
    count = source.read_range(offset, memoryview(into))
    return bytes(into[:count])


def check_interrupted_reads(source: base.RandomReader, reads: cancelling.Reads, content: bytes) -> None:
    """Interrupt reads after delays of different length; what was read must match the content.

    Bytes delivered after an interrupt could still be encrypted, and would be written and counted as done.
    """
    for turn in range(60):
        into = memoryview(bytearray(len(content)))
        count = 0
        with contextlib.suppress(errors.Cancelled), reads.scope() as scope:
            timer = threading.Timer(turn / 4000, scope.set)
            timer.start()
            while count < len(content) and timer.is_alive():
                count += source.read_range(count, into[count:])
        timer.join()
        assert into[:count] == content[:count]


def read_through_engine(image: base.Image) -> bytes:
    """Read everything through the fetch engine: small ranges, in parallel, in order."""
    ranges, size = image.source.ranges, image.facts.size
    assert ranges is not None
    assert size is not None
    options = fetch.FetchOptions(connections=4, chunk=300_000)
    with contextlib.closing(
        fetch.Fetcher(ranges, size, options, scope=cancelling.Cancel()).stream()
    ) as stream:
        return read_all(stream)
