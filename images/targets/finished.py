"""A finished disk, which is only read: a target for comparisons."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Final

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.images.targets import base, claim, remote, storage

#: A FIFO without a writer would be waited for.
_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class Finished(base.Target):
    """A file, block device or NBD export, opened without write access. Nothing can be written to it.

    Its pages are dropped from the cache first, so that the bytes compared are those on storage.
    """

    def __init__(self, held: claim.Reading, options: base.Options) -> None:
        #: Whether it is a device, whose end is not that of the disk.
        self.is_device = True
        if held.device is not None:
            self.is_device = not held.is_served
            super().__init__(_Export(held, held.device, options.cancel), held.size, options)
            return
        fd = os.open(held.path, _FLAGS)
        found = os.fstat(fd)
        self.is_device = stat.S_ISBLK(found.st_mode)
        if not (self.is_device or stat.S_ISREG(found.st_mode)):
            os.close(fd)
            raise errors.TargetError(path=held.path, reason="is neither a file nor a block device")
        super().__init__(storage.Storage(held, fd, options.cancel), os.lseek(fd, 0, os.SEEK_END), options)
        self.storage.drop_cache()

    def _abandon(self) -> None:
        """Leave the disk as it is."""


class _Export(storage.Storage):
    """An NBD export that is read."""

    is_remote = True

    def __init__(self, held: claim.Claim, device: remote.Device, cancel: cancelling.Cancel) -> None:
        super().__init__(held, -1, cancel)
        self._device = device

    def allocated(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        with self.guarded("list its extents"):
            yield from self._device.allocated(start, end)

    def _pread(self, length: int, offset: int) -> bytes:
        return self._device.read(offset, length)
