"""The routes: each brings one disk the way that the plan says."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator

from formats import (
    archive,
    checksum,
    detect,
    facts,
    peek,
    pinned,
    placeable,
    safety,
    vhd,
)
from images import copy, fetch, nbd, place, place_stream, process, qemu_img, staging, target, unpack
from importer import errors, survey
from importer.job import Job
from scratch import space, spill
from sources import base

log = logging.getLogger(__name__)

#: Zeros asked for between two words about progress.
ZERO_STEP = 64 << 20


def blank(job: Job) -> None:
    """BLANK: create, or zero where every byte shall be written."""
    size = job.plan.virtual_size or 0
    job.size = size
    if not job.wanted.preallocation and target.facts(job.wanted.target).kind == "block":
        return
    job.progress.phase("transfer", size)
    with job.open_target(size) as out:
        for part in fetch.split(0, size, ZERO_STEP):
            out.zero(*part)
            job.progress.advance(part.length)
        job.commit(out, size)


def stream(job: Job) -> None:
    """STREAM: a raw disk, by ranges in any order or as one ordered stream."""
    if job.plan.random:
        _stream_ranges(job)
    else:
        _stream_ordered(job)


def extents(job: Job) -> None:
    """EXTENTS: only what the source knows to be data moves."""
    size = job.source.size or 0
    job.progress.phase("transfer", size)
    with job.resumable(job.wanted.target, size, size, job.options) as (out, noted):
        job.fetch_into(out, noted, data(job, out, job.source.extents() or ()))
        job.commit(out, size)


def place_mapped(job: Job) -> None:
    """PLACE: our own reader of the format puts each piece of the disk where it belongs."""
    if job.plan.random:
        _place_ranges(job)
        return
    try:
        _place_ordered(job)
    except errors.ScratchRequired as err:
        if not job.wanted.scratch:
            raise
        if job.source.once:
            advice = "and this source gives it once: upload it as qcow2 (qemu-img convert -O qcow2)"
            raise errors.Unsupported(
                reason=f"it has to be read twice ({err.fields['reason']}), {advice}"
            ) from err
        log.info("spool reason=%r", str(err))
        job.cancel.clear()
        spool(job)


def convert(job: Job) -> None:
    """CONVERT: qemu-img reads the source at random through an NBD export of ours.

    The export is fed by the engine, so that identity, credentials and retries are the same as on any
    other route; a client of qemu's or nbdkit's own knows none of these rules.
    """
    fetcher = job.fetcher(job.count)
    pins = pinned.Pinned(fetcher.read)
    head = pins.read(0, min(fetcher.size, detect.HEAD))
    safety.check(job.content.format, head, read=pins.read, size=fetcher.size)
    # Not pinned: these tables may be long, and what qemu-img opens does not depend on them.
    safety.check_length(job.content.format, fetcher.read, fetcher.size)

    def read(offset: int, into: memoryview, stop: threading.Event) -> None:
        """Give qemu-img what was checked, whatever a hostile server says the second time."""
        fetcher.fill(offset, into, stop)
        pins.lay_over(offset, into)

    parallel = job.fetching.connections
    with nbd.Export(read, fetcher.size, parallel=parallel, interrupt=fetcher.interrupt) as export:
        _convert(job, qemu_img.exported(export.socket, job.content.format), "transfer")


def spool(job: Job) -> None:
    """SPOOL: the whole image into scratch, checked there, converted from there."""
    with scratch(job) as kept:
        path = kept.path("image")
        size = download(job, path)
        job.source.verify()
        form = job.content.format
        with open(path, "rb") as stream:
            read = reader(stream.fileno())
            safety.check(form, read(0, detect.HEAD), read=read, size=size)
            safety.check_length(form, read, size)
        _convert(job, qemu_img.local(path, form), "convert")


def unpack_archive(job: Job) -> None:
    """UNPACK: a tar archive into a staging folder, moved into place when it is whole and verified."""
    if job.wanted.volume:
        # Not before it is known to be an archive. There may be no room for it and an earlier one.
        staging.empty(job.wanted.volume)
        job.limit = survey.room(job.wanted).available
    job.progress.phase("transfer", job.source.size)
    with staging.Staging(job.wanted.target) as staged:
        with job.plain() as packed:
            unpack.unpack(archive.Archive(packed, limit_bytes=job.limit), staged.path, advance=job.wrote)
        job.source.verify()
        job.progress.phase("sync", None)
        staged.commit()


@contextlib.contextmanager
def scratch(job: Job) -> Iterator[space.Scratch]:
    """Yield room in scratch, left to the next attempt by a failure that trying again can mend."""
    with space.Scratch(job.wanted.scratch or "", job.wanted.target, resume=True) as kept:
        try:
            yield kept
        except errors.Error as err:
            if err.retryable or isinstance(err, errors.Cancelled):
                kept.keep()
            raise


def download(job: Job, path: str) -> int:
    """Bring the bytes below all compressions to ``path`` in scratch; return how many they are."""
    size = job.source.size
    job.progress.phase("spool", size)
    if job.ranges and job.source.ranges() and size and not job.content.compressions:
        with job.resumable(path, size, size, target.Options()) as (out, noted):
            job.fetch_into(out, noted, [fetch.Range(0, size)])
            out.commit()
        _verify(job, path)
        return size
    available = survey.spare(job.wanted) or 0
    with target.open(path, None) as out:
        try:
            with job.plain(limit=available) as reader:
                size = copy.copy_ordered(
                    reader, out, limit=available, cancel=job.cancel, give_up=job.cancel.set
                )
        except errors.TooLarge as err:
            # Of the volume's size nothing is known here: it is scratch that has to be larger.
            needs = f"more than {available}"
            raise errors.ScratchTooSmall(size=needs, available=available) from err
        out.commit()
        return size


def _verify(job: Job, path: str) -> None:
    """Verify the checksum of what came in any order, and perhaps in several attempts."""
    if job.wanted.checksum is not None:
        with open(path, "rb", buffering=0) as stream:
            hashing = checksum.HashingReader(stream, checksum.parse(job.wanted.checksum))
            copy.drain(hashing, job.cancel)
            hashing.verify()


def _convert(job: Job, image: qemu_img.Node, phase: str) -> None:
    watch = process.Watch("qemu-img", job.wanted.fetch.no_progress)
    follow = qemu_img.Follow(job.progress.advance, job.cancel, watch)
    size = qemu_img.virtual_size(image, follow)
    if size > job.limit:
        raise errors.TooLarge(virtual_size=size, available=job.limit)
    job.progress.phase(phase, size)
    with job.open_target(size) as out:
        if out.withheld:
            out.write(0, memoryview(qemu_img.head(image, min(out.withheld, size), follow)))
        writing = qemu_img.Writing(
            start=out.withheld,
            fresh=out.is_fresh,
            # Past the page cache it took half of the time and a third of the CPU.
            direct=target.facts(job.wanted.target).direct,
            sparse=not job.wanted.preallocation,
        )
        qemu_img.convert(image, out.written_path, size, writing, follow)
        job.commit(out, size)


def _stream_ranges(job: Job) -> None:
    size = job.source.size or 0
    job.progress.phase("transfer", size)
    with job.resumable(job.wanted.target, size, size, job.options) as (out, noted):
        job.fetch_into(out, noted, [fetch.Range(0, size)])
        job.commit(out, size)


def _stream_ordered(job: Job) -> None:
    job.progress.phase("transfer", job.source.size)
    # Whether the last sector is the disk's or the footer of a fixed VHD shows at the end.
    with job.open_target(None) as out:
        with job.plain() as reader:
            size = copy.copy_ordered(
                vhd.WithoutFooter(reader), out, limit=job.limit, cancel=job.cancel, give_up=job.cancel.set
            )
        job.commit(out, size)


def _place_ranges(job: Job) -> None:
    size = job.plan.virtual_size or 0
    job.progress.phase("transfer", size)
    fetcher = job.fetcher(job.count)
    with job.resumable(job.wanted.target, size, size, job.options) as (out, noted):
        image = placeable.FORMATS[job.content.format].read_image(fetcher.read, fetcher.size)
        _check_same_size(job, image.layout.virtual_size)
        place.from_ranges(image, fetcher, out, noted, job.progress.advance)
        job.commit(out, size)


def _place_ordered(job: Job) -> None:
    size = job.plan.virtual_size or 0
    job.progress.phase("transfer", job.source.size)
    with contextlib.ExitStack() as stack:
        kept = None
        if job.wanted.scratch:
            room = stack.enter_context(space.Scratch(job.wanted.scratch, job.wanted.target))
            kept = stack.enter_context(spill.Spill(room.path("spill")))
        out = stack.enter_context(job.open_target(size))
        with job.plain() as reader:
            ahead = peek.Peek(reader, placeable.HEAD_SIZE)
            follower = placeable.FORMATS[job.content.format].follow(ahead.head)
            _check_same_size(job, follower.virtual_size)
            place_stream.from_stream(
                follower, ahead, out, cancel=job.cancel, spill=kept, give_up=job.cancel.set
            )
        job.commit(out, size)


def _check_same_size(job: Job, now: int) -> None:
    """Refuse another disk than the one the target was opened for: no identity may have told them apart."""
    before = job.plan.virtual_size
    if before != now:
        raise errors.SourceChanged(url=job.source.name, what="virtual size", before=before, now=now)


def data(job: Job, out: target.Target, extents: Iterable[base.Extent]) -> Iterator[fetch.Range]:
    """Yield the data to fetch; what is not data is zeroed on the way."""
    for extent in extents:
        if extent.zero:
            out.zero(extent.offset, extent.length)
            job.progress.advance(extent.length)
        else:
            yield fetch.Range(extent.offset, extent.length)


def reader(fd: int) -> facts.Read:
    """Return what reads from an open file."""
    return lambda offset, length: os.pread(fd, length, offset)
