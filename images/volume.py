"""A device or file read in order: ahead, past the page cache, and zeros told apart."""

from __future__ import annotations

import collections
import errno
import os
import stat
from collections.abc import Iterator
from concurrent import futures
from typing import Final, NamedTuple, Self, TypeAlias

from cdi_worker import errors
from cdi_worker.images import directio

#: Data comes in pieces of so many bytes, and zeros are told apart in them.
CHUNK: Final = 1 << 20
#: Bytes read at once: an empty device of 100 GiB is 25600 of them, each some work for Python.
_READ: Final = 4 * CHUNK
#: Reads under way at once; a thin device gives up zeros no faster than it is asked.
PARALLEL: Final = 3
_BUFFERS: Final = 2 * PARALLEL


class Piece(NamedTuple):
    """At most CHUNK bytes that are not all zero; ``data``: valid until the next is asked for."""

    offset: int
    data: memoryview

    @property
    def length(self) -> int:
        return len(self.data)


class Hole(NamedTuple):
    """Zeros: those that the file system knows of, and those that were read."""

    offset: int
    length: int


Part: TypeAlias = Piece | Hole


class Volume:
    """A block device or a regular file. Errors are ``errors.Unreachable`` and ``TransferFailed``."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = _open(path)
            mode = os.fstat(self._fd).st_mode
            self.size = os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as err:
            raise errors.Unreachable(url=path, reason=errors.words(err)) from err
        self._knows_holes = stat.S_ISREG(mode)
        self._executor = futures.ThreadPoolExecutor(PARALLEL, "volume")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)
        os.close(self._fd)

    def pieces(self, start: int = 0) -> Iterator[Part]:
        """Yield everything from ``start``, a multiple of CHUNK, to the end, in order.

        From where a part began, the same parts follow as before.
        """
        free = [directio.Buffer(_READ) for _ in range(_BUFFERS)]
        coming: collections.deque[tuple[futures.Future[list[Part]], directio.Buffer] | Hole]
        coming = collections.deque()
        for part in self._parts(start):
            if isinstance(part, Hole):
                coming.append(part)
            else:
                buffer = free.pop()
                coming.append((self._executor.submit(self._read, *part, buffer), buffer))
            while coming and not free:
                yield from _first(coming, free)
        while coming:
            yield from _first(coming, free)

    def _parts(self, start: int) -> Iterator[tuple[int, int] | Hole]:
        """Yield offset and length of reads, and holes."""
        while start < self.size:
            data, end = start, self.size
            if self._knows_holes:
                found = self._seek(start, os.SEEK_DATA)
                end = self._seek(found, os.SEEK_HOLE) if found < self.size else found
                # Reads begin where the device likes it.
                data = found - found % CHUNK if found < self.size else found
            if data > start:
                yield Hole(start, data - start)
            end = min(self.size, -(-end // CHUNK) * CHUNK)
            while data < end:
                length = min(_READ - data % _READ, end - data)
                yield data, length
                data += length
            start = end

    def _seek(self, position: int, whence: int) -> int:
        """Return where data or a hole begins; where the file system does not tell, all is data."""
        try:
            return min(os.lseek(self._fd, position, whence), self.size)
        except OSError as err:
            return self.size if err.errno == errno.ENXIO or whence == os.SEEK_HOLE else position

    def _read(self, offset: int, length: int, buffer: directio.Buffer) -> list[Part]:
        done = 0
        try:
            while done < length:
                # Past the page cache the length has to be whole, too; at the end less comes.
                count = os.preadv(self._fd, [buffer.view[done:]], offset + done)
                if not count:
                    raise errors.SourceChanged(
                        url=self.path, what="size", before=self.size, now=offset + done
                    )
                done += count
        except OSError as err:
            reason = errors.words(err)
            raise errors.TransferFailed(url=self.path, offset=offset + done, reason=reason) from err
        return list(_told_apart(offset, buffer.view[:length]))


def _told_apart(offset: int, data: memoryview) -> Iterator[Part]:
    zeros = 0
    for start in range(0, len(data), CHUNK):
        piece = data[start : start + CHUNK]
        if directio.is_zero(piece):
            zeros += len(piece)
            continue
        if zeros:
            yield Hole(offset + start - zeros, zeros)
            zeros = 0
        yield Piece(offset + start, piece)
    if zeros:
        yield Hole(offset + len(data) - zeros, zeros)


def _first(
    coming: collections.deque[tuple[futures.Future[list[Part]], directio.Buffer] | Hole],
    free: list[directio.Buffer],
) -> Iterator[Part]:
    head = coming.popleft()
    if isinstance(head, Hole):
        yield head
        return
    work, buffer = head
    yield from work.result()
    free.append(buffer)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as err:
        if err.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
