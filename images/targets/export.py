"""Write a disk to an NBD export, as to a block device: the first MiB last."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from cdi_worker import errors
from cdi_worker.images.targets import block, claim, remote, storage, zeroing


class ExportClaim(claim.MarkedClaim):
    """A claim on an NBD export. NBD has no locks: other runs are only found by the record."""

    def __init__(self, path: str, connect: remote.Connect) -> None:
        super().__init__(path)
        self.device = connect(path)

    @property
    def size(self) -> int:
        return self.device.size

    def first(self, length: int, /) -> bytes:
        return self.device.read(0, min(length, self.size))

    def close(self) -> None:
        self.device.close()


@contextlib.contextmanager
def image(held: ExportClaim) -> Iterator[str]:
    """Yield the path of a sparse file of the size of an export, with the bytes at its beginning and end."""
    with errors.on_target(held.path, "read"), open(os.memfd_create("export"), "wb", buffering=0) as memory:
        memory.truncate(held.size)
        for offset in (0, max(0, held.size - block.HEAD)):
            os.pwrite(memory.fileno(), held.device.read(offset, block.HEAD), offset)
        yield f"/proc/{os.getpid()}/fd/{memory.fileno()}"


class ExportStorage(block.BlockStorage, storage.RemoteStorage):
    """An NBD export whose first bytes are in memory until ``store`` writes them."""

    def _open(self, held: claim.MarkedClaim) -> tuple[int, int]:
        assert isinstance(held, ExportClaim)  # noqa: S101  (see ``targets.open``)
        self.device = held.device
        return -1, max(512, held.device.unit)

    def _rungs(self) -> Sequence[zeroing.Rung]:
        return (self.clear,)


class ExportTarget(block.BlockTarget):
    """An NBD export, which may contain any data."""

    opens = ExportStorage
