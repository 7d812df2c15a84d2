"""The disk of a plan, and the routes that deliver it: BLANK, STREAM, EXTENTS and PLACE."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

from cdi_worker.formats import views
from cdi_worker.formats.mapped import layout as mapped
from cdi_worker.images import targets
from cdi_worker.images.disks import base, raw
from cdi_worker.images.extents import Extent
from cdi_worker.importer.plan import Route
from cdi_worker.importer.routes import delivery, reading
from cdi_worker.importer.routes.attempt import Attempt
from cdi_worker.scratch import space


def deliver(attempt: Attempt) -> None:
    """Deliver the disk that was planned, and make it usable."""
    request, plan = attempt.request, attempt.plan
    is_exact = request.preallocation or request.is_exact or attempt.comparing
    is_kept = plan.route is Route.BLANK and not is_exact
    if is_kept and targets.facts(request.target, attempt.claim).kind == "block":
        attempt.counts.size = plan.virtual_size or 0
        return
    with contextlib.ExitStack() as stack:
        spill = None
        if plan.spill and request.scratch:
            room = stack.enter_context(space.Scratch(request.scratch, attempt.job))
            spill = stack.enter_context(space.Spill(room.path("spill")))
        make = functools.partial(of, spill=spill)
        place = delivery.to_target(attempt, moved(attempt))
        with delivery.delivered(attempt, make, place) as (out, size):
            delivery.commit(attempt, out, size)


def of(attempt: Attempt, spill: space.Spill | None = None) -> base.Disk:
    """Return the disk of a plan. ``spill``: for what must be kept of a stream beyond memory."""
    plan = attempt.plan
    if plan.route is Route.BLANK:
        return raw.BlankDisk(plan.virtual_size or 0)
    if attempt.survey.chain:
        return _chain(attempt)
    if plan.route is Route.PLACE:
        return _tables(attempt) if plan.random else _following(attempt, spill)
    if not plan.random:
        return _runs(attempt) if plan.route is Route.EXTENTS else stream(attempt)
    read, size = reading.ranges(attempt), _raw_size(attempt)
    if plan.route is Route.EXTENTS:
        return raw.ExtentsDisk(read, size, lambda: extents(attempt))
    return raw.whole(read, size)


def moved(attempt: Attempt) -> int | None:
    """Return the most bytes of the image that are moved for the disk; None if unknown."""
    plan, facts = attempt.plan, attempt.facts
    if plan.route is Route.BLANK:
        return plan.virtual_size
    if attempt.survey.chain:
        return facts.size
    if not plan.random:
        return attempt.image.transferred
    return facts.size if plan.route is Route.PLACE else _raw_size(attempt)


def stream(attempt: Attempt) -> base.Disk:
    """Return the raw disk that the source serves as an ordered stream."""
    size = attempt.facts.size or 0
    if delivery.has_begun(attempt, attempt.request.target, size):
        # The attempt that began it read by ranges, and found no footer.
        return continued(attempt, size)
    opened = functools.partial(reading.plain, attempt)
    return raw.StreamDisk(opened, attempt.scope, footer=not attempt.facts.format)


def continued(attempt: Attempt, size: int) -> base.Disk:
    """Return the ordered stream of ``size`` bytes of which ranges have written a part."""
    opened = functools.partial(reading.plain, attempt, limit=size)
    return raw.StreamDisk(opened, attempt.scope, footer=False, size=size)


def extents(attempt: Attempt) -> Iterator[Extent]:
    """Return the extents of the virtual disk; none if the source does not know them."""
    found = attempt.image.source.extents
    return iter(()) if found is None else found()


def _runs(attempt: Attempt) -> base.Disk:
    keep = attempt.image.source.keep
    return raw.RunsDisk(
        functools.partial(reading.runs, attempt),
        attempt.scope,
        # Only a sender that can skip a part has stated the size of the disk.
        size=attempt.facts.disk_size if keep else None,
        keep=keep,
    )


def _tables(attempt: Attempt) -> base.Disk:
    from cdi_worker.formats.mapped import image
    from cdi_worker.images.disks import tables

    layout, size = _layout(attempt), attempt.facts.size or 0

    def opened(reads: Sequence[views.Read]) -> tables.DiskTables:
        return image.read_image(layout, reads[0], size)

    return tables.MappedDisk(
        [reading.ranges(attempt)], opened, attempt.plan.virtual_size or 0, direct=attempt.request.direct
    )


def _following(attempt: Attempt, spill: space.Spill | None) -> base.Disk:
    from cdi_worker.images.disks import following

    return following.FollowingDisk(
        functools.partial(reading.plain, attempt, whole=False),
        _layout(attempt).follow,
        attempt.plan.virtual_size or 0,
        attempt.scope,
        spill=spill,
        direct=attempt.request.direct,
    )


def _chain(attempt: Attempt) -> base.Disk:
    from cdi_worker.images.disks import chained

    files, is_delta = attempt.survey.chain, attempt.request.is_delta
    names = [file.name for file in files]

    def shown(counts: list[int]) -> None:
        attempt.counts.layers = tuple(zip(names, counts, strict=True))

    return chained.ChainDisk(
        [reading.ranges(attempt, file) for file in attempt.image.files],
        files,
        shown,
        covers_all=not is_delta,
        direct=attempt.request.direct,
    )


def _raw_size(attempt: Attempt) -> int:
    """Return the bytes of the source that are the raw disk, without the footer of a fixed VHD."""
    return (attempt.facts.size or 0) if attempt.survey.raw is None else attempt.survey.raw


def _layout(attempt: Attempt) -> mapped.Layout:
    assert attempt.survey.layout is not None  # noqa: S101  (without one another route is planned)
    return attempt.survey.layout
