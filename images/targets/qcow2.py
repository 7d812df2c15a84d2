"""Write a disk to a new qcow2 file, through QEMU's NBD server on it."""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import struct
import threading
from concurrent import futures
from typing import TYPE_CHECKING, Final

from cdi_worker import errors, units
from cdi_worker.formats import detect, facts, safety, views
from cdi_worker.images import directio
from cdi_worker.images.targets import base, claim, file, storage
from cdi_worker.images.tools import qemu_img, qemu_nbd
from cdi_worker.scratch import ranges

if TYPE_CHECKING:
    from cdi_worker.images.targets import remote

#: Bytes of a disk whose size is not known before its end, when the file is shrunk, and the most entries of
#: its first table (8 MiB).
_UNKNOWN: Final = 8 << 40
_ENTRIES: Final = 1 << 20
#: Offset of the disk's size in the header (docs/interop/qcow2.txt).
_SIZE_FIELD: Final = 24
#: Offset of the offset and length of the backing file's name.
_BACKING_FIELDS: Final = 8
#: Bytes of clusters that wait for their other parts.
_MOST_PARTS: Final = 64 << 20
#: Threads that write what is compressed, each with twice a piece of some MiB.
_PARALLEL: Final = 4


class Qcow2Storage(storage.Remote):
    """The guest's bytes of a qcow2 file, behind a server. ``fd``: the file itself."""

    clusters: _Clusters | None = None

    def zero(self, start: int, end: int) -> None:
        if self.clusters is None:
            super().zero(start, end)
            return
        with self.guarded("zero"):
            self.clusters.zero(start, end)

    def sync(self) -> None:
        if self.clusters is not None:
            with self.guarded("write"):
                self.clusters.finish()
        super().sync()

    def clear(self, _fd: int, offset: int, length: int) -> None:
        """Zero a range; see ``zeroing.Rung``."""
        self.device.zero(offset, length, allocate=False)

    def _put(self, offset: int, data: memoryview) -> None:
        (self.clusters or self.device).write(offset, data)


class Qcow2Target(file.FileTarget):
    """A qcow2 file, ``NAME.part`` until it is complete and qemu-img has found no error in it."""

    storage: Qcow2Storage
    opens = Qcow2Storage

    def __init__(self, held: claim.Claim, size: int | None, options: base.Options) -> None:
        assert options.form is not None  # noqa: S101  (see ``targets.open``)
        self._form = options.form
        self._connect = held.connect
        self._served = contextlib.ExitStack()
        #: Whether what is written is compared with what is there, a backing file.
        self.is_overlay = bool(self._form.backing)
        self._backing = _state(self._form.backing)
        if size is None and self._form.is_preallocated:
            reason = "the size of the disk is known only at its end, so a qcow2 file cannot be preallocated"
            raise errors.Unsupported(reason=reason)
        limit = min(_UNKNOWN, _ENTRIES * self._form.cluster_size**2 // 8)
        # QEMU's filter for compression writes whole clusters only; the size is corrected at the end.
        unit = self._form.cluster_size if self._form.compress else units.SECTOR
        self._created = limit if size is None else -(-size // unit) * unit
        super().__init__(held, size, options)

    def _prepare(self) -> None:
        fd = self.storage.fd
        if self.resumed and not self._is_ours():
            self.resumed, self.is_fresh = False, True
        if not self.resumed:
            backing = (self._form.backing, _backing_format(self._form.backing)) if self.is_overlay else None
            qemu_img.create(self.path, fd, self._form.options, self._created, backing)
            if not self._form.compress:
                _empty(file.journal(self.path))
        self.owned.enter_context(self._served)
        # Compressed clusters begin anywhere: without the page cache, QEMU reads and writes their ends again.
        is_direct = not self._form.compress and _is_direct(fd)
        node = qemu_img.writing(fd, direct=is_direct, compress=self._form.compress)
        serving = qemu_nbd.serving(node, writable=True, pass_fds=(fd,), cancel=self._options.cancel)
        url = self._served.enter_context(serving)
        assert self._connect is not None  # noqa: S101  (given with the format)
        self.storage.device = self._served.enter_context(
            contextlib.closing(self._connect(url, name=f"{self.path} (qemu-nbd)"))
        )
        if self._form.compress:
            clusters = _Clusters(self.storage.device, self._form.cluster_size, has_old=self.is_overlay)
            self.storage.clusters = self._served.enter_context(contextlib.closing(clusters))
        elif self.resumed or self.is_overlay:
            self.storage.zero_by((self.storage.clear,), units.SECTOR)

    def _is_ours(self) -> bool:
        """Return whether the left-over is a qcow2 file as this run creates it, and without an error."""
        fd = self.storage.fd
        try:
            found = _checked(fd, self._form.backing)
            qemu_img.repair(self.path, fd)
        except (errors.ImageError, errors.ToolFailed, errors.TargetError):
            return False
        return found.virtual_size == self._created

    def _ready(self, size: int) -> None:
        fd = self.storage.fd
        self.storage.sync()
        # Ends the server, which closes the file.
        self._served.close()
        if _state(self._form.backing) != self._backing:
            # What was equal in both is not in the overlay.
            raise storage.changed(self._form.backing)
        if size < self._created:
            # Nothing was written behind it; to shrink it, qemu-img would make a table for each 512 MiB.
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


class _Clusters:
    """Collects the parts of clusters: QEMU writes a compressed cluster whole, and once. Thread-safe.

    ``has_old``: the file shows other bytes than zeros where nothing is written, those of a backing file.
    """

    def __init__(self, device: remote.Device, size: int, *, has_old: bool) -> None:
        self._device = device
        self._size = size
        self._has_old = has_old
        self._parts: dict[int, tuple[bytearray, ranges.Ranges]] = {}
        self._lock = threading.Lock()
        self._executor = futures.ThreadPoolExecutor(_PARALLEL, "qcow2")
        self._writes: collections.deque[futures.Future[None]] = collections.deque()

    def write(self, offset: int, data: memoryview, /) -> None:
        first, last = self._whole(offset, offset + len(data))
        self._add(offset, first, data[: first - offset])
        if last > first:
            self._send(first, data[first - offset : last - offset])
        self._add(last, offset + len(data), data[last - offset :])

    def zero(self, start: int, end: int) -> None:
        first, last = self._whole(start, end)
        self._add(start, first, None)
        if last > first and self._has_old:
            self._device.zero(first, last - first, allocate=False)
        self._add(last, end, None)

    def finish(self) -> None:
        """Write the clusters of which only parts have come, the others as the file shows them."""
        with self._lock:
            parts, self._parts = self._parts, {}
        for start, (data, done) in sorted(parts.items()):
            end = min(start + self._size, self._device.size)
            for low, high in done.missing(start, end):
                data[low - start : high - start] = self._device.read(low, high - low)
            self._store(start, memoryview(data)[: end - start])
        while self._writes:
            self._writes.popleft().result()

    def close(self) -> None:
        """End the threads, which may still write."""
        self._executor.shutdown(cancel_futures=True)

    def _send(self, offset: int, data: memoryview) -> None:
        """Write ``data`` soon: compressing takes longer than everything else. Raises an earlier failure."""
        with self._lock:
            self._writes.append(self._executor.submit(self._device.write, offset, memoryview(bytes(data))))
            oldest = self._writes.popleft() if len(self._writes) > 2 * _PARALLEL else None
        if oldest is not None:
            oldest.result()

    def _whole(self, start: int, end: int) -> tuple[int, int]:
        first = min(end, -(-start // self._size) * self._size)
        return first, max(first, end // self._size * self._size)

    def _add(self, start: int, end: int, data: memoryview | None) -> None:
        """Add a part of one cluster; write the cluster if it is complete."""
        if start >= end:
            return
        at = start // self._size * self._size
        with self._lock:
            cluster, done = self._parts.setdefault(at, (bytearray(self._size), ranges.Ranges()))
            if data is not None:
                cluster[start - at : end - at] = data
            done.add(start, end)
            if not done.is_all(at, min(at + self._size, self._device.size)):
                if len(self._parts) * self._size > _MOST_PARTS:
                    reason = "too many of its clusters come in parts to compress them; leave out --compress"
                    raise errors.Unsupported(reason=reason)
                return
            del self._parts[at]
        self._store(at, memoryview(cluster)[: min(self._size, self._device.size - at)])

    def _store(self, start: int, data: memoryview) -> None:
        if not directio.is_zero(data):
            self._send(start, data)
        elif self._has_old:
            self._device.zero(start, len(data), allocate=False)


def check(path: str, backing: str) -> None:
    """Check that a finished qcow2 file is safe to open. ``backing``: its backing file; empty: it has none."""
    try:
        with open(path, "rb", buffering=0) as stream:
            _checked(stream.fileno(), backing)
    except OSError as err:
        raise errors.target_error(path, err, "open") from err
    except errors.Refused as err:
        if backing or err.fields["rule"] != "backing_file":
            raise
        reason = f"{path} is an overlay; name its backing file with --backing"
        raise errors.Refused(format="qcow2", rule="backing_file", reason=reason) from err
    if backing:
        _backing_format(backing)


def _read(fd: int) -> views.Read:
    return lambda offset, length: os.pread(fd, length, offset)


def _checked(fd: int, backing: str) -> facts.Facts:
    """Check a qcow2 file that must have the backing file ``backing``, by its whole path; empty: none."""
    read, size = _read(fd), os.lseek(fd, 0, os.SEEK_END)
    # The check looks at the name without its directory.
    allowed = pathlib.Path(backing).name or None
    found = safety.check("qcow2", read(0, detect.HEAD), read=read, size=size, allow_backing=allowed)
    offset, length = struct.unpack(">QI", read(_BACKING_FIELDS, 12))
    stored = os.fsdecode(read(offset, length)) if offset else ""
    if stored != backing:
        reason = f"the backing file is {stored!r}, expected {backing!r}"
        raise errors.Refused(format="qcow2", rule="backing_file", reason=reason)
    return found


def _backing_format(path: str) -> str:
    """Return the format of a backing file, which must be safe and have none itself."""
    with errors.on_target(path, "open the backing file"), open(path, "rb", buffering=0) as stream:
        fd = stream.fileno()
        read, size = _read(fd), os.lseek(fd, 0, os.SEEK_END)
        head = read(0, detect.HEAD)
        form = detect.detect(head)
        form = "raw" if form == "iso" else form
        if form not in {"raw", "qcow2"}:
            raise errors.RequestError(f"{path}: a backing file is raw or qcow2, this is {form}")
        safety.check(form, head, read=read, size=size)
    return form


def _state(path: str) -> tuple[int, ...]:
    """Return what changes when a backing file is written or replaced; empty: there is none."""
    if not path:
        return ()
    with errors.on_target(path, "open the backing file"):
        found = pathlib.Path(path).stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _is_direct(fd: int) -> bool:
    try:
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _empty(path: str) -> None:
    file.remove(path)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
