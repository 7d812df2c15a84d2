"""Deliver a disk to a target: the stack of sinks, what an earlier attempt has written, and the commit."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

from cdi_worker import errors, lazy, units
from cdi_worker.images import targets
from cdi_worker.images.disks import base as disks
from cdi_worker.images.sinks import base as sinks
from cdi_worker.images.sinks import checks, journaled
from cdi_worker.importer import plan, progress, survey
from cdi_worker.importer.routes import reading
from cdi_worker.importer.routes.attempt import Attempt, Comparing
from cdi_worker.scratch import journal

log = logging.getLogger(__name__)

#: What few imports need (start-up time): sinks that compare, the thread that reads back, checkpoints.
COMPARED: Final = "cdi_worker.images.sinks.compared"
VERIFIED: Final = "cdi_worker.images.sinks.verified"
MAPPING: Final = "cdi_worker.images.sinks.mapping:Mapping"
MAP_FILE: Final = "cdi_worker.importer.report.file:File"
WRITE_MAP: Final = "cdi_worker.formats.bmap:write"
OLD_MAP: Final = "cdi_worker.images.sinks.oldmap"
READBACK: Final = "cdi_worker.images.readback"
CHECKPOINT: Final = "cdi_worker.images.targets.checkpoint"
SELECTION: Final = "cdi_worker.sources.selection"

#: Failures that say nothing against the bytes that were written.
_NO_VERDICT: Final = errors.TargetError, errors.Unreachable, errors.Withdrawn

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
    options: targets.Options
    limit: int
    phase: str = "transfer"
    total: int | None = None
    thin: bool = False
    shortest_zero: int = checks.SHORTEST_ZERO
    begin: Callable[[targets.Target], object] = lambda _: None


def to_target(attempt: Attempt, total: int | None) -> Place:
    """Return the place of the disk itself."""
    space = attempt.space
    return Place(attempt.request.target, options(attempt), space.available, total=total, thin=space.thin)


def options(attempt: Attempt) -> targets.Options:
    """Return the options of the target."""
    asked = attempt.request
    return targets.Options(
        mode="compare" if attempt.comparing else "refresh" if attempt.plan.compared else "new",
        begun=_begin_update,
        preallocate=asked.preallocation,
        direct=asked.direct,
        cancel=attempt.scope,
        claim=attempt.claim,
        existing=asked.existing if asked.existing in ("refuse", "remove") else "replace",
        permissions=asked.permissions,
        form=asked.form,
    )


def meter_of(counted: progress.Progress, moved: Callable[[int], None] = lambda _: None) -> disks.Meter:
    """Return what counts the bytes of a disk in the progress."""
    return disks.Meter(counted.advance, counted.skip, counted.keep, moved)


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
    module, comparing = lazy.load(VERIFIED), attempt.comparing or Comparing()
    within, sample = comparing.within, attempt.request.sample
    if within is None and sample is not None:
        within = sample.within(disk.size, out)
    kind = module.Summing if comparing.again else module.Comparing
    found = kind(out.storage, out.size or 0, within, attempt.scope, attempt.progress.stored)
    _begin_phase(attempt, place)
    only: disks.Missing = disks.EVERYTHING if within is None else functools.partial(module.parts, within)
    size, count = _pour(disk, found, place, meter_of(attempt.progress), only)
    expected = size if disk.covers_all else disk.declared
    if disk.repeats and within is not None:
        # A chain with changes, and a part of it, is compared without knowing how much that is.
        expected = sum(end - start for start, end in only([(0, size)])) if disk.covers_all else 0
    _check_whole(attempt, expected, count)
    found.finish(size, is_device=getattr(out, "is_device", False))
    attempt.outcome.comparison = found
    return size


def _begin_phase(attempt: Attempt, place: Place) -> None:
    if place.phase:
        attempt.progress.phase(place.phase, place.total)


def _pour(
    disk: disks.Disk,
    last: sinks.Sink,
    place: Place,
    meter: disks.Meter,
    missing: disks.Missing = disks.EVERYTHING,
) -> tuple[int, int]:
    """Deliver a disk through the stack of sinks above ``last``; return its size, and the bytes delivered."""
    counting = checks.Counting(last)
    sink: sinks.Sink = checks.Detecting(counting, place.shortest_zero)
    if place.thin:
        sink = checks.Detecting(checks.Thin(counting, place.limit), place.shortest_zero)
    elif not disk.repeats:
        sink = checks.Limited(sink, place.limit)
    size = disk.deliver(sink, missing, meter)
    return size, counting.delivered


def _last(attempt: Attempt, place: Place, out: targets.Target) -> sinks.Sink:
    """Return what is below the stack: the target, or what compares with it first."""
    found: sinks.Sink = out
    if place.options.mode == "refresh" or out.is_overlay:
        updating = lazy.load(COMPARED).Updating(out)
        attempt.outcome.changes = updating.changes
        found = updating
        if (had := attempt.request.had) is not None:
            module = lazy.load(OLD_MAP)
            module.check(out.storage, had.map)
            if attempt.request.blocks is None:
                # By two maps, only what differs is delivered.
                attempt.outcome.old_map = found = module.OldMap(updating, had.map)
    if attempt.request.read_back and place.path == attempt.request.target:
        attempt.outcome.receiving = journaled.Receiving(found, out.size or place.limit)
        found = attempt.outcome.receiving
    if attempt.request.write_map and place.path == attempt.request.target:
        attempt.outcome.mapping = found = out.owned.enter_context(lazy.load(MAPPING)(found))
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
    """Deliver what is missing, while what is noted is read back; deliver again what differs.

    If the identity of the source is weak, a sample is compared first, and nothing is resumed if that differs.
    Returns the bytes that were delivered or resumed.
    """
    outcome, (out, noted) = attempt.outcome, opened
    if noted.covered and attempt.facts.weak:
        _compare_sample(attempt, make, place, opened)
    outcome.resumed = noted.covered
    outcome.kept, skipped = noted.counted if outcome.resumed else (0, 0)
    counted = progress.Continued(attempt.progress, outcome.kept, skipped)
    noted.counting = counted.figures
    counted.begin(place.phase, place.total or 0, is_resumed=bool(outcome.resumed))
    sink = journaled.Journaled(_last(attempt, place, out), noted, out.flush)
    disk.stored, disk.again = out.storage.read, functools.partial(_forget, attempt, sink, out)
    meter = meter_of(counted, sink.moved)
    if not outcome.resumed:
        return _pour(disk, sink, place, meter, noted.missing_of)[1]
    readback = lazy.load(READBACK)

    def missing(count: int) -> None:
        counted.skip(-count)

    with readback.ReadBack(out.storage, noted, attempt.scope, missing) as reading_back:
        _, count = _pour(disk, sink, place, meter, noted.missing_of)
        outcome.refetched = reading_back.wait()
    outcome.resumed -= outcome.refetched
    outcome.kept = max(0, outcome.kept - outcome.refetched)
    if outcome.refetched:
        log.warning("storage differs from what the last attempt wrote refetched=%d", outcome.refetched)
        # What is skipped and kept has been counted before.
        count += _pour(disk, sink, place, disks.Meter(counted.advance, moved=sink.moved), noted.missing_of)[1]
    return count + outcome.resumed


def _forget(attempt: Attempt, sink: journaled.Journaled, out: targets.Target, start: int, end: int) -> None:
    """Forget a part that was wrong, and write what is left of its zeros: not later, over what is right."""
    for each in filter(None, (sink, attempt.outcome.receiving)):
        each.forget(start, end)
    out.flush()


def _compare_sample(attempt: Attempt, make: Make, place: Place, opened: _Opened) -> None:
    """Compare a sample of the source with what an earlier attempt wrote; forget that if it differs."""
    if attempt.request.blocks is not None:
        # What is kept was verified by the same map.
        return
    out, noted = opened
    out.storage.drop_cache()
    stored = lazy.load(COMPARED).Sampled(out.storage, noted)
    try:
        with attempt.scoped() as sampling:
            _pour(make(sampling), stored, place, disks.Meter(), noted.sample().missing_of)
    except errors.SourceChanged as err:
        if not stored.differs:
            raise
        log.warning("starting over: the source has changed since the last attempt reason=%s", err)
        # Another sample, after a kill, may not show it.
        noted.erase()


def _behind_kept(attempt: Attempt, disk: disks.Disk, place: Place, opened: _Opened) -> int:
    """Read back what is there, and have a sender leave that out; return the bytes delivered or kept."""
    outcome, (out, noted) = attempt.outcome, opened
    _begin_phase(attempt, place)
    start = end = out.withheld
    if noted.covered:
        with lazy.load(READBACK).ReadBack(out.storage, noted, attempt.scope) as reading_back:
            outcome.refetched = reading_back.wait()
        end = next((first for first, _ in noted.missing(start, noted.total)), noted.total)
        # The rest is sent again, and its digests may change.
        noted.discard(end, noted.total)
    outcome.resumed = end - start
    outcome.kept = min(outcome.resumed, noted.counted[0])
    assert disk.keep is not None  # noqa: S101  (see ``delivered``)
    disk.keep(start, end)
    sink = journaled.Journaled(_last(attempt, place, out), noted, out.flush)
    size, count = _pour(disk, sink, place, meter_of(attempt.progress, sink.moved))
    _check_size(attempt, noted.total, size)
    return count + outcome.resumed


def _over_written(attempt: Attempt, disk: disks.Disk, place: Place, opened: _Opened) -> int:
    """Deliver a whole disk over what ranges have written, and write only what differs from it."""
    outcome, (out, noted) = attempt.outcome, opened
    _begin_phase(attempt, place)
    covered, figures = noted.covered, noted.counted
    noted.counting = lambda: figures
    sink = _last(attempt, place, out)
    meter = meter_of(attempt.progress)
    if not disk.tentative:
        sink = noting = journaled.Journaled(sink, noted, out.flush)
        meter = meter_of(attempt.progress, noting.moved)
    out.storage.drop_cache()
    continuing = lazy.load(COMPARED).Continuing(out.storage, noted, sink)
    size, count = _pour(disk, continuing, place, meter)
    _check_size(attempt, noted.total, size)
    outcome.refetched = continuing.differed
    outcome.resumed = covered - outcome.refetched
    outcome.kept = max(0, figures[0] - outcome.refetched)
    if outcome.refetched:
        log.warning("storage differs from the stream rewritten=%d", outcome.refetched)
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
    slots = targets.journal_slots(place.path, size, asked.claim, asked.form) if has_journal else None
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
                elif slots is not None and slots.is_apart and not isinstance(err, _NO_VERDICT):
                    # The bytes were wrong, and what removes them leaves a file of its own as it is.
                    noted.erase()
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
    is_kept = source.identity and not (source.weak or source.once or attempt.content.compressions)
    if not is_kept or not size or attempt.plan.compared or attempt.group is not None:
        return False
    if path == targets.STDOUT:
        return False
    asked = options(attempt) if path == attempt.request.target else targets.Options()
    slots = targets.journal_slots(path, size, asked.claim, asked.form)
    return slots is not None and journal.Journal(slots, _key(attempt), size).covered > 0


def _key(attempt: Attempt) -> str:
    """Return the journal's key: the bytes and the job.

    It contains all that selects the bytes, because servers give several objects the same identity: nginx
    makes an ETag of date and size, and a redirect may lead to another object. So the first bytes, which are
    fetched in any case, complete the identity. It contains the owner's UID, which no other user of the same
    device knows. Only a digest of the key is used (``journal.Journal``), and it is not stored.
    """
    selection = lazy.load(SELECTION)
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
        *([asked.blocks.digest] if asked.blocks else ()),
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
        # As for an image: what is on a device would stay there, and be taken for the disk.
        raise errors.Unsupported(reason="the disk has 0 bytes")
    is_partial = attempt.comparing and (attempt.comparing.within or attempt.request.sample)
    if not is_partial:
        reading.verify_again(attempt)
    attempt.image.verify()
    attempt.accept()
    if attempt.comparing is not None:
        attempt.outcome.size = size
        return
    if attempt.outcome.old_map is not None:
        attempt.outcome.old_map.end()
    if attempt.outcome.receiving is not None:
        attempt.outcome.receiving.end(size)
    grow_to = attempt.plan.grow_to
    attempt.outcome.size = max(size, grow_to)
    if grow_to > size:
        out.extend(size, grow_to)
    if attempt.request.write_map:
        _map(attempt, out, size)
    attempt.progress.phase("sync", None)
    attempt.progress.disk(attempt.outcome.size)
    _settle(attempt, out, grow_to)
    if attempt.group is None:
        out.commit(grow_to)
    else:
        attempt.group.add(out, grow_to)


def _map(attempt: Attempt, out: targets.Target, end: int) -> None:
    """Complete the map of a disk delivered to ``end``, by reading what has not passed here."""
    size = units.whole_sectors(attempt.outcome.size)
    with attempt.outcome.mapping or lazy.load(MAPPING)(out) as mapping:
        if missing := mapping.missing(end, size):
            out.flush()
            out.storage.drop_cache()
            attempt.progress.phase("readback", sum(stop - start for start, stop in missing))

            def advance(count: int) -> None:
                attempt.scope.check()
                attempt.progress.advance(count)

            for start, stop in missing:
                mapping.read(out.storage, start, stop, advance)
        attempt.outcome.map = made = mapping.map(size)
    if attempt.request.maps_first:
        written = lazy.load(MAP_FILE)(attempt.request.write_map, "--write-map", attempt.request.target)
        written.write(lazy.load(WRITE_MAP)(made), "write the map")


def _settle(attempt: Attempt, out: targets.Target, size: int) -> None:
    """Store which checkpoint the disk holds, and what an update has changed."""
    if attempt.plan.compared:
        out.settle(size)
    stage = attempt.request.stage
    if stage.current:
        if not (attempt.request.is_delta or stage.final):
            # A later stage may not know by how much the disk has grown.
            out.zero_rest(attempt.outcome.size)
        # The bytes must not be lost after the checkpoint is stored.
        out.flush()
        lazy.load(CHECKPOINT).Checkpoint(current_names(attempt)).write(out.written_path)
    elif attempt.plan.compared and out.has_begun:
        # Nor may the note be lost before them: a delta would take a half of each disk for one.
        out.flush()
        lazy.load(CHECKPOINT).forget(out.written_path)


def current_names(attempt: Attempt) -> frozenset[str]:
    """Return all names of the current checkpoint, with the version of a chain: files can be replaced.

    Of a weak identity only the first bytes count: a refusal is final here, and a copy of the same file may
    have another date. Without an identity there is no version.
    """
    facts = attempt.facts
    names = facts.names(attempt.request.stage.current)
    if not (attempt.content.chain and facts.identity):
        return names
    stated = b"" if facts.weak else facts.identity.encode("utf-8", "surrogateescape")
    return names | {lazy.load(CHECKPOINT).VERSION + hashlib.sha256(stated + facts.head).hexdigest()}


def _begin_update(path: str) -> None:
    """Note that the disk is neither the old nor the new one: no delta may be applied to it."""
    lazy.load(CHECKPOINT).Checkpoint(frozenset(), frozenset({"an update"})).write(path)
