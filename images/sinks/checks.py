"""Sinks that look at what passes: zeros in the data, the limit of the target, what has been delivered."""

from __future__ import annotations

import threading
from typing import Final

from cdi_worker import errors
from cdi_worker.images import directio
from cdi_worker.images.sinks import base

#: Shorter ranges of zeros are written: that is cheaper than a system call to zero them.
SHORTEST_ZERO: Final = 64 << 10


class ZeroDetectingSink(base.ForwardingSink):
    """Turn zeros in the data, in blocks of ``shortest`` bytes, into ranges to zero."""

    def __init__(self, to: base.Sink, shortest: int = SHORTEST_ZERO) -> None:
        super().__init__(to)
        self._shortest = shortest

    def write(self, offset: int, data: memoryview, /) -> None:
        for start, end, is_zero in directio.extents(data, self._shortest):
            if is_zero:
                self._to.zero(offset + start, end - start)
            else:
                self._to.write(offset + start, data[start:end])


class LimitedSink(base.ForwardingSink):
    """Refuse a disk of more than ``limit`` bytes, before the range beyond the limit is written.

    Raises ``errors.TooLarge``.
    """

    def __init__(self, to: base.Sink, limit: int) -> None:
        super().__init__(to)
        self._limit = limit

    def write(self, offset: int, data: memoryview, /) -> None:
        self._check(offset + len(data))
        self._to.write(offset, data)

    def zero(self, offset: int, length: int, /) -> None:
        self._check(offset + length)
        self._to.zero(offset, length)

    def _check(self, end: int) -> None:
        if end > self._limit:
            raise errors.TooLarge(virtual_size=end, available=self._limit)


class ThinSink(base.ForwardingSink):
    """Refuse a thin disk with more than ``limit`` bytes of data, however large it is.

    Zeros must have been detected before. Raises ``errors.TooLarge``.
    """

    def __init__(self, to: base.Sink, limit: int) -> None:
        super().__init__(to)
        self._limit = limit
        self._stored = 0
        self._lock = threading.Lock()

    def write(self, offset: int, data: memoryview, /) -> None:
        self._to.write(offset, data)
        with self._lock:
            self._stored += len(data)
        if self._stored > self._limit:
            raise errors.TooLarge(virtual_size=self._stored, available=self._limit)


class CountingSink(base.ForwardingSink):
    """Count what is delivered, in bytes of the disk, as data and as zeros."""

    def __init__(self, to: base.Sink) -> None:
        super().__init__(to)
        #: Bytes delivered so far.
        self.delivered = 0
        self._lock = threading.Lock()

    def write(self, offset: int, data: memoryview, /) -> None:
        self._to.write(offset, data)
        with self._lock:
            self.delivered += len(data)

    def zero(self, offset: int, length: int, /) -> None:
        self._to.zero(offset, length)
        with self._lock:
            self.delivered += length
