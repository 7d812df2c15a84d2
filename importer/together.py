"""All disks of an OVA, imported in one pass to files of a folder, and made usable together; or compared."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable

from cdi_worker import errors
from cdi_worker.formats.ova import descriptor
from cdi_worker.formats.ova import package as package_format
from cdi_worker.images import targets
from cdi_worker.images.engine import cancelling
from cdi_worker.images.targets import group
from cdi_worker.importer import contact, execute, package, verification
from cdi_worker.importer import request as request_module
from cdi_worker.importer.progress import NullProgress, Part, Progress
from cdi_worker.importer.request import Request
from cdi_worker.importer.result import Result, stated
from cdi_worker.sources import base, selection, trust
from cdi_worker.sources.packages import every, ova


def run_all(
    request: Request,
    progress: Progress | None = None,
    cancel: cancelling.Cancel | cancelling.Event | None = None,
) -> list[Result]:
    """Import all disks of an OVA, as ``execute.run`` does, to files in the folder ``request.target``.

    From a stream they are imported in one pass. None is usable before all are verified.
    """
    progress = progress or NullProgress()
    request_module.check(request)
    finish = execute.audited(request, progress)
    with (
        contact.begun(request, progress, cancel) as start,
        contact.opened(start.source(), start.request, progress, start.reads) as whole,
    ):
        run = execute.Run(Part(progress), start.reads)
        try:
            results = _imported(whole.anew(), start.request, run)
        except errors.NoRanges as err:
            contact.fall_back(whole.engine, err, progress)
            results = _imported(whole.anew(), start.request, run)
    return finish([_of_package(each, whole.facts, start) for each in results])


def verify_all(
    request: Request,
    progress: Progress | None = None,
    cancel: cancelling.Cancel | cancelling.Event | None = None,
) -> list[verification.Verification]:
    """Compare each disk of an OVA with its file in the folder ``request.target``, one after the other.

    The OVA is served by ranges. Raises ``errors.Error`` if there is no verdict about one of the disks.
    """
    progress = progress or NullProgress()
    request = dataclasses.replace(request, existing="compare")
    request_module.check(request)
    with contact.begun(request, progress, cancel) as start:
        with contact.opened(start.source(), start.request, progress, start.reads) as whole:
            each = _compared(whole, start)
        found = [verification.compare(start._replace(request=one), Part(progress)) for one in each]
    progress.done()
    return found


def _compared(whole: base.Image, start: contact.Contact) -> list[Request]:
    """Return the request for each disk of ``whole``, an OVA that is open."""
    request = start.request
    _check_ova(whole, request)
    if whole.at_random(start.reads) is None:
        reason = (
            "is read in order, and --all compares what is served by ranges; compare each disk with --disk"
        )
        raise errors.RequestError(f"{whole.facts.name}: {reason}")
    disks = ova.disks(whole, start.reads)
    return [
        # The OVA is opened again for each: it is what the request demands of the whole.
        dataclasses.replace(one, disk=disk.file, checksum=request.checksum, demand=request.demand)
        for disk, one in zip(disks, _requests(request, disks), strict=True)
    ]


def _check_ova(whole: base.Image, request: Request) -> None:
    """Raise ``errors.RequestError`` for an image that is not an OVA."""
    # The file of a delta is one; files of a chain are not an OVA.
    (first, *others) = whole.files
    if others or not (package.is_tar(first.facts, request) and package_format.is_ova(first.facts.head)):
        raise errors.RequestError(f"{first.facts.name}: not an OVA; name its disk without --all")


def _of_package(result: Result, served: base.Facts, start: contact.Contact) -> Result:
    """Return the result of a disk with what is known of the package."""
    return dataclasses.replace(
        result,
        origin=served.name,
        served=served.size,
        identity=served.identity,
        verified={**result.verified, **stated(start.request.checksum)},
        signatures=(*served.signatures, *start.signatures),
    )


def _imported(whole: base.Image, request: Request, run: execute.Run) -> list[Result]:
    """Import all disks of ``whole``, an OVA that is open; return the results by path.

    Raises ``errors.RequestError`` if it is not an OVA.
    """
    _check_ova(whole, request)
    whole = whole.files[0]
    results: dict[str, Result] = {}
    key = selection.digest(request.location)[:16]
    with group.Group() as disks:
        member = run._replace(group=disks)

        def begin(found: tuple[descriptor.Disk, ...]) -> list[Callable[[base.Source], None]]:
            requests = _requests(request, found)
            # Sorted, because two runs could wait for each other's claims otherwise.
            for each in sorted(requests, key=lambda each: each.target):
                disks.hold(each.target, execute.claimed(each, run.reads, key))
            return [functools.partial(import_disk, each) for each in requests]

        def import_disk(each: Request, disk: base.Source) -> None:
            results[each.target] = execute.import_disk(disk, each, member)

        every.each(whole, package.expected(request), run.reads, begin)
        run.reads.check()
        disks.publish()
    return [results[path] for path in sorted(results)]


def _requests(request: Request, disks: tuple[descriptor.Disk, ...]) -> list[Request]:
    """Return the request for each disk, to a file of its own."""
    paths = [targets.followed(pathlib.Path(request.target, every.image_name(disk))) for disk in disks]
    files = [os.path.realpath(path) for path in paths]
    for path, file in zip(paths, files, strict=True):
        if files.count(file) > 1:
            raise errors.RequestError(f"two disks would be {path}; choose each with --disk")
        # The OVA may have the name of one of its disks, or one that its run removes.
        request_module.check(dataclasses.replace(request, target=path))
        if request.report and os.path.realpath(request.report) in map(os.path.realpath, targets.used(path)):
            raise errors.RequestError(f"--report {request.report}: is one of the disks; name another file")
    # Nothing is demanded of a disk: what they are in was verified when it was opened.
    part = dataclasses.replace(request, checksum=None, disk="", demand=trust.NOTHING)
    return [dataclasses.replace(part, target=path) for path in paths]
