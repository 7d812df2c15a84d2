"""The routes: each brings one disk the way that the plan says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from formats import detect, qcow2, safety
from images import copy, fetch, nbd, place, process, qemu_img, target
from importer import errors
from importer.job import Job
from scratch import space


def blank(job: Job) -> None:
    """BLANK: create, or zero where every byte shall be written."""
    size = job.plan.virtual_size or 0
    job.size = size
    if not job.wanted.preallocation and target.facts(job.wanted.target).kind == "block":
        return
    job.progress.phase("transfer", size)
    with job.open_target(size) as out:
        out.zero(0, size)
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
    with job.open_target(size) as out:
        chunk = job.wanted.fetch.chunk
        job.fetcher(job.arrived).each(_data(job, out, chunk), _placer(out))
        job.commit(out, size)


def place_qcow2(job: Job) -> None:
    """PLACE: our own qcow2 reader puts each cluster where it belongs."""
    size = job.plan.virtual_size or 0
    if job.plan.random:
        job.progress.phase("transfer", size)
        with job.open_target(size) as out:
            fetcher = job.fetcher(job.count)
            image = qcow2.read_image(fetcher.read, fetcher.size)
            place.from_ranges(image, fetcher, out, advance=job.progress.advance)
            job.commit(out, size)
        return
    raise NotImplementedError


def convert(job: Job) -> None:
    """CONVERT: qemu-img reads the source at random through an NBD export of ours.

    The export is fed by the engine, so that identity, credentials and retries are the same as on any
    other route; a client of qemu's or nbdkit's own knows none of these rules.
    """
    fetcher = job.fetcher(job.count)
    with nbd.Export(fetcher.fill, fetcher.size, parallel=job.wanted.fetch.connections) as export:
        _convert(job, qemu_img.exported(export.socket, job.content.format), "transfer")


def spool(job: Job) -> None:
    """SPOOL: the whole image into scratch, checked there, converted from there."""
    with space.spool(job.wanted.scratch or "") as kept:
        job.progress.phase("spool", job.source.size)
        with job.plain(limit=kept.available) as reader:
            size = copy.copy_ordered(reader, kept, limit=kept.available, cancel=job.cancel)
        job.source.verify()
        facts = safety.check(job.content.format, kept.read(0, detect.HEAD), kept.read, size)
        if (facts.virtual_size or 0) > job.limit:
            raise errors.TooLarge(virtual_size=facts.virtual_size, available=job.limit)
        _convert(job, qemu_img.local(kept.path, job.content.format), "convert")


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
            direct=job.wanted.direct,
            sparse=not job.wanted.preallocation,
        )
        qemu_img.convert(image, out.written_path, size, writing, follow)
        job.commit(out, size)


def _stream_ranges(job: Job) -> None:
    size = job.source.size or 0
    job.progress.phase("transfer", size)
    with job.open_target(size) as out:
        job.fetcher(job.arrived).each(fetch.split(0, size, job.wanted.fetch.chunk), _placer(out))
        job.commit(out, size)


def _stream_ordered(job: Job) -> None:
    size = job.plan.virtual_size
    job.progress.phase("transfer", job.source.size)
    with job.open_target(size) as out:
        with job.plain() as reader:
            size = copy.copy_ordered(reader, out, limit=job.limit, cancel=job.cancel)
        job.commit(out, size)


def _placer(out: target.Target) -> Callable[[int, memoryview], None]:
    return lambda offset, data: copy.place(out, offset, data)


def _data(job: Job, out: target.Target, chunk: int) -> Iterator[fetch.Range]:
    """Yield the data to fetch; what is not data is zeroed on the way."""
    for extent in job.source.extents() or ():
        if extent.zero:
            out.zero(extent.offset, extent.length)
            job.progress.advance(extent.length)
        else:
            yield from fetch.split(extent.offset, extent.offset + extent.length, chunk)
