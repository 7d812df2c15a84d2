"""The disk of a plan: how its ranges are found and read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from cdi_worker.images.disks import base, raw
from cdi_worker.images.engine import fetch, retry
from cdi_worker.images.image import Image
from cdi_worker.importer import reading
from cdi_worker.importer.attempt import Attempt
from cdi_worker.importer.plan import Route
from cdi_worker.scratch import space
from cdi_worker.sources import extents

if TYPE_CHECKING:
    from cdi_worker.formats import views
    from cdi_worker.formats.mapped import layout as mapped

#: Makes the disk to deliver; again for a sample, whose failure must not end the reads of the attempt.
Make: TypeAlias = Callable[[Attempt], base.Disk]


@contextlib.contextmanager
def planned(attempt: Attempt, phase: str) -> Iterator[tuple[Make, int | None]]:
    """Yield what makes the disk of a plan, and the most bytes of the image that are moved for it.

    None: unknown. CONVERT, which reads before its disk is delivered, begins the ``phase`` of the progress.
    """
    plan, request, size = attempt.plan, attempt.request, attempt.facts.size
    with contextlib.ExitStack() as stack:
        if plan.route is Route.BLANK:
            yield lambda _: raw.BlankDisk(plan.virtual_size or 0), plan.virtual_size
        elif plan.route is Route.CONVERT:
            from cdi_worker.importer import qemu

            disk = stack.enter_context(qemu.converted(attempt, phase))
            yield disk, size
        elif plan.route is Route.EXTRACT:
            from cdi_worker.importer import unpack

            yield unpack.ExtractedDisk, attempt.image.transferred
        elif attempt.survey.chain:
            yield _chain, size
        elif plan.route is Route.UPDATE:
            yield _changed(attempt)
        elif plan.route is Route.PLACE and plan.random:
            yield _tables, size
        elif plan.route is Route.PLACE:
            spill = None
            if plan.spill and request.scratch:
                room = stack.enter_context(space.Scratch(request.scratch, attempt.job))
                spill = stack.enter_context(space.Spill(room.path("spill")))
            yield functools.partial(_following, spill=spill), attempt.image.transferred
        elif plan.random:
            # Without the footer of a fixed VHD.
            length = (size or 0) if attempt.survey.raw is None else attempt.survey.raw
            listed = attempt.image.source.extents if plan.route is Route.EXTENTS else None
            if listed is None:
                yield lambda now: raw.whole(ranges(now), length), length
            else:
                yield lambda now: raw.ExtentsDisk(ranges(now), length, listed), length
        elif plan.route is Route.EXTENTS:
            yield _runs, attempt.image.transferred
        else:
            yield _stream, attempt.image.transferred


def ranges(attempt: Attempt, file: Image | None = None) -> raw.OpenRanges:
    """Return what opens the image, or a file of a chain, by ranges."""

    def opened(advance: base.Advance) -> fetch.Fetcher:
        return (file or attempt.image).fetcher(attempt.scope, reading.counted(attempt, advance))

    return opened


class OrderedDisk(raw.StreamDisk):
    """The first ``size`` bytes of an image that is read in order, by ranges, for its checksum.

    It continues behind what the target holds. That is hashed, too: it is read from the target.
    """

    def __init__(self, attempt: Attempt, size: int, *, footer: bool) -> None:
        super().__init__(functools.partial(reading.plain, attempt), attempt.scope, footer=footer, size=size)
        self._attempt = attempt
        self.keep = self._keep

    def _keep(self, stored: base.Stored) -> None:
        if stored.start < stored.end:
            self._opened = functools.partial(reading.plain, self._attempt, stored=stored)


def _stream(attempt: Attempt) -> base.Disk:
    """Return the raw disk that the source serves as an ordered stream."""
    found, image, is_declared = attempt.survey, attempt.image, bool(attempt.facts.format)
    if image.seeks and not (found.compressions or found.ordered or image.source.wire):
        # Without the footer of a fixed VHD.
        length = (attempt.facts.size or 0) if found.raw is None else found.raw
        return OrderedDisk(attempt, length, footer=not is_declared)
    return plain(attempt, attempt.request.target, footer=not is_declared)


def plain(attempt: Attempt, path: str, *, footer: bool, limit: int | None = None) -> base.Disk:
    """Return the ordered stream of all bytes of the image, decompressed, which is delivered to ``path``."""
    opened = functools.partial(reading.plain, attempt, limit=limit)
    found, size = attempt.survey, attempt.facts.size
    # Only a journal needs the size before the end. With a footer, the image may be larger than the target.
    is_noted = size and attempt.continues(path) and not found.compressions
    fits = not footer or (size or 0) <= found.usable
    return raw.StreamDisk(opened, attempt.scope, footer=footer, size=size if is_noted and fits else None)


def _runs(attempt: Attempt) -> base.Disk:
    keep = attempt.image.source.keep
    return raw.RunsDisk(
        functools.partial(reading.runs, attempt),
        attempt.scope,
        # Only a sender that can skip a part has stated the size of the disk.
        size=attempt.facts.disk_size if keep else None,
        keep=keep,
    )


def _changed(attempt: Attempt) -> tuple[Make, int]:
    """Return what makes the disk of the changed areas, and the number of their bytes."""
    listed = attempt.image.source.extents
    assert listed is not None  # noqa: S101  (see ``plan``)
    changed = retry.patiently(
        lambda: extents.Kept(listed()),
        attempt.request.fetch.no_progress,
        attempt.scope,
        attempt.progress.retry,
    )
    size = attempt.plan.virtual_size or 0

    def make(attempt: Attempt) -> base.Disk:
        return raw.ExtentsDisk(ranges(attempt), size, lambda: changed, covers_all=False)

    return make, sum(extent.length for extent in changed)


def _tables(attempt: Attempt) -> base.Disk:
    from cdi_worker.formats.mapped import image
    from cdi_worker.images.disks import tables

    layout, size = _layout(attempt), attempt.facts.size or 0

    def opened(reads: Sequence[views.Read]) -> tables.DiskTables:
        return image.MappedImage(layout, reads[0], size)

    return tables.MappedDisk(
        [ranges(attempt)], opened, attempt.plan.virtual_size or 0, direct=attempt.request.direct
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
        workers=attempt.group.workers if attempt.group else following.WORKERS,
    )


def _chain(attempt: Attempt) -> base.Disk:
    from cdi_worker.formats.qcow2 import layers
    from cdi_worker.images.disks import tables

    files, is_base = attempt.survey.chain, not attempt.request.is_delta

    def ended(shown: list[int]) -> None:
        attempt.counts.layers = tuple(zip((file.name for file in files), shown, strict=True))

    return tables.MappedDisk(
        [ranges(attempt, file) for file in attempt.image.files],
        lambda reads: layers.ChainTables(files, reads, is_base=is_base, ended=ended),
        files[-1].virtual_size,
        covers_all=is_base,
        direct=attempt.request.direct,
    )


def _layout(attempt: Attempt) -> mapped.Layout:
    assert attempt.survey.layout is not None  # noqa: S101  (without one another route is planned)
    return attempt.survey.layout
