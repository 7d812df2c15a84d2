"""All disks of an OVA, imported in one pass to files of a folder, and made usable together; or compared."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

from cdi_worker import errors
from cdi_worker.formats.ova import descriptor
from cdi_worker.formats.ova import package as package_format
from cdi_worker.images.engine import cancelling
from cdi_worker.images.targets import group
from cdi_worker.importer import contact, execute, package, verification
from cdi_worker.importer import request as request_module
from cdi_worker.importer.progress import NullProgress, Part, Progress
from cdi_worker.importer.request import Request
from cdi_worker.importer.result import Result, stated
from cdi_worker.sources import base, selection
from cdi_worker.sources.packages import ova
from cdi_worker.sources.trust import Demanded

log = logging.getLogger(__name__)


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
    started = time.monotonic()
    with contact.begin(request, progress, cancel) as (reads, demanded):
        source = contact.source(request, demanded, reads)
        run = execute.Run(Part(progress), reads, demanded)
        with contact.open_source(source, request, demanded, progress, reads) as whole:
            try:
                results = _import(whole.anew(), request, run)
            except errors.NoRanges as err:
                contact.fall_back(whole.engine, err, progress)
                results = _import(whole.anew(), request, run)
    served, verified = whole.facts, stated(demanded.checksum)
    signatures = (*served.signatures, *demanded.signatures)
    results = [
        each._replace(served=served, verified={**each.verified, **verified}, signatures=signatures)
        for each in results
    ]
    return execute.completed(results, request, progress, started)


def verify_all(
    request: Request,
    progress: Progress | None = None,
    cancel: cancelling.Cancel | cancelling.Event | None = None,
) -> list[verification.Verification]:
    """Compare each disk of an OVA with its file in the folder ``request.target``, one after the other.

    The OVA is served by ranges. Raises ``errors.Error`` if there is no verdict about one of the disks.
    """
    progress = progress or NullProgress()
    request = request_module.comparing(request)
    with contact.begin(request, progress, cancel) as (reads, demanded):
        # The OVA is opened again for each disk.
        connect = functools.partial(contact.source, request, demanded, reads)
        with contact.open_source(connect(), request, demanded, progress, reads) as whole:
            _check_ova(whole, request)
            if (read := whole.at_random(reads)) is None:
                reason = "is read in order, and all disks are compared only by ranges"
                remedy = errors.Remedy([("compare each disk", "disk")])
                raise errors.RequestError(f"{whole.facts.name}: {reason}", remedy=remedy)
            disks = ova.disks(whole, read)
        run = execute.Run(Part(progress), reads, demanded)
        requests = request_module.for_disks(request, [(each.file, ova.image_name(each)) for each in disks])
        found = [verification.compare(connect, each, run) for each in requests]
    progress.done()
    return found


def _check_ova(whole: base.Image, request: Request) -> None:
    """Raise ``errors.RequestError`` for an image that is not an OVA."""
    # The file of a delta is one; files of a chain are not an OVA.
    (first, *others) = whole.files
    if others or not (package.is_tar(first.facts, request) and package_format.is_ova(first.facts.head)):
        raise errors.RequestError(f"{first.facts.name}: not an OVA, but one disk; import it alone")


def _import(whole: base.Image, request: Request, run: execute.Run) -> list[Result]:
    """Import all disks of ``whole``, an OVA that is open; return the results by path.

    Raises ``errors.RequestError`` if it is not an OVA.
    """
    _check_ova(whole, request)
    whole = whole.files[0]
    if run.demanded.checksum and whole.seeks:
        log.warning(execute.HASHED)
    results: dict[str, Result] = {}
    key = selection.digest(request.location)[:16]
    with group.Group() as disks:
        # What is demanded is verified of the whole.
        member = run._replace(demanded=Demanded(), group=disks)

        def begin(found: tuple[descriptor.OvfDisk, ...]) -> list[Callable[[base.Source], None]]:
            requests = request_module.for_disks(request, [("", ova.image_name(each)) for each in found])
            # Sorted, because two runs could wait for each other's claims otherwise.
            for each in sorted(requests, key=lambda each: each.target):
                disks.hold(each.target, execute.claim(each, run.reads, key))
            return [functools.partial(import_disk, each) for each in requests]

        def import_disk(each: Request, disk: base.Source) -> None:
            results[each.target] = execute.import_disk(disk, each, member)

        ova.read_each(whole, package.expected(run.demanded), run.reads, begin)
        run.reads.check()
        disks.publish()
    provenance = whole.finish()
    return [results[path]._replace(provenance=provenance) for path in sorted(results)]
