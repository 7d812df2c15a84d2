"""Write a disk to an NBD export, as to a block device: the first MiB last."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cdi_worker import errors
from cdi_worker.images.targets import block, claim, remote, storage
from cdi_worker.scratch import journal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdi_worker.images.targets import zeroing


class Export(claim.Marked):
    """A claim on an NBD export. NBD has no locks: other runs are only found by the record.

    ``state``: a folder for the journal, which also excludes other runs with the same folder; empty: none.
    """

    def __init__(self, path: str, connect: remote.Connect, state: str = "") -> None:
        super().__init__(path)
        self._fd = -1
        self.journal = ""
        self.device = connect(path)
        try:
            if state:
                self._open_journal(state)
        except (OSError, errors.TargetError):
            self.close()
            raise

    def _open_journal(self, state: str) -> None:
        # Another export may have this address later: its size must agree, and its bytes are compared.
        name = hashlib.sha256(f"{self.path} {self.size}".encode("utf-8", "surrogateescape")).hexdigest()[:16]
        path = str(pathlib.Path(state, f"cdi-worker-{name}.journal"))
        with errors.on_target(path, "open the journal"):
            fd = self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        found = os.fstat(fd)
        is_file = stat.S_ISREG(found.st_mode)
        if not is_file or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            # In a folder like /tmp it may say that another disk on the export is the one that was written.
            reason = "others can write to it; remove it, or use another --state"
            raise errors.TargetError(path=path, reason=reason)
        self.journal = path
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            self.journal = ""  # of the other run
            reason = "another run with this --state writes to it; wait for it with --wait SECONDS, or end it"
            raise errors.TargetBusy(path=self.path, reason=reason) from err

    @property
    def size(self) -> int:
        return self.device.size

    def first(self, length: int, /) -> bytes:
        return self.device.read(0, min(length, self.size))

    def slots(self) -> journal.Slots | None:
        """Return where the journal is stored, None without a folder for it."""
        return journal.Slots(self.journal, 0, block.HEAD, is_apart=True) if self.journal else None

    def forget(self) -> None:
        """Remove the journal: the disk is complete."""
        if self.journal:
            pathlib.Path(self.journal).unlink(missing_ok=True)

    def close(self) -> None:
        self.device.close()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            if not os.fstat(fd).st_size:
                self.forget()
            os.close(fd)


@contextlib.contextmanager
def image(held: Export) -> Iterator[str]:
    """Yield the path of a sparse file of the size of an export, with the bytes at its beginning and end."""
    with (
        errors.on_target(held.path, "read"),
        open(os.memfd_create("export"), "wb", buffering=0) as memory,
    ):
        memory.truncate(held.size)
        for offset in (0, max(0, held.size - block.HEAD)):
            os.pwrite(memory.fileno(), held.device.read(offset, block.HEAD), offset)
        yield f"/proc/{os.getpid()}/fd/{memory.fileno()}"


class ExportStorage(block.BlockStorage, storage.Remote):
    """An NBD export whose first bytes are in memory until ``store`` writes them."""

    def _open(self, held: claim.Marked) -> tuple[int, int]:
        assert isinstance(held, Export)  # noqa: S101  (see ``targets.open``)
        self.device = held.device
        return -1, max(512, held.device.unit)

    def _rungs(self) -> Sequence[zeroing.Rung]:
        return (self._zero,)

    def _zero(self, _fd: int, offset: int, length: int) -> None:
        self.device.zero(offset, length, allocate=self._is_preallocated)


class ExportTarget(block.BlockTarget):
    """An NBD export, which may contain any data."""

    opens = ExportStorage

    def _finish(self) -> None:
        super()._finish()
        held = self.storage.claim
        assert isinstance(held, Export)  # noqa: S101  (see ``targets.open``)
        held.forget()
