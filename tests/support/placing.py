"""Read a disk image in memory by each of our readers and return the disk."""

from __future__ import annotations

import array
import contextlib
import threading
from collections.abc import Callable

from cdi_worker import errors
from cdi_worker.formats import facts, vdi, vhdx, views
from cdi_worker.formats.mapped import image
from cdi_worker.formats.mapped import layout as mapped
from cdi_worker.formats.qcow2 import header as qcow2_header
from cdi_worker.formats.qcow2 import layout as qcow2
from cdi_worker.formats.vhd import check as vhd
from cdi_worker.formats.vmdk import check as vmdk
from cdi_worker.images.disks import base, following, tables
from cdi_worker.images.engine import cancelling, fetch
from cdi_worker.images.sinks import delivery
from cdi_worker.images.sinks.base import Sink
from cdi_worker.scratch import journal, space
from tests.support import disks

#: The variants of ``disks`` that the PLACE route can read.
VARIANTS = [
    name
    for name in disks.FORMATS
    if name.startswith(("qcow2", "vmdk", "vdi", "vhd")) and name not in {"vmdk-odd", "vhdx-log", "vhd-fixed"}
]

#: In bytes. A damaged header can state more than fits into memory, which says nothing about the readers.
LARGEST = 256 << 20
#: The checks by qemu-img's name of the format.
_CHECKS: dict[str, Callable[[views.View], facts.ImageFacts]] = {
    "vmdk": vmdk.check,
    "vdi": vdi.check,
    "vpc": vhd.check,
    "vhdx": vhdx.check,
}


class Dirty:
    """A disk in memory, filled with 0xFF; fails if a range is written twice, ``covered`` shows the others."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(b"\xff") * size
        self.covered = bytearray(size // 512)
        self._lock = threading.Lock()

    def write(self, offset: int, data: memoryview) -> None:
        """Write at ``offset``, as a target."""
        assert len(data)
        self._cover(offset, len(data))
        self.data[offset : offset + len(data)] = data

    def zero(self, offset: int, length: int) -> None:
        """Zero a range, as a target."""
        assert length
        self._cover(offset, length)
        self.data[offset : offset + length] = bytes(length)

    def _cover(self, offset: int, length: int) -> None:
        first, end = offset // 512, (offset + length) // 512
        assert offset % 512 == length % 512 == 0
        assert end <= len(self.covered), "behind the end of the disk"
        with self._lock:
            assert not any(self.covered[first:end]), "twice"
            self.covered[first:end] = b"\1" * (end - first)


class Bytes:
    """A file in memory with random access, as ``RandomReader``."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read_range(self, offset: int, into: memoryview, /) -> int:
        """Read at ``offset``; return the number of bytes read."""
        data = self._data[offset : offset + len(into)]
        into[: len(data)] = data
        return len(data)

    def interrupt(self) -> None:
        """Do nothing: reads never block."""


class Counts:
    """Bytes of a file that were not read."""

    def __init__(self) -> None:
        self.skipped = 0
        self.kept = 0

    def skip(self, count: int) -> None:
        """Count bytes that are not read."""
        self.skipped += count

    def keep(self, count: int) -> None:
        """Count bytes that were finished before."""
        self.kept += count


def fetcher(file: Bytes) -> fetch.Fetcher:
    """Return a fetcher of two connections for ``file``."""
    return fetch.Fetcher(file, file.size, fetch.FetchOptions(connections=2), scope=cancelling.Cancel())


def unjournalled() -> journal.Journal:
    """Return a journal that records nothing."""
    return journal.Journal(None, "", 0)


def view(data: bytes, *, ordered: bool = False, length: int = 64 << 10) -> views.View:
    """Return a file as the checks see it: ``ordered``, no more than its first ``length`` bytes."""
    head = data[:length]
    if ordered:
        return views.View(head)
    return views.View(head, lambda offset, length: data[offset : offset + length], len(data))


def layout(file_view: views.View, form: str) -> mapped.Layout:
    """Return how an image is laid out, without the second opinion of ``formats.safety``."""
    if form == "qcow2":
        return qcow2.Qcow2Layout(qcow2_header.parse(file_view.head))
    found = _CHECKS[form](file_view)
    if found.needs:
        raise errors.Truncated(format=form, reason=f"{found.needs} bytes are needed")
    if found.layout is None:
        raise errors.Unsupported(reason=found.unplaceable)
    return found.layout


def no_directory() -> array.array[int]:
    """Return the directory of an image with one level of tables."""
    return array.array("Q")


def size_of(data: bytes, form: str) -> int | None:
    """Return the size of the disk in bytes, None if the image is refused."""
    with contextlib.suppress(errors.ImageError):
        return follower(data, form).virtual_size
    return None


def image_of(data: bytes, form: str = "qcow2") -> image.MappedImage:
    """Return what reads the image in ``data`` at random."""
    file_view = view(data)
    return image.MappedImage(layout(file_view, form), file_view.at, len(data))


def follower(data: bytes, form: str = "qcow2") -> mapped.Follower:
    """Return what follows the image in ``data`` when it comes in order."""
    found = view(data, ordered=True)
    while form in _CHECKS and len(found.head) < len(data) and (needs := _CHECKS[form](found).needs):
        found = view(data, ordered=True, length=needs)
    return layout(found, form).follow()


def tables_of(data: bytes, source: fetch.Fetcher, form: str = "qcow2", *, direct: bool = False) -> base.Disk:
    """Return the disk of an image that ``source`` reads at random."""
    found = image_of(data, form)
    size = found.layout.virtual_size
    return tables.MappedDisk([lambda _: source], lambda _: found, size, direct=direct)


def deliver(
    disk: base.Disk, target: Sink, notes: journal.Journal | None = None, counts: Counts | None = None
) -> None:
    """Deliver what is missing of a disk to ``target``, through the sinks of an import."""
    noted = notes or unjournalled()
    noting = delivery.DeliverySink(target, journals=(noted,))
    counts = counts or Counts()
    meter = base.DeliveryMeter(skip=counts.skip, keep=counts.keep, moved=noting.moved)
    disk.deliver(noting, noted.missing_of, meter)


def read_disk(data: bytes, form: str = "qcow2") -> bytes:
    """Return the disk of an image that is read at random."""
    disk = tables_of(data, fetcher(Bytes(data)), form)
    target = Dirty(disk.size or 0)
    deliver(disk, target)
    assert all(target.covered), "left out"
    return bytes(target.data)


class Ordered:
    """A stream of ``data`` that returns reads of many different lengths."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def readinto(self, into: memoryview, /) -> int:
        """Read the next bytes; return how many."""
        count = min(len(into), len(self._data) - self._at, 1 + self._at * 7 % 300_000)
        into[:count] = self._data[self._at : self._at + count]
        self._at += count
        return count

    def close(self) -> None:
        """Do nothing."""


def following_of(
    data: bytes,
    scratch: space.Spill | None = None,
    form: str = "qcow2",
    scope: cancelling.Cancel | None = None,
) -> base.Disk:
    """Return the disk of an image that passes once."""
    return following.FollowingDisk(
        lambda _: contextlib.nullcontext(Ordered(data)),
        lambda: follower(data, form),
        follower(data, form).virtual_size,
        scope or cancelling.Cancel(),
        spill=scratch,
    )


def streamed(data: bytes, scratch: space.Spill | None = None, form: str = "qcow2") -> bytes:
    """Return the disk of an image that is read once, in order."""
    disk = following_of(data, scratch, form)
    target = Dirty(disk.size or 0)
    deliver(disk, target)
    assert all(target.covered), "left out"
    return bytes(target.data)


def read_vmdk(data: bytes) -> bytes:
    """Return the disk of a VMDK image, and check that both readers return the same."""
    disk = read_disk(data, "vmdk")
    assert streamed(data, form="vmdk") == disk
    return disk


def passed(data: bytes, chunk: int, recent: int, form: str = "qcow2") -> bytes:
    """Return the disk of an image, read in chunks.

    Only the ``recent`` last chunks and what the reader asked to keep can be read again.
    """
    following = follower(data, form)
    disk = bytearray(b"\xff") * following.virtual_size
    kept = bytearray(len(data))
    start = -chunk

    def read(offset: int, length: int) -> bytes:
        old = max(0, start - recent * chunk - offset)
        assert all(kept[offset : offset + min(old, length)]), "neither recent nor kept"
        return data[offset : offset + length]

    while start + chunk <= len(data):
        start += chunk
        end = min(start + chunk, len(data))
        arrival = following.arrive(start, end, read, last=start + chunk > len(data))
        for offset, length in arrival.holes:
            disk[offset : offset + length] = bytes(length)
        for piece in (piece for batch in arrival.ready for piece in batch.pieces):
            body = read(piece.host, min(piece.length, len(data) - piece.host))
            disk[piece.guest : piece.guest + piece.size] = (
                following.inflate(body, piece)[: piece.size] if piece.compressed else body
            )
            if piece.compressed:
                # Another cluster may begin in its last sector, and end in the next one, in which a third one
                # begins. If its table comes much later, an import has to ask for scratch: less than a sector
                # between two known clusters is not kept.
                after = piece.host + piece.length
                kept[after - 512 : after + 512] = b"\1" * 1024
                if piece.host % chunk < 512:
                    # So it has for one that ends in this sector: the chunk before shows no end to keep.
                    first = piece.host // 512 * 512
                    kept[first : first + 512] = b"\1" * 512
        for first, after in arrival.keep:
            assert start <= first < after <= end
            kept[first:after] = b"\1" * (after - first)
    return bytes(disk)


def attempts(data: bytes, form: str) -> set[bytes]:
    """Return the disks read by both readers, without those refused by a clean error, or too large for it."""
    found: set[bytes] = set()
    if (size_of(data, form) or 0) > LARGEST:
        return found
    for way in (read_disk, streamed):
        with contextlib.suppress(errors.ImageError, errors.ScratchRequired):
            found.add(way(data, form=form))
    return found
