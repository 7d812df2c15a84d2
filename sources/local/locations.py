"""The location of a local disk."""

from __future__ import annotations

import dataclasses
import os
import posixpath
import urllib.parse
from pathlib import Path

from cdi_worker import errors
from cdi_worker.images import underlying
from cdi_worker.sources import base, staged

#: The address of standard input; a file with this name is ``./-``.
STDIN = "-"


@dataclasses.dataclass(frozen=True)
class Local(base.Location):
    """A path, a ``file://`` URL, or ``-`` for standard input."""

    @property
    def file_name(self) -> str:
        return "" if self.endpoint == STDIN else posixpath.basename(path_of(self.endpoint))

    def reads(self, path: str) -> bool:
        try:
            ours = os.fstat(0) if self.endpoint == STDIN else disk_of(path_of(self.endpoint)).stat()
            return underlying.share(ours, Path(path).stat())
        except OSError:
            return False


def disk_of(path: str) -> Path:
    """Return the path of the disk that a path names: that in a directory, as on a volume."""
    return Path(path, "disk.img") if Path(path).is_dir() else Path(path)


def path_of(endpoint: str) -> str:
    """Return the path of a path or a ``file://`` URL. Raises ``errors.RequestError``."""
    if endpoint[:5].lower() != "file:":
        return endpoint
    parts = urllib.parse.urlsplit(endpoint)
    if parts.netloc not in {"", "localhost"}:
        raise errors.RequestError(f"{endpoint}: a file URL must not have a host")
    path = urllib.parse.unquote(parts.path)
    if "\0" in path:
        raise errors.RequestError("the path contains a NUL byte")
    return path


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalFile(Local, staged.Files):
    """A local disk that may be a stage: a file of its own for each checkpoint."""
