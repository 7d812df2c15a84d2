"""A private directory for temporary files, removed with its block; after a kill, by a later run."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import shutil
import stat
import tempfile
import weakref
from typing import Final

from cdi_worker import errors
from cdi_worker.images import kernel

log = logging.getLogger(__name__)

#: Longest directory for temporary files, in bytes: a unix socket in it has a path of at most 107 (unix(7)).
LONGEST_PATH: Final = 71
#: In a pod with a read-only root, it may be the only directory for temporary files.
_MEMORY: Final = "/dev/shm"  # noqa: S108  (a private directory in it)
#: Differs from the names of scratch, which a later run resumes.
_PREFIX: Final = "cdi-worker-tmp-"
#: The names that ``tempfile`` makes.
_NAME: Final = re.compile(re.escape(_PREFIX) + "[a-z0-9_]{8}")
#: Other users of a shared directory may fill it with our names.
_MOST: Final = 1000


class Workspace:
    """A new directory, ``name``, that only this user can access, until ``cleanup`` or the end of the block.

    It is locked (flock(2)) as long as its process lives: a new one removes the directories that are not.
    It is in ``/dev/shm`` if there is no other directory, or if the path of a socket in it would be too long.
    Raises ``errors.Error`` if the directory cannot be made.
    """

    def __init__(self) -> None:
        try:
            parent = tempfile.gettempdir()
        except FileNotFoundError:
            parent = _MEMORY
        if len(os.fsencode(parent)) > LONGEST_PATH:
            parent = _MEMORY
        _sweep(parent)
        while True:
            try:
                self._directory = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent)
            except OSError as err:
                reason = f"{parent}: no temporary directory can be made: {errors.words(err)}"
                raise errors.Error(reason=f"{reason}; free space there, or set TMPDIR") from err
            self.name = self._directory.name
            fd = _lock_new(self.name)
            if fd is not None:
                break
            # A run has removed it before it was locked.
            self._directory.cleanup()
        self._unlock = weakref.finalize(self, os.close, fd)

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Remove the directory. Idempotent."""
        try:
            self._directory.cleanup()
        finally:
            self._unlock()


def _lock_new(path: str) -> int | None:
    """Open and lock a new directory; return None if another run has just taken it for a left-over."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.lstat(path)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        return fd  # without locks, as for a directory on NFS, no run removes it
    os.close(fd)
    return None


def _sweep(parent: str) -> None:
    """Remove left-overs of killed processes from a directory that other users may share."""
    with contextlib.suppress(OSError), kernel.open_fd(parent, os.O_DIRECTORY) as above:
        with os.scandir(above) as entries:
            named = (entry.name for entry in entries if _NAME.fullmatch(entry.name))
            found = list(itertools.islice(named, _MOST))
        for name in found:
            with (
                contextlib.suppress(OSError),
                kernel.open_fd(name, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above) as fd,
            ):
                _remove(name, fd, above)


def _remove(name: str, fd: int, above: int) -> None:
    """Remove our directory ``name``, open as ``fd``. Raises ``OSError`` if its process lives.

    Its files are removed through the descriptor: another file may get its name at any time.
    """
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != stat.S_IRWXU:
        return
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    log.info("removing what a killed process has left name=%r", name)
    for each in os.listdir(fd):
        if stat.S_ISDIR(os.stat(each, dir_fd=fd, follow_symlinks=False).st_mode):
            shutil.rmtree(each, dir_fd=fd)
        else:
            os.unlink(each, dir_fd=fd)
    # Removes an empty directory only.
    os.rmdir(name, dir_fd=above)
