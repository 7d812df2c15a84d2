"""One verification: compare the disk of a source with a finished one, and change nothing.

It is the way of an import (``execute.attempts``), whose last sink compares.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from cdi_worker import errors, units
from cdi_worker.images import targets
from cdi_worker.images.engine import cancelling
from cdi_worker.images.sinks import verified
from cdi_worker.images.targets import storage
from cdi_worker.importer import contact, destination, execute
from cdi_worker.importer import request as request_module
from cdi_worker.importer.plan import Plan
from cdi_worker.importer.progress import NullProgress, Progress
from cdi_worker.importer.request import Request
from cdi_worker.importer.routes.attempt import Attempt, Comparing
from cdi_worker.importer.sampling import Sample
from cdi_worker.sources import base

if TYPE_CHECKING:
    from cdi_worker.formats import signature

log = logging.getLogger(__name__)

#: The ranges that are listed.
LISTED: Final = 10
#: The side of a difference that is all zeros, or the end of a disk that is too small.
Side: TypeAlias = Literal["", "source", "disk", "missing"]


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A range that differs, in whole blocks of 4096 bytes. ``zero``: the side that is all zeros there."""

    offset: int
    length: int
    zero: Side


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """The result of a verification. Sizes in bytes.

    ``size``: of the image, ``disk_size``: of the disk. ``compared``: bytes of the image. ``differed``: bytes
    in ``ranges`` that differ (``more``: in more than these), ``first``: the first byte that does.
    ``differences``: the first of these ranges. ``rest``: what follows the end of the image on the disk was
    ``compared`` with zeros, or is ``ignored``, on a device; empty: nothing. ``confirmed``: what differs was
    read twice from both sides. ``in_use``: the device is mounted, and may have changed meanwhile. ``read``:
    bytes read from the source, ``disk_read``: from the disk. ``verified``, ``signatures``: see ``Result``.
    """

    source: str
    target: str
    plan: Plan
    format: str
    compressions: tuple[str, ...]
    size: int
    disk_size: int
    compared: int
    differed: int
    ranges: int
    more: bool
    first: int | None
    differences: tuple[Difference, ...]
    rest: Literal["", "compared", "ignored"]
    sample: Sample | None
    confirmed: bool
    in_use: bool
    read: int
    disk_read: int
    seconds: float
    verified: Mapping[str, str] = dataclasses.field(default_factory=dict)
    signatures: tuple[signature.Signature, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether the disk, or the sample of it, is that of the source."""
        return not self.differed and self.size <= self.disk_size

    @property
    def chance(self) -> float:
        """The probability that a difference of 1 MiB, at a random place, would have been found."""
        return min(1.0, self.compared / self.size) if self.size else 1.0

    def as_fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        fields: dict[str, object] = {
            "equal": self.is_equal,
            "source": self.source,
            "target": self.target,
            "format": self.format,
            "compression": list(self.compressions),
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
        if self.sample is not None:
            fields["sample"] = {**dataclasses.asdict(self.sample), "chance": round(self.chance, 6)}
        return fields

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
    request = dataclasses.replace(request, existing="compare")
    request_module.check(request)
    with contact.begun(request, progress, cancel) as start:
        return compare(start, progress)


def compare(start: contact.Contact, progress: Progress) -> Verification:
    """Compare the disk of a request with that of its source, as ``verify`` does."""
    request, started = start.request, time.monotonic()
    in_use = destination.in_use(request.target)
    with (
        destination.unchanged(request.target),
        destination.reading(request, start.reads) as held,
    ):
        attempt, facts, found = _pass(start, held, progress, Comparing())
        is_confirmed = bool(found.ranges) and not facts.once
        if is_confirmed:
            _confirm(start, held, progress, found, facts)
    progress.done()
    size = units.whole_sectors(found.image_size) if found.image_size < found.size else found.image_size
    result = Verification(
        source=facts.name,
        target=request.target,
        plan=attempt.plan,
        format=attempt.content.format,
        compressions=attempt.content.compressions,
        **of(found, size),
        sample=request.sample,
        confirmed=is_confirmed,
        in_use=in_use,
        read=attempt.outcome.read,
        seconds=time.monotonic() - started,
        verified=facts.verified,
        signatures=(*facts.signatures, *start.signatures),
    )
    log.info("verified equal=%s compared=%d differed=%d", result.is_equal, found.compared, found.differed)
    return result


def _pass(
    start: contact.Contact, held: targets.Claim, progress: Progress, comparing: Comparing
) -> tuple[Attempt, base.Facts, verified.Comparing]:
    """Open the source and compare."""
    request = start.request
    run = execute.Run(progress, start.reads, comparing=comparing)
    with (
        contact.opened(start.source(), request, progress, start.reads) as whole,
        execute.reached(),
    ):
        attempt, facts = execute.attempts(whole, request, held, run)
        found = attempt.outcome.comparison
        assert found is not None  # noqa: S101  (every route delivers, see ``plan``)
        facts = dataclasses.replace(
            facts, verified={**facts.verified, **whole.facts.verified}, signatures=whole.facts.signatures
        )
        return attempt, facts, found


def _confirm(
    start: contact.Contact,
    held: targets.Claim,
    progress: Progress,
    first: verified.Comparing,
    facts: base.Facts,
) -> None:
    """Read what differs again, from both sides. Raises an error if either side is no longer the same."""
    log.info("reading again what differs ranges=%d bytes=%d", len(first.ranges), first.ranges.covered())
    _, now, second = _pass(start, held, progress, Comparing(first.ranges, again=True))
    if (facts.identity, first.image_size) != (now.identity, second.image_size):
        before, after = (f"{each.identity}" for each in (facts, now))
        raise errors.SourceChanged(url=facts.name, what="identity", before=before, now=after)
    if not verified.same(first, second, 0):
        what = "content that differs from the disk"
        raise errors.SourceChanged(url=facts.name, what=what, before="read once", now="different")
    if not verified.same(first, second, 1):
        raise storage.changed(start.request.target)


def of(found: verified.Comparing, size: int) -> dict[str, Any]:
    """Return the fields of a verification that a comparison knows; ``size``: of the image."""
    return {
        "size": size,
        "disk_size": found.size,
        "compared": found.compared,
        "differed": found.differed,
        "ranges": len(found.ranges),
        "more": found.differed > found.ranges.covered(),
        "first": found.first,
        "differences": tuple(_difference(found, *each) for each in list(found.ranges)[:LISTED]),
        "rest": "" if size >= found.size else "ignored" if found.is_device else "compared",
        "disk_read": found.read,
    }


def _difference(found: verified.Comparing, start: int, end: int) -> Difference:
    side: Side = ""
    if end > found.size:
        side = "missing"
    elif not found.from_zero.missing(start, end):
        side = "source"
    elif not found.to_zero.missing(start, end):
        side = "disk"
    return Difference(start, end - start, side)
