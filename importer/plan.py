"""Decide how a disk travels: a pure function of what is known before the first byte is written."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from cdi_worker import errors, request, units
from cdi_worker.formats import detect

if TYPE_CHECKING:
    from cdi_worker.formats.mapped import layout as mapped


class Route(enum.StrEnum):
    """The ways a disk can take, best first (docs/routes.md)."""

    BLANK = "blank"
    EXTENTS = "extents"
    PLACE = "place"
    STREAM = "stream"
    CONVERT = "convert"
    SPOOL = "spool"
    MERGE = "merge"
    UPDATE = "update"
    UNPACK = "unpack"
    EXTRACT = "extract"


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """What the source offers. ``size``: bytes as served, None if unknown.

    ``extents``: the source knows the holes of its ranges; ``runs``: its stream marks them. ``once``: the
    stream cannot be read again. ``blank``: there are no bytes, the disk is zeros.
    """

    size: int | None = None
    identity: str | None = None
    ranges: bool = False
    extents: bool = False
    runs: bool = False
    once: bool = False
    blank: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """What the first bytes tell.

    ``virtual_size``: in bytes, None while unknown (a compressed raw disk tells at its end). ``layout``: of a
    disk that our own reader takes; ``unplaceable``: why it does not, where it takes others of the format.
    ``head``: the first bytes below all compressions, which were checked.
    """

    format: str = "raw"
    compressions: tuple[str, ...] = ()
    virtual_size: int | None = None
    layout: mapped.Layout | None = None
    unplaceable: str = ""
    head: bytes = dataclasses.field(default=b"", repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Space:
    """What the target can take, in bytes: ``available`` for an image, ``usable`` for growing it."""

    block: bool
    available: int
    usable: int


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A decision and its reason.

    ``random``: the source is read by ranges, in parallel, out of order; else in order.
    ``virtual_size``: of the image, None while unknown. ``grow_to``: what a file is grown to when
    that is larger; 0 for a change of an earlier stage's disk. ``spill``: scratch may be used for what
    cannot be placed at once.
    """

    route: Route
    reason: str
    random: bool = False
    virtual_size: int | None = None
    grow_to: int = 0
    scratch: bool = False
    spill: bool = False

    def describe(self) -> str:
        """Return the plan in one line for a log."""
        size = "unknown" if self.virtual_size is None else units.format_size(self.virtual_size)
        return f"{self.route}: {self.reason} (virtual size {size})"


def plan(wanted: request.Request, offer: Offer, content: Content, space: Space, scratch: int | None) -> Plan:
    """Return the best route that applies; ``scratch``: free bytes of scratch, None without scratch.

    Raises ``TooLarge``, ``ScratchRequired`` and ``Unsupported`` when none does.
    """
    if offer.blank:
        return _blank(wanted, space)
    detect.refuse_stranger(content.format)
    if wanted.is_archive:
        return _unpack(wanted, content, space)
    if content.format == "tar":
        raise errors.Unsupported(reason="a tar archive is not a disk; import it with content type archive")
    size = content.virtual_size
    if size is not None and size > space.available:
        raise errors.TooLarge(virtual_size=size, available=space.available)
    chosen = _delta(wanted, offer, content) if wanted.is_delta else _choose(wanted, offer, content)
    crowded = content.layout is not None and content.layout.crowded
    if chosen.spill and crowded and offer.once and (offer.size or 0) <= (scratch or -1):
        # Other sources are read once more when it comes to that.
        why = "may have too many parts to place them as they pass, and the source cannot be read again"
        chosen = Plan(Route.SPOOL, f"{content.format} {why}", scratch=True)
    if chosen.scratch:
        _check_scratch(chosen, offer, scratch)
    grow_to = 0 if space.block or wanted.is_delta else min(wanted.image_size or 0, space.usable)
    return dataclasses.replace(chosen, virtual_size=size, grow_to=grow_to)


def _choose(wanted: request.Request, offer: Offer, content: Content) -> Plan:
    at_random = offer.ranges and not content.compressions and wanted.checksum is None
    forward = _why_forward(wanted, offer, content)
    if content.format in {"raw", "iso"}:
        if offer.extents and at_random:
            return Plan(Route.EXTENTS, "raw disk whose holes the source knows: only data moves", random=True)
        if at_random:
            return Plan(Route.STREAM, "raw disk in parallel ranges, straight to the target", random=True)
        if offer.runs:
            return Plan(Route.EXTENTS, "raw disk, and the stream marks its holes: only data is written")
        return Plan(Route.STREAM, f"raw disk as an ordered stream: {forward}")
    if content.layout is not None:
        parts = f"{content.format} {content.layout.unit}"
        if at_random:
            return Plan(Route.PLACE, f"{parts} fetched by range, put where they belong", random=True)
        return Plan(Route.PLACE, f"{parts} put where they belong as they pass: {forward}", spill=True)
    why = f"{content.format}{': ' + content.unplaceable if content.unplaceable else ''}"
    if at_random:
        return Plan(Route.CONVERT, f"{why} read at random by qemu-img, no scratch", random=True)
    return Plan(Route.SPOOL, f"{why} has to be whole before it can be converted: {forward}", scratch=True)


def _delta(wanted: request.Request, offer: Offer, content: Content) -> Plan:
    """Return how to change what an earlier stage has left; nothing else may happen to that."""
    at_random = offer.ranges and wanted.checksum is None
    why = f"what has changed since checkpoint {wanted.stage.previous}"
    if content.format == "qcow2":
        return Plan(Route.MERGE, f"{why}, through scratch onto the disk", random=at_random, scratch=True)
    if content.format == "raw" and offer.extents and at_random:
        return Plan(Route.UPDATE, f"{why}, written over it in place", random=True)
    raise errors.Unsupported(reason=f"source {wanted.source!r}: does not support checkpoints")


def _why_forward(wanted: request.Request, offer: Offer, content: Content) -> str:
    if content.compressions:
        return f"compressed with {', then '.join(content.compressions)}"
    if not offer.ranges:
        return "the source gives no byte ranges"
    if wanted.checksum is not None:
        return "a checksum wants every byte in order"
    return ""


def _blank(wanted: request.Request, space: Space) -> Plan:
    if space.block:
        size = space.available if wanted.image_size is None else wanted.image_size
        if size > space.available:
            raise errors.TooLarge(virtual_size=size, available=space.available)
    else:
        size = space.usable
    how = "every byte written" if wanted.preallocation else "nothing to write" if space.block else "sparse"
    return Plan(Route.BLANK, f"blank disk, {how}", virtual_size=size)


def _unpack(wanted: request.Request, content: Content, space: Space) -> Plan:
    if content.format != "tar":
        raise errors.Unsupported(reason=f"content type archive wants a tar archive, this is {content.format}")
    if space.block and wanted.content_type == request.CLONE:
        return Plan(Route.EXTRACT, "disk in the tar of a cloned file system, onto the device as it passes")
    if space.block:
        raise errors.RequestError("an archive needs a volume with a file system, not a block device")
    return Plan(Route.UNPACK, "tar archive unpacked as it passes, moved into place when whole")


def _check_scratch(chosen: Plan, offer: Offer, scratch: int | None) -> None:
    if scratch is None:
        raise errors.ScratchRequired(reason=chosen.reason)
    if offer.size is not None and offer.size > scratch:
        raise errors.ScratchTooSmall(size=offer.size, available=scratch)
