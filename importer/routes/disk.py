"""The disk of a plan, and the routes that deliver it: BLANK, STREAM, EXTENTS and PLACE."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Final

from cdi_worker import lazy
from cdi_worker.images import targets
from cdi_worker.images.disks import base, raw
from cdi_worker.importer.plan import Route
from cdi_worker.importer.routes import delivery, reading
from cdi_worker.importer.routes.attempt import Attempt
from cdi_worker.scratch import space

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cdi_worker.formats import views
    from cdi_worker.formats.mapped import layout as mapped
    from cdi_worker.images.disks import mapped as mapping
    from cdi_worker.images.disks import tables
    from cdi_worker.images.disks.chained import Chain
    from cdi_worker.images.disks.following import Following
    from cdi_worker.images.extents import Extent
    from cdi_worker.sources.trust import maps

#: What only some imports need (start-up time).
TABLES: Final = "cdi_worker.images.disks.tables:Tables"
READ_IMAGE: Final = "cdi_worker.formats.mapped.image:read_image"
CHAIN: Final = "cdi_worker.images.disks.chained:Chain"
FOLLOWING: Final = "cdi_worker.images.disks.following:Following"
MAPPED: Final = "cdi_worker.images.disks.mapped"


def deliver(attempt: Attempt) -> None:
    """Deliver the disk that was planned, and make it usable."""
    request, plan = attempt.request, attempt.plan
    is_exact = request.preallocation or request.is_exact or attempt.comparing
    is_kept = plan.route is Route.BLANK and not is_exact
    if is_kept and targets.facts(request.target, attempt.claim).kind == "block":
        attempt.outcome.size = plan.virtual_size or 0
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
        return raw.Blank(plan.virtual_size or 0)
    if attempt.content.chain:
        return _chain(attempt)
    if (blocks := attempt.request.blocks) is not None:
        return _mapped(attempt, blocks)
    if plan.route is Route.PLACE:
        return _tables(attempt) if plan.random else _following(attempt, spill)
    if not plan.random:
        return _runs(attempt) if plan.route is Route.EXTENTS else stream(attempt)
    read, size = reading.ranges(attempt), _raw_size(attempt)
    if plan.route is Route.EXTENTS:
        return raw.Extents(read, size, lambda: extents(attempt))
    return raw.whole(read, size)


def moved(attempt: Attempt) -> int | None:
    """Return the most bytes of the image that are moved for the disk; None if unknown."""
    plan, facts = attempt.plan, attempt.facts
    if plan.route is Route.BLANK:
        return plan.virtual_size
    if attempt.content.chain:
        return facts.size
    if not plan.random:
        return facts.transferred
    if attempt.request.blocks is not None:
        return _selection(attempt, attempt.request.blocks).data
    return facts.size if plan.route is Route.PLACE else _raw_size(attempt)


def stream(attempt: Attempt) -> base.Disk:
    """Return the raw disk that the source serves as an ordered stream."""
    size = attempt.facts.size or 0
    if delivery.has_begun(attempt, attempt.request.target, size):
        # Ranges were served when it was begun, which have shown that it has no footer.
        return continued(attempt, size)
    opened = functools.partial(reading.plain, attempt)
    return raw.Stream(opened, attempt.scope, footer=not attempt.facts.format)


def continued(attempt: Attempt, size: int) -> base.Disk:
    """Return the ordered stream of ``size`` bytes of which ranges have written a part."""
    opened = functools.partial(reading.plain, attempt, limit=size)
    return raw.Stream(opened, attempt.scope, footer=False, size=size)


def extents(attempt: Attempt) -> Iterator[Extent]:
    """Return the extents of the virtual disk; none if the source does not know them."""
    found = attempt.facts.extents
    return iter(()) if found is None else found()


def _mapped(attempt: Attempt, blocks: maps.Blocks) -> base.Disk:
    module, names = lazy.load(MAPPED), (attempt.facts.name, blocks.name)
    selection = _selection(attempt, blocks)
    disk: base.Disk
    if attempt.plan.random:
        image = attempt.image
        known = None if image.engine.renewed else image.known.has
        disk = module.ByRanges(reading.ranges(attempt), selection, attempt.scope, names, known=known)
    else:
        opened = functools.partial(reading.plain, attempt)
        disk = module.Passing(opened, selection, attempt.scope, names, footer=not attempt.facts.format)
    return disk


def _selection(attempt: Attempt, blocks: maps.Blocks) -> mapping.Selection:
    """Return the parts of a mapped disk to deliver: what differs from the map of the disk that is updated."""
    had = attempt.request.had
    made: mapping.Selection = lazy.load(MAPPED).Selection(blocks.map, had.map if had else None)
    return made


def _runs(attempt: Attempt) -> base.Disk:
    facts = attempt.facts
    return raw.Runs(
        functools.partial(reading.runs, attempt),
        attempt.scope,
        # A sender that is told what is there already has stated what it sends.
        size=facts.disk_size if facts.keep else None,
        keep=facts.keep,
    )


def _tables(attempt: Attempt) -> base.Disk:
    layout, size = _layout(attempt), attempt.facts.size or 0

    def opened(reads: Sequence[views.Read]) -> tables.Image:
        image: tables.Image = lazy.load(READ_IMAGE)(layout, reads[0], size)
        return image

    tables_of: type[tables.Tables] = lazy.load(TABLES)
    return tables_of(
        [reading.ranges(attempt)], opened, attempt.plan.virtual_size or 0, direct=attempt.request.direct
    )


def _following(attempt: Attempt, spill: space.Spill | None) -> base.Disk:
    following: type[Following] = lazy.load(FOLLOWING)
    return following(
        functools.partial(reading.plain, attempt, whole=False),
        _layout(attempt).follow,
        attempt.plan.virtual_size or 0,
        attempt.scope,
        spill=spill,
        direct=attempt.request.direct,
    )


def _chain(attempt: Attempt) -> base.Disk:
    files, is_delta = attempt.content.chain, attempt.request.is_delta
    names = [file.name for file in files]

    def shown(counts: list[int]) -> None:
        attempt.outcome.layers = tuple(zip(names, counts, strict=True))

    chain: type[Chain] = lazy.load(CHAIN)
    return chain(
        [reading.ranges(attempt, file) for file in attempt.image.files],
        files,
        shown,
        covers_all=not is_delta,
        direct=attempt.request.direct,
    )


def _raw_size(attempt: Attempt) -> int:
    """Return the bytes of the source that are the raw disk, without the footer of a fixed VHD."""
    return (attempt.facts.size or 0) if attempt.content.raw is None else attempt.content.raw


def _layout(attempt: Attempt) -> mapped.Layout:
    assert attempt.content.layout is not None  # noqa: S101  (without one another route is planned)
    return attempt.content.layout
