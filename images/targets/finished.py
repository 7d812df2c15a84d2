"""A finished disk, which is only read: a target for comparisons."""

from __future__ import annotations

import os
import stat
from typing import Final

from cdi_worker import errors
from cdi_worker.images.targets import base, claim, storage

#: A FIFO without a writer would be waited for.
_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class Finished(base.Target):
    """A file or block device, opened without write access. Nothing can be written to it.

    Its pages are dropped from the cache first, so that the bytes compared are those on storage.
    """

    def __init__(self, held: claim.Claim, options: base.Options) -> None:
        fd = os.open(held.path, _FLAGS)
        found = os.fstat(fd)
        #: Whether it is a block device, whose end is not that of the disk.
        self.is_device = stat.S_ISBLK(found.st_mode)
        if not (self.is_device or stat.S_ISREG(found.st_mode)):
            os.close(fd)
            raise errors.TargetError(path=held.path, reason="is neither a file nor a block device")
        super().__init__(storage.Storage(held, fd, options.cancel), os.lseek(fd, 0, os.SEEK_END), options)
        self.storage.drop_cache()

    def _abandon(self) -> None:
        """Leave the disk as it is."""
