"""The base class of targets: writing, zeroing and syncing a file or block device."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Literal, Self

from cdi_worker import errors
from cdi_worker.images import directio
from cdi_worker.images.engine import cancelling
from cdi_worker.images.targets import claim, writeback, zeroing

log = logging.getLogger(__name__)

#: The size of a disk is a multiple of this: a raw image of another size is padded with zeros, as by qemu-img.
SECTOR: Final = 512
# Bytes of one write, so that dirty pages stay bounded before ``writeback.Window`` is called.
_PIECE: Final = 4 << 20
# Bytes zeroed in one call, which cannot be cancelled: a device without an offload writes them all. The step
# is doubled after a call that took less than _QUICK seconds: steps of 16 MiB took 2 s for an empty TiB.
_ZERO: Final = 16 << 20
_LONGEST_ZERO: Final = 256 << 20
_QUICK: Final = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How to open and write a target.

    ``preallocate``: allocate storage for every byte. ``direct``: bypass the page cache if the storage
    supports it. ``mode``: ``new`` starts over; ``resume`` continues with the left-over of an earlier attempt;
    ``delta`` changes parts of a finished disk in place; ``refresh`` also keeps it usable until the first
    change, before which it calls ``begun`` with the path. ``cancel`` ends a long zeroing with
    ``errors.Cancelled``. ``claim``: the target's, held by the caller; None: claim it until it is closed.
    ``existing``: what happens to a disk at the path: ``replace`` it when the new one is complete, ``remove``
    it before the new one is written, or ``refuse`` to. ``permissions`` of a new file; None: by the umask.
    """

    preallocate: bool = False
    direct: bool = False
    mode: Literal["new", "resume", "delta", "refresh"] = "new"
    begun: Callable[[str], None] = lambda _: None
    cancel: cancelling.Cancel = cancelling.NEVER
    claim: claim.Claim | None = None
    existing: Literal["replace", "remove", "refuse"] = "replace"
    permissions: int | None = None


NEW: Final = Options()


class Target:
    """A disk being written: each range once, in any order, from any thread, then ``commit``.

    Ranges that are neither written nor zeroed have undefined content. Storage errors are raised as
    ``errors.TargetError``, and again by every later call: a disk with a failed write is never committed.
    Writing beyond ``size`` or the end of the device raises ``errors.TooLarge``. After ``errors.TargetLost``
    another run writes to it, and this one changes nothing more, also when it is closed. As a context manager
    it is closed at the end, which removes a disk that was not committed.
    """

    #: Whether the bytes of an earlier attempt are kept. Without them its journal must be ignored.
    resumed: bool = False
    #: Bytes at the start that are stored only by ``commit``: a journal must not list them as finished.
    withheld: int = 0

    #: The path for programs that write to the target themselves.
    written_path: str
    #: Whether the whole target is known to read as zeros.
    is_fresh: bool = False

    def __init__(self, held: claim.Claim, fd: int, size: int | None, options: Options) -> None:
        path = held.path
        self.path = path
        self._claim = held
        #: Closed with the target.
        self.owned = contextlib.ExitStack()
        self.written_path = path
        self.size = size
        self._limit = size
        self._fd = fd
        self._options = options
        self._direct_fd = _open_direct(path, fd) if options.direct else None
        self._window = writeback.Window(fd)
        self._zeros = writeback.Merger(_ZERO)
        self._ladder: zeroing.Ladder | None = None
        #: Whether the disk may have been changed: one that is refreshed stays as it is until then.
        self.has_begun = options.mode != "refresh"
        self._beginning = threading.Lock()
        self._end = size or 0
        self._failure: errors.TargetError | None = None
        self._kept = False
        self._closed = False
        #: Whether the end of the ``with`` block leaves it open.
        self.is_detached = False
        self._lock = threading.Lock()
        # A merged range holds zeros of several threads: a flush must wait for the thread that zeroes it.
        self._zeroing = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_detached:
            self.close()

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data``, which may be reused on return."""
        with self._storage("write"):
            self._reach(offset + len(data))
            self._begin_once()
            self._put(offset, data)

    def zero(self, offset: int, length: int) -> None:
        """Make a range read as zeros, at the latest on the next ``flush``."""
        with self._storage("zero"):
            self._reach(offset + length)
            if length:
                self._begin_once()
            if self._ladder is not None:
                for start, end in self._steps(offset, offset + length):
                    self._clear(start, end)

    def reach(self, end: int) -> None:
        """Note that the disk reaches to ``end``, of which nothing is written that it holds already."""
        self._reach(end)

    def read(self, offset: int, length: int) -> bytes:
        """Return the bytes from ``offset``, fewer at the end. What is withheld is as it will be."""
        with self._storage("read back"):
            return self._read(offset, length)

    def allocated(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a range that are not holes; everything if storage does not know its holes."""
        while start < end:
            try:
                data = os.lseek(self._fd, start, os.SEEK_DATA)
                hole = os.lseek(self._fd, data, os.SEEK_HOLE)
            except OSError as err:
                if err.errno == errno.ENXIO:
                    return  # no data after ``start``
                data, hole = start, end
            if data < end:
                yield data, min(hole, end)
            start = hole

    def zero_rest(self, start: int) -> None:
        """Zero what a later stage of the disk may use, from ``start``, where the disk ends now."""
        if self.size is not None and self.size > start:
            self.zero(start, self.size - start)

    @property
    def readable(self) -> str:
        """A path to open what was written for reading. It names the open file, not what has its name now."""
        return f"/proc/self/fd/{self._fd}"

    def flush(self) -> None:
        """Write everything written and zeroed so far to stable storage, except the withheld bytes."""
        with self._storage("sync"):
            self._flush_zeros()
            os.fsync(self._fd)
            self._check_claim()

    def commit(self, size: int = 0) -> None:
        """Make the disk durable and usable. The target cannot be written after it.

        A file is extended to ``size`` bytes if that is larger than the image; it is never shrunk.
        """
        self.prepare(size)
        self.publish()

    def prepare(self, size: int = 0) -> None:
        """Do all of ``commit`` that can fail before the disk becomes usable."""
        with self._storage("sync"):
            end = self._end + -self._end % SECTOR
            self._end_at(max(size, end))
            if self.has_begun:
                self._clear(self._end, end)
            self._flush_zeros()
            self._ready(max(size, end))

    def publish(self) -> None:
        """Make the disk usable, which is prepared."""
        with self._storage("sync"):
            self._check_claim()
            self._finish()
            self._closed = True

    def detach(self) -> None:
        """Leave the target open at the end of its ``with`` block: the caller publishes or closes it."""
        self.is_detached = True

    def settle(self, size: int = 0) -> None:
        """Begin a refresh that changes only the end of the disk. ``commit`` does it, too."""
        with self._storage("write"):
            self._end_at(max(size, self._end + -self._end % SECTOR))

    def drop_cache(self) -> None:
        """Drop the clean pages of the page cache, so that reads return what is on storage."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def keep(self) -> None:
        """Keep the written bytes on ``close``, so that a later attempt can resume."""
        self._kept = True

    def close(self) -> None:
        """Close the target. A disk that was not committed stays unusable. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for step in (self._abandon, self._release):
            try:
                step()
            except (OSError, errors.TargetError) as err:
                # Only the first failure is reported. The target of another run is left as it is.
                log.debug("clean-up failed path=%r error=%r", self.path, str(err))

    # -- implemented by the sub-classes

    def _end_at(self, _size: int, /) -> None:
        """Begin a refresh if a disk of ``size`` bytes ends elsewhere, or its end holds other bytes."""
        if not self.has_begun and not self._is_zero(self._end, self._end + -self._end % SECTOR):
            self._begin_once()

    def _ready(self, size: int, /) -> None:
        """Make the disk durable where it is not usable yet."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Make the disk usable, and close the target."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """Leave no usable disk. Check the claim before anything is changed or removed."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Make a disk unusable that is refreshed, before its first change."""
        raise NotImplementedError

    def _check_claim(self) -> None:
        """Raise ``errors.TargetLost`` if another run has taken the target over."""
        self._claim.check()

    # -- shared

    @contextlib.contextmanager
    def _storage(self, doing: str) -> Iterator[None]:
        if self._failure is not None:
            raise self._failure
        self._claim.guard()
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

    def _read(self, offset: int, length: int) -> bytes:
        """Read up to the end of the disk. A read that meets a bad sector returns what is before it."""
        stored = os.pread(self._fd, length, offset)
        while len(stored) < length and (
            more := os.pread(self._fd, length - len(stored), offset + len(stored))
        ):
            stored += more
        return stored

    def _is_zero(self, start: int, end: int) -> bool:
        """Return whether a part of the disk holds zeros, or is behind the end of a file."""
        return all(
            directio.is_zero(memoryview(self._read(at, min(_PIECE, after - at))))
            for first, after in self.allocated(start, end)
            for at in range(first, after, _PIECE)
        )

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
            # Unaligned memory, or a device that needs an alignment of more than 4096 bytes.
            self._write_cached(offset, data)

    def _write_cached(self, offset: int, data: memoryview) -> None:
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            _write_all(self._fd, offset + start, piece)
            self._window.wrote(offset + start, offset + start + len(piece))

    def _steps(self, start: int, end: int) -> Iterator[writeback.Range]:
        """Split a range into steps that take a short time, and check ``cancel`` between them."""
        step = _ZERO
        while start < end:
            if self._options.cancel.is_set():
                raise errors.Cancelled
            self._claim.guard()
            stop = min(end, start + step)
            began = time.monotonic()
            yield start, stop
            is_quick = time.monotonic() - began < _QUICK
            step = min(2 * step, _LONGEST_ZERO) if is_quick else _ZERO
            start = stop

    def _begin_once(self) -> None:
        if not self.has_begun:
            with self._beginning:
                if not self.has_begun:
                    self._begin()
                    self._options.begun(self.written_path)
                    os.fsync(self._fd)
                    self.has_begun = True

    def _clear(self, start: int, end: int) -> None:
        if self._ladder is not None and end > start:
            with self._zeroing:
                for merged in self._zeros.add(start, end):
                    self._ladder.zero(*merged)

    def _flush_zeros(self) -> None:
        if self._ladder is not None:
            with self._zeroing:
                for merged in self._zeros.drain():
                    self._ladder.zero(*merged)

    def _release(self) -> None:
        try:
            self._close_files()
        finally:
            self.owned.close()

    def _close_files(self) -> None:
        descriptors = [fd for fd in (self._direct_fd, self._fd) if fd is not None and fd >= 0]
        self._fd, self._direct_fd = -1, None
        for fd in descriptors:
            os.close(fd)


def _open_direct(path: str, fd: int) -> int | None:
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as err:
        log.debug("O_DIRECT not supported path=%r error=%r", path, err.strerror)
        return None


def _write_all(fd: int, offset: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
