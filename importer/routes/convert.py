"""The routes CONVERT, SPOOL and MERGE: qemu-img reads the image."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import detect, facts, safety, views
from cdi_worker.images import targets
from cdi_worker.images.export import server
from cdi_worker.images.targets import copy
from cdi_worker.images.tools import process, qemu_img
from cdi_worker.importer import survey
from cdi_worker.importer.routes import stage
from cdi_worker.importer.routes.job import Job
from cdi_worker.scratch import space

#: A run that was killed later has left the complete image in scratch, where may be no room for two.
_REMOVED: Final = targets.Options(existing="remove")


def convert(job: Job) -> None:
    """CONVERT: qemu-img reads the source at random through our NBD export.

    The export reads through the fetch engine, so that identity, credentials and retries are the same as on
    any other route; qemu's and nbdkit's own clients have none of these rules.
    """
    # Bytes of the file: qemu-img counts holes as work in formats whose map it does not use (VHDX).
    job.progress.phase("transfer", job.source.size)
    fetcher = job.fetcher(job.progress)
    # The fetcher returns to qemu-img the bytes that the survey has checked. The tables that are read here may
    # be too long to keep, and no file that qemu-img opens depends on them.
    found = _checked(job, fetcher.read, fetcher.size)
    parallel = fetcher.options.connections
    # Closing the export sets the scope, which ends all its reads.
    with server.Export(fetcher.fill, fetcher.size, job.scope, parallel=parallel) as export:
        image = qemu_img.exported(export.socket, job.content.format, geometry=found.geometry)
        size = _fitting_size(job, image)
        _convert(job, image, size, _follow(job))


def spool(job: Job) -> None:
    """SPOOL: download the image into scratch, check it there, and convert it from there."""
    with scratch(job) as kept:
        path = kept.path("image")
        size = download(job, path)
        job.source.verify()
        with open(path, "rb") as stream:
            found = _checked(job, reader(stream.fileno()), size)
        image = qemu_img.local(path, job.content.format, geometry=found.geometry)
        fitting = _fitting_size(job, image)
        job.accept()
        job.progress.phase("convert", fitting)
        _convert(job, image, fitting, _follow(job, job.progress.advance))


def _checked(job: Job, read: views.Read, size: int) -> facts.Facts:
    form = job.content.format
    found = safety.check(form, read(0, min(detect.HEAD, size)), read=read, size=size)
    safety.check_length(form, read, size)
    return found


@contextlib.contextmanager
def scratch(job: Job) -> Iterator[space.Scratch]:
    """Yield scratch space; its files are kept for the next attempt after a failure that they outlive."""
    with space.Scratch(job.wanted.scratch or "", job.wanted.target, resume=True) as kept:
        try:
            yield kept
        except errors.Error as err:
            # The run that has taken the target over uses the same folder.
            if err.retryable or job.outlives(err) or isinstance(err, errors.TargetLost):
                kept.keep()
            raise


def download(job: Job, path: str) -> int:
    """Download and decompress the source to ``path`` in scratch; return the number of bytes."""
    size = job.source.size
    if job.engine.seeks(job.source) and size and not job.content.compressions:
        with job.resumable(path, size, size, _REMOVED) as (out, noted):
            job.transfer(out, noted, job.filling(size), size, phase="spool")
            out.commit()
        # Fetched in any order, perhaps in several attempts.
        with open(path, "rb", buffering=0) as stream:
            job.verify(stream)
        return size
    job.progress.phase("spool", job.source.transferred)
    if job.has_begun(path, size or 0):
        with job.continued(path, size or 0, _REMOVED) as (out, disk):
            job.copy_whole(disk, size or 0)
            out.commit()
        return size or 0
    available = survey.spare(job.wanted) or 0
    with targets.open(path, None, _REMOVED) as out:
        try:
            with job.plain(limit=available) as reader:
                size = copy.copy_ordered(reader, out, limit=available, scope=job.scope)
        except errors.TooLarge as err:
            # The limit here is scratch space, not the target's.
            needs = f"more than {available}"
            raise errors.ScratchTooSmall(size=needs, available=available) from err
        out.commit()
        return size


class _Watch(process.Watch):
    """Also ends qemu-img when another run has taken the target over."""

    def __init__(self, job: Job) -> None:
        super().__init__("qemu-img", job.wanted.fetch.no_progress)
        self._claim = job.claim

    def check(self) -> None:
        super().check()
        self._claim.guard()


def _follow(job: Job, advance: Callable[[int], None] = lambda _: None) -> qemu_img.Follow:
    return qemu_img.Follow(advance, job.scope, _Watch(job))


def _fitting_size(job: Job, image: qemu_img.Node) -> int:
    """Return the virtual size in bytes. Raises ``TooLarge``."""
    size = qemu_img.virtual_size(image, _follow(job))
    if size > job.limit:
        raise errors.TooLarge(virtual_size=size, available=job.limit)
    return size


def _convert(job: Job, image: qemu_img.Node, size: int, follow: qemu_img.Follow) -> None:
    with job.open_target(size) as out:
        if out.withheld:
            out.write(0, memoryview(qemu_img.head(image, min(out.withheld, size), follow)))
        writing = qemu_img.Writing(
            start=out.withheld,
            fresh=out.is_fresh,
            # Bypassing the page cache took half of the time and a third of the CPU.
            direct=targets.facts(job.wanted.target).direct,
            sparse=not job.wanted.preallocation,
        )
        qemu_img.convert(image, out.written_path, size, writing, follow)
        job.commit(out, size)


def reader(fd: int) -> views.Read:
    """Return a function that reads from the open file ``fd``."""
    return lambda offset, length: os.pread(fd, length, offset)


def merge(job: Job) -> None:
    """MERGE: download a qcow2 delta into scratch, check it there, and commit it onto the target's disk.

    The disk is not usable until the commit has ended. After an interruption the commit is run again from its
    start and writes the same bytes to the same offsets.
    """
    stage.check(job)
    with scratch(job) as kept:
        path = kept.path("delta")
        size = download(job, path)
        # Ends the transfer, so that the source's disk is not locked during the commit.
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
    direct = targets.facts(job.wanted.target).direct
    options = targets.Options(mode="update", claim=job.claim)
    with targets.open(job.wanted.target, None, options) as out:
        stage.begin(job, out)
        if job.source.previous_size:
            # The delta does not list the space by which the disk grew; to qemu-img the base seems to hold it.
            out.zero(job.source.previous_size, max(0, size - job.source.previous_size))
            out.flush()
        qemu_img.commit(
            path, out.written_path, size, direct=direct, follow=_follow(job, job.progress.advance)
        )
        job.commit(out, out.size or size)
