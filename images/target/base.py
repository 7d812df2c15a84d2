"""What a file and a block device have in common as the place of a disk."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Final, Literal, Self

from cdi_worker import errors
from cdi_worker.images import directio
from cdi_worker.images.engine import cancelling
from cdi_worker.images.target import writeback, zeroing

log = logging.getLogger(__name__)

#: Disks come in such units: a raw image of an odd size ends in zeros, as with qemu-img.
SECTOR: Final = 512
# Bounds what one write leaves dirty before the window sees it.
_PIECE: Final = 4 << 20
# A device without an offload writes it all before anybody looks whether to stop. One that has zeroed this
# within so many seconds is asked for twice as much: a call for each 16 MiB took 2 s of an empty TiB.
_ZERO: Final = 16 << 20
_LONGEST_ZERO: Final = 256 << 20
_QUICK: Final = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How a target is written.

    ``preallocate``: give storage to every byte. ``direct``: keep out of the page cache where the
    storage allows it. ``mode``: ``new`` throws away what was there; ``resume`` goes on with the
    left-over of an earlier attempt; ``update`` changes parts of a finished disk in place. ``cancel``
    ends a long zeroing with ``errors.Cancelled``.
    """

    preallocate: bool = False
    direct: bool = False
    mode: Literal["new", "resume", "update"] = "new"
    cancel: cancelling.Cancel = cancelling.NEVER


NEW: Final = Options()


class Target:
    """Where a disk is written: any order, any thread, each range once, then ``commit``.

    What is neither written nor zeroed is not promised to be zero. Errors of the storage are raised as
    ``errors.TargetError``, and again by every later call: a disk with a failed write is never
    committed. What goes beyond ``size`` or a device is ``errors.TooLarge``. As a context manager it is
    closed at the end, which undoes what was not committed.
    """

    #: Whether an earlier attempt's bytes are there to go on with. A journal is worthless without them.
    resumed: bool = False
    #: So many bytes at the start are on storage only after ``commit``: a journal must not claim them.
    withheld: int = 0

    #: What a program that writes to the target itself must open.
    written_path: str
    #: Whether all of it is known to read as zeros.
    is_fresh: bool = False

    def __init__(self, path: str, fd: int, size: int | None, options: Options) -> None:
        self.path = path
        self.written_path = path
        self.size = size
        self._limit = size
        self._fd = fd
        self._options = options
        self._direct_fd = _open_direct(path, fd) if options.direct else None
        self._window = writeback.Window(fd)
        self._zeros = writeback.Runs(_ZERO)
        self._ladder: zeroing.Ladder | None = None
        self._end = size or 0
        self._failure: errors.TargetError | None = None
        self._kept = False
        self._closed = False
        self._lock = threading.Lock()
        # A run holds zeros of several threads: a flush has to wait for the one that carries them out.
        self._zeroing = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes, which are free again on return."""
        with self._storage("write"):
            self._reach(offset + len(data))
            self._put(offset, data)

    def zero(self, offset: int, length: int) -> None:
        """Make a range read as zeros; done at the latest by ``flush``."""
        with self._storage("zero"):
            self._reach(offset + length)
            if self._ladder is not None:
                for start, end in self._steps(offset, offset + length):
                    self._clear(start, end)

    def flush(self) -> None:
        """Bring everything written and zeroed so far onto stable storage, except what is withheld."""
        with self._storage("sync"):
            self._settle()
            os.fsync(self._fd)

    def commit(self, size: int = 0) -> None:
        """Make the disk durable and usable; nothing can be written after it.

        A file grows to ``size`` where that is more than the image; it is never made shorter.
        """
        with self._storage("sync"):
            pad = -self._end % SECTOR
            self._clear(self._end, self._end + pad)
            self._settle()
            self._finish(max(size, self._end + pad))
            self._closed = True

    def keep(self) -> None:
        """Let ``close`` leave what was written for a later attempt to go on with."""
        self._kept = True

    def close(self) -> None:
        """Let go of the target. Without a commit nothing usable stays. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for step in (self._abandon, self._release):
            try:
                step()
            except OSError as err:
                # The failure that led here is the one to report.
                log.debug("clean-up path=%r error=%r", self.path, err.strerror)

    # -- what the two kinds do differently

    def _finish(self, size: int, /) -> None:
        raise NotImplementedError

    def _abandon(self) -> None:
        raise NotImplementedError

    # -- what they share

    @contextlib.contextmanager
    def _storage(self, doing: str) -> Iterator[None]:
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except OSError as err:
            self._failure = errors.target_error(self.path, err, doing)
            raise self._failure from err

    def _reach(self, end: int) -> None:
        if self._limit is not None and end > self._limit:
            raise errors.TooLarge(virtual_size=end, available=self._limit)
        if end > self._end:
            with self._lock:
                self._end = max(self._end, end)

    def _put(self, offset: int, data: memoryview) -> None:
        if self._direct_fd is None:
            self._write_cached(offset, data)
            return
        first = min(len(data), -offset % directio.UNIT)
        last = max(first, len(data) - (offset + len(data)) % directio.UNIT)
        self._write_cached(offset, data[:first])
        self._write_direct(self._direct_fd, offset + first, data[first:last])
        self._write_cached(offset + last, data[last:])

    def _write_direct(self, fd: int, offset: int, data: memoryview) -> None:
        try:
            _write_all(fd, offset, data)
        except OSError as err:
            if err.errno != errno.EINVAL:
                raise
            # Memory that is not aligned, or units above 4096 bytes.
            self._write_cached(offset, data)

    def _write_cached(self, offset: int, data: memoryview) -> None:
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            _write_all(self._fd, offset + start, piece)
            self._window.wrote(offset + start, offset + start + len(piece))

    def _steps(self, start: int, end: int) -> Iterator[writeback.Run]:
        """Cut zeros into what is done soon, and look between whether to stop."""
        step = _ZERO
        while start < end:
            if self._options.cancel.is_set():
                raise errors.Cancelled
            stop = min(end, start + step)
            began = time.monotonic()
            yield start, stop
            is_quick = time.monotonic() - began < _QUICK
            step = min(2 * step, _LONGEST_ZERO) if is_quick else _ZERO
            start = stop

    def _clear(self, start: int, end: int) -> None:
        if self._ladder is not None and end > start:
            with self._zeroing:
                for run in self._zeros.add(start, end):
                    self._ladder.zero(*run)

    def _settle(self) -> None:
        if self._ladder is not None:
            with self._zeroing:
                for run in self._zeros.drain():
                    self._ladder.zero(*run)

    def _release(self) -> None:
        self._close_files()

    def _close_files(self) -> None:
        descriptors = [fd for fd in (self._direct_fd, self._fd) if fd is not None and fd >= 0]
        self._fd, self._direct_fd = -1, None
        for fd in descriptors:
            os.close(fd)


def _open_direct(path: str, fd: int) -> int | None:
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as err:
        log.debug("direct path=%r refused=%r", path, err.strerror)
        return None


def _write_all(fd: int, offset: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
