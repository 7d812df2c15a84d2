"""The stages of a migration: a delta is delivered in place, to the disk of the stage before it."""

from __future__ import annotations

from cdi_worker import errors
from cdi_worker.images import targets
from cdi_worker.images.disks import base, raw
from cdi_worker.images.engine import retry
from cdi_worker.images.targets import checkpoint
from cdi_worker.importer.routes import delivery, disk, reading
from cdi_worker.importer.routes.attempt import Attempt
from cdi_worker.sources import extents


def update(attempt: Attempt) -> None:
    """UPDATE: write the changes that the source reports, or those in qcow2 files.

    Not resumed: a second attempt writes the same bytes to the same offsets, so no journal is needed.
    """
    if attempt.comparing is None:
        check(attempt)
    make: delivery.Make = disk.of
    total = disk.moved(attempt)
    if not attempt.survey.chain:
        make, total = _changed(attempt)
    place = delivery.to_target(attempt, total)
    if attempt.comparing is None:
        options = delivery.options(attempt)._replace(mode="delta")
        place = place._replace(options=options, begin=lambda out: begin(attempt, out))
    with delivery.delivered(attempt, make, place) as (out, size):
        delivery.commit(attempt, out, size if attempt.comparing else out.size or size)


def _changed(attempt: Attempt) -> tuple[delivery.Make, int]:
    """Return what makes the disk of the changed areas, and the number of their bytes."""
    changed = retry.patiently(
        lambda: extents.Kept(disk.extents(attempt)),
        attempt.request.fetch.no_progress,
        attempt.scope,
        attempt.progress.retry,
    )
    size = attempt.plan.virtual_size or 0

    def make(attempt: Attempt) -> base.Disk:
        return raw.ExtentsDisk(reading.ranges(attempt), size, lambda: changed, covers_all=False)

    return make, sum(extent.length for extent in changed)


def checkpoints(attempt: Attempt) -> tuple[frozenset[str], frozenset[str]]:
    """Return all names of the previous and the current checkpoint."""
    return attempt.image.source.names(attempt.request.stage.previous), delivery.current_names(attempt)


def check(attempt: Attempt) -> None:
    """Check that the target holds the disk that the delta belongs to, before anything is changed.

    Raises ``TargetError`` if there is no disk or one at another checkpoint, ``TooLarge`` if it is too small.
    """
    path, size = attempt.request.target, attempt.plan.virtual_size or 0
    present = targets.facts(path).size
    if not present:
        raise errors.TargetError(
            path=path, reason="no disk of an earlier stage to apply the delta to; run the first stage again"
        )
    if size > present:
        # Only the first stage grows a disk (contract, Checkpoints).
        raise errors.TooLarge(virtual_size=size, available=present)
    if targets.is_left_over(attempt.claim):
        reason = "holds an incomplete disk of an interrupted run; run that again, or the first stage"
        raise errors.TargetError(path=path, reason=reason)
    held = checkpoint.of_disk(path)
    if held is None and (part := targets.unfinished(attempt.claim)):
        reason = f"is beside {part}, the unfinished disk of an interrupted run"
        raise errors.TargetError(path=path, reason=f"{reason}; run that again, or remove the file")
    previous, current = checkpoints(attempt)
    if held is not None and held.is_of_others(current):
        reason = (
            f"holds the disk at checkpoint {held}, but of other files than these: one was replaced; give the "
            "same files again, or start again with a first stage"
        )
        raise errors.TargetError(path=path, reason=reason)
    if held is not None and not held.allows(previous, current):
        reason = (
            f"holds the disk at checkpoint {held}, the delta is from {checkpoint.Checkpoint(previous)} to "
            f"{attempt.request.stage.current}; run the stages in order, or start again with a first stage"
        )
        raise errors.TargetError(path=path, reason=reason)


def begin(attempt: Attempt, opened: targets.Target) -> None:
    """Note on the target that the delta is being applied, before its first byte is written.

    If the disk has become smaller, what is behind its end is zeroed: a later stage may grow it again, and
    names only what it has written since.
    """
    checkpoint.Checkpoint(*checkpoints(attempt)).write(opened.written_path)
    size, before = attempt.plan.virtual_size or 0, attempt.facts.previous_size
    if before is None or before > size:
        opened.flush()
        opened.zero_rest(size)
    opened.flush()
