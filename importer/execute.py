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

from cdi_worker import errors
from cdi_worker.images import targets
from cdi_worker.images.engine import cancelling
from cdi_worker.images.folder import staging
from cdi_worker.importer import audit, contact, destination, package, survey
from cdi_worker.importer import plan as plans
from cdi_worker.importer import request as request_module
from cdi_worker.importer import result as result_module
from cdi_worker.importer.plan import Plan, Route
from cdi_worker.importer.progress import NullProgress, Progress
from cdi_worker.importer.request import Request
from cdi_worker.importer.result import Result
from cdi_worker.importer.routes.attempt import Attempt, Comparing
from cdi_worker.sources import base
from cdi_worker.sources.trust import Demanded

if TYPE_CHECKING:
    from cdi_worker.images.targets import group

log = logging.getLogger(__name__)


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
    with contact.begin(request, cancel) as reads:
        demanded = contact.look_up(request, progress, reads)
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

    The request names no link. ``accepted``: see ``routes.attempt.Attempt``.
    """
    started = time.monotonic()
    result = import_disk(
        source,
        request,
        Run(progress, reads, Demanded(request.checksum, request.demand.signed_by or ""), accepted),
    )
    return completed([result], request, progress, started)[0]


def completed(results: list[Result], request: Request, progress: Progress, started: float) -> list[Result]:
    """Read the imported disks back, if that is requested, and end the progress.

    ``started``: when the run began, by ``time.monotonic``.
    """
    if request.read_back:
        results = [audit.read_back(each, request, progress) for each in results]
    progress.done()
    return [dataclasses.replace(each, seconds=time.monotonic() - started) for each in results]


# -- the way of one import


class Run(NamedTuple):
    """What all attempts share; see ``routes.attempt.Attempt``. A group holds the claim.

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
    _log(result)
    return result


def attempts(
    whole: base.Image, request: Request, held: targets.Claim, run: Run
) -> tuple[Attempt, base.Provenance]:
    """Find the disk in ``whole``, plan, and run the route.

    Returns the attempt that succeeded, and what its source knows at the end.

    The next attempt knows what a failed one has learned: byte ranges are not served, or the image must be
    read twice. Everything is examined again, as what was read before may be wrong too.
    """
    two_passes = ""
    while True:
        plan = None
        try:
            with package.open_disk(whole.anew(), request, run.demanded, run.reads) as (disk, demanded):
                found = survey.look(disk, request, demanded, run.reads, held)
                plan = plans.plan(request, demanded, disk.facts, found, two_passes)
                route = route_of(plan, found.compressions)
                shared = run._replace(demanded=demanded)._asdict()
                attempt = Attempt(request, claim=held, image=disk, survey=found, plan=plan, **shared)
                two_passes = _follow(route, attempt)
                if not two_passes:
                    return attempt, disk.finish()
        except errors.NoRanges as err:
            if plan is not None and (plan.route is Route.UPDATE or found.chain):
                # Neither changes nor the files of a chain are a stream.
                raise
            contact.fall_back(whole.engine, err, run.progress)


def route_of(plan: Plan, compressions: tuple[str, ...] = ()) -> Callable[[Attempt], None]:
    """Import the modules of a plan, and return the function that runs its route.

    Raises ``errors.MissingTool`` if one of its programs is missing, before a byte is fetched.
    """
    if "xz" in compressions:
        from cdi_worker.images.tools import process, xz

        process.require(*xz.PROGRAM)
    if plan.route in {Route.CONVERT, Route.SPOOL, Route.MERGE}:
        from cdi_worker.images.tools import process, qemu_img
        from cdi_worker.importer.routes import convert

        process.require(*qemu_img.PROGRAM)
        return {Route.CONVERT: convert.convert, Route.SPOOL: convert.spool}.get(plan.route, convert.merge)
    if plan.route in {Route.UNPACK, Route.EXTRACT}:
        from cdi_worker.importer.routes import unpack

        return unpack.unpack_archive if plan.route is Route.UNPACK else unpack.extract_disk
    if plan.route is Route.UPDATE:
        from cdi_worker.importer.routes import stage

        return stage.update
    from cdi_worker.importer.routes import disk

    return disk.deliver


def _follow(route: Callable[[Attempt], None], attempt: Attempt) -> str:
    """Run the route of the plan. Return why the image must be read twice, which the route has shown, or "".

    Raises an error of the plan if it cannot be read twice.
    """
    plan = attempt.plan
    log.info("plan %s", plan.describe())
    if plan.virtual_size is not None:
        attempt.progress.disk(plan.virtual_size)
    try:
        with attempt.scoped() as scoped:
            route(scoped)
    except errors.ScratchRequired as err:
        if not plan.spill:
            raise
        two_passes = str(err.fields["reason"])
        plans.plan(attempt.request, attempt.demanded, attempt.facts, attempt.survey, two_passes)
        return two_passes
    return ""


@contextlib.contextmanager
def claim(request: Request, cancel: cancelling.Cancel, key: str = "") -> Iterator[targets.Claim]:
    """Claim the target, until the end of the block. ``key``: see ``targets.Terms``."""
    is_served = request.form is not None or targets.is_export(request.target)
    connect = destination.connect(request, cancel) if is_served else None
    terms = targets.Terms(request.wait, cancel, request.permissions, key, connect)
    folder = request.is_archive and not targets.is_block(request.target)
    take = targets.take_folder if folder else targets.take
    with take(request.target, terms) as held:
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
    from cdi_worker.formats.compressed import decompress  # noqa: F401
    from cdi_worker.images.disks import following  # noqa: F401

    for route in (Route.STREAM, Route.UNPACK):
        route_of(Plan(route, ""))
