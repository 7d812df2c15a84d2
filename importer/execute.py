"""One import: claim the target, open the source, find the disk, survey, plan, deliver, commit.

``import_disk`` is the whole way, and ``attempts`` its middle, also that of ``verification``. It is one module
because it is one story: what differs between imports is a disk, a target, or a round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import pathlib
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from cdi_worker import errors, units
from cdi_worker.formats import safety
from cdi_worker.images import image as images
from cdi_worker.images import readback, targets
from cdi_worker.images.disks import base as disks
from cdi_worker.images.disks import raw
from cdi_worker.images.engine import cancelling
from cdi_worker.images.folder import staging
from cdi_worker.images.sinks import base as sinks
from cdi_worker.images.sinks import compared, delivery, verified
from cdi_worker.importer import audit, contact, destination, disk, package, reading, stage, survey
from cdi_worker.importer import plan as plans
from cdi_worker.importer import progress as progress_module
from cdi_worker.importer import request as request_module
from cdi_worker.importer import result as result_module
from cdi_worker.importer.attempt import Attempt, Comparing
from cdi_worker.importer.plan import Plan, Route
from cdi_worker.importer.progress import NullProgress, Progress
from cdi_worker.importer.request import Request
from cdi_worker.importer.result import Result
from cdi_worker.importer.survey import Survey
from cdi_worker.scratch import journal, space
from cdi_worker.sources import base
from cdi_worker.sources.trust import Demanded

if TYPE_CHECKING:
    from cdi_worker.images.targets import group

log = logging.getLogger(__name__)

#: For an image that would be read by ranges without its checksum: only they need not be fetched again.
HASHED: Final = "because of the checksum, all of the image is downloaded, and again after an interruption"
#: Scratch may still hold the image of a killed run, and have no room for a second one.
_REMOVED: Final = targets.TargetOptions(existing="remove")


def run(
    request: Request,
    progress: Progress | None = None,
    cancel: cancelling.Cancel | cancelling.Event | None = None,
) -> Result:
    """Import a disk. Setting ``cancel`` ends it with ``errors.Cancelled``; a ``threading.Event`` is polled.

    Raises ``errors.Error``; the target then holds no usable disk, and the call may be repeated without
    cleaning up. Only a disk that cannot be read back stays.
    """
    progress = progress or NullProgress()
    request = request_module.resolved(request)
    started = time.monotonic()
    with contact.begin(request, progress, cancel) as (reads, demanded):
        source = contact.source(request, demanded, reads)
        result = import_disk(source, request, Run(progress, reads, demanded))
    return completed([result], request, progress, started)[0]


def run_source(
    source: base.Source,
    request: Request,
    progress: Progress,
    reads: cancelling.Reads,
    *,
    accepted: Callable[[], object] = lambda: None,
) -> Result:
    """Import a disk, as ``run`` does, from a source that was created with ``reads`` and is not yet opened.

    The request names no link. ``accepted``: see ``attempt.Attempt``.
    """
    started = time.monotonic()
    demanded = Demanded(request.checksum, request.demand.signed_by or "")
    result = import_disk(source, request, Run(progress, reads, demanded, accepted))
    return completed([result], request, progress, started)[0]


def completed(results: list[Result], request: Request, progress: Progress, started: float) -> list[Result]:
    """Read the imported disks back, if that is requested, and end the progress.

    ``started``: when the run began, by ``time.monotonic``.
    """
    if request.read_back:
        results = [audit.read_back(each, request, progress) for each in results]
    progress.done()
    return [each._replace(seconds=time.monotonic() - started) for each in results]


# -- the way of one import


class Run(NamedTuple):
    """What all attempts share; see ``attempt.Attempt``. A group holds the claim.

    ``demanded``: of what is opened, which may be a package with the disk.
    """

    progress: Progress
    reads: cancelling.Reads
    demanded: Demanded
    accepted: Callable[[], object] = lambda: None
    group: group.Group | None = None
    comparing: Comparing | None = None


def import_disk(source: base.Source, request: Request, run: Run) -> Result:
    """Import a disk from a source that is not open yet: claim the target, open the source, and try."""
    started = time.monotonic()
    log.info("request source=%r target=%r size=%r", request.source, request.target, request.size)
    group = run.group
    with (
        contextlib.nullcontext(group.claim(request.target)) if group else claim(request, run.reads) as held,
        contact.open_source(source, request, run.demanded, run.progress, run.reads) as whole,
        translate_unreachable(),
    ):
        folder = request.room.mount or request.target
        if (request.room.mount or request.is_archive) and pathlib.Path(folder).is_dir():
            # Removed before space is counted: files of an archive that a killed attempt left.
            staging.remove_left_over(folder)
        attempt, provenance = attempts(whole, request, held, run)
        result = result_module.of(attempt, provenance, whole, run.demanded, time.monotonic() - started)
    log.info(
        "done route=%s size=%d read=%d resumed=%d refetched=%d seconds=%.1f",
        result.plan.route,
        result.size,
        result.read,
        result.resumed,
        result.refetched,
        result.seconds,
    )
    if (changes := result.changes) is not None:
        log.info(
            "updated compared=%d differed=%d written=%d", changes.compared, changes.differed, changes.written
        )
    return result


@contextlib.contextmanager
def claim(request: Request, cancel: cancelling.Cancel, key: str = "") -> Iterator[targets.Claim]:
    """Claim the target, until the end of the block. ``key``: see ``targets.Terms``."""
    # To read a qcow2 file back, its export is read: what that needs must not be missing after the import.
    is_served = targets.is_export(request.target) or (request.read_back and request.form is not None)
    connect = destination.connect(request, cancel) if is_served else None
    terms = targets.Terms(request.wait, cancel, request.permissions, key, connect)
    folder = request.is_archive and not targets.is_block(request.target)
    with targets.take(request.target, terms, folder=folder) as held:
        if not folder:
            destination.check_replaceable(held, request)
        yield held


@contextlib.contextmanager
def translate_unreachable() -> Iterator[None]:
    """Translate ``Unreachable`` into ``Withdrawn``: the contract has another phrase for later failures."""
    try:
        yield
    except errors.Unreachable as err:
        raise errors.Withdrawn(**err.fields) from err


def attempts(
    whole: base.Image, request: Request, held: targets.Claim, run: Run
) -> tuple[Attempt, base.Provenance]:
    """Find the disk in ``whole``, plan, and deliver the disk.

    Returns the attempt that succeeded, and what its source knows at the end.

    The next attempt knows what a failed one has learned: byte ranges are not served, the image must be read
    twice, or what was resumed was wrong. Everything is examined again, as what was read before may be too.
    """
    two_passes, is_anew = "", False
    while True:
        plan = None
        try:
            with package.open_disk(whole.anew(), request, run.demanded, run.reads) as (image, demanded):
                found = survey.look(image, request, demanded, run.reads, held)
                plan = plans.plan(request, demanded, image.facts, found, two_passes)
                load(plan, found)
                log.info("plan %s", plan.describe())
                is_hashed = plan.route is Route.PLACE or not found.ranges
                if is_hashed and whole.seeks and not (plan.random or plan.compared or found.compressions):
                    # Nobody has to do anything about a server's checksum.
                    log.log(logging.WARNING if run.demanded.checksum else logging.INFO, HASHED)
                if plan.virtual_size is not None:
                    run.progress.disk(plan.virtual_size)
                shared = run._replace(demanded=demanded)._asdict()
                attempt = Attempt(request, claim=held, image=image, survey=found, plan=plan, **shared)
                try:
                    with attempt.scoped() as scoped:
                        deliver(scoped)
                except errors.ScratchRequired as err:
                    if not plan.spill:
                        raise
                    two_passes = str(err.fields["reason"])
                    # Raises what prevents that: this image may be read only once.
                    plans.plan(request, demanded, image.facts, found, two_passes)
                except errors.ChecksumMismatch as err:
                    if is_anew or not attempt.counts.resumed:
                        raise
                    is_anew = True
                    # Controllers take this failure for final, and the bytes may be those of two versions.
                    log.warning("starting over: what was resumed does not have the checksum reason=%s", err)
                else:
                    return attempt, image.finish()
        except errors.Reencoded as err:
            log.warning("reading all again, to compare it with what was delivered reason=%s", err)
            run.progress.retry(err)
        except errors.NoRanges as err:
            if plan is not None and (plan.route is Route.UPDATE or found.chain):
                # Neither changes nor the files of a chain are a stream.
                raise
            contact.fall_back(whole.engine, err, run.progress)


def load(plan: Plan, found: Survey) -> None:
    """Import the modules of a plan.

    Raises ``errors.MissingTool`` or ``errors.MissingExtra`` if a program or a library is missing.
    """
    is_converted = plan.route is Route.SPOOL and (found.layout is None or found.ordered)
    if is_converted or plan.route in {Route.CONVERT, Route.MERGE}:
        from cdi_worker.images.tools import process, qemu_img
        from cdi_worker.importer import qemu  # noqa: F401
        from cdi_worker.sources.nbd import handshake

        process.require(*qemu_img.PROGRAM)
        if plan.route is not Route.MERGE:
            handshake.library()
    if plan.route in {Route.UNPACK, Route.EXTRACT}:
        from cdi_worker.importer import unpack  # noqa: F401


def load_frequent() -> None:
    """Import the modules of the most frequent routes, for servers that wait for a disk."""
    from cdi_worker.formats.compressed import decompress  # noqa: F401
    from cdi_worker.images.disks import following  # noqa: F401

    load(Plan(Route.UNPACK, ""), Survey())


# -- the delivery of one attempt


class Place(NamedTuple):
    """Where a disk is delivered to.

    ``phase``: of the progress, with ``total``, the most bytes of the image that are moved (None: unknown);
    empty: the phase has begun. ``by_disk``: what counts, and ``total``, is the data of the disk instead.
    ``limit``: bytes of the largest disk of unknown size; of its data, if it is ``thin``.
    """

    path: str
    options: targets.TargetOptions
    limit: int
    phase: str = "transfer"
    total: int | None = None
    thin: bool = False
    by_disk: bool = False


def deliver(attempt: Attempt) -> None:
    """Deliver the disk that was planned, and make it usable."""
    request, plan = attempt.request, attempt.plan
    if plan.route is Route.UNPACK:
        from cdi_worker.importer import unpack

        unpack.unpack_archive(attempt)
        return
    is_exact = request.preallocation or request.is_exact or attempt.comparing
    if (
        plan.route is Route.BLANK
        and not is_exact
        and targets.facts(request.target, attempt.claim).kind == "block"
    ):
        attempt.counts.size = plan.virtual_size or 0
        return
    if request.is_delta and not attempt.comparing:
        stage.check(attempt)
    if plan.route is Route.MERGE:
        _merge(attempt)
        return
    options, found = _options(attempt), attempt.survey
    with contextlib.ExitStack() as stack:
        spooled = stack.enter_context(_spooled(attempt)) if plan.route is Route.SPOOL else attempt
        phase = "transfer" if spooled is attempt else "convert"
        make, total = stack.enter_context(disk.planned(spooled, phase))
        if spooled is not attempt:
            # A client may be answered only if nothing is left to refuse.
            attempt.accept()
        phase = "" if spooled.plan.route is Route.CONVERT else phase
        place = Place(request.target, options, found.available, phase, total, found.thin)
        if total is None:
            # The image has no known length. Its disk has one, or at most that of the request.
            place = place._replace(total=plan.virtual_size or request.disk_size, by_disk=True)
        with delivered(spooled, make, place) as (out, size):
            survey.check_stated(attempt.facts, size)
            commit(attempt, out, out.size or size if options.mode == "delta" else size)


def _options(attempt: Attempt) -> targets.TargetOptions:
    """Return the options of the target."""
    asked = attempt.request
    mode: targets.Mode = "new"
    if asked.is_delta or attempt.plan.compared:
        mode = "delta" if asked.is_delta and attempt.comparing is None else "update"
        if attempt.plan.compared and attempt.survey.block:
            # A device has no name that says what it holds: until all is compared, it has no disk.
            mode = "update"
    return targets.TargetOptions(
        mode=mode,
        begun=stage.begin_update,
        preallocate=asked.preallocation,
        direct=asked.direct,
        cancel=attempt.scope,
        claim=attempt.claim,
        sectors=lambda: [each.source.first_sector() for each in attempt.image.files],
        existing=asked.existing if asked.existing in ("refuse", "remove") else "replace",
        permissions=asked.permissions,
        form=asked.form,
    )


@contextlib.contextmanager
def _scratch(attempt: Attempt) -> Iterator[space.Scratch]:
    """Yield scratch space; its files are kept for the next attempt after a failure that they outlive."""
    with space.Scratch(attempt.request.scratch or "", attempt.job, resume=True) as kept:
        try:
            yield kept
        except errors.Error as err:
            # The run that has taken the target over uses the same folder.
            if attempt.outlives(err) or isinstance(err, errors.TargetLost):
                kept.keep()
            raise


def _download(attempt: Attempt, path: str) -> None:
    """Download and decompress the image to ``path`` in scratch, and verify it."""
    size, available = attempt.facts.size or 0, survey.spare(attempt.request) or 0
    is_random = attempt.image.seeks and size and not attempt.survey.compressions

    def make(attempt: Attempt) -> disks.Disk:
        if is_random and attempt.checksums:
            return disk.OrderedDisk(attempt, size, footer=False)
        if is_random:
            return raw.whole(disk.ranges(attempt), size)
        return disk.plain(attempt, path, footer=False, limit=available)

    total = size if is_random else attempt.image.transferred
    try:
        with delivered(attempt, make, Place(path, _REMOVED, available, "spool", total)) as (out, _):
            out.commit()
    except errors.TooLarge as err:
        # The limit here is scratch space, not the target's.
        raise errors.ScratchTooSmall(size=f"more than {available}", available=available) from err
    # Ends the transfer, so that the source's disk is not locked meanwhile.
    attempt.image.verify()


@contextlib.contextmanager
def _spooled(attempt: Attempt) -> Iterator[Attempt]:
    """SPOOL: download the image into scratch; yield the attempt that reads it there, by ranges."""
    from cdi_worker.sources.local import file

    with _scratch(attempt) as kept:
        path = kept.path("image")
        _download(attempt, path)
        engine = images.Engine(attempt.request.fetch)
        source = file.LocalSource(path, attempt.reads, base.Access())
        with base.open_image(source, base.Opening(engine)) as stored:
            stated = attempt.facts
            facts = dataclasses.replace(
                stored.facts, name=stated.name, identity=stated.identity, weak=stated.weak
            )
            image = base.Image(source, facts, engine)
            found = survey.examine([image], attempt.request, Demanded(), attempt.reads)
            if found.format != attempt.survey.format:
                before = attempt.survey.format
                raise errors.SourceChanged(url=stated.name, what="format", before=before, now=found.format)
            read_at = image.at_random(attempt.scope)
            if read_at is not None:
                safety.check_length(found.format, read_at, facts.size or 0)
            # The first bytes may not have shown it.
            plans.check_room(found.virtual_size or 0, attempt.request, attempt.survey)
            is_placed = found.layout is not None and not attempt.survey.ordered
            read = attempt.counts.read
            yield dataclasses.replace(
                attempt,
                image=image,
                survey=dataclasses.replace(
                    attempt.survey, ranges=True, compressions=(), layout=found.layout, head=found.head
                ),
                plan=attempt.plan._replace(
                    route=Route.PLACE if is_placed else Route.CONVERT,
                    random=True,
                    virtual_size=found.virtual_size,
                ),
                progress=progress_module.Local(attempt.progress),
            )
            attempt.counts.read = read


def _merge(attempt: Attempt) -> None:
    """MERGE, beside the others: download a delta into scratch; qemu-img commits it to the disk before it.

    The disk is not usable until the commit has ended.
    """
    from cdi_worker.importer import qemu

    with _scratch(attempt) as kept:
        path = kept.path("delta")
        _download(attempt, path)
        qemu.check_delta(attempt, path)
        attempt.accept()
        attempt.progress.phase("merge", attempt.plan.virtual_size)
        with targets.open(attempt.request.target, None, _options(attempt)) as out:
            stage.begin(attempt, out)
            qemu.merge(attempt, path, out)
            commit(attempt, out, out.size or attempt.plan.virtual_size or 0)


@contextlib.contextmanager
def delivered(attempt: Attempt, make: disk.Make, place: Place) -> Iterator[tuple[targets.Target, int]]:
    """Deliver a disk, in rounds; yield its target, which is not committed yet, and its size in bytes.

    Of an earlier attempt's disk, what is still right is kept. After a retryable failure, also of the block,
    target and journal are kept for the next attempt.
    """
    made, noted, options = make(attempt), None, place.options
    announced = made.size
    if announced and options.mode == "new" and (made.resumes or attempt.continues(place.path)):
        noted = attempt.journal(place.path, announced)
    if noted is not None and noted.tentative and made.resumes:
        # The source now has ranges, with which nothing of the stream would be compared.
        noted.forget()
    resume = noted is not None and noted.covered > 0
    is_ours = noted is not None and noted.was_loaded
    if not is_ours and options.mode == "new" and place.path == attempt.request.target:
        _report_discarded(attempt)
    with (
        targets.open(place.path, announced, options._replace(resume=resume)) as out,
        _keeping(attempt, place, out, noted),
    ):
        if options.mode == "delta":
            stage.begin(attempt, out)
        if noted is not None and noted.covered and made.resumes and attempt.facts.weak:
            _compare_sample(attempt, make, out, noted)
        size, count, before = 0, 0, attempt.counts.resumed
        with contextlib.closing(_rounds(attempt, place, made, out, noted)) as rounds:
            for each in rounds:
                of_image, of_disk = each.meter, disks.DeliveryMeter()
                if place.by_disk:
                    of_image, of_disk = of_disk, of_image
                sink = delivery.DeliverySink(
                    each.into,
                    # The size of others is known, and checked by the target.
                    place.limit if place.thin or not made.repeats else None,
                    thin=place.thin,
                    journals=each.journals,
                    flush=out.flush,
                    data=of_disk.advance,
                    holes=of_disk.skip,
                )
                size = made.deliver(sink, each.missing, of_image._replace(moved=sink.moved))
                sink.note_holes()
                count += sink.delivered
                if place.path == attempt.request.target:
                    attempt.counts.written += sink.written
        if made.resumes:
            count += attempt.counts.resumed - before
        _check_whole(attempt, made, noted, size, count)
        if announced and size < announced and options.mode == "new":
            out.cut(size)
        yield out, size


def _report_discarded(attempt: Attempt) -> None:
    """Report that a partial import of something else on the target is discarded, if there is one."""
    left = targets.partial(attempt.claim)
    if left is not None:
        part = units.format_size(left) if left else "a part"
        what = f"{attempt.claim.path} holds {part} of another source, version or request"
        log.warning("starting over: %s", what)


class Round(NamedTuple):
    """One delivery of the ``missing`` ranges of a disk. ``journals`` note what ``into`` has taken."""

    into: sinks.Sink
    missing: disks.Missing
    meter: disks.DeliveryMeter
    journals: tuple[journal.Journal, ...]


def _rounds(
    attempt: Attempt,
    place: Place,
    made: disks.Disk,
    out: targets.Target,
    noted: journal.Journal | None,
) -> Generator[Round, None, None]:
    """Yield the rounds in which a disk is delivered, and count what is kept of an earlier attempt."""
    counts, progress, missing = attempt.counts, attempt.progress, disks.EVERYTHING
    meter = disks.DeliveryMeter(progress.advance, progress.skip, progress.keep)
    into: sinks.Sink = out
    received: tuple[journal.Journal, ...] = ()
    if place.path == attempt.request.target:
        into, missing = _innermost(attempt, out)
        if attempt.request.read_back:
            counts.received = journal.Journal.in_memory(out.size or place.limit)
            received = (counts.received,)
    covered = 0 if noted is None else noted.covered
    journals = received if noted is None else (noted, *received)
    if noted is not None and made.tentative and not noted.tentative:
        # The tables of a stream may come last. What ranges have noted is certain, and stays noted alone.
        noted.tentative = not covered
        journals = received if covered else journals
    if place.phase and (noted is None or not made.resumes):
        progress.phase(place.phase, place.total)
    if made.keep and not covered:
        made.keep(disks.Stored(out.withheld, out.withheld, out.storage.read))
    if noted is None or not (made.resumes or covered):
        yield Round(into, missing, meter, journals)
    elif made.resumes:
        # What is missing, while the rest is read back; then what storage has lost.
        kept, skipped = noted.counted if covered else (0, 0)
        counted = progress_module.Continued(progress, kept, skipped)
        noted.counting = counted.figures
        if place.phase:
            counted.begin(place.phase, place.total, is_resumed=bool(covered))
        meter = disks.DeliveryMeter(counted.advance, counted.skip, counted.keep)
        if not covered:
            yield Round(into, noted.missing_of, meter, journals)
            return

        def lost(count: int) -> None:
            counted.skip(-count)

        with readback.ReadBack(out.storage, noted, attempt.scope, lost) as reading_back:
            if made.repeats:
                yield Round(into, noted.missing_of, meter, journals)
            refetched = reading_back.wait()
        if refetched:
            log.warning("storage differs from what the last attempt wrote refetched=%d", refetched)
        if made.keep:
            # Read in order: the rest is sent again, perhaps with other bytes.
            start, before = out.withheld, noted.covered
            end = noted.cut_at_gap(start)
            lost(before - noted.covered)
            covered, kept = end - start + refetched, min(end - start, kept) + refetched
            made.keep(disks.Stored(start, end, out.storage.read))
            # These holes are not delivered again: those of the rest are other ones.
            counted.skip(skipped)
        counts.count_kept(covered, kept, refetched)
        if made.keep:
            yield Round(into, noted.missing_of, meter, journals)
        elif refetched:
            # Skipped and kept bytes were counted in the first round.
            yield Round(into, noted.missing_of, disks.DeliveryMeter(counted.advance), journals)
    else:
        # A stream cannot skip what was written: it is compared, and only what differs is written.
        figures = noted.counted
        # What was moved passes again.
        noted.counting = lambda: (max(0, figures[0] - noted.moved_now), figures[1])
        out.storage.drop_cache()
        continuing = compared.ContinuingSink(out.storage, noted, into)
        yield Round(continuing, missing, meter, journals)
        counts.count_kept(covered, figures[0], continuing.differed)
        counts.written -= continuing.spared
        if continuing.differed:
            log.warning("storage differs from the stream rewritten=%d", continuing.differed)


def _innermost(attempt: Attempt, out: targets.Target) -> tuple[sinks.Sink, disks.Missing]:
    """Return the target, or the sink that compares with it first, and which parts of the disk it takes."""
    if attempt.comparing is not None:
        within = attempt.comparing.within
        kind = verified.SummingSink if attempt.comparing.again else verified.ComparingSink
        found = kind(out.storage, out.size or 0, within, attempt.scope, attempt.progress.stored)
        attempt.counts.comparison = found
        return found, disks.EVERYTHING if within is None else functools.partial(verified.parts, within)
    if attempt.plan.compared:
        # Another machine may have written to a shared device, whose pages were kept here.
        out.storage.drop_cache()
        updating = compared.UpdatingSink(out)
        attempt.counts.changes = updating.changes
        return updating, disks.EVERYTHING
    return out, disks.EVERYTHING


def _compare_sample(attempt: Attempt, make: disk.Make, out: targets.Target, noted: journal.Journal) -> None:
    """Compare a sample of the source with what an earlier attempt wrote; forget that if it differs."""
    out.storage.drop_cache()
    stored = compared.SampleSink(out.storage, noted)
    try:
        with attempt.scoped() as sampling:
            sink = delivery.DeliverySink(stored)
            made = make(sampling)
            if made.keep:
                made = raw.whole(disk.ranges(sampling), noted.total)
            made.deliver(sink, noted.sample().missing_of, disks.DeliveryMeter())
    except errors.SourceChanged as err:
        if not stored.differs:
            raise
        log.warning("starting over: the source has changed since the last attempt reason=%s", err)
        # A later attempt draws another sample, which may not show the difference.
        noted.erase()


def _check_whole(
    attempt: Attempt, made: disks.Disk, noted: journal.Journal | None, size: int, count: int
) -> None:
    """Raise ``errors.SourceError`` unless everything was delivered: other parts may hold anything."""
    if noted is not None and size != made.size:
        url = attempt.facts.name
        raise errors.SourceChanged(url=url, what="size", before=noted.total, now=size)
    expected = size if made.covers_all else made.declared
    if attempt.comparing is not None and attempt.comparing.within is not None:
        # The size of the changes in a part of a chain is not known in advance.
        parts = verified.parts(attempt.comparing.within, [(0, size)]) if made.covers_all else ()
        expected = sum(end - start for start, end in parts)
    if count < expected:
        reason = f"{attempt.facts.name}: only {count} of {expected} bytes of the disk were delivered"
        raise errors.SourceError(reason=reason)


@contextlib.contextmanager
def _keeping(
    attempt: Attempt, place: Place, out: targets.Target, noted: journal.Journal | None
) -> Iterator[None]:
    """Keep the target and its journal if the block fails, and what was written stays valid."""
    if noted is None:
        yield
        return
    if out.storage.is_raw:
        noted.store_in(out.storage.readable)
    if not out.resumed:
        noted.forget()
    log.info("resume covered=%d of=%d identity=%r", noted.covered, noted.total, attempt.facts.identity)
    try:
        yield
    except errors.Error as err:
        # A failure to save must not hide the first one; then nothing is kept.
        with contextlib.suppress(errors.TargetError):
            if attempt.outlives(err) and noted.covered:
                noted.save(out.flush)
                out.keep()
                if isinstance(err, errors.Cancelled):
                    moved, skipped = noted.figures
                    total = units.format_size(max(moved, (place.total or 0) - skipped))
                    kept = f"{units.format_size(moved)} of {total} are kept"
                    raise errors.Interrupted(kept=kept) from err
        raise
    if attempt.group is not None and out.is_detached:
        noted.save(out.flush)
        attempt.group.keep(out, attempt.outlives)


def commit(attempt: Attempt, out: targets.Target, size: int) -> None:
    """Verify the source and make the completely written disk of ``size`` bytes usable."""
    counts, progress, comparing = attempt.counts, attempt.progress, attempt.comparing
    if not size:
        # A device would keep its old content, which would be taken for the disk.
        raise errors.Unsupported(reason="the disk has 0 bytes")
    if not (comparing and comparing.again):
        reading.verify_again(attempt)
    attempt.image.verify()
    attempt.accept()
    # As stored: the rest of the last sector is zeros.
    counts.size = units.whole_sectors(size)
    if counts.comparison is not None:
        counts.comparison.finish(size, is_device=out.is_device)
        return
    if counts.received is not None:
        counts.received.end(size)
    grow_to = attempt.plan.grow_to
    if grow_to > size:
        out.extend(size, grow_to)
        counts.size = grow_to
    progress.phase("sync", None)
    progress.disk(counts.size)
    if attempt.plan.compared:
        out.settle(grow_to)
    settle = functools.partial(stage.settle, attempt, out, counts.size)
    if attempt.group is None:
        settle()
        out.commit(grow_to)
    else:
        attempt.group.add(out, grow_to, settle)
