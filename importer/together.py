"""All disks of a source, imported to files of a folder, and made usable together; or compared.

An OVA that is a stream is read in one pass, the disks of other sources at the same time.
"""

from __future__ import annotations

import functools
import logging
import pathlib
import re
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Final, TypeAlias, TypeVar

from cdi_worker import errors
from cdi_worker.formats import detect
from cdi_worker.formats.ova import package as package_format
from cdi_worker.images.engine import cancelling
from cdi_worker.images.targets import group
from cdi_worker.importer import contact, execute, package, verification
from cdi_worker.importer import request as request_module
from cdi_worker.importer.progress import NullProgress, Progress, Share
from cdi_worker.importer.request import Request
from cdi_worker.importer.result import Result, stated
from cdi_worker.sources import base, selection
from cdi_worker.sources.packages import choice, ova
from cdi_worker.sources.trust import Demanded

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Runs one import or comparison.
Job: TypeAlias = Callable[[execute.Run], T]

#: Disks that are imported together: each keeps some files open until all are complete.
MOST: Final = 100
#: Disks that are read at the same time. Each has buffers of its own.
STREAMS: Final = 4


def run_all(
    request: Request,
    progress: Progress | None = None,
    cancel: cancelling.Cancel | cancelling.Event | None = None,
) -> list[Result]:
    """Import all disks of a source, as ``execute.run`` does, to files in the folder ``request.target``.

    None is usable before all are verified.
    """
    progress = progress or NullProgress()
    request_module.check(request)
    started = time.monotonic()
    with contact.begin(request, progress, cancel) as (reads, demanded):
        source = contact.source(request, demanded, reads)
        run = execute.Run(progress, reads, demanded)
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
    """Compare each disk of a source with its file in the folder ``request.target``.

    An OVA is served by ranges. Raises ``errors.Error`` if there is no verdict about one of the disks.
    """
    progress = progress or NullProgress()
    request = request_module.comparing(request)
    with contact.begin(request, progress, cancel) as (reads, demanded):
        source = contact.source(request, demanded, reads)
        run = execute.Run(progress, reads, demanded)

        def compare(disk: base.Held, each: Request, run: execute.Run) -> verification.Verification:
            return verification.compare(lambda: _Member(disk), each, run)

        with contact.open_source(source, request, demanded, progress, reads) as whole:
            disks = _disks(whole, request, run)
            if not disks:
                reason = "is read in order, and all disks are compared only by ranges"
                remedy = errors.Remedy([("compare each disk", "disk")])
                raise errors.RequestError(f"{whole.facts.name}: {reason}", remedy=remedy)

            requests = _requests(whole, request, disks)
            found = _each(
                compare, disks, requests, run._replace(demanded=Demanded()), _streams(whole, request)
            )
            whole.verify()
            whole.finish()
    progress.done()
    return found


def _import(whole: base.Image, request: Request, run: execute.Run) -> list[Result]:
    """Import all disks of ``whole``, which is open; return the results by path."""
    passes = run.demanded.checksum is not None
    disks = _disks(whole, request, run, passes=passes)
    if passes and whole.seeks:
        log.warning(execute.HASHED)
    key = selection.digest(request.location)[:16]
    streams = _streams(whole, request)
    # More threads than CPUs only wait for the interpreter's lock.
    with group.Group(1 if streams > 1 else 2) as together:
        # What is demanded is verified of the whole.
        member = run._replace(demanded=Demanded(), group=together)

        def claimed(disks: Sequence[base.Held]) -> list[Request]:
            requests = _requests(whole, request, disks)
            # Sorted, because two runs could wait for each other's claims otherwise.
            for each in sorted(requests, key=lambda each: each.target):
                together.hold(each.target, execute.claim(each, run.reads, key))
            return requests

        def begin(disks: Sequence[base.Held]) -> list[Callable[[base.Source], Result]]:
            parts = zip(claimed(disks), _shares(disks, run.progress), strict=True)
            return [
                functools.partial(execute.import_disk, request=each, run=member._replace(progress=share))
                for each, share in parts
            ]

        def import_disk(disk: base.Held, each: Request, run: execute.Run) -> Result:
            return execute.import_disk(_Member(disk), each, run)

        if disks:
            results = _each(import_disk, disks, claimed(disks), member, streams)
        else:
            results = ova.read_each(whole.files[0], package.expected(run.demanded), run.reads, begin)
        whole.verify()
        run.reads.check()
        run.progress.phase("sync", None)
        together.publish()
    provenance = whole.finish()
    verified = provenance.verified
    results = [
        each._replace(provenance=provenance, verified={**each.verified, **verified}) for each in results
    ]
    return sorted(results, key=lambda each: each.target)


class _Member(base.Source):
    """One disk of several, which each attempt opens anew: a host may export it with other bytes each time."""

    def __init__(self, disk: base.Held) -> None:
        self.name = disk.names[0]
        self.disks = (disk._replace(make=lambda _, cancel: disk.make(True, cancel)),)

    def open(self, opening: base.Opening) -> base.Facts:
        return base.Facts(name=self.name)


def _disks(
    whole: base.Image, request: Request, run: execute.Run, *, passes: bool = False
) -> tuple[base.Held, ...]:
    """Return the disks of ``whole``; none of an OVA that is read in one pass, as it is if ``passes``.

    Raises ``errors.RequestError`` for any other source.
    """
    name, demanded = whole.facts.name, run.demanded
    if disks := whole.source.disks:
        if demanded.checksum:
            raise errors.RequestError(f"{name}: a checksum is that of one disk; import each alone")
        choice.check(name, *disks)
        return disks
    # The file of a delta is one; files of a chain are not an OVA.
    (first, *others) = whole.files
    if others or not (package.is_tar(first.facts, request) and package_format.is_ova(first.facts.head)):
        raise errors.RequestError(f"{name}: not an OVA, but one disk; import it alone")
    read = None if passes else first.at_random(run.reads)
    return () if read is None else ova.disks(first, package.expected(demanded), read)


def _requests(whole: base.Image, request: Request, disks: Sequence[base.Held]) -> list[Request]:
    if len(disks) > MOST:
        reason = f"{whole.facts.name}: {len(disks)} disks, at most {MOST} are imported together"
        raise errors.Unsupported(reason=reason, remedy=errors.Remedy([("choose each", "disk")]))
    return request_module.for_disks(request, [_file_name(disk.file, n) for n, disk in enumerate(disks, 1)])


def _file_name(name: str, number: int) -> str:
    """Return the name of the file for a disk: that which its source states, without that of a compression."""
    path = pathlib.PurePosixPath(re.sub(r"[\0-\x1f]", "_", name))
    if path.suffix.removeprefix(".").lower() in detect.COMPRESSIONS:
        path = path.with_suffix("")
    stem = path.stem.lstrip(".")
    return f"{stem or f'disk{number}'}.img"


def _streams(whole: base.Image, request: Request) -> int:
    """Return how many disks are read at the same time: of an OVA one, by parallel ranges."""
    return min(STREAMS, request.fetch.connections) if whole.source.disks else 1


def _shares(disks: Sequence[base.Held], progress: Progress) -> list[Share]:
    """Begin the one phase of all disks; return the progress of each."""
    sizes = [disk.size for disk in disks]
    total = None if None in sizes else sum(filter(None, sizes))
    progress.phase("transfer", total)
    if total is not None:
        progress.disk(total)
    return [Share(progress, size or 0) for size in sizes]


def _each(
    work: Callable[[base.Held, Request, execute.Run], T],
    disks: Sequence[base.Held],
    requests: Sequence[Request],
    run: execute.Run,
    streams: int,
) -> list[T]:
    """Run ``work`` for each disk, for so many at the same time. The first failure ends the others."""
    parts = [*zip(disks, requests, _shares(disks, run.progress), strict=True)]
    if min(streams, len(disks)) == 1:
        return [work(disk, each, run._replace(progress=share)) for disk, each, share in parts]
    with run.reads.scope() as scope, futures.ThreadPoolExecutor(streams, "disk") as pool:

        def apart(disk: base.Held, each: Request, share: Share) -> T:
            try:
                with cancelling.Reads(scope) as reads:
                    reads.check()
                    return work(disk, each, run._replace(progress=share, reads=reads))
            except BaseException as err:
                scope.fail(err)
                raise

        try:
            return [*pool.map(apart, *zip(*parts, strict=True))]
        except BaseException as err:
            # Also an interrupt, before the pool waits for its threads.
            scope.fail(err)
            raise
