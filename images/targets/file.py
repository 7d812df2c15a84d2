"""Write a disk to a file: under another name, and rename it when it is complete."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
from typing import Final

from cdi_worker import errors
from cdi_worker.images import kernel
from cdi_worker.images.targets import base, claim, zeroing

_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC

#: The name of the disk on a pod's volume.
DISK: Final = "disk.img"


def part(path: str) -> str:
    """Return the path of an incomplete disk."""
    return f"{path}.part"


def changing(path: str) -> str:
    """Return the path of a finished disk during an update. It differs from ``part``, which may be removed."""
    return f"{path}.changing"


def lock_file(path: str) -> str:
    """Return the path of the lock file of a disk."""
    return f"{path}.lock"


def is_reserved(path: str) -> bool:
    """Return whether a run with another target may use this path, and remove what is there."""
    return path.endswith((part(""), changing(""), lock_file("")))


class FileTarget(base.Target):
    """A file. A new one consists of holes or is preallocated, so that zeroing needs no system call.

    A new attempt gets a new inode: a run that has lost its claim may still hold the old one.
    """

    def __init__(self, held: claim.Claim, size: int | None, options: base.Options) -> None:
        path = held.path
        with contextlib.ExitStack() as undo:
            self._directory = os.open(pathlib.Path(path).parent, os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, self._directory)
            fd, self.resumed = _open_part(path, options)
            undo.callback(os.close, fd)
            self._inode = os.fstat(fd)
            super().__init__(held, fd, _length(fd) if options.mode == "delta" else size, options)
            undo.pop_all()
        self.written_path = _written(path, options)
        self.is_fresh = not self.resumed
        try:
            if options.mode == "delta":
                # The old name must be gone before the first change, also after a power cut.
                self._sync_directory()
            self._prepare(self.size)
        except (OSError, errors.Error):
            self.close()
            raise

    def _prepare(self, size: int | None) -> None:
        # A left-over may be longer than the disk: the journal is stored after the last byte.
        if size and _length(self._fd) < size and self.has_begun:
            os.ftruncate(self._fd, size)
        rungs: tuple[zeroing.Rung, ...] | None = None
        if self.resumed:
            rungs = zeroing.ALLOCATED if self._options.preallocate else zeroing.SPARSE
        elif self._options.preallocate:
            if size and self._allocate(size):
                self._zero_by_device(size)
            else:
                rungs = zeroing.NEW
        if rungs is not None:
            self._ladder = zeroing.Ladder(self._fd, rungs, base.SECTOR, self._put)

    def _allocate(self, size: int) -> bool:
        try:
            kernel.allocate(self._fd, 0, size)
        except OSError as err:
            if err.errno not in kernel.REFUSALS:
                raise
            return False
        return True

    def _begin(self) -> None:
        """Rename the disk, and remove the left-over of another attempt."""
        if self.written_path == self.path:
            _rename(self.path, changing(self.path))
            self.written_path = changing(self.path)
        _remove(part(self.path))
        self._sync_directory()

    def _zero_by_device(self, size: int) -> None:
        """Make the allocated storage of a new file written extents, if its device zeroes without a transfer.

        Not earlier: this takes the device's time, and a lack of space must be reported before.
        """
        try:
            for start, end in self._steps(0, size):
                kernel.write_zeroes(self._fd, start, end - start)
        except OSError as err:
            if err.errno not in kernel.REFUSALS:
                raise

    def _end_at(self, size: int) -> None:
        if not self.has_begun:
            is_same = _length(self._fd) == size and self._is_zero(self._end, size)
            if not is_same or self.written_path != self.path or self._options.preallocate:
                self._begin_once()

    def _ready(self, size: int) -> None:
        if not self.has_begun:
            os.fsync(self._fd)
            return
        os.ftruncate(self._fd, self._end)
        os.ftruncate(self._fd, size)
        if self._options.preallocate and not self._allocate(size):
            ladder = zeroing.Ladder(self._fd, (), base.SECTOR, self._put)
            for step in self._steps(self._end, size):
                ladder.zero(*step)
        os.fsync(self._fd)
        self._close_files()
        self._check_claim()
        self._check_existing()

    def _check_existing(self) -> None:
        is_refused = self._options.existing == "refuse" and not self._claim.may_replace
        if is_refused and os.path.lexists(self.path):
            raise errors.TargetExists(path=self.path, reason="exists")

    def _finish(self) -> None:
        if not self.has_begun:
            self._release()
            return
        self._check_existing()
        _rename(self.written_path, self.path)
        if not os.path.samestat(os.lstat(self.path), self._inode):
            raise self._claim.lose("another run has replaced it while it was renamed")
        try:
            _remove(changing(self.path))  # replaced by the new disk
            self._sync_directory()
        except OSError:
            _rename(self.path, self.written_path)
            raise
        self._release()

    def _check_claim(self) -> None:
        super()._check_claim()
        try:
            is_same = os.path.samestat(os.lstat(self.written_path), self._inode)
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise self._claim.lose(f"another run has removed or replaced {self.written_path}")

    def _sync_directory(self) -> None:
        kernel.sync_directory(self._directory)

    def _abandon(self) -> None:
        if not self._kept and self._options.mode not in {"delta", "refresh"}:
            self._check_claim()
            _remove(part(self.path))

    def _release(self) -> None:
        os.close(self._directory)
        super()._release()


def _open_part(path: str, options: base.Options) -> tuple[int, bool]:
    """Return a descriptor, and whether the file holds bytes of an earlier attempt or stage."""
    if options.mode == "delta":
        return _open_finished(path), True
    if options.mode == "refresh":
        return os.open(_written(path, options), _FLAGS), True
    name = part(path)
    fd = _open_left_over(name) if options.mode == "resume" else None
    if fd is not None:
        return fd, True
    for left_over in (path, changing(path), name) if options.existing == "remove" else (name,):
        _remove(left_over)
    fd = os.open(name, _FLAGS | os.O_CREAT | os.O_EXCL, options.permissions or 0o666)
    if options.permissions is not None:
        with contextlib.suppress(PermissionError):  # file systems without modes
            os.fchmod(fd, options.permissions)  # open(2) has applied the umask
    return fd, False


def _written(path: str, options: base.Options) -> str:
    """Return the name under which the disk is written. A refresh has changed nothing yet."""
    if options.mode == "refresh":
        return path if os.path.lexists(path) else changing(path)
    return changing(path) if options.mode == "delta" else part(path)


def _open_finished(path: str) -> int:
    if os.path.lexists(path):
        _rename(path, changing(path))
    fd = _open_left_over(changing(path))
    if fd is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return fd


def _open_left_over(name: str) -> int | None:
    try:
        if not stat.S_ISREG(os.lstat(name).st_mode):
            return None
        return os.open(name, _FLAGS)
    except FileNotFoundError:
        return None


def _rename(path: str, name: str) -> None:
    pathlib.Path(path).replace(name)


def _remove(path: str) -> None:
    pathlib.Path(path).unlink(missing_ok=True)


def _length(fd: int) -> int:
    return os.fstat(fd).st_size
