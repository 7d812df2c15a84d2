"""Block maps of finished disks: make one, and verify a disk by one, without a source."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import bmap, detect
from cdi_worker.images import targets
from cdi_worker.images.engine import cancelling
from cdi_worker.images.sinks import mapping, verified
from cdi_worker.importer import contact, destination, verification
from cdi_worker.importer import request as request_module
from cdi_worker.importer.plan import Plan, Route
from cdi_worker.importer.progress import NullProgress, Progress
from cdi_worker.importer.request import Request

log = logging.getLogger(__name__)

#: Bytes that a thread reads at a time; whole pieces of a map, but far behind in a large disk.
_SPAN: Final = 16 << 20


def create(
    request: Request,
    progress: Progress | None = None,
    cancel: cancelling.Cancel | cancelling.Event | None = None,
) -> bmap.Map:
    """Return the map of the disk at ``request.target``, which is only read. Holes of a file are not read.

    Raises ``errors.TargetError`` if the disk cannot be read, is changed meanwhile, or is an image in a file:
    the map of a compressed file is not that of the disk. ``request.format`` says that it is the disk itself.
    """
    progress = progress or NullProgress()
    request = dataclasses.replace(request, existing="compare")
    request_module.check(request)
    destination.in_use(request.target)
    with _opened(request, cancel) as (disk, scope):
        size = disk.size or 0
        if not size:
            raise errors.TargetError(path=request.target, reason="is empty; a map is of a disk")
        if not (request.format or request.is_qcow2):
            _check_disk(request.target, disk.storage.read(0, min(size, detect.HEAD)))
        progress.phase("transfer", size)
        with mapping.Mapping(_Nowhere()) as made:

            def one(span: tuple[int, int]) -> None:
                made.read(disk.storage, *span, progress.advance)

            verified.each(_spans(made, disk, size, progress.skip), one, scope)
            # Pieces longer than a span, whose parts came in too different an order to wait for each other.
            for start, end in made.missing(size, size):
                made.read(disk.storage, start, end, lambda _: None)
            found = made.map(size)
    progress.done()
    log.info("map size=%d ranges=%d bytes=%d", size, len(found.ranges), found.mapped)
    return found


def _check_disk(path: str, head: bytes) -> None:
    """Raise ``errors.TargetError`` for an image that holds a disk: its map is not that of the disk."""
    try:
        form = detect.detect(head)
    except errors.Refused:
        return
    if form in detect.COMPRESSIONS | detect.DISKS - {"raw", "iso"}:
        what = "--format qcow2" if form == "qcow2" else f"cdi-worker import {path} DISK --write-map FILE"
        reason = (
            f"is a {form} file; for the map of the disk in it: {what}; for that of the file: --format raw"
        )
        raise errors.TargetError(path=path, reason=reason)


def _spans(
    made: mapping.Mapping, disk: targets.Target, size: int, skip: Callable[[int], object]
) -> Iterator[tuple[int, int]]:
    """Yield what is to be read, in order; holes between are zeros."""
    at = 0
    for first, after in disk.storage.allocated(0, size):
        low = max(at, first // _SPAN * _SPAN)
        made.zero(at, low - at)
        skip(low - at)
        at = low
        while at < after:
            yield at, min(size, at + _SPAN)
            at = min(size, at + _SPAN)
    made.zero(at, size - at)
    skip(size - at)


class _Nowhere:
    """Takes what nothing is written of."""

    def write(self, offset: int, data: memoryview, /) -> None:
        """See ``sinks.base.Sink``."""

    def zero(self, offset: int, length: int, /) -> None:
        """See ``sinks.base.Sink``."""


def verify(
    request: Request,
    progress: Progress | None = None,
    cancel: cancelling.Cancel | cancelling.Event | None = None,
) -> verification.Verification:
    """Compare the disk at ``request.target`` with the map at ``request.demand.map``, without a source.

    The disk is only read. The source of the request serves the map if it is there, and is ``none`` else.
    Raises ``errors.Error`` if there is no verdict: the map is not signed as demanded or is not valid, the
    disk cannot be read, or is being changed.
    """
    progress, started = progress or NullProgress(), time.monotonic()
    request = dataclasses.replace(request, existing="compare")
    request_module.check(request, [] if request.demand.map else ["no map given; name one with --map"])
    with contact.begun(request, progress, cancel) as start:
        request, made = start.request, start.request.blocks
        assert made is not None  # noqa: S101  (checked above)
        size, in_use = made.map.size, destination.in_use(request.target)
        with _opened(request, start.reads) as (disk, scope):
            within = request.sample.within(size, disk) if request.sample else None
            found = verified.ByMap(disk.storage, disk.size or 0, within, scope)
            progress.phase("transfer", size)
            found.compare(made.map, progress.advance)
            found.finish(size, is_device=getattr(disk, "is_device", False))
        log.info("verified equal=%s compared=%d differed=%d", found.is_equal, found.compared, found.differed)
    progress.done()
    reason = "checksums of the map compared with the disk; nothing is written to it"
    return verification.Verification(
        source=made.name,
        target=request.target,
        plan=Plan(Route.EXTENTS, reason, virtual_size=size),
        format="bmap",
        compressions=(),
        **verification.of(found, size),
        sample=request.sample,
        confirmed=bool(found.ranges),
        in_use=in_use,
        read=0,
        seconds=time.monotonic() - started,
        verified={"map": made.digest},
        signatures=start.signatures,
    )


@contextlib.contextmanager
def _opened(
    request: Request, cancel: cancelling.Cancel | cancelling.Event | None
) -> Iterator[tuple[targets.Target, cancelling.Cancel]]:
    """Yield the disk, open to read, and the scope of its reads."""
    with (
        errors.masked_causes(),
        cancelling.adapted(cancel) as stop,
        cancelling.Reads(stop) as reads,
        destination.unchanged(request.target),
        destination.reading(request, reads) as held,
        targets.open(request.target, None, targets.Options(mode="compare", claim=held)) as disk,
    ):
        yield disk, reads
