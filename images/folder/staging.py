"""A staging folder on the target volume, whose content is moved to the volume when it is complete."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import re
import stat
from typing import Final, Self

from cdi_worker import errors
from cdi_worker.images import kernel
from cdi_worker.images.targets import claim, file
from cdi_worker.scratch import space

log = logging.getLogger(__name__)

_NAME: Final = ".cdi-worker-unpacking"
_LOCK: Final = file.lock_file(file.DISK)
#: Created by mkfs, and the lock file of the running attempt.
_KEPT: Final = frozenset({"lost+found", _LOCK})
#: Opens a directory in another one without following a symlink.
_INNER: Final = os.O_DIRECTORY | os.O_NOFOLLOW
_OCCUPIED: Final = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR})


def remove_left_over(directory: str | os.PathLike[str]) -> None:
    """Remove the staging folder of a killed attempt, so that its space counts as free."""
    path = pathlib.Path(directory, _NAME)
    with errors.on_target(path, "remove"):
        space.remove(path)


def empty(volume: str | os.PathLike[str]) -> None:
    """Remove all files on a volume that is mounted for this job only: earlier attempts wrote them.

    They may be a whole archive or clone, and the volume has no space for a second copy. In a folder that is
    not a mount point only the staging folder is removed: other files may belong to someone else. Other mount
    points below the volume, and the directories that contain them, are kept.
    """
    remove_left_over(volume)
    if not os.path.ismount(volume):
        return
    # All mount points: the fifth field of proc_pid_mountinfo(5).
    lines = pathlib.Path("/proc/self/mountinfo").read_bytes().splitlines()
    points = (
        re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), line.split()[4]) for line in lines
    )
    mounts = [pathlib.Path(os.fsdecode(point)) for point in points]
    for path in pathlib.Path(volume).resolve().iterdir():
        if path.name in _KEPT or any(mount.is_relative_to(path) for mount in mounts):
            continue
        log.info("removing file of an earlier attempt path=%r", str(path))
        # Errors are ignored: files that stay reduce the available space, which is checked later.
        with contextlib.suppress(OSError):
            space.remove(path, ignore_errors=True)


class Staging:
    """A context manager with ``path``, an empty directory on the file system of the claimed folder.

    Unless ``commit`` is called, the directory and its content are removed at the end. ``replace``: existing
    files are replaced, otherwise they are an ``errors.TargetExists``.
    """

    def __init__(self, held: claim.Claim, *, replace: bool = True) -> None:
        self._claim = held
        self._replace = replace
        self._directory = pathlib.Path(held.path)
        self.path = self._directory / _NAME

    def __enter__(self) -> Self:
        remove_left_over(self._directory)
        with errors.on_target(self.path, "make directory"):
            self.path.mkdir(mode=0o700)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # An error of the clean-up must not hide the first one.
        with contextlib.suppress(*(() if error is None else (errors.TargetError,))):
            self._claim.check()  # another run may use the staging folder now
            remove_left_over(self._directory)

    def commit(self) -> None:
        """Move everything to the folder and sync. Existing directories are merged.

        Raises ``errors.Refused`` for the names of the staging folder and of the lock file, and if what
        becomes the disk of the volume is not a regular file.
        """
        with (
            errors.on_target(self._directory, "move into place"),
            kernel.open_fd(self._directory, os.O_DIRECTORY) as final,
        ):
            lock = self.path / _LOCK
            with contextlib.suppress(OSError):
                if claim.holder(claim.read(str(lock))) is not None:
                    lock.unlink()  # of a killed run, on a volume that was cloned
            for name in (_NAME, _LOCK):
                if os.path.lexists(self.path / name):
                    reason = f"it contains {name!r}, which cdi-worker uses itself; rename it in the archive"
                    raise errors.Refused(format="tar", rule="name", reason=reason)
            # The file system decides: a hard link may lead to a symlink, and letter case may not count.
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG((self.path / file.DISK).lstat().st_mode):
                    reason = f"{file.DISK!r} is not a regular file, as the disk of a volume must be"
                    raise errors.Refused(format="tar", rule="disk", reason=reason)
            if not self._replace:
                _refuse_existing(self.path, self._directory)
            self._claim.check()
            with kernel.open_fd(_NAME, _INNER, dir_fd=final) as staged:
                _merge(staged, final)
            kernel.sync_filesystem(final)


def _refuse_existing(source: pathlib.Path, target: pathlib.Path) -> None:
    """Raise ``errors.TargetExists`` for the first file that ``_merge`` would replace."""
    for path in sorted(source.iterdir()):
        final = target / path.name
        if path.is_dir() and not path.is_symlink() and final.is_dir() and not final.is_symlink():
            _refuse_existing(path, final)
        elif os.path.lexists(final):
            raise errors.TargetExists(path=final, reason="exists")


def _merge(source: int, target: int) -> None:
    """Move all files of a directory to another one: merge directories, replace other files."""
    for name in sorted(os.listdir(source)):
        try:
            os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
            continue
        except OSError as err:
            if err.errno not in _OCCUPIED:
                raise
        if not _is_directory(name, target):
            os.unlink(name, dir_fd=target)
            os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
        elif _is_directory(name, source):
            with (
                kernel.open_fd(name, _INNER, dir_fd=source) as inner,
                kernel.open_fd(name, _INNER, dir_fd=target) as outer,
            ):
                _merge(inner, outer)
        else:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)


def _is_directory(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
