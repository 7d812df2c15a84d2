"""Write a disk to a new qcow2 file, through QEMU's NBD server on it."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Final

from cdi_worker import errors, units
from cdi_worker.formats import detect, facts, safety
from cdi_worker.images import kernel
from cdi_worker.images.targets import base, claim, file, storage
from cdi_worker.images.targets.storage import RemoteStorage
from cdi_worker.images.tools import qemu_img, qemu_nbd

#: Bytes of a disk whose size is not known before its end, when the file is shrunk, and the most entries of
#: its first table (8 MiB).
_UNKNOWN: Final = 8 << 40
_ENTRIES: Final = 1 << 20
#: Offset of the disk's size in the header (docs/interop/qcow2.txt).
_SIZE_FIELD: Final = 24


class Qcow2Target(file.FileTarget):
    """A qcow2 file, ``NAME.part`` until it is complete and qemu-img has found no error in it.

    ``storage``: the guest's bytes, behind a server; its ``fd`` is the file itself.
    """

    storage: RemoteStorage
    opens = RemoteStorage

    def __init__(self, held: claim.Claim, size: int | None, options: base.TargetOptions) -> None:
        assert options.form is not None  # noqa: S101  (see ``targets.open``)
        self._form = options.form
        self._connect = held.connect
        self._served = contextlib.ExitStack()
        if size is None and self._form.preallocation != "off":
            reason = "the size of the disk is known only at its end, so a qcow2 file cannot be preallocated"
            raise errors.Unsupported(reason=reason)
        limit = min(_UNKNOWN, _ENTRIES * self._form.cluster_size**2 // 8)
        self._created = limit if size is None else units.whole_sectors(size)
        super().__init__(held, size, options)

    def _prepare(self) -> None:
        fd = self.storage.fd
        if self.resumed:
            # Only if it is a qcow2 file as this run creates it, and without an error.
            try:
                found = _checked(fd)
                qemu_img.repair(self.path, fd)
                self.resumed = found.virtual_size == self._created
            except (errors.ImageError, errors.ToolFailed, errors.TargetError):
                self.resumed = False
        if not self.resumed:
            qemu_img.create(self.path, fd, self._form.options, self._created)
            journal = file.journal(self.path)
            file.remove(journal)
            os.close(os.open(journal, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        self.owned.enter_context(self._served)
        node = qemu_img.writing(fd, direct=kernel.supports_direct(f"/proc/self/fd/{fd}"))
        serving = qemu_nbd.serve(node, writable=True, pass_fds=(fd,), cancel=self._options.cancel)
        url = self._served.enter_context(serving)
        assert self._connect is not None  # noqa: S101  (given with the format)
        self.storage.device = self._served.enter_context(
            contextlib.closing(self._connect(url, name=f"{self.path} (qemu-nbd)"))
        )
        if self.resumed:
            self.storage.zero_by((self.storage.clear,), units.SECTOR)

    def _ready(self, size: int) -> None:
        fd = self.storage.fd
        self.storage.sync()
        # Ends the server, which closes the file.
        self._served.close()
        if size < self._created:
            # Nothing was written after the end; to shrink it, qemu-img would make a table for each 512 MiB.
            storage.write_all(fd, _SIZE_FIELD, memoryview(size.to_bytes(8, "big")))
        elif size > self._created:
            qemu_img.grow(self.path, fd, size, preallocation=self._form.preallocation)
        qemu_img.repair(self.path, fd)
        os.fsync(fd)
        self.storage.close()
        self._check_claim()
        self._check_existing()

    def _finish(self) -> None:
        super()._finish()
        file.remove(file.journal(self.path))

    def _abandon(self) -> None:
        self._served.close()
        super()._abandon()
        if not self._kept:
            file.remove(file.journal(self.path))


def check(path: str) -> None:
    """Check that a finished qcow2 file is safe to open."""
    try:
        with (
            errors.on_target(path, "open"),
            # A pipe without a writer is not waited for.
            open(
                path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
            ) as stream,
        ):
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise errors.TargetError(path=path, reason="is not a regular file; name another target")
            _checked(stream.fileno())
    except errors.Refused as err:
        if err.fields["rule"] != "backing_file":
            raise
        raise facts.refuse(
            "qcow2", "backing_file", f"{path} is an overlay", ("flatten it", "flatten")
        ) from err


def _checked(fd: int) -> facts.ImageFacts:
    def read(offset: int, length: int) -> bytes:
        return os.pread(fd, length, offset)

    return safety.check("qcow2", read(0, detect.HEAD), read=read, size=os.lseek(fd, 0, os.SEEK_END))
