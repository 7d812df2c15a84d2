"""Write a disk to a block device, the first MiB last, and its first sector with data after the others."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final

from cdi_worker import errors, units
from cdi_worker.formats import raw
from cdi_worker.images import directio, kernel
from cdi_worker.images.targets import base, claim, storage, zeroing

log = logging.getLogger(__name__)

#: Bytes at the start that hold boot sectors, partition tables, volume labels and superblocks.
HEAD: Final = 1 << 20
#: Offset in the head where the journal is stored during a transfer, up to 64 KiB before the end of the head.
JOURNAL_OFFSET: Final = 256 << 10
_OVERWRITTEN: Final = "another run has written to its beginning"


class BlockStorage(storage.Storage):
    """A block device whose first bytes, ``head``, are in memory until ``store`` writes them.

    On the device, they are zeros meanwhile, and the claim's record, which ``withhold`` writes.
    """

    def __init__(self, held: claim.MarkedClaim, head: int, options: base.TargetOptions) -> None:
        fd, self._sector = self._open(held)
        super().__init__(held, fd, options.cancel, direct=options.direct)
        self.head = bytearray(head)
        self._device = held
        self._sectors = options.sectors
        self._is_preallocated = options.preallocate
        self.zero_by(self._rungs(), self._sector)

    def _open(self, held: claim.MarkedClaim) -> tuple[int, int]:
        """Return a descriptor of the device, and the bytes of its logical sector."""
        assert isinstance(held, claim.DeviceClaim)  # noqa: S101  (an export has a storage of its own)
        return os.dup(held.fd), kernel.sector_size(held.fd)

    def _rungs(self) -> Sequence[zeroing.Rung]:
        # Without rungs, every byte is written.
        return () if self._is_preallocated else zeroing.SPARSE

    def write(self, offset: int, data: memoryview) -> None:
        inside = self._inside(offset, len(data))
        self.head[offset : offset + inside] = data[:inside]
        super().write(offset + inside, data[inside:])

    def zero(self, start: int, end: int) -> None:
        inside = self._inside(start, end - start)
        self.head[start : start + inside] = bytes(inside)
        super().zero(start + inside, end)

    def view(self, offset: int, length: int) -> bytes | memoryview:
        inside = self._inside(offset, length)
        head = bytes(self.head[offset : offset + inside])
        return head + super().view(offset + inside, length - inside) if inside < length else head

    def allocated(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        if inside := self._inside(start, end - start):
            # It is in memory, whatever the device holds there meanwhile.
            yield start, start + inside
        yield from super().allocated(start + inside, end)

    def _inside(self, offset: int, length: int) -> int:
        return max(0, min(length, len(self.head) - offset))

    def zero_rest(self, start: int) -> None:
        """Zero the device from ``start``, or from the end of its head if that is later.

        Storage that cannot zero without a transfer is read, and only what is not zero is written.
        """
        rungs = () if self._is_preallocated else (kernel.punch_hole,)
        ladder = zeroing.Ladder(self.fd, rungs, self._sector, self._put_zeros)
        with self.guard("zero"):
            for part in self.steps(max(start, len(self.head)), self._device.size):
                ladder.zero(*part)

    def _put_zeros(self, offset: int, zeros: memoryview) -> None:
        if not directio.is_zero(memoryview(self._pread(len(zeros), offset))):
            self._put(offset, zeros)

    def load(self) -> None:
        """Read the head of the disk that the device holds."""
        # Another machine may have written to a shared device, while its pages were kept here.
        self.drop_cache()
        self.head[:] = self._pread(len(self.head), 0)
        self._device.expect(bytes(self.head[: claim.RECORD]))

    def require_unchanged(self) -> None:
        """Require the head that was loaded. Raises ``errors.TargetLost``.

        While this process was stopped, another machine may have imported to the device: bytes that were equal
        may have changed.
        """
        self.drop_cache()
        if self._pread(len(self.head), 0) != self.head:
            raise self._device.lose(_OVERWRITTEN)

    def withhold(self, end: int = HEAD) -> None:
        """Zero the head up to ``end`` on the device, and put the claim's record into its first sector.

        Raises ``errors.RequestError`` if the source has the record then, and puts back what was there.
        """
        head = bytearray(min(end, len(self.head)))
        self._device.expect(b"")
        if head:
            old = self._disable(len(head))
            head[: claim.RECORD] = self._device.record
            self._put(0, memoryview(head))
            self.fsync()
            # Once: when the target is abandoned, the source may be closed.
            sectors, self._sectors = self._sectors, list
            if self._device.record in sectors():
                # They are one disk under two names, of which sysfs does not know.
                self._put(0, memoryview(old))
                self.fsync()
                self._device.lose("it is the disk of the source")
                raise errors.RequestError(claim.SAME_DISK)
            self._device.expect(self._device.record)

    def _disable(self, end: int) -> bytes:
        """Zero the sector that makes the old disk usable, first: a power cut may tear the write of the head.

        Return the old head; empty if it cannot be read.
        """
        # What is read must be what a power cut leaves. The page cache may show that sector as zeroed by a run
        # that was killed, or whose sync failed; the first sector with data would then be another one.
        self.fsync()
        self.drop_cache()
        try:
            old = self._pread(end, 0)
        except OSError:
            self._disable_unreadable(end)
            return b""
        if claim.holder(old[: claim.RECORD]) is None:
            self._erase(_first_data(old, self._sector))
        return old

    def _disable_unreadable(self, end: int) -> None:
        """Zero unreadable pages, which may hold that sector, up to the first readable sector with data."""
        for start in range(0, end, directio.UNIT):
            page = slice(start, min(end, start + directio.UNIT))
            try:
                old = self._pread(page.stop - start, start)
            except OSError:  # a device that can be written, but not be read
                self._erase(page)
                continue
            first = _first_data(old, self._sector)
            if first.stop:
                self._erase(slice(start + first.start, start + first.stop))
                return

    def _erase(self, part: slice) -> None:
        if part.stop:
            self._put(part.start, memoryview(self._no_data(part)))
            self.fsync()

    def _no_data(self, part: slice) -> bytes:
        """Return what replaces a part of the head: zeros, and the record at the start of the device.

        Without the record, a delta would accept the rest as its disk.
        """
        return (b"" if part.start else self._device.record).ljust(part.stop - part.start, b"\0")

    def warn_of_sectors(self) -> None:
        """Warn if the disk has a partition table for other sectors than those of the device."""
        size = raw.partition_sector_size(bytes(self.head))
        # The smallest block of an NBD export is not the sector that a machine sees.
        if size not in {None, self._sector} and self.is_raw:
            log.warning(
                "%s has sectors of %d bytes, the partition table is for %d: the disk does not boot from it, "
                "except in a virtual machine that sees sectors of %d bytes",
                self.path,
                self._sector,
                size,
                size,
            )

    def store(self) -> None:
        """Write the head, which makes the disk usable. Raises ``errors.TargetLost`` if others write there."""
        self._device.expect(b"")
        # A power cut may tear the write of the head, but not that of a sector: the one that makes the disk
        # usable, such as a boot sector, is written when all others are on stable storage.
        last = _first_data(self.head, self._sector)
        data = bytes(self.head[last])
        if data:
            self.head[last] = self._no_data(last)
        self._put(0, memoryview(self.head))
        self.fsync()
        self._put(last.start, memoryview(data))
        self.fsync()
        self.head[last] = data
        first = self.head[: claim.RECORD]
        if self._device.first(len(first)) != first:
            raise self._device.lose(_OVERWRITTEN)


class BlockTarget(base.Target):
    """A block device, opened exclusively by its claim: a mounted device is refused.

    Until the head is stored, its first sector holds the claim's record. The device may contain any data.
    Bytes after the end of the disk are not changed, with one exception: for an image of unknown size the
    whole head is zeroed first, also if the image is shorter. A delta changes the head in place, too.
    """

    storage: BlockStorage
    #: Opens the storage.
    opens: ClassVar[type[BlockStorage]] = BlockStorage

    def __init__(self, held: claim.MarkedClaim, size: int | None, options: base.TargetOptions) -> None:
        device_size = held.size
        if size is not None and size > device_size:
            raise errors.TooLarge(virtual_size=size, available=device_size)
        head = min(HEAD, device_size, HEAD if size is None else units.whole_sectors(size))
        stored = self.opens(held, 0 if options.mode == "delta" else head, options)
        super().__init__(stored, size, options)
        # The kernel shortens a zeroing at the end of the device and reports success (block/fops.c).
        self._limit = device_size if size is None else size
        self.resumed = options.resume or options.mode != "new"
        self.withheld = len(stored.head)
        self._is_stored = False
        try:
            if self.has_begun:
                stored.withhold(JOURNAL_OFFSET if options.resume else HEAD)
            else:
                stored.load()
        except (OSError, errors.Error):
            self.close()
            raise

    def zero_rest(self, start: int) -> None:
        """Zero the device after the end of the disk: nothing says how large an earlier stage was."""
        self.storage.zero_rest(start)

    def extend(self, end: int, size: int) -> None:
        if self.has_begun or any(self.storage.nonzero(end, size)):
            self._limit = size
            self.zero(end, size - end)

    def settle(self, size: int = 0) -> None:
        # After the end of a short disk, the rest of the head is zeroed, as for a new one.
        end = max(units.whole_sectors(self._end), self.withheld)
        if not self.has_begun and any(self.storage.nonzero(self._end, end)):
            self._begin()

    def _disable(self) -> None:
        """Zero the head on the device; what it held is in memory, and all of it is stored at the end."""
        self.storage.require_unchanged()
        self.storage.withhold()

    def _check_claim(self) -> None:
        super()._check_claim()
        with self._lock:  # another thread may begin
            if not self.has_begun:
                # Another run may have written elsewhere, or the same first sector, such as zeros.
                self.storage.require_unchanged()

    def _ready(self, _size: int) -> None:
        self.storage.sync()
        self.storage.warn_of_sectors()

    def _finish(self) -> None:
        self._is_stored = True
        self.storage.store()

    def _abandon(self) -> None:
        if self.has_begun and (self._is_stored or not self._kept):
            self._check_claim()
            # Without a record, a delta would accept the zeros as a disk, and the next run as a foreign one.
            self.storage.withhold()


def _first_data(head: bytes | bytearray, sector: int) -> slice:
    """Return the first sector that is not zero; empty if all are."""
    for start in range(0, len(head), sector):
        part = slice(start, min(start + sector, len(head)))
        if not directio.is_zero(memoryview(head)[part]):
            return part
    return slice(0, 0)
