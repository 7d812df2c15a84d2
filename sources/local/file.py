"""A local file, block device or pipe, and the disk of another volume."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator

from cdi_worker import errors, units
from cdi_worker.formats import readers
from cdi_worker.images import directio, kernel, targets
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.sources import base, extents
from cdi_worker.sources.local import locations

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
    path = locations.disk_of(location.endpoint)
    kind = LocalSource if str(path) == location.endpoint else _Image
    return kind(str(path), cancel, location.access, is_volume=True)


class LocalSource(base.Source):
    """A local file, block device or pipe. ``access``: how long a pipe may be silent.

    ``is_volume``: a raw disk, which may be thin.
    """

    #: Whether a file or a device is read at offsets.
    seeks = True

    def __init__(
        self, path: str, cancel: base.Cancel, access: base.Access, *, is_volume: bool = False
    ) -> None:
        self.name = path
        self._is_volume = is_volume
        self._cancel = cancel
        self._meter = retry.SpeedMeter(access.patience, access.min_speed)
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
            self._seekable = self.seeks and (stat.S_ISREG(info.st_mode) or stat.S_ISBLK(info.st_mode))
            if self._seekable:
                targets.refuse_unfinished(self.name, self._fd)
                self._size = os.lseek(self._fd, 0, os.SEEK_END)
                self._identity = _identity(info)
                self._head = os.pread(self._fd, base.HEAD_SIZE, 0)
        except OSError as err:
            raise errors.Unreachable(url=self.name, reason=errors.words(err)) from err
        if stat.S_ISDIR(info.st_mode):
            raise errors.Unreachable(url=self.name, reason="is a directory")
        if self._head and not self._size:
            # A file of procfs.
            reason = "has content, but its size is 0; read it with another program, and import its output"
            raise errors.Unreachable(url=self.name, reason=reason)
        if not self._seekable:
            self._pipe = readers.Peek(readers.RangesReader(self._read_next, 0, sys.maxsize), base.HEAD_SIZE)
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
        )

    @property
    def ranges(self) -> base.RandomReader | None:
        return self if self._seekable else None

    @property
    def extents(self) -> Callable[[], Iterator[base.Extent]] | None:
        return self._list_extents if self._size else None

    def _open(self) -> int:
        # Without O_NONBLOCK, opening a pipe without a writer blocks and cannot be cancelled.
        return os.open(self.name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def first_sector(self) -> bytes:
        # Fails for a pipe.
        with contextlib.suppress(OSError):
            return directio.read_past_cache(self._fd, units.SECTOR)
        return b""

    def verify(self) -> None:
        """Raise ``SourceChanged`` if the file was modified since it was opened."""
        now = _identity(os.fstat(self._fd))
        if now != self._identity:
            raise errors.SourceChanged(url=self.name, what="file", before=self._identity, now=now)

    def stream(self, offset: int = 0) -> base.Reader:
        if self._size is not None:
            return readers.RangesReader(self.read_range, offset, self._size)
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

    def _list_extents(self) -> Iterator[base.Extent]:
        size = self._size or 0
        parts = kernel.allocated(self._fd, 0, size, self.name)
        data = (base.Extent(start, end - start, zero=False) for start, end in parts)
        return extents.complete(data, size)

    def _read_next(self, offset: int, into: memoryview) -> int:
        """Wait for the next bytes of a pipe and read them. ``offset`` is for messages."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        with cancelling.wake_on(self._cancel) as wake:
            poll.register(wake.fd, select.POLLIN)
            count: int | None = None
            try:
                while count is None:
                    began = time.monotonic()
                    happened = poll.poll(self._meter.left * 1000)
                    wake.check()
                    # Standard input may block.
                    with contextlib.suppress(BlockingIOError):
                        count = os.readv(self._fd, [into]) if happened else None
                    if count != 0:
                        self._meter.count(count or 0, time.monotonic() - began)
            except retry.Slow as err:
                remedy = errors.Remedy([("check the program that writes to it", ""), *err.remedy])
                raise errors.TransferFailed(
                    url=self.name, offset=offset, reason=str(err), remedy=remedy
                ) from err
            except OSError as err:
                raise self._broken(offset, err) from err
            return count

    def _broken(self, offset: int, err: OSError) -> errors.TransferFailed:
        return errors.TransferFailed(url=self.name, offset=offset, reason=errors.words(err))


class StandardInput(LocalSource):
    """Standard input, read once and in order from where it is, also if it is a file.

    It is not set to O_NONBLOCK: other programs share it, such as the shell.
    """

    seeks = False

    def __init__(self, cancel: base.Cancel, access: base.Access) -> None:
        super().__init__("standard input", cancel, access)

    def _open(self) -> int:
        if sys.stdin is None:
            raise OSError(errno.EBADF, "closed")
        if os.isatty(STDIN):
            raise errors.RequestError("standard input is a terminal; redirect a file or a pipe to it")
        return os.dup(STDIN)

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
