"""The routes BLANK, STREAM and EXTENTS: raw disks, written without conversion."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator

from cdi_worker import errors
from cdi_worker.formats import facts, vhd
from cdi_worker.images import targets
from cdi_worker.images.engine import fetch
from cdi_worker.images.targets import copy, journaled
from cdi_worker.importer import progress
from cdi_worker.importer.routes.job import Job
from cdi_worker.scratch import journal
from cdi_worker.sources import base

#: Bytes zeroed between two progress updates.
ZERO_STEP = 64 << 20
#: The most extents, and the seconds, for which data waits until the list of extents is known. VMware lists
#: them as slowly as 32 GiB per request.
LISTED = 64 << 10
LISTING = 5.0


def blank(job: Job) -> None:
    """BLANK: create an empty disk; with preallocation, write every byte."""
    size = job.plan.virtual_size or 0
    job.size = size
    if not job.wanted.preallocation and targets.facts(job.wanted.target).kind == "block":
        return
    job.progress.phase("transfer", size)
    with job.open_target(size) as out:
        for part in fetch.split(0, size, ZERO_STEP):
            out.zero(*part)
            job.progress.advance(part.length)
        job.commit(out, size)


def stream(job: Job) -> None:
    """STREAM: copy a raw disk, by ranges in any order or as one ordered stream."""
    if job.plan.random:
        _stream_ranges(job)
    else:
        _stream_ordered(job)


def extents(job: Job) -> None:
    """EXTENTS: copy only the source's data extents, by ranges in any order or as one ordered stream."""
    if job.plan.random:
        _extents_ranges(job)
    else:
        _extents_ordered(job)


def _extents_ordered(job: Job) -> None:
    job.progress.phase("transfer", job.source.transferred)
    size = job.source.disk_size or 0
    if job.source.identity and size:
        with job.received(job.wanted.target, size, job.options) as (received, disk):
            with job.runs() as runs:
                found = copy.copy_runs(runs, disk, limit=job.limit, scope=job.scope, thin=job.thin)
            if found != size:
                raise errors.SourceChanged(url=job.source.name, what="size", before=size, now=found)
            job.commit(received, size)
        return
    with job.open_target(None) as out:
        with job.runs() as runs:
            size = copy.copy_runs(runs, out, limit=job.limit, scope=job.scope, thin=job.thin)
        job.commit(out, size)


def _extents_ranges(job: Job) -> None:
    size = _size(job)

    def fill(out: journaled.Flushable, noted: journal.Journal, counted: progress.Progress) -> None:
        disk = journaled.Journaled(out, noted)
        job.fetch_into(disk, data(disk, _before(size, job.source.extents() or ()), counted), counted)

    with job.resumable(job.wanted.target, size, size, job.options) as (out, noted):
        job.transfer(out, noted, fill, size)
        job.commit(out, size)


def _stream_ranges(job: Job) -> None:
    size = _size(job)
    with job.resumable(job.wanted.target, size, size, job.options) as (out, noted):
        job.transfer(out, noted, job.filling(size), size)
        job.commit(out, size)


def _size(job: Job) -> int:
    """Return the bytes of the source that are the raw disk, without the footer of a fixed VHD."""
    return (job.source.size or 0) if job.content.raw is None else job.content.raw


def _before(end: int, extents: Iterable[base.Extent]) -> Iterator[base.Extent]:
    """Yield the parts of the extents before ``end``."""
    for extent in extents:
        if extent.offset < end:
            yield dataclasses.replace(extent, length=min(extent.length, end - extent.offset))


def _stream_ordered(job: Job) -> None:
    size = job.source.size or 0
    job.progress.phase("transfer", job.source.transferred)
    if job.has_begun(job.wanted.target, size):
        # Ranges were served when it was begun, which have shown that it has no footer.
        with job.continued(job.wanted.target, size, job.options) as (out, kept):
            job.copy_whole(kept, size)
            job.commit(out, size)
        return
    with job.open_target(None) as out:
        with job.plain() as reader:
            if job.source.format:
                size = copy.copy_ordered(reader, out, limit=job.limit, scope=job.scope, thin=job.thin)
            else:
                # The last sector may be the footer of a fixed VHD; that is known only at the end.
                disk = vhd.WithoutFooter(reader)
                size = copy.copy_ordered(disk, out, limit=job.limit, scope=job.scope, thin=job.thin)
                if disk.footer:
                    vhd.check_fixed(disk.footer, size)
        if not job.source.format:
            facts.check_size("raw", size)
        job.commit(out, size)


def data(
    disk: journaled.Journaled, extents: Iterable[base.Extent], counted: progress.Progress
) -> Iterator[fetch.Range]:
    """Yield the ranges of the data extents; zero the other extents on ``disk`` as they are met."""
    for extent in _listed(extents, counted):
        if extent.zero:
            disk.zero_missing([(extent.offset, extent.length)])
        else:
            yield fetch.Range(extent.offset, extent.length)


def _listed(extents: Iterable[base.Extent], counted: progress.Progress) -> Iterator[base.Extent]:
    """Yield ``extents``; take the zeros off the total, before anything is moved if they are listed soon."""
    coming = iter(extents)
    until = time.monotonic() + LISTING
    first: list[base.Extent] = []
    for extent in coming:
        first.append(extent)
        if extent.zero:
            counted.skip(extent.length)
        if len(first) >= LISTED or time.monotonic() > until:
            break
    yield from first
    for extent in coming:
        if extent.zero:
            counted.skip(extent.length)
        yield extent
