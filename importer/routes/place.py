"""The route PLACE: our own format readers write each cluster to its offset, without scratch."""

from __future__ import annotations

import contextlib
import logging

from cdi_worker import errors
from cdi_worker.formats.mapped import image
from cdi_worker.formats.mapped import layout as mapped
from cdi_worker.images.place import ranges, stream
from cdi_worker.images.targets import copy, journaled
from cdi_worker.importer import progress
from cdi_worker.importer.routes.job import Job
from cdi_worker.scratch import journal, space

log = logging.getLogger(__name__)


def place_mapped(job: Job) -> None:
    """PLACE: write each cluster to its offset; a stream that must be read twice falls back to SPOOL.

    Of a chain of files, the newest cluster of each part of the disk.
    """
    if job.plan.random:
        _place_ranges(job)
        return
    try:
        with job.attempt():
            _place_ordered(job)
    except errors.ScratchRequired as err:
        if not job.wanted.scratch and job.may_read_twice:
            log.info("random reads reason=%r", str(err))
            _place_ranges(job)
            return
        if not job.wanted.scratch:
            raise
        if job.source.once:
            advice = "but this source can be read only once; convert it first: qemu-img convert -O qcow2"
            raise errors.Unsupported(
                reason=f"it must be read twice ({err.fields['reason']}), {advice}"
            ) from err
        log.info("spool reason=%r", str(err))
        # Imported when used: rarely needed (start-up time).
        from cdi_worker.importer.routes import convert, relay

        if job.plan.compared:
            # qemu-img would write to the disk that is updated.
            relay.relay(job, convert.spool)
            return
        convert.spool(job)


def _place_ranges(job: Job) -> None:
    size = job.plan.virtual_size or 0

    def fill(out: journaled.Flushable, noted: journal.Journal, counted: progress.Progress) -> None:
        fetcher = job.fetcher(counted)
        if job.content.chain:
            # Imported when used: few imports need it (start-up time).
            from cdi_worker.importer.routes import chain

            chain.place(job, fetcher, out, noted, counted)
            return
        found = image.read_image(_layout(job), fetcher.read, fetcher.size)
        ranges.from_ranges(found, fetcher, out, noted, counted, direct=job.wanted.direct)

    with job.resumable(job.wanted.target, size, size, job.options) as (out, noted):
        job.transfer(out, noted, fill, job.source.size or 0)
        job.commit(out, size)


def _place_ordered(job: Job) -> None:
    size = job.plan.virtual_size or 0
    job.progress.phase("transfer", job.source.transferred)
    with contextlib.ExitStack() as stack:
        kept = None
        if job.wanted.scratch:
            room = stack.enter_context(space.Scratch(job.wanted.scratch, job.wanted.target))
            kept = stack.enter_context(space.Spill(room.path("spill")))
        disk: copy.Writable
        if job.has_begun(job.wanted.target, size):
            # Not noted: the tables may come last, and only they confirm where data belongs.
            again = job.continued(job.wanted.target, size, job.options, noting=False)
            out, disk = stack.enter_context(again)
        else:
            out = disk = stack.enter_context(job.open_target(size))
        with job.plain(whole=False) as reader:
            follower, direct = _layout(job).follow(), job.wanted.direct
            stream.from_stream(follower, reader, disk, scope=job.scope, spill=kept, direct=direct)
        job.commit(out, size)


def _layout(job: Job) -> mapped.Layout:
    assert job.content.layout is not None  # noqa: S101  (without one another route is planned)
    return job.content.layout
