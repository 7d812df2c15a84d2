"""The inspection of a source: the facts and the plan of an import, without the import."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cdi_worker import errors, units
from cdi_worker.formats.compressed import stated
from cdi_worker.formats.qcow2 import layers
from cdi_worker.images import targets
from cdi_worker.images.disks import tables
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contact, destination, execute, package, survey
from cdi_worker.importer import plan as plans
from cdi_worker.importer import request as request_module
from cdi_worker.importer.plan import Plan
from cdi_worker.importer.progress import NullProgress
from cdi_worker.importer.request import Request
from cdi_worker.importer.survey import Survey
from cdi_worker.sources import base

if TYPE_CHECKING:
    from fractions import Fraction


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The result of inspecting a source: ``plan``, or ``obstacle`` if an import is not possible.

    ``volume_size``: bytes of the smallest volume for the disk, of which its file system takes ``overhead``.
    ``stated_size``: bytes of a raw disk that its compression states, unverified; None: it states none.
    ``target``: what is there now; None: no target is named.
    """

    facts: base.Facts
    survey: Survey
    plan: Plan | None
    obstacle: errors.Error | None
    volume_size: int | None
    details: Mapping[str, object]
    overhead: Fraction | int
    stated_size: int | None = None
    target: destination.Standing | None = None

    @property
    def source(self) -> str:
        """The address of the disk, without secrets."""
        return self.facts.name


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
    with contact.begin(request, silent, cancel) as (reads, demanded):
        run = execute.Run(silent, reads, demanded)
        opened = contact.source(request, demanded, reads)
        with (
            contact.open_source(opened, request, demanded, silent, reads, whole=False) as whole,
            destination.claim_export(request, reads) as export,
        ):
            try:
                return _inspect(whole.anew(), request, export, run, overhead)
            except errors.NoRanges as err:
                contact.fall_back(whole.engine, err, silent)
                return _inspect(whole.anew(), request, export, run, overhead)


def _inspect(
    whole: base.Image,
    request: Request,
    export: targets.Claim | None,
    run: execute.Run,
    overhead: Fraction | int | None,
) -> Inspection:
    with package.open_disk(whole, request, run.demanded, run.reads) as (disk, demanded):
        found = survey.look(disk, request, demanded, run.reads, export)
        plan, obstacle, size = None, None, None
        if found.format in {"raw", "iso"} and len(found.compressions) == 1:
            (only,) = disk.files
            read = only.checked(run.reads)
            size = stated.size(found.compressions[0], only.facts.head, read, only.facts.size)
            size = None if size is None else units.whole_sectors(size)
        try:
            plan = plans.plan(request, demanded, disk.facts, found)
            execute.load(plan, found)
            _check_target(found, request, size, export)
        except errors.Error as err:
            plan, obstacle = None, err
        overhead = request.room.overhead if overhead is None else overhead
        disk_size = found.virtual_size if size is None else size
        volume = None if disk_size is None else units.volume_size(disk_size, overhead)
        details = {**package.listed(whole), **disk.source.describe()}
        if found.chain and found.ranges:
            with run.reads.scope() as scope:
                details["chain"] = _shares(disk.files, found, request, scope)
        details |= run.demanded.details
        details |= {"targetFormat": request.format} if request.format else {}
        standing = destination.standing(request, export) if request.target else None
        return Inspection(disk.facts, found, plan, obstacle, volume, details, overhead, size, standing)


def _check_target(found: Survey, request: Request, size: int | None, export: targets.Claim | None) -> None:
    """Raise an error if the target has no room for ``size`` bytes, or cannot be written, or be replaced.

    ``export``: the claim on an NBD export.
    """
    if size is not None:
        plans.check_room(size, request, found)
    if not request.target or found.ordered or request.compares:
        return
    if export is not None:
        destination.check_replaceable(export, request)
    elif found.block:
        # Opens the device exclusively, and writes nothing.
        with targets.take(request.target) as claim:
            destination.check_replaceable(claim, request)
    elif request.is_archive:
        targets.check_folder(f"{request.target}/disk.img")
    else:
        destination.check_replaceable(targets.ReadingClaim(request.target), request)
        targets.check_folder(request.target)


def _shares(
    images: Sequence[base.Image], found: Survey, request: Request, cancel: cancelling.Cancel
) -> list[dict[str, object]]:
    """Read the tables of a chain; return its files and how many bytes of the disk come from each."""
    fetchers = [each.fetcher(cancel) for each in images]
    reads = [fetcher.read for fetcher in fetchers]
    shown: list[int] = []
    disk = layers.ChainTables(found.chain, reads, is_base=not request.is_delta, ended=shown.extend)
    for window in disk.windows():
        tables.load(window, fetchers)
    return [
        {
            "name": file.name,
            "virtualSize": file.virtual_size,
            "backingFile": file.facts.backing,
            "bitmaps": list(file.facts.bitmaps),
            "bytes": count,
        }
        for file, count in zip(found.chain, shown, strict=True)
    ]
