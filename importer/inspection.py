"""The inspection of a source: the facts and the plan of an import, without the import."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from cdi_worker import errors, lazy, units
from cdi_worker.images import targets
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contact, destination, package, survey
from cdi_worker.importer import request as request_module
from cdi_worker.importer.plan import Content, Plan, check_room
from cdi_worker.importer.progress import NullProgress
from cdi_worker.importer.request import Request
from cdi_worker.importer.survey import Survey
from cdi_worker.sources import base

if TYPE_CHECKING:
    from fractions import Fraction

#: What only a compressed disk needs (start-up time).
STATED: Final = "cdi_worker.formats.compressed.stated:size"


@dataclasses.dataclass(frozen=True, slots=True)
class Inspection:
    """The result of inspecting a source: ``plan``, or ``obstacle`` if an import is not possible.

    ``volume_size``: bytes of the smallest volume for the disk, of which its file system takes ``overhead``.
    ``stated_size``: bytes of a raw disk that its compression states, unverified; None: it states none.
    """

    source: str
    survey: Survey
    plan: Plan | None
    obstacle: errors.Error | None
    volume_size: int | None
    details: Mapping[str, object]
    overhead: Fraction | int
    stated_size: int | None = None


def inspect(
    source: Request | str,
    cancel: cancelling.Cancel | cancelling.Event | None = None,
    *,
    overhead: Fraction | int | None = None,
) -> Inspection:
    """Examine a source, a request or an address, and plan its import.

    What would stop the import although the source can be examined is ``obstacle``: an error of the plan, a
    missing program, no space, a target that exists, is in use, or cannot be written. What prevents examining
    it is raised (``errors.Error``): a server that is not reached, an image that is refused, a target without
    a directory. Without a target the plan is that for one with enough space. ``overhead``: of the file system
    of ``volume_size``; None: that of the request.
    """
    request = request_module.of(source) if isinstance(source, str) else source
    request_module.check(request, needs_target=False)
    silent = NullProgress()
    with (
        contact.begun(request, silent, cancel) as start,
        contact.opened(start.source(), start.request, silent, start.reads, whole=False) as whole,
        destination.inspected(start.request, start.reads) as held,
    ):
        try:
            return _inspected(whole.anew(), start, held, overhead)
        except errors.NoRanges as err:
            contact.fall_back(whole.engine, err, silent)
            return _inspected(whole.anew(), start, held, overhead)


def _inspected(
    whole: base.Image, start: contact.Contact, held: targets.Claim | None, overhead: Fraction | int | None
) -> Inspection:
    with package.unpacked(whole, start.request, start.reads) as (disk, request):
        facts = survey.survey(disk, request, start.reads, held=held)
        plan, obstacle = None, None
        size = _stated(disk.files, facts.content, start.reads)
        try:
            plan = facts.plan(request)
            _check_target(facts, request, size, held)
        except errors.Error as err:
            plan, obstacle = None, err
        overhead = request.room.overhead if overhead is None else overhead
        disk_size = facts.content.virtual_size if size is None else size
        volume = None if disk_size is None else units.volume_size(disk_size, overhead)
        details = dict(disk.facts.description)
        if facts.content.chain and facts.offer.ranges:
            details["chain"] = _shares(disk.files, facts.content, request, start.reads)
        details |= start.details
        details |= {"targetFormat": request.format} if request.format else {}
        return Inspection(disk.facts.name, facts, plan, obstacle, volume, details, overhead, size)


def _stated(images: Sequence[base.Image], content: Content, cancel: cancelling.Cancel) -> int | None:
    """Return the size that a compression states of a raw disk."""
    if content.format not in {"raw", "iso"} or len(content.compressions) != 1:
        return None
    (only,) = images
    read, head = only.checked(cancel), only.facts.head
    found = lazy.load(STATED)(content.compressions[0], head, read, only.facts.size)
    return None if found is None else units.whole_sectors(found)


def _check_target(facts: Survey, request: Request, size: int | None, held: targets.Claim | None) -> None:
    """Raise an error if the target has no room for ``size`` bytes, or cannot be written, or be replaced.

    ``held``: the claim on an NBD export.
    """
    space = facts.space
    if size is not None:
        check_room(size, facts.content, request, space)
    if not request.target or space.ordered or request.existing == "compare":
        return
    if held is not None:
        destination.check_replaceable(held, request)
    elif space.block:
        # Opens the device exclusively, and writes nothing.
        with targets.take(request.target) as claim:
            destination.check_replaceable(claim, request)
    else:
        if space.present and request.existing == "refuse" and not request.is_delta:
            raise errors.TargetExists(path=request.target, reason="exists")
        targets.check_folder(f"{request.target}/disk.img" if request.is_archive else request.target)


def _shares(
    images: Sequence[base.Image], content: Content, request: Request, cancel: cancelling.Cancel
) -> list[dict[str, object]]:
    """Read the tables of a chain; return its files and how many bytes of the disk come from each."""
    # Imported when used: few sources are chains (start-up time).
    from cdi_worker.formats.qcow2 import layers
    from cdi_worker.images.disks import tables

    fetchers = [each.fetcher(cancel) for each in images]
    reads = [fetcher.read for fetcher in fetchers]
    disk = layers.Tables(content.chain, reads, is_base=not request.is_delta)
    for window in disk.windows():
        tables.load(window, fetchers)
        for fetcher in fetchers:
            fetcher.confirm()
    return [
        {
            "name": file.name,
            "virtualSize": file.virtual_size,
            "backingFile": file.facts.backing,
            "bitmaps": list(file.facts.bitmaps),
            "bytes": count,
        }
        for file, count in zip(content.chain, disk.shown, strict=True)
    ]
