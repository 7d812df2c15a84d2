"""Scratch space: a private directory for the files of one job."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import stat
from typing import Self

from cdi_worker import errors


def available(directory: str | os.PathLike[str] | None, target: str) -> int | None:
    """Return the free bytes for unprivileged users, including those of this job's left-overs.

    None if the scratch directory does not exist. It is not changed.
    """
    if directory is None or not pathlib.Path(directory).is_dir():
        return None
    with errors.on_target(directory, "inspect scratch"):
        room = os.statvfs(directory)
        free = room.f_bavail * room.f_frsize
        for path in _folder(directory, target).glob("**/*"):
            with contextlib.suppress(FileNotFoundError):
                free += path.lstat().st_blocks * 512
        return free


class Scratch:
    """A private folder in a scratch directory, removed with its block unless ``keep`` was called.

    ``target``: the path of the job's target. A later attempt of the same job uses the same folder; two jobs
    never do at the same time, because the job has claimed its target. ``resume``: keep the files of an
    earlier attempt; otherwise they are removed first.
    """

    def __init__(self, directory: str | os.PathLike[str], target: str, *, resume: bool = False) -> None:
        self.folder = _folder(directory, target)
        self._kept = False
        with errors.on_target(self.folder, "open scratch"):
            with contextlib.suppress(FileNotFoundError):
                found = self.folder.lstat()
                # Others may have created it, or may write to it.
                is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
                if resume and is_ours and not found.st_mode & 0o022:
                    return
            remove(self.folder)
            self.folder.mkdir(mode=0o700)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._kept:
            # An earlier failure is reported, not that of the clean-up.
            with contextlib.suppress(OSError):
                remove(self.folder)

    def path(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return str(self.folder / name)

    def keep(self) -> None:
        """Keep the folder for a later attempt of the same job."""
        self._kept = True


def is_ours(found: os.stat_result, directory: str | os.PathLike[str]) -> bool:
    """Return whether a left-over is ours, and not writable for everybody: anybody can create one in /tmp.

    SMB, and NFS that squashes users, show the same owner and mode for all files of a directory.
    """
    if found.st_uid == os.geteuid() and not found.st_mode & stat.S_IWOTH:
        return True
    import tempfile

    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=directory) as new:
        ours = os.fstat(new.fileno())
        return found.st_uid == ours.st_uid and not found.st_mode & ~ours.st_mode & stat.S_IWOTH
    return False


def _folder(directory: str | os.PathLike[str], target: str) -> pathlib.Path:
    # Two jobs may call their targets disk.img, each in its own directory.
    name = hashlib.sha256(os.path.realpath(target).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return pathlib.Path(directory) / f"cdi-worker-{name}"


def remove(path: pathlib.Path, *, ignore_errors: bool = False) -> None:
    """Remove a file, or a directory with all that is in it, if it exists."""
    if path.is_dir() and not path.is_symlink():
        import shutil

        shutil.rmtree(path, ignore_errors=ignore_errors)
    else:
        path.unlink(missing_ok=True)


class Spill:
    """A scratch file with parts of a stream that are needed later. Raises ``errors.TargetError``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        with errors.on_target(path, "open scratch"):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, offset: int, data: memoryview) -> None:
        """Store ``data`` at its offset in the stream."""
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], offset + done)
        except OSError as err:
            raise errors.target_error(self._path, err, "write scratch") from err

    def read(self, offset: int, length: int) -> bytes:
        """Return at most ``length`` stored bytes."""
        try:
            return os.pread(self._fd, length, offset)
        except OSError as err:
            raise errors.target_error(self._path, err, "read scratch") from err
