"""A local file, block device or pipe, and the disk of another volume."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.remedy import Remedy
from cdi_worker.sources import base
from cdi_worker.sources.local import locations

HEAD_SIZE = 256 * 1024
STDIN = 0


def source(location: base.Location, cancel: base.Cancel) -> LocalSource:
    """Return the source for a path, a ``file://`` URL, or ``-`` for standard input."""
    if location.endpoint == locations.STDIN:
        return StandardInput(cancel, location.access)
    return LocalSource(locations.path_of(location.endpoint), cancel, location.access)


def volume(location: base.Location, cancel: base.Cancel) -> LocalSource:
    """Return the source for another volume: a device, a disk image, or a directory with ``disk.img``.

    It is always raw: its guest controls the content, so no format is detected.
    """
    path = Path(location.endpoint)
    if path.is_dir():
        return _Image(str(path / "disk.img"), cancel, location.access, is_volume=True)
    return LocalSource(str(path), cancel, location.access, is_volume=True)


class LocalSource(base.Source):
    """A local file, block device or pipe, opened once. ``access``: how long a pipe may be silent.

    ``is_volume``: it is a raw disk, and thin.
    """

    def __init__(
        self, path: str, cancel: base.Cancel, access: base.Access, *, is_volume: bool = False
    ) -> None:
        self.name = path
        self._is_volume = is_volume
        self._cancel = cancel
        self._meter = retry.Meter(access.patience, access.slowest)
        self._fd = -1
        self._seekable = False
        self._pipe: readers.Peek | None = None
        self._size: int | None = None
        self._head = b""
        self._identity: str | None = None

    def open(self, opening: base.Opening) -> base.Facts:
        try:
            self._fd = self._open()
            info = os.fstat(self._fd)
            self._seekable = self._seeks(info.st_mode)
            if self._seekable:
                self._size = os.lseek(self._fd, 0, os.SEEK_END)
                self._identity = _identity(info)
                self._head = os.pread(self._fd, HEAD_SIZE, 0)
        except OSError as err:
            self.close()
            raise errors.Unreachable(url=self.name, reason=errors.words(err)) from err
        if stat.S_ISDIR(info.st_mode):
            self.close()
            raise errors.Unreachable(url=self.name, reason="is a directory")
        if self._head and not self._size:
            # In procfs: the disk would be one of 0 bytes.
            self.close()
            reason = "has content, but its size is 0; read it with another program, and import its output"
            raise errors.Unreachable(url=self.name, reason=reason)
        if not self._seekable:
            self._pipe = readers.Peek(readers.Consecutive(self._read_next, 0, sys.maxsize), HEAD_SIZE)
            self._head = self._pipe.head
        return base.Facts(
            name=self.name,
            size=self._size,
            head=self._head,
            identity=self._identity,
            # A modification time can be set, and its clock may tick only every few milliseconds.
            weak=True,
            format="raw" if self._is_volume else None,
            once=not self._seekable,
            thin=self._is_volume,
            ranges=self if self._seekable else None,
            extents=self._extents if self._size else None,
        )

    def _open(self) -> int:
        # Without O_NONBLOCK, opening a pipe without a writer blocks and cannot be cancelled.
        return os.open(self.name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def _seeks(self, mode: int) -> bool:
        return stat.S_ISREG(mode) or stat.S_ISBLK(mode)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def verify(self) -> None:
        """Raise ``SourceChanged`` if the file was modified since it was opened."""
        now = _identity(os.fstat(self._fd))
        if now != self._identity:
            raise errors.SourceChanged(url=self.name, what="file", before=self._identity, now=now)

    def stream(self, offset: int = 0) -> base.Reader:
        if self._size is not None:
            return readers.Consecutive(self.read_range, offset, self._size)
        if offset or self._pipe is None:
            raise errors.NoRanges(url=self.name, reason="a pipe can be read only once")
        pipe, self._pipe = self._pipe, None
        return pipe

    def read_range(self, offset: int, into: memoryview, /) -> int:
        """Read at ``offset``; see ``sources.base.RandomReader``."""
        try:
            count = os.preadv(self._fd, [into], offset)
        except OSError as err:
            raise self._broken(offset, err) from err
        if not count:
            raise errors.SourceChanged(url=self.name, what="size", before=self._size, now=offset)
        return count

    def _extents(self) -> Iterator[base.Extent]:
        """Yield data and holes (``SEEK_DATA``, ``SEEK_HOLE``)."""
        position, size = 0, self._size or 0
        while position < size:
            data = self._seek(position, os.SEEK_DATA, size)
            if data > position:
                yield base.Extent(position, data - position, zero=True)
            position = self._seek(data, os.SEEK_HOLE, size) if data < size else size
            if position > data:
                yield base.Extent(data, position - data, zero=False)

    def _seek(self, position: int, whence: int, size: int) -> int:
        """Return the next offset of data or a hole. Without support of the file system all is data."""
        try:
            return min(os.lseek(self._fd, position, whence), size)
        except OSError as err:
            if err.errno == errno.ENXIO or whence == os.SEEK_HOLE:
                return size
            return position

    def _read_next(self, offset: int, into: memoryview) -> int:
        """Wait for the next bytes of a pipe and read them. ``offset`` is for messages."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        with cancelling.woken(self._cancel) as wake:
            poll.register(wake.fd, select.POLLIN)
            try:
                return self._next(poll, wake, into)
            except retry.Slow as err:
                advice = Remedy([("check the program that writes to it", ""), *err.remedy])
                raise errors.TransferFailed(
                    url=self.name, offset=offset, reason=str(err), remedy=advice
                ) from err
            except OSError as err:
                raise self._broken(offset, err) from err

    def _next(self, poll: select.poll, wake: cancelling.Wake, into: memoryview) -> int:
        while True:
            began = time.monotonic()
            happened = poll.poll(self._meter.left * 1000)
            wake.check()
            count = 0
            # Standard input may block.
            with contextlib.suppress(BlockingIOError):
                if happened and not (count := os.readv(self._fd, [into])):
                    return 0
            self._meter.count(count, time.monotonic() - began)
            if count:
                return count

    def _broken(self, offset: int, err: OSError) -> errors.TransferFailed:
        return errors.TransferFailed(url=self.name, offset=offset, reason=errors.words(err))


class StandardInput(LocalSource):
    """Standard input, read once and in order from where it is, also if it is a file.

    It is not set to O_NONBLOCK: other programs share it, such as the shell.
    """

    def __init__(self, cancel: base.Cancel, access: base.Access) -> None:
        super().__init__("standard input", cancel, access)

    def _open(self) -> int:
        if sys.stdin is None:
            raise OSError(errno.EBADF, "closed")
        if os.isatty(STDIN):
            raise errors.RequestError("standard input is a terminal; redirect a file or a pipe to it")
        return os.dup(STDIN)

    def _seeks(self, mode: int) -> bool:
        return False

    def verify(self) -> None:
        """Do nothing: what was read once cannot be compared."""


def _identity(info: os.stat_result) -> str | None:
    """Return the identity of a file; None for a device or a pipe."""
    if not stat.S_ISREG(info.st_mode):
        return None
    return f"inode {info.st_ino} changed {info.st_mtime_ns} size {info.st_size}"


class _Image(LocalSource):
    """The disk image in a volume. A symlink would lead to other mounts of this container."""

    def _open(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(self.name).st_mode):
                raise errors.Unreachable(
                    url=self.name, reason="is not a regular file; put the disk itself there"
                )
        return os.open(self.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
