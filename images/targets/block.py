"""Write a disk to a block device, the first MiB last, and its first sector with data after the others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

from cdi_worker import errors
from cdi_worker.images import directio, kernel
from cdi_worker.images.targets import base, claim, zeroing

#: Bytes at the start that hold boot sectors, partition tables, volume labels and superblocks.
HEAD: Final = 1 << 20
#: Offset in the head where the journal is stored during a transfer, up to 64 KiB before the end of the head.
JOURNAL_OFFSET: Final = 256 << 10


class BlockTarget(base.Target):
    """A block device, opened exclusively by its claim: a mounted device is refused.

    Until the head is written, its first sector holds the claim's record. The device may contain any data.
    Bytes after the end of the image are not changed, with one exception: for an image of unknown size the
    whole head is zeroed first, also if the image is shorter. An update writes the head in place, too.
    """

    def __init__(self, held: claim.Device, size: int | None, options: base.Options) -> None:
        self._device = held
        with contextlib.ExitStack() as undo:
            fd = os.dup(held.fd)
            undo.callback(os.close, fd)
            device_size = os.lseek(fd, 0, os.SEEK_END)
            if size is not None and size > device_size:
                raise errors.TooLarge(virtual_size=size, available=device_size)
            self._sector = kernel.sector_size(fd)
            super().__init__(held, fd, size, options)
            undo.pop_all()
        # The kernel shortens a zeroing at the end of the device and reports success (block/fops.c).
        self._limit = device_size if size is None else size
        self.resumed = options.mode != "new"
        rungs = zeroing.WRITTEN if options.preallocate else zeroing.SPARSE
        self._ladder = zeroing.Ladder(fd, rungs, self._sector, self._put)
        self._head = bytearray(0 if options.mode == "delta" else _head_size(size, device_size))
        self._head_written = False
        self.withheld = len(self._head)
        try:
            if not self.has_begun:
                # Another machine may have written to a shared device, while its pages were kept here.
                self.drop_cache()
                self._head[:] = os.pread(fd, len(self._head), 0)
                return
            self._mark(JOURNAL_OFFSET if options.mode == "resume" else HEAD)
        except OSError:
            self.close()
            raise

    def write(self, offset: int, data: memoryview) -> None:
        inside = self._inside(offset, len(data))
        self._set_head(offset, data[:inside])
        super().write(offset + inside, data[inside:])

    def zero(self, offset: int, length: int) -> None:
        inside = self._inside(offset, length)
        self._set_head(offset, memoryview(bytes(inside)))
        super().zero(offset + inside, length - inside)

    def zero_rest(self, start: int) -> None:
        """Zero the device after the end of the disk: nothing says how large an earlier stage was.

        Storage that cannot zero without a transfer is read, and only what is not zero is written.
        """
        rungs = () if self._options.preallocate else (kernel.punch_hole,)
        ladder = zeroing.Ladder(self._fd, rungs, self._sector, self._put_zeros)
        with self._storage("zero"):
            first = max(start, self.withheld)
            for part in self._steps(first, os.lseek(self._fd, 0, os.SEEK_END)):
                ladder.zero(*part)

    def _put_zeros(self, offset: int, zeros: memoryview) -> None:
        if not directio.is_zero(memoryview(os.pread(self._fd, len(zeros), offset))):
            self._put(offset, zeros)

    def _set_head(self, offset: int, data: memoryview) -> None:
        if data:
            with self._storage("write"):
                self._begin_once()
        self._head[offset : offset + len(data)] = data

    def allocated(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        inside = min(end, len(self._head))
        if start < inside:
            # It is in memory, whatever the device holds there meanwhile.
            yield start, inside
        yield from super().allocated(max(start, inside), end)

    def _read(self, offset: int, length: int) -> bytes:
        inside = self._inside(offset, length)
        head = bytes(self._head[offset : offset + inside])
        return head + super()._read(offset + inside, length - inside) if inside < length else head

    def _end_at(self, _size: int) -> None:
        if self._options.mode == "refresh":
            # Behind the end of a short disk, the rest of the head is zeroed, as for a new one.
            end = max(self._end + -self._end % base.SECTOR, len(self._head))
            if not self._is_zero(self._end, end):
                self._begin_once()
                self._head[self._end :] = bytes(max(0, len(self._head) - self._end))

    def _begin(self) -> None:
        """Zero the head on the device; what it held is in memory, and all of it is written at the end."""
        self._mark(HEAD)

    def _clear(self, start: int, end: int) -> None:
        super()._clear(max(start, self.withheld), end)

    def _inside(self, offset: int, length: int) -> int:
        return max(0, min(length, len(self._head) - offset))

    def _mark(self, end: int) -> None:
        """Zero the head, and put the claim's record into its first sector."""
        head = bytearray(min(end, len(self._head)))
        if head:
            self._device.unmark()
            self._disable(len(head))
            head[: claim.RECORD] = self._device.record
            self._put(0, memoryview(head))
            os.fsync(self._fd)
            self._device.mark()

    def _disable(self, end: int) -> None:
        """Zero the sector that makes an old disk usable: a power cut may tear the write of all others."""
        # What is read must be what a power cut leaves. The page cache may show that sector as zeroed by a run
        # that was killed, or whose sync failed; the first sector with data would then be another one.
        os.fsync(self._fd)
        self.drop_cache()
        try:
            old = os.pread(self._fd, end, 0)
        except OSError:
            self._disable_unreadable(end)
            return
        if claim.holder(old[: claim.RECORD]) is None:
            self._erase(_first_data(old, self._sector))

    def _disable_unreadable(self, end: int) -> None:
        """Zero page by page what cannot be read, which may be that sector, up to the first one with data."""
        for start in range(0, end, directio.UNIT):
            page = slice(start, min(end, start + directio.UNIT))
            try:
                old = os.pread(self._fd, page.stop - start, start)
            except OSError:  # a device that can be written, but not be read
                self._erase(page)
                continue
            first = _first_data(old, self._sector)
            if first.stop:
                self._erase(slice(start + first.start, start + first.stop))
                return

    def _erase(self, part: slice) -> None:
        if part.stop:
            self._put(part.start, directio.zeros()[: part.stop - part.start])
            os.fsync(self._fd)

    def _ready(self, _size: int) -> None:
        os.fsync(self._fd)

    def _finish(self) -> None:
        if not self.has_begun:
            self._release()
            return
        self._device.unmark()
        self._head_written = True
        # A power cut may tear the write of the head, but not that of a sector: the one that makes the disk
        # usable, such as a boot sector, is written when all others are on stable storage.
        last = _first_data(self._head, self._sector)
        data = bytes(self._head[last])
        self._head[last] = bytes(len(data))
        self._put(0, memoryview(self._head))
        os.fsync(self._fd)
        self._put(last.start, memoryview(data))
        os.fsync(self._fd)
        self._head[last] = data
        first = self._head[: claim.RECORD]
        if claim.read_past_cache(self._fd, len(first)) != first:
            raise self._claim.lose("another run has written to its beginning")
        self._release()

    def _abandon(self) -> None:
        if self._options.mode == "refresh" and not self._head_written:
            return  # if it has begun, the record shows that the disk is incomplete
        if self._head_written or not self._kept:
            self._check_claim()
            # Without a record, a delta would take the zeros for a disk, and the next run for somebody's.
            self._mark(HEAD)


def _first_data(head: bytes | bytearray, sector: int) -> slice:
    """Return the first sector that is not zero; empty if all are."""
    for start in range(0, len(head), sector):
        found = slice(start, min(start + sector, len(head)))
        if not directio.is_zero(memoryview(head)[found]):
            return found
    return slice(0, 0)


def _head_size(size: int | None, device_size: int) -> int:
    if size is None:
        size = HEAD
    return min(HEAD, device_size, -(-size // base.SECTOR) * base.SECTOR)
