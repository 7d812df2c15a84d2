"""Write a disk to a new qcow2 file.

qemu-img creates the empty file, and checks the complete one. Clusters and tables are written here: writes
through QEMU's NBD server took twice as long. Specification: docs/interop/qcow2.rst of QEMU.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
from collections.abc import Iterator
from typing import Final

from cdi_worker import errors, units
from cdi_worker.formats import detect, facts, safety, views
from cdi_worker.formats.qcow2 import header, tables
from cdi_worker.images.targets import base, claim, file, storage, zeroing
from cdi_worker.images.tools import qemu_img

#: Bytes of a disk whose size is not known before its end, when the file is shrunk, and the most entries of
#: its first table (8 MiB).
_UNKNOWN: Final = 8 << 40
_ENTRIES: Final = 1 << 20
#: Offsets in the header: of the disk's size, and of the refcount table's offset and length.
_SIZE_FIELD: Final = 24
_REFCOUNT_FIELDS: Final = 48
#: The flag of an entry whose cluster has exactly one reference, as all have here.
_COPIED: Final = 1 << 63
#: Bytes by which the file grows: a write beyond its end would lock it for other writes.
_GROWTH: Final = 64 << 20


class Qcow2Storage(storage.Storage):
    """The guest's bytes of a qcow2 file. New clusters are appended to the file, in the order of the writes.

    The tables are read from the file each time: for 1 TiB of data they have 128 MiB.
    """

    is_raw = False

    def load(self, size: int, cluster_size: int) -> None:
        """Read the header and the tables of a file as this program creates it, which may be incomplete.

        Raises ``errors.ImageError`` for any other file.
        """
        self._allocating = threading.Lock()
        found = self._header = header.parse(os.pread(self.fd, header.HEAD_SIZE, 0))
        sizes = found.version, found.virtual_size, found.cluster_size
        if (*sizes, found.snapshots, found.extended_l2) != (3, size, cluster_size, 0, False):
            raise errors.Corrupt(format="qcow2", reason="another program or another run has written the file")
        # An empty disk has no table.
        last = max(0, found.l1_offset + found.l1_needed * 8 - 1)
        for table in self._offsets(found.l1_offset, found.l1_needed):
            last = max(last, table, *self._offsets(table, found.table_entries))
        #: Where the next cluster is appended, and the length of the file.
        self._end = self._length = (last // cluster_size + 1) * cluster_size
        # After a power cut, clusters without an entry may follow, and a table may lack; new ones must read as
        # zeros, also after another power cut.
        os.ftruncate(self.fd, self._end)
        os.fsync(self.fd)

    def write(self, offset: int, data: memoryview) -> None:
        for start, end, at in self._parts(offset, offset + len(data), allocate=True):
            super().write(at, data[start - offset : end - offset])

    def zero(self, start: int, end: int) -> None:
        # Without a ladder there are no old bytes.
        for first, after, at in self._parts(start, end) if self._ladder is not None else ():
            super().zero(at, at + after - first)

    def view(self, offset: int, length: int) -> bytes:
        into = bytearray(max(0, min(length, self._header.virtual_size - offset)))
        for start, end, at in self._parts(offset, offset + len(into)):
            stored = super().view(at, end - start)
            into[start - offset : start - offset + len(stored)] = stored
        return bytes(into)

    def allocated(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        for first, after, at in self._parts(start, end):
            for low, high in super().allocated(at, at + after - first):
                yield first + low - at, first + high - at

    def write_refcounts(self) -> None:
        """Write one reference for each cluster; ``qemu-img check`` frees those that have none."""
        size = self._header.cluster_size
        each = size // 2  # references of 16 bits in a block of one cluster
        # Enough to count also themselves and the clusters of their table.
        blocks = self._end // size // (each - 2) + 1
        clusters = -(-blocks * 8 // size)
        count = self._end // size + blocks + clusters
        for block in range(blocks):
            ones = memoryview(b"\0\1" * min(each, count - block * each))
            self._write_cached(self._end + block * size, ones)
        table = self._end + blocks * size
        offsets = range(self._end, table, size)
        self._write_cached(table, memoryview(struct.pack(f">{blocks}Q", *offsets)))
        os.ftruncate(self.fd, table + clusters * size)
        self._write_cached(_REFCOUNT_FIELDS, memoryview(struct.pack(">QI", table, clusters)))

    def _parts(self, start: int, end: int, *, allocate: bool = False) -> Iterator[tuple[int, int, int]]:
        """Yield (start, end, offset in the file) of the parts of a range that have clusters."""
        size, reach = self._header.cluster_size, self._header.reach
        while start < end:
            # The part that one table maps, from the start of a cluster.
            stop = min(end, start // reach * reach + reach)
            guest = start // size * size
            number, count = guest % reach // size, -(-(stop - guest) // size)
            with self.guard("write" if allocate else "read back"), self._allocating:
                entries = self._entries(start // reach, number, count, allocate=allocate)
            for piece in tables.decode(self._header, entries, guest):
                first, after = max(start, piece.guest), min(stop, piece.guest + piece.size)
                yield first, after, piece.host + first - piece.guest
            start = stop

    def _entries(self, table: int, number: int, count: int, *, allocate: bool) -> bytes:
        """Return ``count`` entries of a table from ``number`` on; empty if it does not exist."""
        place = self._header.l1_offset + 8 * table
        (entry,) = struct.unpack(">Q", os.pread(self.fd, 8, place))
        if not entry:
            if not allocate:
                return b""
            entry = self._append()
            self._write_cached(place, memoryview(struct.pack(">Q", entry)))
        at = entry - _COPIED + 8 * number
        data = os.pread(self.fd, 8 * count, at)
        if allocate:
            entries = views.entries(data, tables.ENTRY)
            if 0 in entries:
                data = struct.pack(f">{count}Q", *(each or self._append() for each in entries))
                self._write_cached(at, memoryview(data))
        return data

    def _append(self) -> int:
        """Return the entry of a new cluster."""
        entry = self._end + _COPIED
        self._end += self._header.cluster_size
        if self._end > self._length:
            self._length = self._end + _GROWTH
            os.ftruncate(self.fd, self._length)
        return entry

    def _offsets(self, at: int, count: int) -> list[int]:
        """Return the offsets in a table."""
        # After a power cut, the file may end before one of its tables.
        data = os.pread(self.fd, 8 * count, at).ljust(8 * count, b"\0")
        found = [entry - _COPIED for entry in views.entries(data, tables.ENTRY) if entry]
        if any(offset % self._header.cluster_size or not 0 < offset < 1 << 56 for offset in found):
            raise errors.Corrupt(format="qcow2", reason=f"the table at byte {at} is not of this program")
        return found


class Qcow2Target(file.FileTarget):
    """A qcow2 file, ``NAME.part`` until it is complete and qemu-img has found no error in it.

    ``storage``: the guest's bytes; its ``fd`` is the file itself.
    """

    storage: Qcow2Storage
    opens = Qcow2Storage

    def __init__(self, held: claim.Claim, size: int | None, options: base.TargetOptions) -> None:
        assert options.form is not None  # noqa: S101  (see ``targets.open``)
        self._form = options.form
        if size is None and self._form.preallocation != "off":
            reason = "the size of the disk is known only at its end, so a qcow2 file cannot be preallocated"
            raise errors.Unsupported(reason=reason)
        limit = min(_UNKNOWN, _ENTRIES * self._form.cluster_size**2 // 8)
        self._created = limit if size is None else units.whole_sectors(size)
        super().__init__(held, size, options)
        self._limit = self._created if size is None else size

    def _prepare(self) -> None:
        fd = self.storage.fd
        if self.resumed:
            try:
                self.storage.load(self._created, self._form.cluster_size)
            except errors.ImageError:
                self.resumed = False
            else:
                kept = zeroing.ALLOCATED if self._form.preallocation in {"falloc", "full"} else zeroing.SPARSE
                self.storage.zero_by(kept, units.SECTOR)
                return
        qemu_img.create(self.path, fd, self._form.options, self._created)
        self.storage.load(self._created, self._form.cluster_size)
        journal = file.journal(self.path)
        file.remove(journal)
        os.close(os.open(journal, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def _ready(self, size: int) -> None:
        fd = self.storage.fd
        self.storage.sync()
        self.storage.write_refcounts()
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
        super()._abandon()
        if not self._kept:
            file.remove(file.journal(self.path))


def check(path: str) -> None:
    """Check that a finished qcow2 file is safe to open. Reads then return what is on storage."""
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
            fd = stream.fileno()
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            safety.check(
                "qcow2",
                os.pread(fd, detect.HEAD, 0),
                read=lambda offset, length: os.pread(fd, length, offset),
                size=os.lseek(fd, 0, os.SEEK_END),
            )
    except errors.Refused as err:
        if err.fields["rule"] != "backing_file":
            raise
        raise facts.refuse(
            "qcow2", "backing_file", f"{path} is an overlay", ("flatten it", "flatten")
        ) from err
