"""Write a disk to a file: under another name, and rename it when it is complete."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import stat
from typing import ClassVar, Final

from cdi_worker import errors, units
from cdi_worker.formats import detect
from cdi_worker.images import directio, kernel
from cdi_worker.images.targets import base, claim, storage, zeroing
from cdi_worker.scratch import journal as journals
from cdi_worker.scratch import space

log = logging.getLogger(__name__)

_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC

#: The name of the disk on a pod's volume.
DISK: Final = "disk.img"


def part(path: str) -> str:
    """Return the path of an incomplete disk."""
    return f"{path}.part"


def journal(path: str) -> str:
    """Return the path of the journal of an incomplete qcow2 file, which itself grows while it is written."""
    return part(f"{path}.journal")


def changing(path: str) -> str:
    """Return the path of a finished disk while it is changed. Not ``part``, which may be removed."""
    return f"{path}.changing"


def lock_file(path: str) -> str:
    """Return the path of the lock file of a disk."""
    return f"{path}.lock"


def is_reserved(path: str) -> bool:
    """Return whether a run with another target may use this path, and remove what is there."""
    return path.endswith((part(""), changing(""), lock_file("")))


def refuse_unfinished(path: str, fd: int) -> None:
    """Raise ``errors.Unsupported`` for the incomplete disk of an import, open as ``fd``. Raises OSError."""
    detect.refuse_unfinished(directio.read_past_cache(fd, len(detect.CLAIM)))
    if not path.endswith((part(""), changing(""))):
        return
    path = os.path.realpath(path)
    is_ours = path.endswith(changing(""))
    if path.endswith(part("")):
        # Browsers name downloads so, too. Ours is locked, or was by a run that was killed, or has a journal.
        with contextlib.suppress(OSError):
            is_ours = claim.holder(claim.read(lock_file(path.removesuffix(part(""))))) is not None
        is_ours = is_ours or journals.is_at_end_of(path)
    if is_ours:
        detect.refuse_stranger("unfinished")


class FileTarget(base.Target):
    """A file that gets its name when it is complete. A new one consists of holes or is preallocated.

    A new attempt gets a new inode: a run that has lost its claim may still hold the old one.
    """

    #: Opens the storage.
    opens: ClassVar[type[storage.Storage]] = storage.Storage

    def __init__(self, held: claim.Claim, size: int | None, options: base.TargetOptions) -> None:
        with contextlib.ExitStack() as undo:
            self._directory = os.open(pathlib.Path(held.path).parent, os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, self._directory)
            fd, name, self.resumed = self._open(held.path, options)
            undo.callback(os.close, fd)
            self._inode = os.fstat(fd)
            stored = self.opens(held, fd, options.cancel, direct=options.direct)
            super().__init__(stored, size, options)
            undo.pop_all()
        self.owned.callback(os.close, self._directory)
        self.written_path = name
        try:
            self._prepare()
        except (OSError, errors.Error):
            self.close()
            raise

    @staticmethod
    def _open(path: str, options: base.TargetOptions, /) -> tuple[int, str, bool]:
        """Return a descriptor, the name of its file, and whether it has the bytes of an earlier run."""
        name = part(path)
        fd = _open_left_over(name) if options.resume else None
        if fd is not None:
            return fd, name, True
        removed = (path, changing(path)) if options.existing == "remove" else ()
        for left_over in (*removed, name, journal(path)):
            try:
                remove(left_over)
            except PermissionError as err:
                # In a folder with the sticky bit, such as /tmp.
                reason = "belongs to another user, who may be importing too; choose another name or folder"
                raise errors.TargetError(path=left_over, reason=reason) from err
        # Never writable for everybody, whatever the umask is: it would not be continued.
        fd = os.open(name, _FLAGS | os.O_CREAT | os.O_EXCL, options.permissions or 0o664)
        if options.permissions is not None:
            with contextlib.suppress(PermissionError):  # file systems without modes
                os.fchmod(fd, options.permissions)  # open(2) has applied the umask
        return fd, name, False

    def _prepare(self) -> None:
        """Give the file its size, and its storage if it is preallocated."""
        # A left-over may be longer than the disk: the journal is stored after the last byte.
        if self.size and os.fstat(self.storage.fd).st_size < self.size:
            os.ftruncate(self.storage.fd, self.size)
        if self.resumed:
            rungs = zeroing.ALLOCATED if self._options.preallocate else zeroing.SPARSE
            self.storage.zero_by(rungs, units.SECTOR)
        elif self._options.preallocate:
            if self.size and self._allocate(self.size):
                self._zero_by_device(self.size)
            else:
                # New storage reads as zeros.
                self.storage.zero_by((kernel.allocate,), units.SECTOR)

    def _allocate(self, size: int) -> bool:
        try:
            kernel.allocate(self.storage.fd, 0, size)
        except OSError as err:
            if err.errno not in kernel.REFUSALS:
                raise
            return False
        return True

    def _zero_by_device(self, size: int) -> None:
        """Make the allocated storage of a new file written extents, if its device zeroes without a transfer.

        Not earlier: this takes the device's time, and a lack of space must be reported before.
        """
        try:
            for start, end in self.storage.steps(0, size):
                kernel.write_zeroes(self.storage.fd, start, end - start)
        except OSError as err:
            if err.errno not in kernel.REFUSALS:
                raise

    def _ready(self, size: int) -> None:
        if self.has_begun:
            os.ftruncate(self.storage.fd, self._end)
            os.ftruncate(self.storage.fd, size)
            if self._options.preallocate and not self._allocate(size):
                self.storage.zero(self._end, size)
        else:
            # A run that was killed between its rename and the sync may have left it.
            kernel.sync_directory(self._directory)
        self.storage.sync()
        self.storage.close()
        self._check_claim()
        self._check_existing()

    def _check_existing(self) -> None:
        is_refused = self._options.existing == "refuse" and not self.storage.claim.may_replace
        if is_refused and os.path.lexists(self.path):
            raise errors.TargetExists(path=self.path, reason="exists")

    def _finish(self) -> None:
        self._check_existing()
        pathlib.Path(self.written_path).replace(self.path)
        if not os.path.samestat(os.lstat(self.path), self._inode):
            raise self.storage.claim.lose("another run has replaced it while it was renamed")
        try:
            remove(changing(self.path))  # replaced by the new disk
            kernel.sync_directory(self._directory)
        except OSError:
            pathlib.Path(self.path).replace(self.written_path)
            raise

    def _check_claim(self) -> None:
        super()._check_claim()
        try:
            is_same = os.path.samestat(os.lstat(self.written_path), self._inode)
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise self.storage.claim.lose(f"another run has removed or replaced {self.written_path}")

    def _abandon(self) -> None:
        if not self._kept:
            self._check_claim()
            remove(self.written_path)


class ChangedFile(FileTarget):
    """A finished disk that is changed in place, under another name: from the start, or its first change."""

    @staticmethod
    def _open(path: str, _options: base.TargetOptions, /) -> tuple[int, str, bool]:
        name = path if os.path.lexists(path) else changing(path)
        if not stat.S_ISREG(os.lstat(name).st_mode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        with contextlib.ExitStack() as undo:
            fd = os.open(name, _FLAGS)
            undo.callback(os.close, fd)
            found = os.fstat(fd)
            folder = pathlib.Path(path).parent
            if name != path and folder.stat().st_mode & stat.S_IWOTH and not space.is_ours(found, folder):
                # Any user may have created it. It would become the disk, and still belong to that user.
                reason = f"belongs to user {found.st_uid}; if it is the disk of an update of yours, chown it"
                raise errors.TargetError(path=name, reason=reason)
            if found.st_nlink > 1:
                # It stays usable by its other name while it is neither the old nor the new disk.
                reason = "has several hard links, and would change under all; copy it, and change the copy"
                raise errors.TargetError(path=path, reason=reason)
            undo.pop_all()
        return fd, name, True

    def _prepare(self) -> None:
        if self.has_begun:
            self._disable()
            self.size = self._limit = self._end = os.fstat(self.storage.fd).st_size
        rungs = zeroing.ALLOCATED if self._options.preallocate else zeroing.SPARSE
        self.storage.zero_by(rungs, units.SECTOR)

    def settle(self, size: int = 0) -> None:
        if not self.has_begun:
            size = max(size, units.whole_sectors(self._end))
            is_resized = os.fstat(self.storage.fd).st_size != size
            is_changed = is_resized or any(self.storage.nonzero(self._end, size))
            if is_changed or self.written_path != self.path or self._options.preallocate:
                self._begin()

    def _disable(self) -> None:
        """Rename the disk, and remove the left-over of another attempt."""
        if self.written_path == self.path:
            pathlib.Path(self.path).replace(changing(self.path))
            self.written_path = changing(self.path)
        remove(part(self.path))
        # The old name must be gone before the first change, also after a power cut.
        kernel.sync_directory(self._directory)

    def _abandon(self) -> None:
        """Leave the disk: it is complete, or its name shows that it is not."""


def _open_left_over(name: str) -> int | None:
    """Open the left-over of an earlier run of this user; None if there is none, or it is another user's."""
    try:
        found = os.lstat(name)
        is_single = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        if not (is_single and space.is_ours(found, pathlib.Path(name).parent)):
            log.warning("not continued: others may write to it path=%r owner=%d", name, found.st_uid)
            return None
        fd = os.open(name, _FLAGS)
    except FileNotFoundError:
        return None
    if os.path.samestat(os.fstat(fd), found):
        return fd
    os.close(fd)
    return None


def remove(path: str) -> None:
    """Remove a file if it exists."""
    pathlib.Path(path).unlink(missing_ok=True)
