"""The routes CONVERT and SPOOL: qemu-img reads the image."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from cdi_worker import errors, survey
from cdi_worker.formats import checksum, detect, safety, views
from cdi_worker.images import target
from cdi_worker.images.engine import fetch
from cdi_worker.images.export import server
from cdi_worker.images.target import copy
from cdi_worker.images.tools import process, qemu_img
from cdi_worker.routes.job import Job
from cdi_worker.scratch import space


def convert(job: Job) -> None:
    """CONVERT: qemu-img reads the source at random through an NBD export of ours.

    The export is fed by the engine, so that identity, credentials and retries are the same as on any
    other route; a client of qemu's or nbdkit's own knows none of these rules.
    """
    fetcher = job.fetcher(job.count)
    # The survey has checked all else, and the fetcher gives qemu-img the bytes that were checked. The tables
    # may be long, and what qemu-img opens does not depend on them.
    safety.check_length(job.content.format, fetcher.read, fetcher.size)
    parallel = fetcher.options.connections
    with server.Export(fetcher.fill, fetcher.size, parallel=parallel, interrupt=fetcher.interrupt) as export:
        image = qemu_img.exported(export.socket, job.content.format)
        _convert(job, image, _fitting_size(job, image), "transfer")


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
        image = qemu_img.local(path, form)
        fitting = _fitting_size(job, image)
        job.accept()
        _convert(job, image, fitting, "convert")


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
    if job.engine.seeks(job.source) and size and not job.content.compressions:
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


def _follow(job: Job) -> qemu_img.Follow:
    watch = process.Watch("qemu-img", job.wanted.fetch.no_progress)
    return qemu_img.Follow(job.progress.advance, job.cancel, watch)


def _fitting_size(job: Job, image: qemu_img.Node) -> int:
    """Return the virtual size in bytes. Raises ``TooLarge``."""
    size = qemu_img.virtual_size(image, _follow(job))
    if size > job.limit:
        raise errors.TooLarge(virtual_size=size, available=job.limit)
    return size


def _convert(job: Job, image: qemu_img.Node, size: int, phase: str) -> None:
    follow = _follow(job)
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


def reader(fd: int) -> views.Read:
    """Return what reads from an open file."""
    return lambda offset, length: os.pread(fd, length, offset)


def merge(job: Job) -> None:
    """MERGE: a qcow2 delta into scratch, checked there, committed onto the disk that is there.

    The disk is not one until the commit has ended. One that was interrupted, however, is done again
    from its start: it writes the same bytes to the same places, whatever it had written before.
    """
    job.check_stage()
    with scratch(job) as kept:
        path = kept.path("delta")
        size = download(job, path)
        # The transfer ends here: the disk at the other end is not held while this one is written.
        job.source.verify()
        _check_delta(job, path, size)
        job.accept()
        _commit(job, path)


def _check_delta(job: Job, path: str, size: int) -> None:
    previous = job.wanted.stage.previous
    with open(path, "rb") as stream:
        read = reader(stream.fileno())
        found = safety.check("qcow2", read(0, detect.HEAD), read=read, size=size, allow_backing=previous)
        safety.check_length("qcow2", read, size)
    before, now = (previous, job.plan.virtual_size), (found.backing, found.virtual_size)
    if found.backing is None or found.virtual_size != job.plan.virtual_size:
        raise errors.SourceChanged(url=job.source.name, what="delta", before=before, now=now)


def _commit(job: Job, path: str) -> None:
    size = job.plan.virtual_size or 0
    job.progress.phase("merge", size)
    direct = target.facts(job.wanted.target).direct
    with target.open(job.wanted.target, None, target.Options(mode="update")) as out:
        qemu_img.commit(path, out.written_path, size, direct=direct, follow=_follow(job))
        job.commit(out, out.size or size)
