"""Run one import: open the source, survey, plan, run the route, report the result."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from cdi_worker import errors, lazy, sources
from cdi_worker.formats import checksum
from cdi_worker.images import image, targets
from cdi_worker.images.engine import cancelling
from cdi_worker.images.folder import staging
from cdi_worker.importer import package, plan
from cdi_worker.importer import progress as progress_module
from cdi_worker.importer import request as request_module
from cdi_worker.importer import survey as survey_module
from cdi_worker.importer.request import Request
from cdi_worker.importer.result import Result
from cdi_worker.importer.routes.attempt import Attempt
from cdi_worker.sources import base, trust

if TYPE_CHECKING:
    from cdi_worker.formats import signature
    from cdi_worker.images.targets import group as target_group
    from cdi_worker.importer.report import provenance

log = logging.getLogger(__name__)

#: A route's module is imported when the route is used (start-up time).
ROUTES: lazy.Table[plan.Route, Callable[[Attempt], None]] = lazy.Table(
    {
        plan.Route.BLANK: "cdi_worker.importer.routes.deliver:deliver",
        plan.Route.EXTENTS: "cdi_worker.importer.routes.deliver:deliver",
        plan.Route.PLACE: "cdi_worker.importer.routes.deliver:deliver",
        plan.Route.STREAM: "cdi_worker.importer.routes.deliver:deliver",
        plan.Route.CONVERT: "cdi_worker.importer.routes.convert:convert",
        plan.Route.SPOOL: "cdi_worker.importer.routes.convert:spool",
        plan.Route.MERGE: "cdi_worker.importer.routes.convert:merge",
        plan.Route.UPDATE: "cdi_worker.importer.routes.stage:update",
        plan.Route.UNPACK: "cdi_worker.importer.routes.unpack:unpack_archive",
        plan.Route.EXTRACT: "cdi_worker.importer.routes.unpack:extract_disk",
    }
)


#: The routes after which a disk may be read back: not a blank disk, nor a folder.
WRITTEN: Final = frozenset(plan.Route) - {plan.Route.BLANK, plan.Route.UNPACK}


@dataclasses.dataclass(frozen=True, slots=True)
class Inspection:
    """The result of inspecting a source: ``plan``, or ``obstacle`` if an import is not possible."""

    source: str
    survey: survey_module.Survey
    plan: plan.Plan | None
    obstacle: errors.Error | None
    volume_size: int | None
    details: Mapping[str, object]


def run(
    request: Request,
    progress: progress_module.Progress | None = None,
    cancel: cancelling.Cancel | cancelling.Event | None = None,
) -> Result:
    """Import a disk. Setting ``cancel`` ends it with ``errors.Cancelled``; a ``threading.Event`` is polled.

    Raises ``errors.Error``; the target then holds no usable disk, and the call may be repeated without
    cleaning up. Only a disk that cannot be read back, or whose report cannot be written, stays.
    """
    progress = progress or progress_module.NullProgress()
    request_module.check(request)
    audit = _Audit(request)
    kind = sources.find(request.source)
    with (
        errors.masked_causes(),
        cancelling.adapted(cancel) as stop,
        cancelling.Reads(stop) as reads,
        sources.foreign(kind),
    ):
        request, _, signatures = _listed(request, reads, progress)
        done = _run_source(_source(kind, request, reads), request, progress, reads)
    return audit.finish([dataclasses.replace(done, signatures=(*done.signatures, *signatures))])[0]


class _Audit:
    """What follows a finished import: its disks are read back, and a report is written.

    Raises ``errors.RequestError`` if the report cannot be written, before anything is imported.
    """

    def __init__(self, request: Request) -> None:
        self._read_back = request.read_back
        self._report: provenance.Report | None = None
        if request.report:
            # Imported when used (start-up time).
            from cdi_worker.importer.report import provenance

            self._report = provenance.Report(request.report, request)

    def finish(self, results: list[Result]) -> list[Result]:
        """Return the results, with the SHA-256 of each disk that is read back."""
        if self._read_back:
            results = [_with_sha256(each) if each.plan.route in WRITTEN else each for each in results]
        if self._report is not None:
            self._report.write(results)
        return results


def _with_sha256(done: Result) -> Result:
    # Imported when used (start-up time).
    from cdi_worker.images import stored

    digest = stored.sha256(done.target, done.size)
    log.info("read back sha256=%s", digest)
    return dataclasses.replace(done, sha256=digest)


def check_report(request: Request) -> None:
    """Raise ``errors.RequestError`` if the report of an import cannot be written."""
    _Audit(request)


def _source(kind: sources.kind.Kind, request: Request, cancel: cancelling.Cancel) -> base.Source:
    """Return the source of a request, which may consist of several files."""
    first = kind.open(request.location, cancel)
    if not request.layers and not (request.is_delta and request.location.of_files):
        return first
    # Imported when used: few imports need it (start-up time).
    from cdi_worker.sources import chained

    return chained.Files([first, *(kind.open(layer, cancel) for layer in request.layers)])


def run_source(
    unopened: base.Source,
    request: Request,
    progress: progress_module.Progress,
    reads: cancelling.Reads,
    *,
    accepted: Callable[[], object] = lambda: None,
) -> Result:
    """Import a disk, as ``run`` does, from a source that was created with ``reads`` and is not yet opened.

    ``accepted``: see ``routes.attempt.Attempt``.
    """
    audit = _Audit(request)
    return audit.finish([_run_source(unopened, request, progress, reads, accepted=accepted)])[0]


def _run_source(
    unopened: base.Source,
    request: Request,
    progress: progress_module.Progress,
    reads: cancelling.Reads,
    *,
    accepted: Callable[[], object] = lambda: None,
    group: target_group.Group | None = None,
) -> Result:
    """Import a disk. ``accepted``, ``group``: see ``routes.attempt.Attempt``. The group holds the claim."""
    started = time.monotonic()
    if not (request.room.mount or request.existing == "remove"):
        # On a volume, an earlier pod may have created a link that leads to other mounts.
        request = dataclasses.replace(request, target=targets.followed(request.target))
    log.info("request source=%r target=%r size=%r", request.source, request.target, request.size)
    engine = image.Engine(request.fetch, progress.retry)
    with (
        contextlib.nullcontext(group.claim(request.target)) if group else _claimed(request, reads) as held,
        opened(unopened, engine, request, progress, reads) as served,
        _reached(),
    ):
        folder = request.room.mount or request.target
        if (request.room.mount or request.is_archive) and pathlib.Path(folder).is_dir():
            # Removed before space is counted: files of an archive that a killed attempt left.
            staging.remove_left_over(folder)
        done = _attempts(served, engine, request, _Run(held, progress, reads, accepted, group))
        labels, info = done.source.labels(), done.source.info()
    progress.done()
    result = _result(done, time.monotonic() - started, labels=labels, vddk_info=info)
    return _attested(result, done, served, request)


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """What all attempts of a run share: see ``routes.attempt.Attempt``."""

    claim: targets.Claim
    progress: progress_module.Progress
    reads: cancelling.Reads
    accepted: Callable[[], object]
    group: target_group.Group | None


def _attempts(served: base.Source, engine: image.Engine, request: Request, run: _Run) -> Attempt:
    """Find the disk in what is served, plan, and run the route; return the attempt that succeeded.

    What an attempt has found out is a fact for the next one: that byte ranges are not served, or that the
    image must be read twice. Everything is examined again, as what was read before may be wrong too.
    """
    two_passes = ""
    while True:
        chosen: plan.Plan | None = None
        try:
            unpacked = package.unpacked(_images(served, engine), served, request, run.reads)
            with unpacked as (source, images, asked):
                facts = survey_module.survey(source, images, asked, run.reads, two_passes)
                chosen = facts.plan(asked)
                attempt = Attempt(
                    request=asked,
                    claim=run.claim,
                    source=source,
                    images=images,
                    content=facts.content,
                    plan=chosen,
                    space=facts.space,
                    progress=run.progress,
                    reads=run.reads,
                    accepted=run.accepted,
                    group=run.group,
                )
                _follow(attempt)
                return attempt
        except errors.NoRanges as err:
            if chosen is not None and chosen.route is plan.Route.UPDATE:
                # Changes are not a stream.
                raise
            _do_without_ranges(engine, err, run.progress)
        except errors.ScratchRequired as err:
            if chosen is None or not chosen.spill or two_passes:
                raise
            two_passes = str(err.fields["reason"])
            if served.once:
                # It cannot be read again: the plan says what to do instead.
                facts.with_two_passes(two_passes).plan(asked)
                raise


def _follow(attempt: Attempt) -> None:
    """Run the route of the plan."""
    chosen = attempt.plan
    log.info("plan %s", chosen.describe())
    if chosen.virtual_size is not None:
        attempt.progress.disk(chosen.virtual_size)
    with attempt.scoped() as running:
        ROUTES[chosen.route](running)
    attempt.source.finish()


def _images(served: base.Source, engine: image.Engine) -> tuple[base.Image, ...]:
    """Return the files of a source that is open, with nothing known of them but their heads."""
    return tuple(image.Image(each, engine) for each in served.files)


def _do_without_ranges(
    engine: image.Engine, failure: errors.NoRanges, progress: progress_module.Progress
) -> None:
    """Read in order from now on. Raises ``failure`` if ranges were not used."""
    engine.do_without_ranges(failure)
    log.warning("falling back to one ordered stream reason=%s", failure)
    progress.retry(failure)


def _attested(result: Result, done: Attempt, served: base.Source, request: Request) -> Result:
    """Complete the result with the source's name, size, identity and verified digests.

    ``served``: the source, which may be a package with the disk.
    """
    verified = {**done.source.verified, **served.verified}
    # The checksum of a request for a package is that of the whole.
    expected = ",".join(filter(None, (done.request.checksum, done.source.checksum)))
    stated = _stated(expected if done.source is served else request.checksum or expected)
    verified |= stated
    # In this route alone, the bytes that were hashed are those that were written, all of them.
    is_same = (
        done.plan.route is plan.Route.STREAM
        and done.source is served
        and request.checksum is not None
        and not (done.content.compressions or result.resumed or request.is_archive or request.is_delta)
        and result.size == served.size
    )
    digests = dict(each.split(":") for each in stated.get("file", "").split(",") if each)
    return dataclasses.replace(
        result,
        origin=served.name,
        served=served.size,
        identity=served.identity,
        verified=verified,
        signatures=served.signatures,
        sha256=digests.get("sha256", "") if is_same else "",
    )


def _stated(text: str | None) -> dict[str, str]:
    """Return the checksums of the bytes as served, as ``Result.verified`` has them."""
    return {"file": str(checksum.parse(text))} if text else {}


def run_all(
    request: Request,
    progress: progress_module.Progress | None = None,
    cancel: cancelling.Cancel | cancelling.Event | None = None,
) -> list[Result]:
    """Import all disks of an OVA, as ``run`` does, to files in the folder ``request.target``.

    From a stream they are imported in one pass. None is usable before all are verified.
    """
    progress = progress or progress_module.NullProgress()
    request_module.check(request)
    audit = _Audit(request)
    kind = sources.find(request.source)
    with (
        errors.masked_causes(),
        cancelling.adapted(cancel) as stop,
        cancelling.Reads(stop) as reads,
        sources.foreign(kind),
    ):
        request, _, signatures = _listed(request, reads, progress)
        engine = image.Engine(request.fetch, progress.retry)
        with opened(kind.open(request.location, reads), engine, request, progress, reads) as served:
            # What they are in was verified when it was opened.
            each = dataclasses.replace(request, demand=trust.NOTHING)
            try:
                done = _together(image.Image(served, engine), each, progress, reads)
            except errors.NoRanges as err:
                _do_without_ranges(engine, err, progress)
                done = _together(image.Image(served, engine), each, progress, reads)
    progress.done()
    verified = _stated(request.checksum)
    return audit.finish(
        [
            dataclasses.replace(
                done[path],
                origin=served.name,
                served=served.size,
                identity=served.identity,
                verified={**done[path].verified, **verified},
                signatures=(*served.signatures, *signatures),
            )
            for path in sorted(done)
        ]
    )


def _together(
    whole: base.Image,
    request: Request,
    progress: progress_module.Progress,
    reads: cancelling.Reads,
) -> dict[str, Result]:
    """Import all disks of an open OVA, and make them usable together; return the results by path."""
    # Imported when used: few imports are of several disks (start-up time).
    from cdi_worker.images.targets import group as target_group
    from cdi_worker.sources import selection

    done: dict[str, Result] = {}
    key = selection.digest(request.location)[:16]
    with target_group.Group() as group:

        def claim(asked: Request) -> None:
            group.hold(asked.target, _claimed(asked, reads, key))

        def run_disk(disk: base.Source, request: Request) -> None:
            done[request.target] = _run_source(
                disk, request, progress_module.Part(progress), reads, group=group
            )

        package.each(whole, request, reads, claim, run_disk)
        reads.check()
        group.publish()
    return done


def _result(
    done: Attempt, seconds: float, *, labels: Mapping[str, str], vddk_info: Mapping[str, str]
) -> Result:
    """Return the result of a finished attempt, and log it."""
    outcome, changes = done.outcome, done.outcome.changes
    log.info(
        "done route=%s size=%d read=%d resumed=%d refetched=%d seconds=%.1f",
        done.plan.route,
        outcome.size,
        outcome.read,
        outcome.resumed,
        outcome.refetched,
        seconds,
    )
    if changes is not None:
        log.info(
            "updated compared=%d differed=%d written=%d", changes.compared, changes.differed, changes.written
        )
    return Result(
        source=done.source.name,
        target=done.request.target,
        plan=done.plan,
        format=done.content.format,
        compressions=done.content.compressions,
        size=outcome.size,
        read=outcome.read,
        resumed=outcome.resumed,
        refetched=outcome.refetched,
        seconds=seconds,
        preallocated=done.request.preallocates,
        labels=labels,
        vddk_info=vddk_info,
        layers=outcome.layers,
        changes=changes,
    )


def inspect(request: Request, cancel: cancelling.Cancel | cancelling.Event | None = None) -> Inspection:
    """Examine a source and plan its import; an error of the plan becomes ``obstacle``.

    Without a target the plan is that for one with enough space.
    """
    request_module.check(request, needs_target=False)
    kind = sources.find(request.source)
    with errors.masked_causes(), cancelling.adapted(cancel) as stop, sources.foreign(kind):
        asked, listed, _ = _listed(request, stop, progress_module.NullProgress())
        found = _inspect(_source(kind, asked, stop), asked, stop)
        return dataclasses.replace(found, details={**found.details, **listed})


def _listed(
    request: Request, cancel: cancelling.Cancel, progress: progress_module.Progress
) -> tuple[Request, Mapping[str, object], tuple[signature.Signature, ...]]:
    """Look up the checksum file: return the request with its checksum, details for inspect, signatures."""
    if not request.demand.checksum_file:
        return request, {}, ()
    # Imported when used: few imports need it (start-up time).
    from cdi_worker.sources.trust import checksums

    reading = checksums.Reading(cancel, request.connect_patience, progress.retry)
    listed = checksums.look_up(request.demand, sources.find(request.source), request.location, reading)
    request = dataclasses.replace(request, checksum=listed.checksum, demand=request.demand.rest)
    return request, listed.details, listed.signatures


def _inspect(unopened: base.Source, request: Request, cancel: cancelling.Cancel) -> Inspection:
    silent = progress_module.NullProgress()
    engine = image.Engine(request.fetch)
    with opened(unopened, engine, request, silent, cancel) as served:
        try:
            return _inspected(served, engine, request, cancel)
        except errors.NoRanges as err:
            _do_without_ranges(engine, err, silent)
            return _inspected(served, engine, request, cancel)


def _inspected(
    served: base.Source, engine: image.Engine, request: Request, cancel: cancelling.Cancel
) -> Inspection:
    with package.unpacked(_images(served, engine), served, request, cancel) as (source, images, asked):
        facts = survey_module.survey(source, images, asked, cancel)
        chosen, obstacle = None, None
        try:
            chosen = facts.plan(asked)
        except errors.Error as err:
            obstacle = err
        volume = survey_module.volume_size(facts.content, request.room.overhead)
        details = dict(source.describe())
        if facts.content.chain and facts.offer.ranges:
            details["chain"] = survey_module.shares(images, facts.content, request, cancel)
        return Inspection(source.name, facts, chosen, obstacle, volume, details)


@contextlib.contextmanager
def _claimed(request: Request, cancel: cancelling.Cancel, key: str = "") -> Iterator[targets.Claim]:
    """Yield the claim on the target, held until the end of the block. ``key``: see ``targets.Terms``."""
    terms = targets.Terms(request.wait, cancel, request.permissions, key)
    folder = request.is_archive and not targets.is_block(request.target)
    take = targets.take_folder if folder else targets.take
    with take(request.target, terms) as held:
        if not (folder or request.is_delta or request.existing == "remove"):
            targets.check_replaceable(held, force=request.existing in {"replace", "update"})
            if request.existing in {"refuse", "update"} and targets.is_foreign(held):
                _check_signatures(held.path)
        yield held


def _check_signatures(path: str) -> None:
    """Raise ``errors.TargetExists`` if a device belongs to swap, LVM or RAID."""
    # Imported when used: it starts a program (start-up time).
    from cdi_worker.images.tools import wipefs

    if found := wipefs.in_use(path):
        raise errors.TargetExists(path=path, reason=f"holds {', '.join(found)}")


@contextlib.contextmanager
def opened(
    source: base.Source,
    engine: image.Engine,
    request: Request,
    progress: progress_module.Progress,
    cancel: cancelling.Cancel,
) -> Iterator[base.Source]:
    """Yield the source, opened and reached; close it after the block."""
    progress.phase("connect", None)
    try:
        survey_module.contact(source, engine, request, cancel)
        yield source
    finally:
        source.close()


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    """Translate ``Unreachable`` into ``Withdrawn``: the contract has another phrase for later failures."""
    try:
        yield
    except errors.Unreachable as err:
        raise errors.Withdrawn(**err.fields) from err


def load() -> None:
    """Import the modules of the most frequent routes, for servers that wait for a disk."""
    for route in (plan.Route.STREAM, plan.Route.UNPACK):
        _ = ROUTES[route]
    for name in ("cdi_worker.images.disks.following", "cdi_worker.formats.compressed.decompress"):
        lazy.load(name)
