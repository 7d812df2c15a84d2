"""Linux system calls, mostly those that Python's os module lacks. All raise OSError and release the GIL."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import struct
from collections.abc import Iterator
from typing import Final

log = logging.getLogger(__name__)

#: Errors of a kernel, file system, device or seccomp filter that does not support a call.
REFUSALS: Final = frozenset(
    {
        errno.EACCES,
        errno.EBUSY,
        errno.EINVAL,
        errno.ENODEV,
        errno.ENOSYS,
        errno.ENOTTY,
        errno.EOPNOTSUPP,
        errno.EPERM,
    }
)

# linux/falloc.h
_KEEP_SIZE: Final = 0x01
_PUNCH_HOLE: Final = 0x02
_ZERO_RANGE: Final = 0x10
_WRITE_ZEROES: Final = 0x80

# linux/fs.h; mips, powerpc and sparc have other numbers
_BLKROGET: Final = 0x125E
_BLKSSZGET: Final = 0x1268
_BLKZEROOUT: Final = 0x127F
_LOOP_GET_STATUS64: Final = 0x4C05

#: Errors of a file system without record locks, such as NFSv3 without a lock manager.
_NO_LOCKS: Final = frozenset({errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})

# linux/fs.h, for sync_file_range
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.syncfs.argtypes = (ctypes.c_int,)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


@contextlib.contextmanager
def open_fd(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, dir_fd: int | None = None
) -> Iterator[int]:
    """Open a file or directory as a descriptor, which is closed with the block."""
    fd = os.open(path, flags | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def supports_direct(path: str | os.PathLike[str], flags: int = 0) -> bool:
    """Return whether a file can be opened for writing with O_DIRECT."""
    try:
        with open_fd(path, os.O_RDWR | os.O_DIRECT | flags):
            return True
    except OSError:
        return False


def allocated(fd: int, start: int, end: int, name: str) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range of a file that are not holes; all of it from where holes are not known."""
    while start < end:
        reason = "it is changed, or its file system returns wrong offsets"
        data = hole = -1
        try:
            data = os.lseek(fd, start, os.SEEK_DATA)
            hole = os.lseek(fd, data, os.SEEK_HOLE)
        except OSError as err:
            if err.errno == errno.ENXIO and data < 0:
                return  # no data after ``start``
            # The file system does not know holes.
            reason = "" if err.errno in REFUSALS else os.strerror(err.errno or 0).lower()
        if not start <= data < hole:
            if reason:
                log.warning("no extents of %r at byte %d reason=%s", name, start, reason)
            data, hole = start, end
        if data < end:
            yield data, min(hole, end)
        start = hole


def allocate(fd: int, offset: int, length: int) -> None:
    """Allocate storage for a range of a file; bytes that were not written read as zeros.

    Unlike ``os.posix_fallocate`` it has no emulation, which reads and writes every block.
    """
    _fallocate(fd, 0, offset, length)


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Make a range read as zeros and free its storage.

    A block device zeroes with an offload that may unmap, or refuses (block/fops.c since Linux 4.12:
    blkdev_issue_zeroout with BLKDEV_ZERO_NOFALLBACK); it is never a discard, which guarantees nothing.
    """
    _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length)


def zero_range(fd: int, offset: int, length: int) -> None:
    """Make a range read as zeros and keep its storage; a block device may write zeros for it."""
    _fallocate(fd, _ZERO_RANGE | _KEEP_SIZE, offset, length)


def write_zeroes(fd: int, offset: int, length: int) -> None:
    """Zero a range of a file by an offload of its device, and store it as written extents.

    ``allocate`` leaves unwritten extents, which the file system converts at the first write, with a
    transaction of its journal. Since Linux 6.17: ext4 allocates first, zeroes, and converts last, so that a
    crash leaves zeros too. It refuses if the device does not promise zeros after an unmap
    (queue/write_zeroes_unmap_max_bytes in sysfs). A block device may unmap the range itself: that is no
    preallocation.
    """
    _fallocate(fd, _WRITE_ZEROES, offset, length)


def zero_out(fd: int, offset: int, length: int) -> None:
    """Zero whole sectors of a block device, by offload or by writing (BLKZEROOUT)."""
    fcntl.ioctl(fd, _BLKZEROOUT, struct.pack("QQ", offset, length))


def is_read_only(fd: int) -> bool:
    """Return whether a block device is read-only, as its driver or ``blockdev --setro`` says (BLKROGET)."""
    return bool(struct.unpack("i", fcntl.ioctl(fd, _BLKROGET, struct.pack("i", 0)))[0])


def loop_file(fd: int) -> tuple[int, int]:
    """Return device and inode of the file behind a loop device (LOOP_GET_STATUS64, linux/loop.h)."""
    status = fcntl.ioctl(fd, _LOOP_GET_STATUS64, bytes(232))
    device, inode = struct.unpack_from("QQ", status)
    # As the kernel encodes it (new_encode_dev): 12 bits of the major number among those of the minor one.
    return os.makedev(device >> 8 & 0xFFF, (device & 0xFF) | (device >> 12 & 0xFFF00)), inode


def sector_size(fd: int) -> int:
    """Return the logical sector of a block device."""
    return int(struct.unpack("i", fcntl.ioctl(fd, _BLKSSZGET, struct.pack("i", 0)))[0])


def processors(limit: str = "/sys/fs/cgroup/cpu.max") -> float:
    """Return how many CPUs this process may use: by its affinity, and by the limit of its pod (cgroup v2)."""
    found = float(len(os.sched_getaffinity(0)))
    # Without a limit it is the word "max"; outside of a container there is no such file.
    with contextlib.suppress(OSError, ValueError, ArithmeticError), open(limit, encoding="ascii") as file:
        quota, period = map(int, file.read().split())
        found = min(found, quota / period)
    return found


def lock(fd: int, offset: int) -> bool | None:
    """Take an exclusive lock on one byte of a file; return False if another open file has it.

    Returns None if the file system has no locks. The lock belongs to the open file, not to the process
    (F_OFD_SETLK, fcntl(2)): it ends with the last descriptor of this open file. NFSv4 has such locks too.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0))
    except OSError as err:
        if err.errno in {errno.EACCES, errno.EAGAIN}:
            return False
        if err.errno in _NO_LOCKS:
            return None
        raise
    return True


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Start writing the dirty pages of a range; blocks only while the device's queue is full."""
    _check(_libc.sync_file_range(fd, offset, length, _WRITE))


def finish_writeback(fd: int, offset: int, length: int) -> None:
    """Write the dirty pages of a range and drop them from the page cache.

    A write-back error raised here is not reported again by the next fsync: treat it as final.
    """
    _check(_libc.sync_file_range(fd, offset, length, _WAIT_BEFORE | _WRITE | _WAIT_AFTER))
    os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def sync_filesystem(fd: int) -> None:
    """Write all dirty pages of the file system of ``fd``.

    Since Linux 5.8 it raises write-back errors that occurred since ``fd`` was opened.
    """
    _check(_libc.syncfs(fd))


def sync_directory(fd: int) -> None:
    """Make the names in a directory durable, if its file system can sync one (fsync(2), EINVAL)."""
    try:
        os.fsync(fd)
    except OSError as err:
        if err.errno != errno.EINVAL:
            raise


def _fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    # A signal interrupts a long fallocate with EINTR; repeating the whole range is harmless.
    while _libc.fallocate(fd, mode, offset, length):
        if ctypes.get_errno() != errno.EINTR:
            _check(-1)


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
