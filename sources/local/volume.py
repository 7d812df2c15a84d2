"""The disk of another volume. Always raw: its guest controls the content, so no format is detected."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat

from cdi_worker import errors
from cdi_worker.sources import base
from cdi_worker.sources.local import file


def source(location: base.Location, cancel: base.Cancel) -> file.LocalSource:
    """Return the source for a device, a disk image, or a volume's directory with ``disk.img``."""
    path = pathlib.Path(location.endpoint)
    is_folder = path.is_dir()
    made: file.LocalSource = (_Image if is_folder else file.LocalSource)(
        str(path / "disk.img" if is_folder else path), cancel, location.access
    )
    made.format = "raw"
    made.thin = True
    return made


class _Image(file.LocalSource):
    """The disk image in a volume. A symlink would lead to other mounts of this container."""

    def _open(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(self.name).st_mode):
                raise errors.Unreachable(
                    url=self.name, reason="is not a regular file; put the disk itself there"
                )
        return os.open(self.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
