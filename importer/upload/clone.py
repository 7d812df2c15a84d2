"""The receiving end of a clone: a device's bytes or a tar of a file system, as either source sends them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import threading
from collections.abc import Callable, Iterator

from cdi_worker import errors, plan, progress, request, survey
from cdi_worker.formats import checksum, readers
from cdi_worker.formats import clone as extents
from cdi_worker.formats.compressed import snappy
from cdi_worker.formats.tar import archive
from cdi_worker.images import directio, target
from cdi_worker.images.engine import ahead, retry
from cdi_worker.images.folder import staging, unpack
from cdi_worker.images.target import copy
from cdi_worker.upload import headers

log = logging.getLogger(__name__)

#: How the disk is told in the tar of a file system.
DISK = "disk.img"


@dataclasses.dataclass(frozen=True, slots=True)
class Clone:
    """One clone under way."""

    wanted: request.Request
    room: plan.Space
    progress: progress.Progress
    cancel: retry.Cancel
    give_up: Callable[[], None]

    @property
    def options(self) -> target.Options:
        return target.Options(
            preallocate=self.wanted.preallocation, direct=self.wanted.direct, cancel=self.cancel
        )

    def commit(self, out: target.Target) -> None:
        """Make the disk usable: all of it has come."""
        self.progress.phase("sync", None)
        grow_to = 0 if self.room.block else min(self.wanted.image_size or 0, self.room.usable)
        out.commit(grow_to)


def receive(
    wanted: request.Request,
    kind: str,
    body: readers.Reader,
    shown: progress.Progress,
    cancel: retry.Cancel,
    *,
    give_up: Callable[[], None],
    ours: bool,
) -> None:
    """Bring a clone of a content type of ``upload_headers.CLONES`` to the target. Raises ``errors.Error``.

    ``ours``: it comes as our own source sends it, not in snappy's frames. ``give_up``, called from another
    thread, ends the read of ``body`` that is under way.
    """
    clone = _begin(wanted, kind, shown, cancel, give_up)
    if wanted.checksum is not None:
        body = checksum.VerifyingReader(body, checksum.parse(wanted.checksum))
    if kind == headers.FILESYSTEM:
        with contextlib.closing(ahead.Reader(body, cancel, give_up)) as received:
            _archive(clone, extents.Reader(received) if ours else snappy.Reader(received))
    elif ours:
        _extents(clone, extents.Decoder(body, ahead.buffers(extents.LONGEST)))
    else:
        _device(clone, snappy.Reader(body))
    shown.done()


def _begin(
    wanted: request.Request,
    kind: str,
    shown: progress.Progress,
    cancel: retry.Cancel,
    give_up: Callable[[], None],
) -> Clone:
    if kind == headers.FILESYSTEM and wanted.volume:
        staging.empty(wanted.volume)
    elif not pathlib.Path(wanted.target).is_block_device():
        staging.remove_left_over(pathlib.Path(wanted.target).parent)
    shown.phase("transfer", None)
    return Clone(wanted, survey.room(wanted), shown, cancel, give_up)


def _extents(clone: Clone, decoder: extents.Decoder) -> None:
    limit, at = clone.room.available, 0
    over = threading.Event()
    with (
        target.open(clone.wanted.target, None, clone.options) as out,
        ahead.Ahead(iter(decoder), over, clone.give_up) as runs,
    ):
        for run in runs:
            if clone.cancel.is_set():
                raise errors.Cancelled
            length = run if isinstance(run, int) else len(run)
            if at + length > limit:
                raise errors.TooLarge(virtual_size=at + length, available=limit)
            if isinstance(run, int):
                out.zero(at, length)
            else:
                copy.place(out, at, run)
            clone.progress.advance(length)
            at += length
        clone.commit(out)


def _archive(clone: Clone, reader: readers.Reader) -> None:
    if clone.room.block:
        _disk_of(clone, reader)
    else:
        _folder(clone, reader, pathlib.Path(clone.wanted.target).parent)


def _device(clone: Clone, reader: readers.Reader) -> None:
    with target.open(clone.wanted.target, None, clone.options) as out:
        copy.copy_ordered(
            reader,
            out,
            limit=clone.room.available,
            cancel=clone.cancel,
            advance=clone.progress.advance,
            give_up=clone.give_up,
        )
        clone.commit(out)


def _folder(clone: Clone, reader: readers.Reader, folder: pathlib.Path) -> None:
    with staging.Staging(folder) as staged:
        entries = archive.Archive(reader, limit_bytes=clone.room.available)
        unpack.unpack(entries, staged.path, advance=clone.progress.advance)
        copy.drain(reader, clone.cancel)
        clone.progress.phase("sync", None)
        staged.commit()


def _disk_of(clone: Clone, reader: readers.Reader) -> None:
    """Put the disk of a file system onto a block device."""
    entries = archive.Archive(reader, limit_bytes=clone.room.available)
    with contextlib.ExitStack() as stack:
        out: target.Target | None = None
        for entry in entries:
            if out is None and entry.kind == "file" and DISK in "/".join(entry.path):
                log.info("disk entry=%r size=%d", "/".join(entry.path), entry.size)
                size = survey.padded(entry.size)
                out = stack.enter_context(target.open(clone.wanted.target, size, clone.options))
                _place(clone, entries, entry, out)
        if out is None:
            raise errors.Unsupported(reason=f"the file system that was sent holds no file named {DISK}")
        copy.drain(reader, clone.cancel)
        clone.commit(out)


def _parts(entry: archive.Entry) -> Iterator[tuple[int, int, bool]]:
    """Yield offset, length and whether it is data, of the whole file in order."""
    at = 0
    for offset, length in entry.runs():
        if offset > at:
            yield at, offset - at, False
        yield offset, length, True
        at = offset + length
    if entry.size > at:
        yield at, entry.size - at, False


def _place(clone: Clone, entries: archive.Archive, entry: archive.Entry, out: target.Target) -> None:
    """Write the current entry, a hole as zeros."""
    buffer = directio.Buffer(ahead.CHUNK)
    for offset, length, is_data in _parts(entry):
        if not is_data:
            out.zero(offset, length)
            continue
        at, end = offset, offset + length
        while at < end:
            if clone.cancel.is_set():
                raise errors.Cancelled
            count = _fill(entries, buffer.view[: end - at])
            copy.place(out, at, buffer.view[:count])
            clone.progress.advance(count)
            at += count


def _fill(entries: archive.Archive, into: memoryview) -> int:
    filled = 0
    while filled < len(into):
        filled += entries.readinto(into[filled:])
    return filled
