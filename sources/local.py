"""A file, block device or pipe of this machine."""

from __future__ import annotations

import errno
import os
import stat
import urllib.parse
from collections.abc import Iterator
from typing import Self

from importer import errors
from sources import base

HEAD_SIZE = 256 * 1024


def source(location: base.Location, _cancel: base.Cancel) -> LocalSource:
    """Return the source for a path or a ``file://`` URL."""
    endpoint = location.endpoint
    if endpoint.startswith("file:"):
        parts = urllib.parse.urlsplit(endpoint)
        if parts.netloc not in {"", "localhost"}:
            raise errors.RequestError(f"{endpoint}: a file URL names no other host")
        endpoint = urllib.parse.unquote(parts.path)
    return LocalSource(endpoint)


class LocalSource(base.Source):
    """Bytes behind one descriptor, opened once and held."""

    def __init__(self, path: str) -> None:
        self.name = path
        self._fd = -1
        self._seekable = False
        self._fresh = True

    def __enter__(self) -> Self:
        try:
            self._fd = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC)
            info = os.fstat(self._fd)
            self._seekable = stat.S_ISREG(info.st_mode) or stat.S_ISBLK(info.st_mode)
            if self._seekable:
                self.size = os.lseek(self._fd, 0, os.SEEK_END)
                self.identity = f"inode {info.st_ino} changed {info.st_mtime_ns} size {self.size}"
                self.head = os.pread(self._fd, HEAD_SIZE, 0)
        except OSError as err:
            self.close()
            raise errors.Unreachable(url=self.name, reason=os.strerror(err.errno or 0).lower()) from err
        if stat.S_ISDIR(info.st_mode):
            self.close()
            raise errors.Unreachable(url=self.name, reason="is a directory")
        if not self._seekable:
            self._read_head()
        return self

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def interrupt(self) -> None:
        """Nothing to do: no read of a file waits for long."""

    def ranges(self) -> base.RandomReader | None:
        return self if self._seekable else None

    def stream(self, offset: int = 0) -> base.Reader:
        if not self._seekable:
            if offset or not self._fresh:
                raise errors.NoRanges(url=self.name, reason="a pipe is read once")
            self._fresh = False
        return _LocalStream(self, offset, b"" if self._seekable else self.head)

    def read_range(self, offset: int, into: memoryview, /) -> int:
        """Read at ``offset``; see ``sources.base.RandomReader``."""
        try:
            count = os.preadv(self._fd, [into], offset)
        except OSError as err:
            raise errors.TransferFailed(
                url=self.name, offset=offset, reason=os.strerror(err.errno or 0)
            ) from err
        if not count:
            raise errors.SourceChanged(url=self.name, what="size", before=self.size, now=offset)
        return count

    def extents(self) -> Iterator[base.Extent] | None:
        """Return data and holes as the file system knows them; a hole reads as zeros."""
        if not self._seekable or not self.size:
            return None
        return self._extents(self.size)

    def _extents(self, size: int) -> Iterator[base.Extent]:
        position = 0
        while position < size:
            data = self._seek(position, os.SEEK_DATA, size)
            if data > position:
                yield base.Extent(position, data - position, zero=True)
            position = self._seek(data, os.SEEK_HOLE, size) if data < size else size
            if position > data:
                yield base.Extent(data, position - data, zero=False)

    def _seek(self, position: int, whence: int, size: int) -> int:
        """Return where data or a hole begins; where the file system does not tell, all is data."""
        try:
            return min(os.lseek(self._fd, position, whence), size)
        except OSError as err:
            if err.errno == errno.ENXIO or whence == os.SEEK_HOLE:
                return size
            return position

    def _read_head(self) -> None:
        head = b""
        while len(head) < HEAD_SIZE and (more := os.read(self._fd, HEAD_SIZE - len(head))):
            head += more
        self.head = head

    def read_next(self, into: memoryview) -> int:
        """Read what a pipe gives next."""
        return os.readv(self._fd, [into])


class _LocalStream:
    def __init__(self, source: LocalSource, offset: int, replay: bytes) -> None:
        self._source = source
        self._offset = offset
        self._replay = replay

    def readinto(self, into: memoryview, /) -> int:
        if self._replay:
            count = min(len(into), len(self._replay))
            into[:count] = self._replay[:count]
            self._replay = self._replay[count:]
            return count
        if self._source.size is None:
            return self._source.read_next(into)
        if self._offset >= self._source.size:
            return 0
        count = self._source.read_range(self._offset, into)
        self._offset += count
        return count

    def close(self) -> None:
        """Leave the descriptor to the source."""
