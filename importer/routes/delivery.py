"""Deliver a disk to a target: the stack of sinks, what an earlier attempt has written, and the commit."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from cdi_worker import errors, units
from cdi_worker.images import readback, targets
from cdi_worker.images.disks import base as disks
from cdi_worker.images.sinks import base as sinks
from cdi_worker.images.sinks import checks, compared, journaled, verified
from cdi_worker.images.targets import checkpoint
from cdi_worker.importer import plan, progress, survey
from cdi_worker.importer.routes import reading
from cdi_worker.importer.routes.attempt import Attempt, Comparing
from cdi_worker.scratch import journal
from cdi_worker.sources import selection

log = logging.getLogger(__name__)

#: Makes the disk to deliver; again for a sample, whose failure must not end the reads of the attempt.
Make: TypeAlias = Callable[[Attempt], disks.Disk]


class Place(NamedTuple):
    """Where a disk is delivered to.

    ``phase``: of the progress, with ``total``, the most bytes of the image that are moved (None: unknown);
    empty: the current one.
    ``limit``: bytes of the largest disk of unknown size; of its data, if it is ``thin``. ``shortest_zero``:
    shorter ranges of zeros, in bytes, are written. ``begin``: called with the open target, before the first
    byte.
    """

    path: str
    options: targets.TargetOptions
    limit: int
    phase: str = "transfer"
    total: int | None = None
    thin: bool = False
    shortest_zero: int = checks.SHORTEST_ZERO
    begin: Callable[[targets.Target], object] = lambda _: None


def to_target(attempt: Attempt, total: int | None) -> Place:
    """Return the place of the disk itself."""
    found = attempt.survey
    return Place(attempt.request.target, options(attempt), found.available, total=total, thin=found.thin)


def options(attempt: Attempt) -> targets.TargetOptions:
    """Return the options of the target."""
    asked = attempt.request
    return targets.TargetOptions(
        mode="compare" if attempt.comparing else "refresh" if attempt.plan.compared else "new",
        begun=_begin_update,
        preallocate=asked.preallocation,
        direct=asked.direct,
        cancel=attempt.scope,
        claim=attempt.claim,
        sectors=lambda: [each.source.first_sector() for each in attempt.image.files],
        existing=asked.existing if asked.existing in ("refuse", "remove") else "replace",
        permissions=asked.permissions,
        form=asked.form,
    )


def meter_of(
    counted: progress.Progress, moved: Callable[[int], None] = lambda _: None
) -> disks.DeliveryMeter:
    """Return what counts the bytes of a disk in the progress."""
    return disks.DeliveryMeter(counted.advance, counted.skip, counted.keep, moved)


@contextlib.contextmanager
def delivered(attempt: Attempt, make: Make, place: Place) -> Iterator[tuple[targets.Target, int]]:
    """Deliver a disk; yield its target, which is not committed yet, and its size in bytes.

    Of an earlier attempt's disk, what is still right is kept. After a retryable failure, also of the block,
    target and journal are kept for the next attempt.
    """
    disk = make(attempt)
    if place.options.mode == "compare":
        with targets.open(place.path, None, place.options) as out:
            yield out, _compare(attempt, disk, place, out)
        return
    if not (disk.size and (disk.repeats or disk.keep or has_begun(attempt, place.path, disk.size))):
        _begin_phase(attempt, place)
        with targets.open(place.path, disk.size, place.options) as out:
            place.begin(out)
            size, count = _pour(disk, _last(attempt, place, out), place, meter_of(attempt.progress))
            _check_whole(attempt, size if disk.covers_all else disk.declared, count)
            yield out, size
        return
    with _resumable(attempt, place, disk.size) as opened:
        place.begin(opened.out)
        if disk.repeats:
            count = _by_parts(attempt, disk, make, place, opened)
        elif disk.keep:
            count = _behind_kept(attempt, disk, place, opened)
        else:
            count = _over_written(attempt, disk, place, opened)
        _check_whole(attempt, disk.size if disk.covers_all else disk.declared, count)
        yield opened.out, disk.size


def _compare(attempt: Attempt, disk: disks.Disk, place: Place, out: targets.Target) -> int:
    """Compare a disk with ``out``, or read again what differs; return its size in bytes."""
    comparing = attempt.comparing or Comparing()
    within = comparing.within
    kind = verified.SummingSink if comparing.again else verified.ComparingSink
    found = kind(out.storage, out.size or 0, within, attempt.scope, attempt.progress.stored)
    _begin_phase(attempt, place)
    only: disks.Missing = disks.EVERYTHING if within is None else functools.partial(verified.parts, within)
    size, count = _pour(disk, found, place, meter_of(attempt.progress), only)
    expected = size if disk.covers_all else disk.declared
    if disk.repeats and within is not None:
        # The size of the changes in a part of a chain is not known in advance.
        expected = sum(end - start for start, end in only([(0, size)])) if disk.covers_all else 0
    _check_whole(attempt, expected, count)
    found.finish(size, is_device=getattr(out, "is_device", False))
    attempt.counts.comparison = found
    return size


def _begin_phase(attempt: Attempt, place: Place) -> None:
    if place.phase:
        attempt.progress.phase(place.phase, place.total)


def _pour(
    disk: disks.Disk,
    last: sinks.Sink,
    place: Place,
    meter: disks.DeliveryMeter,
    missing: disks.Missing = disks.EVERYTHING,
) -> tuple[int, int]:
    """Deliver a disk through the stack of sinks above ``last``; return its size, and the bytes delivered."""
    counting = checks.CountingSink(last)
    sink: sinks.Sink = checks.ZeroDetectingSink(counting, place.shortest_zero)
    if place.thin:
        sink = checks.ZeroDetectingSink(checks.ThinSink(counting, place.limit), place.shortest_zero)
    elif not disk.repeats:
        sink = checks.LimitedSink(sink, place.limit)
    size = disk.deliver(sink, missing, meter)
    return size, counting.delivered


def _last(attempt: Attempt, place: Place, out: targets.Target) -> sinks.Sink:
    """Return the innermost sink: the target, or the wrapper that compares before writing."""
    found: sinks.Sink = out
    if place.options.mode == "refresh":
        updating = compared.UpdatingSink(out)
        attempt.counts.changes = updating.changes
        found = updating
    if attempt.request.read_back and place.path == attempt.request.target:
        attempt.counts.receiving = journaled.DigestSink(found, out.size or place.limit)
        found = attempt.counts.receiving
    return found


def _check_whole(attempt: Attempt, size: int, count: int) -> None:
    """Raise ``errors.SourceError`` unless everything was delivered: other parts may hold anything."""
    if count < size:
        reason = f"{attempt.facts.name}: only {count} of {size} bytes of the disk were delivered"
        raise errors.SourceError(reason=reason)


class _Opened(NamedTuple):
    """An open target, and the journal of what is finished there."""

    out: targets.Target
    noted: journal.Journal


def _by_parts(attempt: Attempt, disk: disks.Disk, make: Make, place: Place, opened: _Opened) -> int:
    """Deliver the missing ranges while the noted ones are read back; then deliver those that storage lost.

    If the identity of the source is weak, a sample is compared first, and nothing is resumed if that differs.
    Returns the bytes that were delivered or resumed.
    """
    counts, (out, noted) = attempt.counts, opened
    if noted.covered and attempt.facts.weak:
        _compare_sample(attempt, make, place, opened)
    counts.resumed = noted.covered
    counts.kept, skipped = noted.counted if counts.resumed else (0, 0)
    counted = progress.Continued(attempt.progress, counts.kept, skipped)
    noted.counting = counted.figures
    counted.begin(place.phase, place.total or 0, is_resumed=bool(counts.resumed))
    sink = journaled.JournalSink(_last(attempt, place, out), noted, out.flush)
    meter = meter_of(counted, sink.moved)
    if not counts.resumed:
        return _pour(disk, sink, place, meter, noted.missing_of)[1]

    def missing(count: int) -> None:
        counted.skip(-count)

    with readback.ReadBack(out.storage, noted, attempt.scope, missing) as reading_back:
        _, count = _pour(disk, sink, place, meter, noted.missing_of)
        counts.refetched = reading_back.wait()
    counts.resumed -= counts.refetched
    counts.kept = max(0, counts.kept - counts.refetched)
    if counts.refetched:
        log.warning("storage differs from what the last attempt wrote refetched=%d", counts.refetched)
        # Skipped and kept bytes were counted in the first round.
        count += _pour(
            disk, sink, place, disks.DeliveryMeter(counted.advance, moved=sink.moved), noted.missing_of
        )[1]
    return count + counts.resumed


def _compare_sample(attempt: Attempt, make: Make, place: Place, opened: _Opened) -> None:
    """Compare a sample of the source with what an earlier attempt wrote; forget that if it differs."""
    out, noted = opened
    out.storage.drop_cache()
    stored = compared.SampleSink(out.storage, noted)
    try:
        with attempt.scoped() as sampling:
            _pour(make(sampling), stored, place, disks.DeliveryMeter(), noted.sample().missing_of)
    except errors.SourceChanged as err:
        if not stored.differs:
            raise
        log.warning("starting over: the source has changed since the last attempt reason=%s", err)
        # A later attempt draws another sample, which may not show the difference.
        noted.erase()


def _behind_kept(attempt: Attempt, disk: disks.Disk, place: Place, opened: _Opened) -> int:
    """Resume a clone: verify the existing prefix, and tell the sender to skip it.

    Returns the bytes that were delivered or kept.
    """
    counts, (out, noted) = attempt.counts, opened
    _begin_phase(attempt, place)
    start = end = out.withheld
    if noted.covered:
        with readback.ReadBack(out.storage, noted, attempt.scope) as reading_back:
            counts.refetched = reading_back.wait()
        end = next((first for first, _ in noted.missing(start, noted.total)), noted.total)
        # The rest is sent again, perhaps with other bytes.
        noted.discard(end, noted.total)
    counts.resumed = end - start
    counts.kept = min(counts.resumed, noted.counted[0])
    assert disk.keep is not None  # noqa: S101  (see ``delivered``)
    disk.keep(start, end)
    sink = journaled.JournalSink(_last(attempt, place, out), noted, out.flush)
    size, count = _pour(disk, sink, place, meter_of(attempt.progress, sink.moved))
    _check_size(attempt, noted.total, size)
    return count + counts.resumed


def _over_written(attempt: Attempt, disk: disks.Disk, place: Place, opened: _Opened) -> int:
    """Deliver a whole disk over what ranges have written, and write only what differs from it."""
    counts, (out, noted) = attempt.counts, opened
    _begin_phase(attempt, place)
    covered, figures = noted.covered, noted.counted
    noted.counting = lambda: figures
    sink = _last(attempt, place, out)
    meter = meter_of(attempt.progress)
    if not disk.tentative:
        sink = noting = journaled.JournalSink(sink, noted, out.flush)
        meter = meter_of(attempt.progress, noting.moved)
    out.storage.drop_cache()
    continuing = compared.ContinuingSink(out.storage, noted, sink)
    size, count = _pour(disk, continuing, place, meter)
    _check_size(attempt, noted.total, size)
    counts.refetched = continuing.differed
    counts.resumed = covered - counts.refetched
    counts.kept = max(0, figures[0] - counts.refetched)
    if counts.refetched:
        log.warning("storage differs from the stream rewritten=%d", counts.refetched)
    return count


def _check_size(attempt: Attempt, before: int, now: int) -> None:
    if now != before:
        raise errors.SourceChanged(url=attempt.facts.name, what="size", before=before, now=now)


# -- what is kept for the next attempt


@contextlib.contextmanager
def _resumable(attempt: Attempt, place: Place, size: int) -> Iterator[_Opened]:
    """Open the target, and the journal of the ranges that an earlier attempt wrote there.

    After a retryable failure both are kept for the next attempt, and for the stream that replaces ranges.
    """
    asked = place.options
    has_journal = attempt.facts.identity and asked.mode == "new"
    slots = targets.journal_slots(place.path, size, asked.form) if has_journal else None
    key = _key(attempt) if slots is not None else ""
    noted = journal.Journal(slots, key, size, seconds=attempt.request.journal_interval)
    if noted.covered:
        asked = asked._replace(mode="resume")
    with targets.open(place.path, size, asked) as out:
        if not out.storage.is_remote:
            noted.store_in(out.storage.readable)
        if not out.resumed:
            noted.forget()
        log.info("resume covered=%d of=%d identity=%r", noted.covered, size, attempt.facts.identity)
        try:
            yield _Opened(out, noted)
        except errors.Error as err:
            # A failure to save must not hide the first one; then nothing is kept.
            with contextlib.suppress(errors.TargetError):
                if slots is not None and outlives(attempt, err):
                    noted.save(out.flush)
                    out.keep()
                    if isinstance(err, errors.Cancelled) and noted.covered:
                        raise errors.Interrupted(kept=_kept(noted, place)) from err
            raise
        if attempt.group is not None and out.is_detached and slots is not None:
            noted.save(out.flush)
            attempt.group.keep(out, functools.partial(outlives, attempt))


def outlives(attempt: Attempt, failure: errors.Error) -> bool:
    """Return whether the bytes written so far stay valid although ``failure`` ends the attempt.

    Ranges that are no longer served were valid. The stream that replaces them has the same bytes if the
    identity is strong. A source that has changed has another identity then.
    """
    if isinstance(failure, errors.NoRanges | errors.SourceChanged):
        return not (attempt.facts.weak or isinstance(failure, errors.WrongRanges))
    return failure.retryable or isinstance(failure, errors.Cancelled)


def has_begun(attempt: Attempt, path: str, size: int) -> bool:
    """Return whether ranges have written a part of this disk of ``size`` bytes that a stream may keep."""
    source = attempt.facts
    is_kept = source.identity and not (source.weak or source.once or attempt.survey.compressions)
    if not is_kept or not size or attempt.plan.compared or attempt.group is not None:
        return False
    if path == targets.STDOUT:
        return False
    form = attempt.request.form if path == attempt.request.target else None
    slots = targets.journal_slots(path, size, form)
    return slots is not None and journal.Journal(slots, _key(attempt), size).covered > 0


def _key(attempt: Attempt) -> str:
    """Return the journal's key: the bytes and the job.

    It contains all that selects the bytes, because servers give several objects the same identity: nginx
    makes an ETag of date and size, and a redirect may lead to another object. So the first bytes, which are
    fetched in any case, complete the identity. It contains the owner's UID, which no other user of the same
    device knows. Only a digest of the key is used (``journal.Journal``), and it is not stored.
    """
    asked, source, route = attempt.request, attempt.facts, attempt.plan.route
    parts = (
        asked.source,
        *map(selection.digest, (asked.location, *asked.layers)),
        asked.disk,
        source.name,
        source.identity,
        hashlib.sha256(source.head).hexdigest(),
        # Both write the bytes of a raw disk to their offsets.
        str(plan.Route.STREAM if route is plan.Route.EXTENTS else route),
        asked.room.owner,
        asked.target,
        asked.form,
    )
    return repr(parts)


def _kept(noted: journal.Journal, place: Place) -> str:
    moved, skipped = noted.figures
    total = max(moved, (place.total or 0) - skipped)
    return f"{units.format_size(moved)} of {units.format_size(total)} are kept"


# -- the end


def commit(attempt: Attempt, out: targets.Target, size: int) -> None:
    """Verify the source and make the completely written disk of ``size`` bytes usable."""
    survey.check_stated(attempt.facts, size)
    if not size:
        # A device would keep its old content, which would be taken for the disk.
        raise errors.Unsupported(reason="the disk has 0 bytes")
    if not (attempt.comparing and attempt.comparing.again):
        reading.verify_again(attempt)
    attempt.image.verify()
    attempt.accept()
    if attempt.comparing is not None:
        attempt.counts.size = size
        return
    if attempt.counts.receiving is not None:
        attempt.counts.receiving.end(size)
    grow_to = attempt.plan.grow_to
    attempt.counts.size = max(size, grow_to)
    if grow_to > size:
        out.extend(size, grow_to)
    attempt.progress.phase("sync", None)
    attempt.progress.disk(attempt.counts.size)
    _settle(attempt, out, grow_to)
    if attempt.group is None:
        out.commit(grow_to)
    else:
        attempt.group.add(out, grow_to)


def _settle(attempt: Attempt, out: targets.Target, size: int) -> None:
    """Store which checkpoint the disk holds, and what an update has changed."""
    if attempt.plan.compared:
        out.settle(size)
    stage = attempt.request.stage
    if stage.current:
        if not (attempt.request.is_delta or stage.final):
            # A later stage may not know by how much the disk has grown.
            out.zero_rest(attempt.counts.size)
        # The bytes must be on storage before the checkpoint that vouches for them.
        out.flush()
        checkpoint.Checkpoint(current_names(attempt)).write(out.written_path)
    elif attempt.plan.compared and out.has_begun:
        # The bytes must be on storage before the note of the update is removed: a delta would otherwise be
        # applied to a mixture of two disks.
        out.flush()
        checkpoint.forget(out.written_path)


def current_names(attempt: Attempt) -> frozenset[str]:
    """Return all names of the current checkpoint, and for a chain its version, as files can be replaced.

    Of a weak identity only the first bytes count: a refusal is final here, and a copy of the same file may
    have another date. Without an identity there is no version.
    """
    facts = attempt.facts
    names = attempt.image.source.names(attempt.request.stage.current)
    if not (attempt.survey.chain and facts.identity):
        return names
    stated = b"" if facts.weak else facts.identity.encode("utf-8", "surrogateescape")
    return names | {checkpoint.VERSION + hashlib.sha256(stated + facts.head).hexdigest()}


def _begin_update(path: str) -> None:
    """Note that the disk is neither the old nor the new one: no delta may be applied to it."""
    checkpoint.Checkpoint(frozenset(), frozenset({"an update"})).write(path)
