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
from cdi_worker.images import targets
from cdi_worker.images.engine import cancelling
from cdi_worker.images.folder import staging
from cdi_worker.importer import engine, package, plan, request
from cdi_worker.importer import progress as progress_module
from cdi_worker.importer import survey as survey_module
from cdi_worker.importer.result import Result
from cdi_worker.importer.routes import job as job_module
from cdi_worker.sources import base, trust

if TYPE_CHECKING:
    from cdi_worker.formats import signature
    from cdi_worker.images.targets import group as target_group
    from cdi_worker.importer.report import provenance

log = logging.getLogger(__name__)

#: A route's module is imported when the route is used (start-up time).
ROUTES: lazy.Table[plan.Route, Callable[[job_module.Job], None]] = lazy.Table(
    {
        plan.Route.BLANK: "cdi_worker.importer.routes.direct:blank",
        plan.Route.EXTENTS: "cdi_worker.importer.routes.direct:extents",
        plan.Route.PLACE: "cdi_worker.importer.routes.place:place_mapped",
        plan.Route.STREAM: "cdi_worker.importer.routes.direct:stream",
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
    wanted: request.Request,
    progress: progress_module.Progress | None = None,
    cancel: cancelling.Cancel | cancelling.Event | None = None,
) -> Result:
    """Import a disk. Setting ``cancel`` ends it with ``errors.Cancelled``; a ``threading.Event`` is polled.

    Raises ``errors.Error``; the target then holds no usable disk, and the call may be repeated without
    cleaning up. Only a disk that cannot be read back, or whose report cannot be written, stays.
    """
    progress = progress or progress_module.NullProgress()
    audit = _Audit(wanted)
    request.check(wanted)
    kind = sources.find(wanted.source)
    with (
        errors.masked_causes(),
        cancelling.adapted(cancel) as stop,
        cancelling.Reads(stop) as reads,
        sources.foreign(kind),
    ):
        wanted, _, signatures = _listed(wanted, reads, progress)
        done = _run_source(_source(kind, wanted, reads), wanted, progress, reads)
    return audit.finish([dataclasses.replace(done, signatures=(*done.signatures, *signatures))])[0]


class _Audit:
    """What follows a finished import: its disks are read back, and a report is written.

    Raises ``errors.RequestError`` if the report cannot be written, before anything is imported.
    """

    def __init__(self, wanted: request.Request) -> None:
        self._read_back = wanted.read_back
        self._report: provenance.Report | None = None
        if wanted.report:
            # Imported when used (start-up time).
            from cdi_worker.importer.report import provenance

            self._report = provenance.Report(wanted.report, wanted)

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


def check_report(wanted: request.Request) -> None:
    """Raise ``errors.RequestError`` if the report of an import cannot be written."""
    _Audit(wanted)


def _source(kind: sources.kind.Kind, wanted: request.Request, cancel: cancelling.Cancel) -> base.Source:
    """Return the source of a request, which may consist of several files."""
    first = kind.open(wanted.location, cancel)
    if not wanted.layers and not (wanted.is_delta and wanted.location.of_files):
        return first
    # Imported when used: few imports need it (start-up time).
    from cdi_worker.sources import chained

    return chained.Files([first, *(kind.open(layer, cancel) for layer in wanted.layers)])


def run_source(
    unopened: base.Source,
    wanted: request.Request,
    progress: progress_module.Progress,
    reads: cancelling.Reads,
    *,
    accepted: Callable[[], object],
) -> Result:
    """Import a disk, as ``run`` does, from a source that was created with ``reads`` and is not yet opened.

    ``accepted``: see ``routes.job.Job``.
    """
    audit = _Audit(wanted)
    return audit.finish([_run_source(unopened, wanted, progress, reads, accepted=accepted)])[0]


def _run_source(
    unopened: base.Source,
    wanted: request.Request,
    progress: progress_module.Progress,
    reads: cancelling.Reads,
    *,
    accepted: Callable[[], object] = lambda: None,
    group: target_group.Group | None = None,
) -> Result:
    """Import a disk. ``accepted``, ``group``: see ``routes.job.Job``. The group holds the claim."""
    started = time.monotonic()
    if not (wanted.room.mount or wanted.existing == "remove"):
        # On a volume, an earlier pod may have created a link that leads to other mounts.
        wanted = dataclasses.replace(wanted, target=targets.followed(wanted.target))
    log.info("request source=%r target=%r size=%r", wanted.source, wanted.target, wanted.size)
    reading = engine.Engine(wanted.fetch, progress.retry)
    opening = opened(unopened, reading, wanted, progress, reads)
    with (
        contextlib.nullcontext(group.claim(wanted.target)) if group else _claimed(wanted, reads) as held,
        opening as served,
        _reached(),
        package.unpacked(served, reading, wanted, reads) as (source, asked),
    ):
        folder = wanted.room.mount or wanted.target
        if (wanted.room.mount or wanted.is_archive) and pathlib.Path(folder).is_dir():
            # Removed before space is counted: files of an archive that a killed attempt left.
            staging.remove_left_over(folder)
        found = survey_module.survey(source, reading, asked, reads)
        ending = _Ending(held, accepted, group)
        job = _run_plan(asked, source, reading, found, progress, ending=ending, reads=reads)
        source.finish()
        labels, info = source.labels(), source.info()
    progress.done()
    done = _result(job, time.monotonic() - started, labels=labels, vddk_info=info)
    return _attested(done, job, served, wanted)


def _attested(done: Result, job: job_module.Job, served: base.Source, wanted: request.Request) -> Result:
    """Complete the result with the source's name, size, identity and verified digests.

    ``served``: the source, which may be a package with the disk.
    """
    verified = {**job.source.verified, **served.verified}
    # The checksum of a request for a package is that of the whole.
    stated = _stated(job.checksum if job.source is served else wanted.checksum or job.checksum)
    verified |= stated
    # In this route alone, the bytes that were hashed are those that were written, all of them.
    is_same = (
        job.plan.route is plan.Route.STREAM
        and job.source is served
        and wanted.checksum is not None
        and not (job.content.compressions or job.resumed or wanted.is_archive or wanted.is_delta)
        and job.size == served.size
    )
    digests = dict(each.split(":") for each in stated.get("file", "").split(",") if each)
    return dataclasses.replace(
        done,
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
    wanted: request.Request,
    progress: progress_module.Progress | None = None,
    cancel: cancelling.Cancel | cancelling.Event | None = None,
) -> list[Result]:
    """Import all disks of an OVA, as ``run`` does, to files in the folder ``wanted.target``.

    From a stream they are imported in one pass. None is usable before all are verified.
    """
    progress = progress or progress_module.NullProgress()
    audit = _Audit(wanted)
    request.check(wanted)
    kind = sources.find(wanted.source)
    with (
        errors.masked_causes(),
        cancelling.adapted(cancel) as stop,
        cancelling.Reads(stop) as reads,
        sources.foreign(kind),
    ):
        wanted, _, signatures = _listed(wanted, reads, progress)
        reading = engine.Engine(wanted.fetch, progress.retry)
        with opened(kind.open(wanted.location, reads), reading, wanted, progress, reads) as served:
            # What they are in was verified when it was opened.
            each = dataclasses.replace(wanted, demand=trust.NOTHING)
            try:
                done = _together(served, each, progress, reads)
            except errors.NoRanges as err:
                reading.do_without_ranges(err)
                log.warning("falling back to one ordered stream reason=%s", err)
                progress.retry(err)
                served.engine = reading
                done = _together(served, each, progress, reads)
    progress.done()
    verified = _stated(wanted.checksum)
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
    served: base.Source,
    wanted: request.Request,
    progress: progress_module.Progress,
    reads: cancelling.Reads,
) -> dict[str, Result]:
    """Import all disks of an open OVA, and make them usable together; return the results by path."""
    # Imported when used: few imports are of several disks (start-up time).
    from cdi_worker.images.targets import group as target_group
    from cdi_worker.sources import selection

    done: dict[str, Result] = {}
    key = selection.digest(wanted.location)[:16]
    with target_group.Group() as group:

        def claim(asked: request.Request) -> None:
            group.hold(asked.target, _claimed(asked, reads, key))

        def run_disk(disk: base.Source, wanted: request.Request) -> None:
            done[wanted.target] = _run_source(
                disk, wanted, progress_module.Part(progress), reads, group=group
            )

        package.each(served, wanted, reads, claim, run_disk)
        reads.check()
        group.publish()
    return done


def _result(
    job: job_module.Job, seconds: float, *, labels: Mapping[str, str], vddk_info: Mapping[str, str]
) -> Result:
    """Return the result of a finished job, and log it."""
    log.info(
        "done route=%s size=%d read=%d resumed=%d refetched=%d seconds=%.1f",
        job.plan.route,
        job.size,
        job.read,
        job.resumed,
        job.refetched,
        seconds,
    )
    if job.changes is not None:
        found = job.changes
        log.info("updated compared=%d differed=%d written=%d", found.compared, found.differed, found.written)
    return Result(
        source=job.source.name,
        target=job.wanted.target,
        plan=job.plan,
        format=job.content.format,
        compressions=job.content.compressions,
        size=job.size,
        read=job.read,
        resumed=job.resumed,
        refetched=job.refetched,
        seconds=seconds,
        preallocated=job.wanted.preallocates,
        labels=labels,
        vddk_info=vddk_info,
        layers=job.layers,
        changes=job.changes,
    )


def inspect(
    wanted: request.Request, cancel: cancelling.Cancel | cancelling.Event | None = None
) -> Inspection:
    """Examine a source and plan its import; an error of the plan becomes ``obstacle``."""
    request.check(wanted)
    kind = sources.find(wanted.source)
    with errors.masked_causes(), cancelling.adapted(cancel) as stop, sources.foreign(kind):
        asked, listed, _ = _listed(wanted, stop, progress_module.NullProgress())
        found = _inspect(_source(kind, asked, stop), asked, stop)
        return dataclasses.replace(found, details={**found.details, **listed})


def _listed(
    wanted: request.Request, cancel: cancelling.Cancel, progress: progress_module.Progress
) -> tuple[request.Request, Mapping[str, object], tuple[signature.Signature, ...]]:
    """Look up the checksum file: return the request with its checksum, details for inspect, signatures."""
    if not wanted.demand.checksum_file:
        return wanted, {}, ()
    # Imported when used: few imports need it (start-up time).
    from cdi_worker.sources.trust import checksums

    reading = checksums.Reading(cancel, wanted.connect_patience, progress.retry)
    listed = checksums.look_up(wanted.demand, sources.find(wanted.source), wanted.location, reading)
    wanted = dataclasses.replace(wanted, checksum=listed.checksum, demand=wanted.demand.rest)
    return wanted, listed.details, listed.signatures


def _inspect(unopened: base.Source, wanted: request.Request, cancel: cancelling.Cancel) -> Inspection:
    silent = progress_module.NullProgress()
    reading = engine.Engine(wanted.fetch, silent.retry)
    with (
        opened(unopened, reading, wanted, silent, cancel) as served,
        package.unpacked(served, reading, wanted, cancel) as (source, asked),
    ):
        found = survey_module.survey(source, reading, asked, cancel)
        made, obstacle = None, None
        try:
            made = found.plan(asked)
        except errors.Error as err:
            obstacle = err
        volume = survey_module.volume_size(found.content, wanted.room.overhead)
        details = dict(source.describe())
        if found.content.chain and found.offer.ranges:
            details["chain"] = survey_module.shares(source, reading, found.content, wanted, cancel)
        return Inspection(source.name, found, made, obstacle, volume, details)


@contextlib.contextmanager
def _claimed(wanted: request.Request, cancel: cancelling.Cancel, key: str = "") -> Iterator[targets.Claim]:
    """Yield the claim on the target, held until the end of the block. ``key``: see ``targets.Terms``."""
    terms = targets.Terms(wanted.wait, cancel, wanted.permissions, key)
    folder = wanted.is_archive and not targets.is_block(wanted.target)
    with targets.take_folder(wanted.target, terms) if folder else targets.take(wanted.target, terms) as held:
        if not (folder or wanted.is_delta or wanted.existing == "remove"):
            targets.check_replaceable(held, force=wanted.existing in {"replace", "update"})
            if wanted.existing in {"refuse", "update"} and targets.is_foreign(held):
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
    reading: engine.Engine,
    wanted: request.Request,
    progress: progress_module.Progress,
    cancel: cancelling.Cancel,
) -> Iterator[base.Source]:
    """Yield the source, opened and reached; close it after the block."""
    progress.phase("connect", None)
    try:
        survey_module.contact(source, reading, wanted, cancel, progress.retry)
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Ending:
    """The arguments of a job for its end: see ``routes.job.Job``."""

    held: targets.Claim
    accepted: Callable[[], object]
    group: target_group.Group | None


def _run_plan(
    wanted: request.Request,
    source: base.Source,
    reading: engine.Engine,
    found: survey_module.Survey,
    progress: progress_module.Progress,
    *,
    ending: _Ending,
    reads: cancelling.Reads,
) -> job_module.Job:
    """Plan and run the route; plan again for an ordered stream if the source does not serve its ranges."""
    while True:
        made = found.plan(wanted)
        log.info("plan %s", made.describe())
        if made.virtual_size is not None:
            progress.disk(made.virtual_size)
        job = job_module.Job(
            wanted=wanted,
            claim=ending.held,
            source=source,
            engine=reading,
            content=found.content,
            plan=made,
            limit=found.space.available,
            thin=found.space.thin,
            progress=progress,
            reads=reads,
            accepted=ending.accepted,
            group=ending.group,
        )
        try:
            with job.attempt():
                if made.relayed:
                    # Imported when used: few imports need it (start-up time).
                    from cdi_worker.importer.routes import relay

                    relay.relay(job, ROUTES[made.route])
                else:
                    ROUTES[made.route](job)
            return job
        except errors.NoRanges as err:
            if made.route is plan.Route.UPDATE:
                # Changes are not a stream.
                raise
            reading.do_without_ranges(err)
            log.warning("falling back to one ordered stream reason=%s", err)
            progress.retry(err)
            # What was read by ranges may be wrong too.
            found = survey_module.survey(source, reading, wanted, reads)


def load() -> None:
    """Import the modules of the most frequent routes, for servers that wait for a disk."""
    for route in (plan.Route.STREAM, plan.Route.PLACE, plan.Route.UNPACK):
        _ = ROUTES[route]
    lazy.load("cdi_worker.formats.compressed.decompress")
