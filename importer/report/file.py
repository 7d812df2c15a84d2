"""A file that is written beside a disk, such as a report, when the disk is complete."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from pathlib import Path

from cdi_worker import errors
from cdi_worker.images import kernel, targets


class File:
    """A file, or standard output (``-``). Until it is written whole, what has its name stays as it is.

    ``option``: that names it. ``target``: of the import, which it must not replace, nor ``base``, a file that
    is read; empty: none. Raises ``errors.RequestError`` if it cannot be written, before anything is imported.
    """

    def __init__(self, path: str, option: str, target: str = "", base: str = "") -> None:
        self._path = path
        self._name = f"{option} {path}"
        if path == targets.STDOUT:
            if target == targets.STDOUT:
                raise errors.RequestError(f"{self._name}: standard output gets the disk; name a file")
            return
        try:
            self._check(target, base)
            beside, fd = self._create()
            os.close(fd)
            beside.unlink()
        except OSError as err:
            raise errors.RequestError(f"{self._name}: cannot be written: {errors.words(err)}") from err

    def _check(self, target: str, base: str) -> None:
        """Raise ``errors.RequestError`` for a path that a file must not replace."""
        if base and os.path.realpath(self._path) == os.path.realpath(base):
            raise errors.RequestError(f"{self._name}: would replace a file that is read; name another file")
        if target and os.path.realpath(self._path) in map(os.path.realpath, targets.used(target)):
            raise errors.RequestError(f"{self._name}: is the target; name another file")
        try:
            mode = Path(self._path).lstat().st_mode
        except FileNotFoundError:
            return
        if stat.S_ISLNK(mode):
            # Somebody else may have made it, in a folder that others can write to.
            raise errors.RequestError(f"{self._name}: is a symbolic link; name the file itself")
        if not stat.S_ISREG(mode):
            hint = "name a file, or - for standard output"
            raise errors.RequestError(f"{self._name}: not a regular file; {hint}")

    def _create(self) -> tuple[Path, int]:
        """Create a file with another name beside it; return its path and descriptor."""
        beside = Path(f"{self._path}.{secrets.token_hex(4)}.part")
        # O_EXCL follows no link (open(2)); nor does the rename that replaces the file.
        return beside, os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes, doing: str) -> None:
        """Write the file and make it durable. Raises ``errors.TargetError``; ``doing``: see there.

        Raises ``errors.Error`` if standard output is closed or full.
        """
        if self._path == targets.STDOUT:
            _print(data.decode(), doing)
            return
        with errors.on_target(self._path, doing):
            beside, fd = self._create()
            try:
                with open(fd, "wb") as stream:
                    stream.write(data)
                    stream.flush()
                    os.fsync(stream.fileno())
                beside.replace(self._path)
                _sync(Path(self._path).parent)
            finally:
                beside.unlink(missing_ok=True)


def _print(text: str, doing: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # its reader has seen enough
    except OSError as err:
        raise errors.Error(reason=f"standard output: {doing}: {errors.words(err)}") from err


def _sync(folder: Path) -> None:
    """Make a rename in ``folder`` durable."""
    with kernel.opened(folder, os.O_DIRECTORY) as fd:
        kernel.sync_directory(fd)
