"""UPDATE: what has changed since the previous checkpoint, written over the disk of an earlier stage."""

from __future__ import annotations

import dataclasses

from images import retry, target
from importer import merge, routes
from importer.job import Job
from scratch import journal


def update(job: Job) -> None:
    """UPDATE: only the areas that the source knows to have changed; what is zero in them is zeroed.

    After a kill all of it is done again: the same bytes at the same places, nothing to remember.
    """
    merge.check_disk(job)
    size = job.plan.virtual_size or 0
    changed = retry.patiently(
        lambda: list(job.source.extents() or ()),
        job.wanted.fetch.no_progress,
        job.cancel,
        job.progress.retry,
    )
    job.progress.phase("transfer", sum(extent.length for extent in changed))
    with target.open(job.wanted.target, size, dataclasses.replace(job.options, mode="update")) as out:
        job.fetch_into(out, journal.Journal(None, "", size), routes.data(job, out, changed))
        job.commit(out, out.size or size)
