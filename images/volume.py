"""Read a block device or file in order, with read-ahead, O_DIRECT and zero detection."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from concurrent import futures
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeAlias

from cdi_worker import errors
from cdi_worker.formats import detect
from cdi_worker.images import directio

if TYPE_CHECKING:
    from cdi_worker.images.targets import storage

#: Bytes of a piece of data; the unit of zero detection.
CHUNK: Final = 1 << 20
#: Offsets and lengths of holes in a file are multiples of this. Reading and sending a shorter hole costs less
#: than another piece does.
GRAIN: Final = 64 << 10
#: Bytes of one read: an empty device of 100 GiB takes 25600 reads, each with some work in Python.
_READ: Final = 4 * CHUNK
#: Parallel reads: an empty thin device returns zeros only as fast as requests arrive.
PARALLEL: Final = 3
_BUFFERS: Final = 2 * PARALLEL


class Data(NamedTuple):
    """At most CHUNK bytes that are not all zero; ``data`` is valid until the next part is requested."""

    offset: int
    data: memoryview

    @property
    def length(self) -> int:
        return len(self.data)


class Hole(NamedTuple):
    """Zeros, found in the file system's map or by reading."""

    offset: int
    length: int


Part: TypeAlias = Data | Hole


class Volume:
    """A block device or a regular file. Raises ``errors.Unreachable`` and ``errors.TransferFailed``."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as err:
                if err.errno != errno.EINVAL:
                    raise
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.stat = os.fstat(self._fd)
            self.size = os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as err:
            raise errors.Unreachable(url=path, reason=errors.words(err)) from err
        self._is_file = stat.S_ISREG(self.stat.st_mode)
        self._executor = futures.ThreadPoolExecutor(PARALLEL, "volume")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)
        os.close(self._fd)

    def pieces(self, start: int = 0, end: int | None = None) -> Iterator[Part]:
        """Yield all parts from ``start`` to ``end`` (multiples of GRAIN) or the end of the volume, in order.

        Starting again at the offset of a part yields the same parts again.
        """
        free = [directio.Buffer(_READ) for _ in range(_BUFFERS)]
        pending: collections.deque[tuple[futures.Future[list[Part]], directio.Buffer] | Hole]
        pending = collections.deque()
        parts = self._parts(start, self.size if end is None else min(end, self.size))
        while (part := next(parts, None)) is not None or pending:
            if isinstance(part, Hole):
                pending.append(part)
            elif part is not None:
                buffer = free.pop()
                pending.append((self._executor.submit(self._read, *part, buffer), buffer))
            while pending and (part is None or not free):
                head = pending.popleft()
                if isinstance(head, Hole):
                    yield head
                    continue
                work, buffer = head
                yield from work.result()
                free.append(buffer)

    def check_finished(self) -> None:
        """Raise ``errors.Unsupported`` for a disk that an import has not completed."""
        # What cannot be read is reported when it is sent.
        with contextlib.suppress(OSError):
            detect.refuse_unfinished(directio.read_past_cache(self._fd, len(detect.CLAIM)))
            if self.path.endswith((".part", ".changing")):
                from cdi_worker.images.targets import file

                file.refuse_unfinished(self.path, self._fd)

    def check_unchanged(self) -> None:
        """Raise ``errors.SourceChanged`` if a file has been changed since it was opened."""
        before, now = (
            f"{found.st_size} bytes, {found.st_ctime_ns}" for found in (self.stat, os.fstat(self._fd))
        )
        if self._is_file and before != now:
            raise errors.SourceChanged(url=self.path, what="size or time of change", before=before, now=now)

    def _parts(self, start: int, last: int) -> Iterator[tuple[int, int] | Hole]:
        """Yield offset and length of reads, and holes."""
        for first, end in self._extents(start, last):
            low = max(start, first)
            if low > start:
                yield Hole(start, low - start)
            while low < end:
                length = min(_READ - low % _READ, end - low)
                yield low, length
                low += length
            start = max(start, end)
        if start < last:
            yield Hole(start, last - start)

    def _extents(self, start: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield start and end of the data to read, in whole grains, which are also aligned for O_DIRECT.

        One may begin before the last ends. Extents without a whole grain between them are one, up to the end
        of a read: reading begins before a long map is known.
        """
        if not self._is_file:
            yield start, last
            return
        while start < last and (found := self._seek(start, os.SEEK_DATA)) < last:
            first = end = found - found % GRAIN
            while found - found % GRAIN == end < last:
                end = min(last, -(-self._seek(found, os.SEEK_HOLE) // GRAIN) * GRAIN)
                if end % _READ == 0:
                    break
                found = self._seek(end, os.SEEK_DATA)
            yield first, end
            start = end

    def _seek(self, position: int, whence: int) -> int:
        """Return where data or a hole begins. Without SEEK_DATA support everything is data."""
        try:
            return min(os.lseek(self._fd, position, whence), self.size)
        except OSError as err:
            return self.size if err.errno == errno.ENXIO or whence == os.SEEK_HOLE else position

    def _read(self, offset: int, length: int, buffer: directio.Buffer) -> list[Part]:
        try:
            self._fill(buffer.view, offset, length)
        except OSError as err:
            raise errors.TransferFailed(url=self.path, offset=offset, reason=errors.words(err)) from err
        data = buffer.view[:length]
        parts: list[Part] = []
        for start, end, is_zero in directio.extents(data, CHUNK):
            if is_zero:
                parts.append(Hole(offset + start, end - start))
                continue
            parts += [Data(offset + at, data[at : min(at + CHUNK, end)]) for at in range(start, end, CHUNK)]
        return parts

    def _fill(self, view: memoryview, offset: int, length: int) -> None:
        """Read ``length`` bytes into ``view``, which is longer if it is not aligned for O_DIRECT."""
        done = 0
        while done < length:
            # O_DIRECT needs an aligned length; at the end of the file the read is short.
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if not count:
                raise errors.SourceChanged(url=self.path, what="size", before=self.size, now=offset + done)
            done += count


class StoredVolume(Volume):
    """The first ``size`` bytes of a target that is not a raw disk."""

    def __init__(self, stored: storage.Storage, size: int) -> None:
        self.path = stored.path
        self.size = size
        self._stored = stored
        self._executor = futures.ThreadPoolExecutor(PARALLEL, "volume")

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def _extents(self, start: int, last: int) -> Iterator[tuple[int, int]]:
        for first, after in self._stored.allocated(start, last):
            yield first - first % GRAIN, min(last, -(-after // GRAIN) * GRAIN)

    def _fill(self, view: memoryview, offset: int, length: int) -> None:
        data = self._stored.read(offset, length)
        if len(data) < length:
            raise errors.TransferFailed(url=self.path, offset=offset + len(data), reason="the disk ends here")
        view[:length] = data
