"""A folder beside the final place, whose content moves there when it is whole and verified."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import re
import shutil
import stat
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self

from cdi_worker import errors
from cdi_worker.images import kernel

log = logging.getLogger(__name__)

_NAME: Final = ".cdi-worker-unpacking"
#: What a file system has by itself.
_KEPT: Final = frozenset({"lost+found"})
_IN_THE_WAY: Final = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR})


def remove_left_over(directory: str | os.PathLike[str]) -> None:
    """Remove what a killed attempt left, so that its space counts as free."""
    path = pathlib.Path(directory, _NAME)
    with _storage(path, "remove"):
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)


def empty(volume: str | os.PathLike[str]) -> None:
    """Remove everything on a volume that was mounted for this job alone: earlier attempts left it.

    It may be all of an archive or clone, for which there is no room twice. In a folder that is no
    mount point there may be things of others: of that only what ``remove_left_over`` removes. What
    else is mounted below is left alone, and all that leads there.
    """
    remove_left_over(volume)
    if not os.path.ismount(volume):
        return
    mounts = _mounts()
    for path in pathlib.Path(volume).resolve().iterdir():
        if path.name in _KEPT or any(mount.is_relative_to(path) for mount in mounts):
            continue
        log.info("left over path=%r", str(path))
        if path.is_dir() and not path.is_symlink():
            # What cannot be removed is missed, if at all, when room is counted.
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def _mounts() -> list[pathlib.Path]:
    """Return where something is mounted: the fifth field of proc_pid_mountinfo(5)."""
    lines = pathlib.Path("/proc/self/mountinfo").read_bytes().splitlines()
    points = (
        re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), line.split()[4]) for line in lines
    )
    return [pathlib.Path(os.fsdecode(point)) for point in points]


class Staging:
    """Within ``with``: ``path`` is an empty directory on the same file system as ``directory``.

    Without ``commit`` all of it is removed at the end.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = pathlib.Path(directory)
        self.path = self._directory / _NAME

    def __enter__(self) -> Self:
        remove_left_over(self._directory)
        with _storage(self.path, "make directory"):
            self.path.mkdir(mode=0o700)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An error while tidying up must not hide the one that led here.
        with contextlib.suppress(*(() if kind is None else (errors.TargetError,))):
            remove_left_over(self._directory)

    def commit(self) -> None:
        """Move everything to its place, durably. Directories that are there already are filled further."""
        with _storage(self._directory, "move into place"):
            _merge(self.path, self._directory)
            fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                kernel.sync_filesystem(fd)
            finally:
                os.close(fd)


def _merge(source: pathlib.Path, target: pathlib.Path) -> None:
    for path in sorted(source.iterdir()):
        final = target / path.name
        try:
            path.rename(final)
        except OSError as err:
            if err.errno not in _IN_THE_WAY:
                raise
            _make_room(path, final)


def _make_room(path: pathlib.Path, final: pathlib.Path) -> None:
    """Move ``path`` to a place that is taken: into a directory, or instead of a file."""
    if not stat.S_ISDIR(final.lstat().st_mode):
        final.unlink()
        path.rename(final)
    elif stat.S_ISDIR(path.lstat().st_mode):
        _merge(path, final)
    else:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(final))


@contextlib.contextmanager
def _storage(path: pathlib.Path, doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise errors.target_error(path, err, doing) from err
