"""Write a disk to a block device, the first MiB last, and its first sector with data after the others."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import Final

from cdi_worker import errors
from cdi_worker.images import directio, kernel
from cdi_worker.images.target import base, zeroing

#: Bytes at the start that hold boot sectors, partition tables, volume labels and superblocks.
HEAD: Final = 1 << 20
#: Offset in the head where the journal is stored during a transfer.
JOURNAL_OFFSET: Final = 256 << 10

#: A container runtime gives the device of a pod to root, whatever user the pod runs as, unless it is told to.
_NOT_OURS: Final = (
    "the user of this process may not write to the device; in Kubernetes, set "
    "device_ownership_from_security_context = true in the node's container runtime"
)


class BlockTarget(base.Target):
    """A block device, opened exclusively: a mounted device is refused.

    The device may contain any data. Bytes after the end of the image are not changed, with one exception: for
    an image of unknown size the whole head is zeroed first, also if the image is shorter. An update writes
    the head in place, too.
    """

    def __init__(self, path: str, size: int | None, options: base.Options) -> None:
        with contextlib.ExitStack() as undo:
            fd, device_size = _open_device(path)
            undo.callback(os.close, fd)
            if size is not None and size > device_size:
                raise errors.TooLarge(virtual_size=size, available=device_size)
            self._sector = kernel.sector_size(fd)
            super().__init__(path, fd, size, options)
            undo.pop_all()
        # The kernel shortens a zeroing at the end of the device and reports success (block/fops.c).
        self._limit = device_size if size is None else size
        self.resumed = options.mode != "new"
        rungs = zeroing.WRITTEN if options.preallocate else zeroing.SPARSE
        self._ladder = zeroing.Ladder(fd, rungs, self._sector, self._put)
        self._head = bytearray(0 if options.mode == "update" else _head_size(size, device_size))
        self._head_written = False
        self.withheld = len(self._head)
        try:
            self._zero_head(JOURNAL_OFFSET if options.mode == "resume" else HEAD)
        except OSError:
            self.close()
            raise

    def write(self, offset: int, data: memoryview) -> None:
        inside = self._inside(offset, len(data))
        self._head[offset : offset + inside] = data[:inside]
        super().write(offset + inside, data[inside:])

    def zero(self, offset: int, length: int) -> None:
        inside = self._inside(offset, length)
        self._head[offset : offset + inside] = bytes(inside)
        super().zero(offset + inside, length - inside)

    def zero_rest(self) -> None:
        """Zero the device after the end of the disk."""
        with self._storage("zero"):
            for start, end in self._steps(max(self._end, self.withheld), os.lseek(self._fd, 0, os.SEEK_END)):
                self._clear(start, end)

    def _inside(self, offset: int, length: int) -> int:
        return max(0, min(length, len(self._head) - offset))

    def _zero_head(self, end: int) -> None:
        self._put(0, directio.zeros()[: min(end, len(self._head))])
        os.fsync(self._fd)

    def _finish(self, _size: int) -> None:
        os.fsync(self._fd)
        self._head_written = True
        # A power cut may tear the write of the head, but not that of a sector: the one that makes the disk
        # usable, such as a boot sector, is written when all others are on stable storage.
        last = _first_data(self._head, self._sector)
        data = bytes(self._head[last])
        self._head[last] = bytes(len(data))
        self._put(0, memoryview(self._head))
        os.fsync(self._fd)
        self._put(last.start, memoryview(data))
        os.fsync(self._fd)
        self._release()

    def _abandon(self) -> None:
        if self._head_written or not self._kept:
            self._zero_head(HEAD)


def _first_data(head: bytearray, sector: int) -> slice:
    """Return the first sector that is not zero; empty if all are."""
    for start in range(0, len(head), sector):
        found = slice(start, start + sector)
        if not directio.is_zero(memoryview(head)[found]):
            return found
    return slice(0, 0)


def _head_size(size: int | None, device_size: int) -> int:
    if size is None:
        size = HEAD
    return min(HEAD, device_size, -(-size // base.SECTOR) * base.SECTOR)


def _open_device(path: str) -> tuple[int, int]:
    # Without O_CREAT, O_EXCL opens a block device exclusively (open(2)).
    try:
        fd = os.open(path, os.O_RDWR | os.O_EXCL | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError as err:
        raise errors.TargetError(path=path, reason=f"open: {errors.words(err)}; {_NOT_OURS}") from err
    try:
        if not stat.S_ISBLK(os.fstat(fd).st_mode):
            raise OSError(errno.ENOTBLK, os.strerror(errno.ENOTBLK))
        return fd, os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        os.close(fd)
        raise
