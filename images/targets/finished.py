"""A finished disk, which is only read: a target for comparisons."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import detect
from cdi_worker.images import directio
from cdi_worker.images.engine import cancelling
from cdi_worker.images.targets import base, claim, file, remote, storage

#: A FIFO without a writer would be waited for.
_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class Finished(base.Target):
    """A file, block device or NBD export, opened without write access. Nothing can be written to it.

    Reads return what is on storage: cached pages are dropped, and O_DIRECT bypasses the cache.
    """

    def __init__(self, held: claim.ReadingClaim, options: base.TargetOptions) -> None:
        if held.device is not None:
            self.is_device = remote.is_export(held.path)
            shown = storage.RemoteStorage(held, -1, options.cancel)
            shown.device = held.device
            with _naming(held.path):
                detect.refuse_unfinished(shown.device.read(0, directio.UNIT))
            super().__init__(shown, held.size, options)
            return
        with contextlib.ExitStack() as undo:
            fd = os.open(held.path, _FLAGS)
            undo.callback(os.close, fd)
            found = os.fstat(fd)
            self.is_device = stat.S_ISBLK(found.st_mode)
            if not (self.is_device or stat.S_ISREG(found.st_mode)):
                raise errors.TargetError(path=held.path, reason="is neither a file nor a block device")
            with _naming(held.path):
                file.refuse_unfinished(held.path, fd)
            super().__init__(_Local(held, fd, options.cancel), os.lseek(fd, 0, os.SEEK_END), options)
            undo.pop_all()
        self.storage.drop_cache()

    def _abandon(self) -> None:
        """Leave the disk as it is."""


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Name the disk in the error: a comparison has two."""
    try:
        yield
    except errors.Unsupported as err:
        raise errors.Unsupported(reason=f"{path}: {err.fields['reason']}") from None


class _Local(storage.Storage):
    """A file or device, read with O_DIRECT if possible: the kernel's read-ahead took twice the time."""

    def __init__(self, held: claim.Claim, fd: int, cancel: cancelling.Cancel) -> None:
        super().__init__(held, fd, cancel)
        self._own = threading.local()
        with contextlib.suppress(OSError):
            self._direct_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)

    def _view(self, length: int, offset: int) -> bytes | memoryview:
        if (direct := self._direct_fd) is None:
            return self._pread(length, offset)
        start = offset // directio.UNIT * directio.UNIT
        wanted = -(-(offset + length - start) // directio.UNIT) * directio.UNIT
        buffer = getattr(self._own, "buffer", None)
        if buffer is None or buffer.size < wanted:
            buffer = self._own.buffer = directio.Buffer(max(wanted, directio.LARGE))
        try:
            count = os.preadv(direct, [buffer.view[:wanted]], start)
        except OSError as err:
            if err.errno != errno.EINVAL:
                raise
            # The storage needs a larger alignment.
            return self._pread(length, offset)
        return buffer.view[offset - start : min(count, offset + length - start)]
