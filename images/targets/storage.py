"""The storage of a disk: the bytes of one file or block device, whatever they mean."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import Final

from cdi_worker import errors
from cdi_worker.images import directio, kernel
from cdi_worker.images.engine import cancelling
from cdi_worker.images.targets import claim, remote, writeback, zeroing

log = logging.getLogger(__name__)

# Bytes of one write, so that dirty pages stay bounded before ``writeback.WritebackWindow`` is called.
_PIECE: Final = 4 << 20
# Bytes zeroed in one call, which cannot be cancelled: a device without an offload writes them all. The step
# is doubled after a call that took less than _QUICK seconds: steps of 16 MiB took 2 s for an empty TiB.
_ZERO: Final = zeroing.TOGETHER
_LONGEST_ZERO: Final = 256 << 20
_QUICK: Final = 0.05
# Bytes that are read at once to find data.
_LOOK: Final = 1 << 20


class Storage:
    """What is claimed by ``held``, open as ``fd``, which is closed with it. Thread-safe.

    Errors are raised as ``errors.TargetError``, and again by every later call: a disk with a failed write is
    never made usable. After ``errors.TargetLost`` another run writes to it, and nothing more is changed.
    ``direct``: bypass the page cache if that is possible. ``cancel`` ends a long zeroing with
    ``errors.Cancelled``.
    """

    #: Whether ``fd`` has the bytes of the disk at their offsets.
    is_raw = True

    def __init__(
        self, held: claim.Claim, fd: int, cancel: cancelling.Cancel, *, direct: bool = False
    ) -> None:
        self.claim = held
        self.path = held.path
        self.fd = fd
        self._cancel = cancel
        self._direct_fd: int | None = None
        if direct:
            try:
                self._direct_fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as err:
                log.debug("O_DIRECT not supported path=%r error=%r", self.path, err.strerror)
        self._window = writeback.WritebackWindow(fd)
        self._ladder: zeroing.Ladder | None = None
        self._failure: errors.TargetError | None = None

    @contextlib.contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """Check the claim, then translate the errors of the block, and remember the first."""
        if self._failure is not None:
            raise self._failure
        self.claim.guard()
        try:
            yield
        except OSError as err:
            self._failure = errors.target_error(self.path, err, doing)
            raise self._failure from err
        except errors.TargetError as err:
            self._failure = err
            raise

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data``, which may be reused on return."""
        with self.guard("write"):
            self._put(offset, data)

    def zero_by(self, rungs: Sequence[zeroing.Rung], sector: int) -> None:
        """Zero with these calls from now on. Without any, ``zero`` does nothing: new storage is zero."""
        self._ladder = zeroing.Ladder(self.fd, rungs, sector, self._put)

    def zero(self, start: int, end: int) -> None:
        """Make a range read as zeros, at the latest on the next ``sync``."""
        with self.guard("zero"):
            if self._ladder is not None:
                for part in self.steps(start, end):
                    self._ladder.add(*part)

    def read(self, offset: int, length: int) -> bytes:
        """Return the bytes from ``offset``, fewer at the end."""
        return bytes(self.view(offset, length))

    def view(self, offset: int, length: int) -> bytes | memoryview:
        """Do what ``read`` does without a copy: the bytes are valid until the next call of this thread."""
        with self.guard("read back"):
            # A read that meets a bad sector returns what is before it.
            stored = self._view(length, offset)
            while len(stored) < length and (more := self._pread(length - len(stored), offset + len(stored))):
                stored = bytes(stored) + more
            return stored

    def allocated(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a range that are not holes; everything if holes are not known."""
        return kernel.allocated(self.fd, start, end, self.path)

    def nonzero(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a range, in whole pages, that are not all zeros."""
        for first, after in self.allocated(start, end):
            for at in range(first, after, _LOOK):
                piece = memoryview(self.read(at, min(_LOOK, after - at)))
                for low, high, is_zero in directio.extents(piece):
                    if not is_zero:
                        yield at + low, at + high

    def sync(self) -> None:
        """Write everything written and zeroed so far to stable storage."""
        with self.guard("sync"):
            if self._ladder is not None:
                self._ladder.drain()
            self.fsync()

    def fsync(self) -> None:
        """Write everything written so far to stable storage."""
        os.fsync(self.fd)

    @property
    def readable(self) -> str:
        """A path to open what was written for reading. It names the open file, not what has its name now."""
        return f"/proc/self/fd/{self.fd}"

    def drop_cache(self) -> None:
        """Drop the clean pages of the page cache, so that reads return what is on storage."""
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def steps(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Split a range into steps that are zeroed in a short time, and check ``cancel`` between them."""
        step = _ZERO
        while start < end:
            if self._cancel.is_set():
                raise errors.Cancelled
            self.claim.guard()
            stop = min(end, start + step)
            began = time.monotonic()
            yield start, stop
            is_quick = time.monotonic() - began < _QUICK
            step = min(2 * step, _LONGEST_ZERO) if is_quick else _ZERO
            start = stop

    def close(self) -> None:
        """Close what is open. Idempotent."""
        descriptors = [fd for fd in (self._direct_fd, self.fd) if fd is not None and fd >= 0]
        self.fd, self._direct_fd = -1, None
        for fd in descriptors:
            os.close(fd)

    def _view(self, length: int, offset: int) -> bytes | memoryview:
        return self._pread(length, offset)

    def _pread(self, length: int, offset: int) -> bytes:
        return os.pread(self.fd, length, offset)

    def _put(self, offset: int, data: memoryview) -> None:
        if (fd := self._direct_fd) is None:
            self._write_cached(offset, data)
            return
        first = min(len(data), -offset % directio.UNIT)
        last = max(first, len(data) - (offset + len(data)) % directio.UNIT)
        self._write_cached(offset, data[:first])
        try:
            write_all(fd, offset + first, data[first:last])
        except OSError as err:
            if err.errno != errno.EINVAL:
                raise
            # Unaligned memory, or a device that needs an alignment of more than 4096 bytes.
            self._write_cached(offset + first, data[first:last])
        self._write_cached(offset + last, data[last:])

    def _write_cached(self, offset: int, data: memoryview) -> None:
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            write_all(self.fd, offset + start, piece)
            self._window.wrote(offset + start, offset + start + len(piece))


class RemoteStorage(Storage):
    """The bytes behind an NBD server: ``device``, to which it is connected. ``fd`` does not name them."""

    is_raw = False
    device: remote.Device
    _is_preallocated = False

    def clear(self, _fd: int, offset: int, length: int) -> None:
        """Zero a range; see ``zeroing.Rung``."""
        self.device.zero(offset, length, allocate=self._is_preallocated)

    def allocated(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        with self.guard("list its extents"):
            yield from self.device.allocated(start, end)

    def fsync(self) -> None:
        self.device.flush()

    def drop_cache(self) -> None:
        """Do nothing: no cache of this machine is between."""

    def _pread(self, length: int, offset: int) -> bytes:
        return self.device.read(offset, length)

    def _put(self, offset: int, data: memoryview) -> None:
        self.device.write(offset, data)


def write_all(fd: int, offset: int, data: memoryview) -> None:
    """Write all of ``data``: a write may end early. Raises ``OSError``."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def changed(path: str) -> errors.TargetError:
    """Return the error of a finished disk that is written while it is read."""
    return errors.TargetError(path=path, reason="changed while it was read; stop what writes to it")
