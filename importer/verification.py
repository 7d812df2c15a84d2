"""One verification: compare the disk of a source with a finished one, and change nothing.

It is the way of an import (``execute.attempts``), whose last sink compares.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from cdi_worker import errors, units
from cdi_worker.images import targets
from cdi_worker.images.engine import cancelling
from cdi_worker.images.sinks import verified
from cdi_worker.images.targets import storage
from cdi_worker.importer import contact, destination, execute
from cdi_worker.importer import request as request_module
from cdi_worker.importer.attempt import Attempt, Comparing
from cdi_worker.importer.plan import Plan
from cdi_worker.importer.progress import NullProgress, Progress
from cdi_worker.importer.request import Request
from cdi_worker.importer.survey import Survey
from cdi_worker.sources import base

log = logging.getLogger(__name__)

#: The ranges that are listed.
LISTED: Final = 10
#: The side of a difference that is all zeros, or the end of a disk that is too small.
Side: TypeAlias = Literal["", "source", "disk", "missing"]
#: Makes the source, which is opened once for each pass.
Connect: TypeAlias = Callable[[], base.Source]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A range that differs, in whole blocks of 4096 bytes. ``zero``: the side that is all zeros there."""

    offset: int
    length: int
    zero: Side


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of a verification. Sizes in bytes.

    ``size``: of the image, ``disk_size``: of the disk. ``compared``: bytes of the image. ``differed``: bytes
    in ``ranges`` that differ (``more``: in more than these), ``first``: the first byte that does.
    ``differences``: the first of these ranges. ``rest``: what follows the end of the image on the disk was
    ``compared`` with zeros, or is ``ignored``, on a device; empty: nothing. ``confirmed``: what differs was
    read twice from both sides. ``in_use``: the device is mounted, and may have changed meanwhile. ``read``:
    bytes read from the source, ``disk_read``: from the disk.
    """

    target: str
    facts: base.Facts
    survey: Survey
    plan: Plan
    size: int
    disk_size: int
    compared: int
    differed: int
    ranges: int
    more: bool
    first: int | None
    differences: tuple[Difference, ...]
    rest: Literal["", "compared", "ignored"]
    confirmed: bool
    in_use: bool
    read: int
    disk_read: int
    seconds: float

    @property
    def source(self) -> str:
        """The address of the disk, without secrets."""
        return self.facts.name

    @property
    def is_equal(self) -> bool:
        """Whether the disk is that of the source."""
        return not self.differed and self.size <= self.disk_size

    def as_fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {
            "equal": self.is_equal,
            "source": self.source,
            "target": self.target,
            "format": self.survey.format,
            "compression": list(self.survey.compressions),
            "size": self.size,
            "diskSize": self.disk_size,
            "compared": self.compared,
            "differed": self.differed,
            "ranges": self.ranges,
            "moreRanges": self.more,
            "first": self.first,
            "differences": [dataclasses.asdict(each) for each in self.differences],
            "rest": self.rest,
            "confirmed": self.confirmed,
            "inUse": self.in_use,
            "read": self.read,
            "diskRead": self.disk_read,
            "seconds": round(self.seconds, 3),
            "route": str(self.plan.route),
            "reason": self.plan.reason,
        }

    def difference(self) -> str:
        """Return how the disk differs, in one sentence; empty if it does not."""
        if self.is_equal:
            return ""
        parts = []
        if self.differed:
            ranges = f"{'more than ' if self.more else ''}{self.ranges}"
            noun = "range" if self.ranges == 1 and not self.more else "ranges"
            parts.append(f"{self.differed} bytes in {ranges} {noun} differ, the first is byte {self.first}")
        if self.size > self.disk_size:
            parts.append(f"it has {self.disk_size} bytes, the image {self.size}")
        return "; ".join(parts)


def verify(
    request: Request,
    progress: Progress | None = None,
    cancel: cancelling.Cancel | cancelling.Event | None = None,
) -> Verification:
    """Compare the disk at ``request.target`` with that of the source. Only ``scratch`` is written to.

    What differs is read a second time from both sides. Raises ``errors.Error`` if there is no verdict: a
    source that changes, lies or stalls, a disk that cannot be read or is being changed.
    """
    progress = progress or NullProgress()
    request = request_module.comparing(request)
    with contact.begin(request, progress, cancel) as (reads, demanded):
        connect = functools.partial(contact.source, request, demanded, reads)
        return compare(connect, request, execute.Run(progress, reads, demanded))


def compare(connect: Connect, request: Request, run: execute.Run) -> Verification:
    """Compare the disk of a request with that of its source, as ``verify`` does."""
    started = time.monotonic()
    if in_use := targets.in_use(request.target):
        log.warning(
            "the device is mounted or in use, and may change while it is compared path=%r", request.target
        )
    with (
        destination.refuse_changes(request.target),
        destination.open_finished(request, request.target, run.reads, is_qcow2=request.is_qcow2) as held,
    ):
        attempt, found = _pass(connect, request, held, run._replace(comparing=Comparing()))
        facts = attempt.facts
        is_confirmed = bool(found.ranges) and not facts.once
        if is_confirmed:
            log.info(
                "reading again what differs ranges=%d bytes=%d", len(found.ranges), found.ranges.covered()
            )
            again = run._replace(comparing=Comparing(found.ranges, again=True))
            second, found_again = _pass(connect, request, held, again)
            if (facts.identity, found.image_size) != (second.facts.identity, found_again.image_size):
                before, now = f"{facts.identity}", f"{second.facts.identity}"
                raise errors.SourceChanged(url=facts.name, what="identity", before=before, now=now)
            if not verified.same(found, found_again, 0):
                what = "content that differs from the disk"
                raise errors.SourceChanged(url=facts.name, what=what, before="read once", now="different")
            if not verified.same(found, found_again, 1):
                raise storage.changed(request.target)
    run.progress.done()
    size = units.whole_sectors(found.image_size) if found.image_size < found.size else found.image_size
    result = Verification(
        target=request.target,
        facts=facts,
        survey=attempt.survey,
        plan=attempt.plan,
        size=size,
        disk_size=found.size,
        compared=found.compared,
        differed=found.differed,
        ranges=len(found.ranges),
        more=found.differed > found.ranges.covered(),
        first=found.first,
        differences=tuple(_difference(found, *each) for each in list(found.ranges)[:LISTED]),
        rest="" if size >= found.size else "ignored" if found.is_device else "compared",
        confirmed=is_confirmed,
        in_use=in_use,
        read=attempt.counts.read,
        disk_read=found.read,
        seconds=time.monotonic() - started,
    )
    log.info("verified equal=%s compared=%d differed=%d", result.is_equal, found.compared, found.differed)
    return result


def _pass(
    connect: Connect, request: Request, held: targets.Claim, run: execute.Run
) -> tuple[Attempt, verified.ComparingSink]:
    """Open the source and compare."""
    with (
        contact.open_source(connect(), request, run.demanded, run.progress, run.reads) as whole,
        execute.translate_unreachable(),
    ):
        attempt, _ = execute.attempts(whole, request, held, run)
        found = attempt.counts.comparison
        assert found is not None  # noqa: S101  (every route delivers, see ``plan``)
        return attempt, found


def _difference(found: verified.ComparingSink, start: int, end: int) -> Difference:
    side: Side = ""
    if end > found.size:
        side = "missing"
    elif not found.from_zero.missing(start, end):
        side = "source"
    elif not found.to_zero.missing(start, end):
        side = "disk"
    return Difference(start, end - start, side)
