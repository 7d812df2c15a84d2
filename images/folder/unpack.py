"""Unpack a tar archive below a directory.

Nothing is opened, created or changed through a symlink, wherever it leads: every directory of a path is
opened relative to its parent's descriptor with O_NOFOLLOW, so that one entry cannot redirect another
(CVE-2007-4559 and similar). openat2(2) would save calls, but the seccomp profiles of some container runtimes
refuse it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from concurrent import futures
from typing import Final

from cdi_worker import errors
from cdi_worker.formats.tar import archive as tar
from cdi_worker.images import kernel
from cdi_worker.images.targets import storage, writeback

_BUFFER: Final = 1 << 20
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: Some file servers let nobody write to a file without these, not even the run that created it.
_WRITABLE: Final = stat.S_IRUSR | stat.S_IWUSR
#: Files of this size and more are written back while they are unpacked, and synced one by one.
_LARGE: Final = 8 << 20
#: Bytes of an archive after which the files so far are synced.
_SYNC: Final = 32 << 20


def unpack(
    archive: tar.Archive,
    directory: str | os.PathLike[str],
    *,
    advance: Callable[[int], object] = lambda _: None,
) -> None:
    """Create every entry of ``archive`` below an existing directory, and sync.

    Existing files are replaced, existing directories kept. Owners, and times of directories, are not
    restored. ``advance`` gets the bytes written. Raises ``errors.TargetError``, ``errors.Refused``, and the
    errors of ``archive``.
    """
    with errors.on_target(directory, "open"):
        root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    work = _Unpacking(root, os.fspath(directory), archive, advance)
    with contextlib.closing(work), futures.ThreadPoolExecutor(1, "sync") as executor:
        syncing, begun_at = executor.submit(lambda: None), 0
        for entry in archive:
            work.make(entry)
            # Otherwise storage would be idle until the end: the kernel writes small files back when they are
            # 30 seconds old, or a tenth of memory is dirty.
            if archive.at - begun_at >= _SYNC and syncing.done():
                with errors.on_target(directory, "sync"):
                    syncing.result()
                syncing, begun_at = executor.submit(kernel.sync_filesystem, root), archive.at
        with errors.on_target(directory, "sync"):
            syncing.result()
            kernel.sync_filesystem(root)


class _Unpacking:
    def __init__(
        self, root: int, directory: str, archive: tar.Archive, advance: Callable[[int], object]
    ) -> None:
        self._directory = directory
        self._archive = archive
        self._advance = advance
        self._buffer = memoryview(bytearray(_BUFFER))
        #: The directories of the last path, which are open as ``_open``, from the root: most entries are in
        #: that of the entry before. A name stays that of its directory, because no entry removes one.
        self._path: tuple[str, ...] = ()
        self._open = [root]
        #: The modes of new files in the last of them, by the modes that they were created with: the umask and
        #: a default ACL change them.
        self._modes: dict[int, int] = {}

    def close(self) -> None:
        """Close all directories, also the root."""
        while self._open:
            os.close(self._open.pop())

    def make(self, entry: tar.Entry) -> None:
        *folder, name = entry.path
        try:
            parent = self._enter(tuple(folder))
            if entry.kind == "file":
                self._make_file(parent, name, entry)
            elif entry.kind == "directory":
                # The worker must be able to create and remove files in it.
                os.fchmod(self._enter(entry.path), entry.mode | 0o700)
            elif entry.kind == "symlink":
                _remove(parent, name)
                os.symlink(entry.link, name, dir_fd=parent)
                os.utime(name, (entry.mtime, entry.mtime), dir_fd=parent, follow_symlinks=False)
            elif entry.link == "/".join(entry.path):
                _check_earlier(parent, name, entry)  # "tar --create FILE FILE" makes the second one of these
            else:
                _remove(parent, name)
                *folder, other = entry.link.split("/")
                # Opening the directory of the other name closes that of this one.
                with kernel.open_fd(".", _DIRECTORY, dir_fd=parent) as here:
                    there = self._enter(tuple(folder))
                    _check_earlier(there, other, entry)
                    os.link(other, name, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
        except OSError as err:
            path = "/".join((self._directory, *entry.path))
            raise errors.target_error(path, err, "unpack") from err

    def _enter(self, path: tuple[str, ...]) -> int:
        """Return the directory at ``path`` below the root, created with its parents if missing; keep it open.

        Raises ``errors.Refused`` for a symlink, wherever it leads.
        """
        if path == self._path:
            return self._open[-1]
        depth = len(os.path.commonprefix((self._path, path)))  # noqa: RUF071  (compares names)
        self._path = path[:depth]
        self._modes.clear()
        while len(self._open) > depth + 1:
            os.close(self._open.pop())
        for name in path[depth:]:
            there = "/".join((*self._path, name))
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=self._open[-1])
                self._open.append(os.open(name, _DIRECTORY, dir_fd=self._open[-1]))
            except OSError as err:
                if err.errno not in {errno.ENOTDIR, errno.ELOOP}:
                    raise errors.target_error(f"{self._directory}/{there}", err, "make directory") from err
                reason = f"{there!r} is a directory in this entry, but a file or link in an earlier one"
                raise errors.Refused(format="tar", rule="link", reason=reason) from err
            self._path = (*self._path, name)
        return self._open[-1]

    def _make_file(self, parent: int, name: str, entry: tar.Entry) -> None:
        wanted = entry.mode | _WRITABLE
        try:
            fd = os.open(name, _NEW_FILE, wanted, dir_fd=parent)
        except FileExistsError:
            # Of an earlier entry.
            _remove(parent, name)
            fd = os.open(name, _NEW_FILE, wanted, dir_fd=parent)
        try:
            if (mode := self._modes.get(wanted)) is None:
                mode = self._modes[wanted] = stat.S_IMODE(os.fstat(fd).st_mode)
            self._fill(fd, entry)
            if mode != entry.mode:
                os.fchmod(fd, entry.mode)
            os.utime(fd, (entry.mtime, entry.mtime))
            if entry.size >= _LARGE:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _fill(self, fd: int, entry: tar.Entry) -> None:
        window = writeback.WritebackWindow(fd) if entry.size >= _LARGE else None
        written = pushed = 0
        for offset, length in entry.extents():
            at, end = offset, offset + length
            while at < end:
                count = self._archive.readinto(self._buffer[: end - at])
                storage.write_all(fd, at, self._buffer[:count])
                written = at = at + count
                if window is not None:
                    # Includes holes: a call for each extent of a fragmented disk took most of the time.
                    window.wrote(pushed, at)
                    pushed = at
                self._advance(count)
        if written < entry.size:
            os.ftruncate(fd, entry.size)


def _check_earlier(parent: int, name: str, entry: tar.Entry) -> None:
    """Check that the target of a hard link is a file or symlink. Raises ``errors.Refused``."""
    try:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        mode = 0
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        reason = f"{'/'.join(entry.path)!r} is a hard link to {entry.link!r}, which is not an earlier file"
        raise errors.Refused(format="tar", rule="link", reason=reason)


def _remove(parent: int, name: str) -> None:
    """Remove an earlier entry of this name. A directory is kept, and the next call fails."""
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(name, dir_fd=parent)
