"""Memory that every device accepts, and zeros found at memory speed."""

from __future__ import annotations

import contextlib
import functools
import mmap
import threading
from typing import Final

from cdi_worker import errors

#: O_DIRECT wants memory, offset and length in these units or smaller ones; also the page, so that no
#: page is ever written both through the cache and past it.
UNIT: Final = 4096

# The size of a huge page of x86-64 and arm64.
_HUGE: Final = 2 << 20

# The untouched memory of bytes(n) is the kernel's one zero page: comparing with it stays in the cache.
_ZEROS: Final = bytes(4 << 20)


class Buffer:
    """Page-aligned memory of a fixed size, zero at first. ``view``: all of it, writable."""

    def __init__(self, size: int) -> None:
        self.size = size
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE:
            # O_DIRECT pins every page: reads of zeros took a third of the time with huge ones.
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(memory)


class BufferPool:
    """At most ``total`` bytes of buffers, made when first needed. Thread-safe."""

    def __init__(self, total: int, buffer_size: int) -> None:
        self.buffer_size = buffer_size
        self._unmade = max(1, total // buffer_size)
        self._free: list[Buffer] = []
        self.closed = False
        self._changed = threading.Condition()

    def take(self) -> Buffer:
        """Wait for a buffer. Raises ``errors.Cancelled`` once the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._unmade or self.closed)
            if self.closed:
                raise errors.Cancelled
            if self._free:
                return self._free.pop()
            self._unmade -= 1
        return Buffer(self.buffer_size)

    def give(self, buffer: Buffer) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def close(self) -> None:
        """Wake and refuse whoever waits, and let the memory go."""
        with self._changed:
            self.closed = True
            self._free.clear()
            self._changed.notify_all()


@functools.cache
def zeros() -> memoryview:
    """Return 1 MiB of aligned zeros."""
    return Buffer(1 << 20).view.toreadonly()


def is_zero(data: memoryview) -> bool:
    """Tell whether all bytes are zero. Data is told apart at its first other byte."""
    step = len(_ZEROS)
    return all(_ZEROS.startswith(data[start : start + step]) for start in range(0, len(data), step))


def data_runs(data: memoryview, block: int = UNIT) -> list[tuple[int, int, bool]]:
    """Split into the longest runs ``(start, end, zero)`` of whole blocks that are all zero or are not.

    ``bytes.startswith`` is the one comparison of the standard library that is a memcmp without a copy.
    """
    length = len(data)
    if length == 0:
        return []
    if is_zero(data):
        return [(0, length, True)]
    runs = []
    start, zero = 0, _ZEROS.startswith(data[:block])
    for offset in range(block, length, block):
        now = _ZEROS.startswith(data[offset : offset + block])
        if now is not zero:
            runs.append((start, offset, zero))
            start, zero = offset, now
    runs.append((start, length, zero))
    return runs
