"""The checkpoint of a disk: a delta is applied to no other disk, and a disk says which one it holds."""

from __future__ import annotations

import hashlib

from cdi_worker import errors
from cdi_worker.images import targets
from cdi_worker.images.targets import checkpoint
from cdi_worker.importer.attempt import Attempt


def _names(attempt: Attempt) -> tuple[frozenset[str], frozenset[str]]:
    """Return all names of the previous and the current checkpoint.

    That of a chain has its version, as files can be replaced. Of a weak identity only the first bytes count:
    a refusal is final here, and a copy of the same file may have another date. Without an identity there is
    no version.
    """
    facts, stage, source = attempt.facts, attempt.request.stage, attempt.image.source
    current = source.names(stage.current)
    if attempt.survey.chain and facts.identity:
        stated = b"" if facts.weak else facts.identity.encode("utf-8", "surrogateescape")
        current |= {checkpoint.VERSION + hashlib.sha256(stated + facts.head).hexdigest()}
    return source.names(stage.previous), current


def _whole(names: frozenset[str]) -> frozenset[str]:
    """Return the names of a checkpoint to which a stage leads that writes all of the disk."""
    return frozenset(f"{name} (all of the disk)" for name in names)


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
    if targets.is_left_over(attempt.claim) and not attempt.plan.compared:
        reason = "holds an incomplete disk of an interrupted run; run that again, or the first stage"
        raise errors.TargetError(path=path, reason=reason)
    held = checkpoint.of_disk(path)
    if held is None and (part := targets.unfinished(attempt.claim)):
        reason = f"is beside {part}, the unfinished disk of an interrupted run"
        raise errors.TargetError(path=path, reason=f"{reason}; run that again, or remove the file")
    previous, current = _names(attempt)
    if held is not None and held.is_of_others(current):
        reason = (
            f"holds the disk at checkpoint {held}, but of other files than these: one was replaced; give the "
            "same files again, or start again with a first stage"
        )
        raise errors.TargetError(path=path, reason=reason)
    may_follow = current | _whole(current) if attempt.plan.compared else current
    if held is not None and not held.allows(previous, may_follow):
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
    previous, current = _names(attempt)
    # All of a disk is verified at its end: changes are not written over what is left of it.
    to = _whole(current) if attempt.plan.compared else current
    checkpoint.Checkpoint(previous, to).write(opened.written_path)
    size, before = attempt.plan.virtual_size or 0, attempt.facts.previous_size
    if before is None or before > size:
        opened.flush()
        opened.zero_rest(size)
    opened.flush()


def begin_update(path: str) -> None:
    """Note that the disk is neither the old nor the new one: no delta may be applied to it."""
    checkpoint.Checkpoint(frozenset(), frozenset({"an update"})).write(path)


def settle(attempt: Attempt, out: targets.Target, size: int) -> None:
    """Store which checkpoint the disk of ``size`` bytes holds."""
    stage = attempt.request.stage
    if stage.current:
        # On a device, a delta that is compared may be the first stage that succeeds.
        is_first = not stage.final
        if attempt.request.is_delta:
            is_first = attempt.plan.compared and attempt.survey.block
        if is_first:
            # A later stage may not know by how much the disk has grown.
            out.zero_rest(size)
        # The bytes must be on storage before the checkpoint that vouches for them.
        out.flush()
        checkpoint.Checkpoint(_names(attempt)[1]).write(out.written_path)
    elif attempt.plan.compared and out.has_begun:
        # The bytes must be on storage before the note of the update is removed: a delta would otherwise be
        # applied to a mixture of two disks.
        out.flush()
        checkpoint.forget(out.written_path)
