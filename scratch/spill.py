"""A sparse file in scratch that holds parts of another, each at its own offset."""

from __future__ import annotations

import os
from typing import Self

from importer import errors


class Spill:
    """Parts of a file that will be read again. Errors are ``errors.TargetError`` of scratch."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as err:
            raise errors.target_error(path, err, "open scratch") from err

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, offset: int, data: memoryview) -> None:
        """Keep ``data``."""
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], offset + done)
        except OSError as err:
            raise errors.target_error(self._path, err, "write scratch") from err

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes that were kept, at most ``length``."""
        try:
            return os.pread(self._fd, length, offset)
        except OSError as err:
            raise errors.target_error(self._path, err, "read scratch") from err
