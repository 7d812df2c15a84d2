"""One import: open the source, find the disk in it, survey, plan, run the route, return the result.

``import_disk`` is the whole way, and ``attempts`` its middle, also that of ``verification``. Readers are
stacked in ``routes.reading``, and sinks in ``routes.delivery``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from cdi_worker import errors, lazy, units
from cdi_worker.images import targets
from cdi_worker.images.engine import cancelling
from cdi_worker.images.folder import staging
from cdi_worker.importer import contact, destination, package, survey
from cdi_worker.importer import request as request_module
from cdi_worker.importer import result as result_module
from cdi_worker.importer.plan import Route
from cdi_worker.importer.progress import NullProgress, Progress
from cdi_worker.importer.request import Request
from cdi_worker.importer.result import Result
from cdi_worker.importer.routes.attempt import Attempt, Comparing
from cdi_worker.sources import base

if TYPE_CHECKING:
    from cdi_worker.images.targets import group

log = logging.getLogger(__name__)

#: A route's module is imported when the route is used (start-up time).
ROUTES: lazy.Table[Route, Callable[[Attempt], None]] = lazy.Table(
    {
        Route.BLANK: "cdi_worker.importer.routes.disk:deliver",
        Route.EXTENTS: "cdi_worker.importer.routes.disk:deliver",
        Route.PLACE: "cdi_worker.importer.routes.disk:deliver",
        Route.STREAM: "cdi_worker.importer.routes.disk:deliver",
        Route.CONVERT: "cdi_worker.importer.routes.convert:convert",
        Route.SPOOL: "cdi_worker.importer.routes.convert:spool",
        Route.MERGE: "cdi_worker.importer.routes.convert:merge",
        Route.UPDATE: "cdi_worker.importer.routes.stage:update",
        Route.UNPACK: "cdi_worker.importer.routes.unpack:unpack_archive",
        Route.EXTRACT: "cdi_worker.importer.routes.unpack:extract_disk",
    }
)


def run(
    request: Request,
    progress: Progress | None = None,
    cancel: cancelling.Cancel | cancelling.Event | None = None,
) -> Result:
    """Import a disk. Setting ``cancel`` ends it with ``errors.Cancelled``; a ``threading.Event`` is polled.

    Raises ``errors.Error``; the target then holds no usable disk, and the call may be repeated without
    cleaning up. Only a disk that cannot be read back, or whose report cannot be written, stays.
    """
    progress = progress or NullProgress()
    request_module.check(request)
    if request.existing == "compare":
        raise errors.RequestError("a disk is compared by verify")
    finish = audited(request, progress)
    with contact.begun(request, progress, cancel) as start:
        result = import_disk(start.source(), start.request, Run(progress, start.reads))
    return finish([dataclasses.replace(result, signatures=(*result.signatures, *start.signatures))])[0]


def run_source(
    source: base.Source,
    request: Request,
    progress: Progress,
    reads: cancelling.Reads,
    *,
    accepted: Callable[[], object] = lambda: None,
) -> Result:
    """Import a disk, as ``run`` does, from a source that was created with ``reads`` and is not yet opened.

    ``accepted``: see ``routes.attempt.Attempt``.
    """
    finish = audited(request, progress)
    return finish([import_disk(source, request, Run(progress, reads, accepted))])[0]


def audited(request: Request, progress: Progress) -> Callable[[list[Result]], list[Result]]:
    """Return what completes the results of a request, and ends its progress; see ``audit.Audit``.

    Raises ``errors.RequestError``.
    """
    started = time.monotonic()
    audit: Callable[[list[Result]], list[Result]] = lambda results: results  # noqa: E731
    if request.report or request.read_back or request.write_map:
        # Imported when used (start-up time).
        from cdi_worker.importer import audit as module

        audit = module.Audit(request, progress).finish

    def finish(results: list[Result]) -> list[Result]:
        results = audit(results)
        progress.done()
        return [dataclasses.replace(each, seconds=time.monotonic() - started) for each in results]

    return finish


# -- the way of one import


class Run(NamedTuple):
    """What all attempts share; see ``routes.attempt.Attempt``. A group holds the claim."""

    progress: Progress
    reads: cancelling.Reads
    accepted: Callable[[], object] = lambda: None
    group: group.Group | None = None
    comparing: Comparing | None = None


def import_disk(source: base.Source, request: Request, run: Run) -> Result:
    """Import a disk from a source that is not open yet: claim the target, open the source, and try."""
    started = time.monotonic()
    if not (request.room.mount or request.existing == "remove"):
        # On a volume, an earlier pod may have created a link that leads to other mounts.
        request = dataclasses.replace(request, target=targets.followed(request.target))
    log.info("request source=%r target=%r size=%r", request.source, request.target, request.size)
    group = run.group
    with (
        contextlib.nullcontext(group.claim(request.target))
        if group
        else claimed(request, run.reads) as claim,
        contact.opened(source, request, run.progress, run.reads) as whole,
        reached(),
    ):
        folder = request.room.mount or request.target
        if (request.room.mount or request.is_archive) and pathlib.Path(folder).is_dir():
            # Removed before space is counted: files of an archive that a killed attempt left.
            staging.remove_left_over(folder)
        attempt, facts = attempts(whole, request, claim, run)
        result = result_module.of(attempt, facts, whole, request, time.monotonic() - started)
    _log(result)
    return result


def attempts(
    whole: base.Image, request: Request, claim: targets.Claim, run: Run
) -> tuple[Attempt, base.Facts]:
    """Find the disk in ``whole``, plan, and run the route.

    Returns the attempt that succeeded, and what its source has stated until the end.

    What an attempt has shown is a fact for the next one: that byte ranges are not served, that the first
    bytes were wrong, or that the image must be read twice. Everything is examined again, as what was read
    before may be wrong too.
    """
    two_passes, is_wrong = "", False
    while True:
        plan = None
        try:
            if is_wrong:
                whole, is_wrong = whole.renewed(run.reads), False
            with package.unpacked(whole.anew(), request, run.reads) as (disk, part):
                # Each time: what an attempt has written may be wrong, and is not what the map says.
                asked = _having(part, claim)
                facts = survey.survey(disk, asked, run.reads, two_passes, claim)
                plan = facts.plan(asked)
                attempt = Attempt(asked, claim, disk, facts.content, plan, facts.space, **run._asdict())
                two_passes = _follow(attempt, facts)
                if not two_passes:
                    return attempt, disk.finish()
        except errors.NoRanges as err:
            if plan is not None and plan.route is Route.UPDATE:
                # Changes are not a stream.
                raise
            contact.fall_back(whole.engine, err, run.progress)
            # The first bytes may be those that were wrong. Without a map only they show another object.
            is_wrong = isinstance(err, errors.WrongRanges) and request.blocks is not None
        except errors.MapMismatch as err:
            if not err.is_head:
                raise
            log.warning("the first bytes are fetched again, and the image is examined again: %s", err)
            run.progress.retry(err)
            whole.engine.renewed = is_wrong = True


def _follow(attempt: Attempt, facts: survey.Survey) -> str:
    """Run the route of the plan. Return why the image must be read twice, which the route has shown, or "".

    Raises an error of the plan if it cannot be read twice.
    """
    plan = attempt.plan
    log.info("plan %s", plan.describe())
    if plan.virtual_size is not None:
        attempt.progress.disk(plan.virtual_size)
    try:
        with attempt.scoped() as scoped:
            ROUTES[plan.route](scoped)
    except errors.ScratchRequired as err:
        if not plan.spill:
            raise
        two_passes = str(err.fields["reason"])
        facts.with_two_passes(two_passes).plan(attempt.request)
        return two_passes
    return ""


@contextlib.contextmanager
def claimed(request: Request, cancel: cancelling.Cancel, key: str = "") -> Iterator[targets.Claim]:
    """Yield the claim on the target, held until the end of the block. ``key``: see ``targets.Terms``."""
    is_served = request.form is not None or targets.is_export(request.target)
    connect = destination.connect(request, cancel) if is_served else None
    terms = targets.Terms(request.wait, cancel, request.permissions, key, connect, request.state)
    folder = request.is_archive and not targets.is_block(request.target)
    take = targets.take_folder if folder else targets.take
    with take(request.target, terms) as claim:
        if not folder:
            destination.check_replaceable(claim, request)
        yield claim


def _having(request: Request, claim: targets.Claim) -> Request:
    """Return the request, without the map of a disk that an interrupted run has changed since.

    Raises ``errors.TargetError`` for a target that cannot hold the disk of that map.
    """
    if request.had is None:
        return request
    if targets.is_half_changed(claim):
        log.warning("all of the disk is compared, not its map: an interrupted run has changed it")
        return dataclasses.replace(request, had=None)
    present, size = targets.facts(claim.path, claim), units.whole_sectors(request.had.map.size)
    if present.size < size or (present.kind == "file" and present.size > size):
        reason = f"has {present.size} bytes, and the disk of its map {size} (--have); make a map of this disk"
        raise errors.TargetError(path=claim.path, reason=reason)
    return request


@contextlib.contextmanager
def reached() -> Iterator[None]:
    """Translate ``Unreachable`` into ``Withdrawn``: the contract has another phrase for later failures."""
    try:
        yield
    except errors.Unreachable as err:
        raise errors.Withdrawn(**err.fields) from err


def _log(result: Result) -> None:
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


def load() -> None:
    """Import the modules of the most frequent routes, for servers that wait for a disk."""
    for route in (Route.STREAM, Route.UNPACK):
        _ = ROUTES[route]
    for name in ("cdi_worker.images.disks.following", "cdi_worker.formats.compressed.decompress"):
        lazy.load(name)
