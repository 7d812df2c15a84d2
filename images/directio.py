"""Aligned buffers for O_DIRECT, and zero detection at memory speed."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Iterator
from typing import Final

#: Alignment of memory, offset and length for O_DIRECT: devices need this or less. It is also the page size,
#: so no page is written both through the page cache and past it.
UNIT: Final = 4096

# The size of a huge page of x86-64 and arm64.
_HUGE: Final = 2 << 20

#: Bytes of a buffer that has a huge page on every kernel: before Linux 6.7, the kernel does not align them.
LARGE: Final = 2 * _HUGE

# The memory of bytes(n) is never written: it maps the kernel's zero page, which stays in the CPU cache.
_ZEROS: Final = bytes(4 << 20)


_libc: Final = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Buffer:
    """Page-aligned memory of a fixed size, zero at first. ``view``: all of it, writable."""

    def __init__(self, size: int) -> None:
        self.size = size
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE:
            # O_DIRECT pins every page: with huge pages, reads of zeros took a third of the time.
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(memory)


@functools.cache
def _aligned_zeros() -> memoryview:
    return Buffer(1 << 20).view.toreadonly()


def zeros(start: int, end: int) -> Iterator[tuple[int, memoryview]]:
    """Yield aligned zeros for a range, at most 1 MiB at a time, each with its offset."""
    view = _aligned_zeros()
    for offset in range(start, end, len(view)):
        yield offset, view[: end - offset]


def is_zero(data: memoryview) -> bool:
    """Return whether all bytes are zero. Stops at the first byte that is not."""
    step = len(_ZEROS)
    if len(data) <= step:
        return _ZEROS.startswith(data)
    return all(_ZEROS.startswith(data[start : start + step]) for start in range(0, len(data), step))


def equal(one: bytes | memoryview, other: bytes | memoryview) -> bool:
    """Return whether both have the same bytes: of two views, ``==`` compares byte by byte."""
    return len(one) == len(other) and not (one and _libc.memcmp(_address(one), _address(other), len(one)))


def _address(data: bytes | memoryview) -> object:
    """Return what ctypes takes for the address of ``data``, which it keeps."""
    if isinstance(data, memoryview) and not data.readonly:
        return ctypes.byref(ctypes.c_char.from_buffer(data))
    return bytes(data)


def extents(data: memoryview, block: int = UNIT) -> list[tuple[int, int, bool]]:
    """Split ``data`` into extents ``(start, end, zero)`` of whole blocks, as long as possible.

    ``bytes.startswith`` is the only comparison of the standard library that is a memcmp without a copy.
    """
    length = len(data)
    if length == 0:
        return []
    if is_zero(data):
        return [(0, length, True)]
    found = []
    start, zero = 0, _ZEROS.startswith(data[:block])
    for offset in range(block, length, block):
        now = _ZEROS.startswith(data[offset : offset + block])
        if now is not zero:
            found.append((start, offset, zero))
            start, zero = offset, now
    found.append((start, length, zero))
    return found


def read_past_cache(fd: int, length: int) -> bytes:
    """Return the first bytes of an open file or device from storage: another machine may write to it."""
    os.posix_fadvise(fd, 0, UNIT, os.POSIX_FADV_DONTNEED)
    buffer = Buffer(UNIT).view
    try:
        _read(fd, os.O_DIRECT, buffer)
    except OSError:
        # O_DIRECT is not supported, or needs a larger alignment. Clean pages were dropped above.
        _read(fd, 0, buffer)
    return bytes(buffer[:length])


def _read(fd: int, flags: int, buffer: memoryview) -> None:
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.preadv(other, [buffer], 0)
    finally:
        os.close(other)
