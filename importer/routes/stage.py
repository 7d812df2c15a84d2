"""The stages of a migration: the route UPDATE, and the checkpoint of the disk on the target."""

from __future__ import annotations

import dataclasses

from cdi_worker import errors
from cdi_worker.images import targets
from cdi_worker.images.engine import retry
from cdi_worker.images.targets import checkpoint, journaled
from cdi_worker.importer.routes import direct
from cdi_worker.importer.routes.job import Job
from cdi_worker.scratch import journal
from cdi_worker.sources import extents


def update(job: Job) -> None:
    """UPDATE: copy the areas that the source reports as changed; zero extents in them are zeroed.

    Not resumed: a second attempt writes the same bytes to the same offsets, so no journal is needed.
    """
    check(job)
    if job.content.chain:
        _update_from_files(job)
        return
    size = job.plan.virtual_size or 0
    changed = retry.patiently(
        lambda: extents.Kept(job.source.extents() or ()),
        job.wanted.fetch.no_progress,
        job.scope,
        job.progress.retry,
    )
    job.progress.phase("transfer", sum(extent.length for extent in changed))
    with targets.open(job.wanted.target, size, dataclasses.replace(job.options, mode="update")) as out:
        begin(job, out)
        disk = journaled.Journaled(out, journal.Journal(None, "", size))
        job.fetch_into(disk, direct.data(disk, changed, job.progress), job.progress)
        job.commit(out, out.size or size)


def _update_from_files(job: Job) -> None:
    """Write what qcow2 files with changes hold; their zeros are zeroed, other parts are not touched."""
    # Imported when used: few imports need it (start-up time).
    from cdi_worker.importer.routes import chain

    size = job.plan.virtual_size or 0
    job.progress.phase("transfer", job.source.size)
    with targets.open(job.wanted.target, size, dataclasses.replace(job.options, mode="update")) as out:
        begin(job, out)
        unnoted = journal.Journal(None, "", size)
        chain.place(job, job.fetcher(job.progress), out, unnoted, job.progress)
        job.commit(out, out.size or size)


def check(job: Job) -> None:
    """Check that the target holds the disk that the delta belongs to, before anything is changed.

    Raises ``TargetError`` if there is no disk or one at another checkpoint, ``TooLarge`` if it is too small.
    """
    path, size = job.wanted.target, job.plan.virtual_size or 0
    present = targets.facts(path).size
    if not present:
        raise errors.TargetError(
            path=path, reason="no disk of an earlier stage to apply the delta to; run the first stage again"
        )
    if size > present:
        # Only the first stage grows a disk (contract, Checkpoints).
        raise errors.TooLarge(virtual_size=size, available=present)
    if targets.is_left_over(job.claim):
        reason = "holds an incomplete disk of an interrupted run; run that again, or the first stage"
        raise errors.TargetError(path=path, reason=reason)
    held = checkpoint.of_disk(path)
    if held is not None and not held.allows(*job.checkpoints):
        wanted = job.wanted.stage
        reason = (
            f"holds the disk at checkpoint {held}, the delta is from {wanted.previous} to "
            f"{wanted.current or 'now'}; run the stages in order, or start again with a first stage"
        )
        raise errors.TargetError(path=path, reason=reason)


def begin(job: Job, opened: targets.Target) -> None:
    """Note on the target that the delta is being applied, before its first byte is written.

    If the disk has become smaller, what is behind its end is zeroed: a later stage may grow it again, and
    names only what it has written since.
    """
    checkpoint.Checkpoint(*job.checkpoints).write(opened.written_path)
    size, before = job.plan.virtual_size or 0, job.source.previous_size
    if before is None or before > size:
        opened.zero_rest(size)
    opened.flush()
