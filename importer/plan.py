"""The plan of an import: the route and its reason, decided before the first byte is written, without I/O."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, NamedTuple

from cdi_worker import errors, units
from cdi_worker.formats import detect, facts
from cdi_worker.importer import request as request_module
from cdi_worker.importer.request import Request

if TYPE_CHECKING:
    from cdi_worker.formats.mapped import layout as mapped
    from cdi_worker.formats.qcow2 import chain


class Route(enum.StrEnum):
    """The routes from a source to a target, best first (docs/reference/routes.md)."""

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


class Offer(NamedTuple):
    """The abilities of the source. ``name``: its address. ``size``: bytes as served, None if unknown.

    ``checksum``: the server states one of the bytes as served. ``extents``: it reports data and holes of its
    ranges; ``runs``: its stream marks holes, of a file system those of its disk. ``once``: its stream can be
    read only once. ``blank``: it has no data, the disk is all zeros. ``obstacle``: why it is not imported
    although it can be examined. ``two_passes``: why the disk cannot be delivered while its image passes once,
    which an attempt has shown; empty: not known.
    """

    name: str = ""
    size: int | None = None
    identity: str | None = None
    checksum: bool = False
    ranges: bool = False
    extents: bool = False
    runs: bool = False
    once: bool = False
    blank: bool = False
    obstacle: errors.Error | None = None
    two_passes: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """The content as detected from the first bytes.

    ``virtual_size``: in bytes, None while unknown (until the end of a compressed raw disk). ``layout``: of an
    image that our own reader supports; ``unplaceable``: why it does not support this image of its format.
    ``raw``: bytes of the source that are a raw disk, if a footer follows it (fixed VHD). ``footer``: bytes at
    the end of a stream that may be such a footer, which is known only then. ``chain``: the files of a chain,
    or the one file that holds what changed since a checkpoint. ``head``: the first bytes after
    decompression, which were checked.
    """

    format: str = "raw"
    compressions: tuple[str, ...] = ()
    virtual_size: int | None = None
    layout: mapped.Layout | None = None
    unplaceable: str = ""
    raw: int | None = None
    footer: int = 0
    chain: tuple[chain.File, ...] = ()
    head: bytes = dataclasses.field(default=b"", repr=False)


class Space(NamedTuple):
    """Space on the target, in bytes: ``available`` for an image, ``usable`` for growing it.

    ``thin``: holes need none, so that the disk may be larger. ``ordered``: it is a stream, written in order.
    ``present``: it holds a disk, or is a device, which always holds something.
    """

    block: bool
    available: int
    usable: int
    thin: bool = False
    ordered: bool = False
    present: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A route and the reason for it.

    ``random``: the source is read by ranges, in parallel and out of order; else in order.
    ``compared``: with what the target holds, and only what differs is written.
    ``virtual_size``: of the image in bytes, None while unknown. ``grow_to``: bytes that a smaller disk is
    grown to; 0 for a delta, and for the device of a pod. ``spill``: scratch may hold data whose offset is not
    known yet.
    """

    route: Route
    reason: str
    random: bool = False
    compared: bool = False
    virtual_size: int | None = None
    grow_to: int = 0
    scratch: bool = False
    spill: bool = False

    def describe(self) -> str:
        """Return the plan as one line for the log."""
        size = "unknown" if self.virtual_size is None else units.format_size(self.virtual_size)
        return f"{self.route}: {self.reason} (virtual size {size})"


def plan(request: Request, offer: Offer, content: Content, space: Space, scratch: int | None) -> Plan:
    """Return the plan with the best possible route. ``scratch``: free bytes of scratch, None without scratch.

    Raises ``TooLarge``, ``ScratchRequired``, ``ScratchTooSmall`` and ``Unsupported`` if there is none, and
    the obstacle of the source.
    """
    if offer.obstacle is not None:
        raise offer.obstacle
    _check_map(request, offer, content)
    if offer.blank:
        return _blank(request, space)
    detect.refuse_stranger(content.format)
    if request.is_archive:
        return _unpack(request, offer, content, space)
    if content.format == "tar":
        raise _not_a_disk(content)
    size = content.virtual_size
    if size is not None:
        check_room(size, content, request, space)
    asked = 0 if request.is_delta else request.disk_size or 0
    if request.is_exact and asked > space.usable:
        raise errors.TooLarge(virtual_size=asked, available=space.usable)
    _check_form(request, max(size or 0, asked))
    choose = _delta if request.is_delta else _in_order if space.ordered else _choose
    chosen = choose(request, offer, content, scratch)
    layout = content.layout
    crowded = layout is not None and layout.crowded and layout.map_length <= facts.MAX_TABLE
    if chosen.spill and crowded and offer.once and (offer.size or 0) <= (scratch or -1):
        # A source that can be read again is spooled only when an attempt has shown that it must be.
        why = "may have too many pieces to write in one pass, and the source can be read only once"
        chosen = Plan(Route.SPOOL, f"{content.format} {why}", scratch=True)
    if request.existing in {"update", "compare"} and space.present and not request.is_delta:
        chosen = _compared(request, chosen)
    if chosen.scratch:
        _check_scratch(chosen, offer, scratch)
    # On the command line a size is that of the disk. In a pod it is that of the volume, a device.
    is_kept = request.is_delta or (space.block and not request.is_exact)
    grow_to = 0 if is_kept else min(asked, space.usable)
    return dataclasses.replace(chosen, virtual_size=size, grow_to=grow_to)


def _check_map(request: Request, offer: Offer, content: Content) -> None:
    """Raise an error for what cannot be imported by its map: another format, an image of another size."""
    blocks = request.blocks
    if blocks is None:
        return
    if content.format not in {"raw", "iso"} or content.chain or offer.blank:
        form = "blank" if offer.blank else content.format
        reason = f"--map is for a raw disk, plain or compressed, and this is {form}"
        raise errors.Unsupported(reason=reason)
    size = None if content.compressions else offer.size
    if size not in {None, blocks.map.size}:
        reason = f"it has {size} bytes, the disk of the map {blocks.map.size}"
        raise errors.MapMismatch(url=offer.name, map=blocks.name, reason=reason)


def _not_a_disk(content: Content) -> errors.Unsupported:
    if content.compressions:
        return errors.Unsupported(reason="a compressed tar archive is not a disk; decompress an OVA first")
    reason = (
        "a tar archive is not a disk; import it with content type archive. In an OVA the OVF descriptor "
        "is the first file; pack it again: tar -cf vm.ova vm.ovf, then the other files"
    )
    return errors.Unsupported(reason=reason)


def _compared(request: Request, chosen: Plan) -> Plan:
    """Return the plan of a comparison. What qemu-img writes is completed in scratch first."""
    then = "only what differs is written" if request.existing == "update" else "nothing is written to it"
    reason = f"{chosen.reason}; compared with the target, {then}"
    if chosen.route not in {Route.CONVERT, Route.SPOOL}:
        return dataclasses.replace(chosen, reason=reason, compared=True)
    return dataclasses.replace(chosen, reason=reason, compared=True, scratch=True)


def _in_order(request: Request, offer: Offer, content: Content, _scratch: int | None) -> Plan:
    """Return the plan for a target that is written in order. Raises ``Unsupported`` for any other format."""
    if content.format in {"raw", "iso"} or content.raw is not None:
        forward = _why_forward(request, offer, content) or "the target is written in order"
        return Plan(Route.STREAM, f"raw disk, ordered stream: {forward}")
    reason = f"{content.format} is not in the order of the disk, and standard output is written in order"
    raise errors.Unsupported(reason=f"{reason}; name a file or a device as the target")


def _choose(request: Request, offer: Offer, content: Content, scratch: int | None) -> Plan:
    seekable = offer.ranges and not content.compressions
    at_random = seekable and request.checksum is None and not offer.checksum
    forward = _why_forward(request, offer, content)
    if content.chain:
        return _chain(offer, content)
    if request.blocks is not None:
        return _mapped(forward, at_random=seekable and request.checksum is None)
    if content.format in {"raw", "iso"} or content.raw is not None:
        return _raw(offer, forward, at_random=at_random)
    if content.layout is not None:
        parts = f"{content.format} {content.layout.unit}"
        if at_random:
            return Plan(Route.PLACE, f"{parts} fetched by range and written to their offsets", random=True)
        if offer.two_passes:
            return _two_passes(request, offer, content, scratch)
        return Plan(
            Route.PLACE, f"{parts} written to their offsets from an ordered stream: {forward}", spill=True
        )
    why = f"{content.format}{': ' + content.unplaceable if content.unplaceable else ''}"
    if at_random or (seekable and request.checksum is None and scratch is None):
        again = "" if at_random else ", then read again for the checksum"
        return Plan(
            Route.CONVERT, f"{why}, converted by qemu-img with random reads, no scratch{again}", random=True
        )
    return Plan(
        Route.SPOOL, f"{why}, must be downloaded completely before conversion: {forward}", scratch=True
    )


def _two_passes(request: Request, offer: Offer, content: Content, scratch: int | None) -> Plan:
    """Return the plan for an image that must be read twice, from scratch or from the source.

    From the source only for the checksum that the server itself states: one that lies about its bytes can lie
    about their checksum.
    """
    why = f"{content.format}: {offer.two_passes}"
    if scratch is not None and offer.once:
        advice = "this source can be read only once; convert it first: qemu-img convert -O qcow2"
        raise errors.Unsupported(reason=f"it must be read twice ({offer.two_passes}), but {advice}")
    if scratch is not None:
        if content.layout is not None:
            facts.check_table(content.format, content.layout.map_length)
        return Plan(Route.SPOOL, f"{why}, downloaded before conversion", scratch=True)
    if offer.ranges and not offer.once and request.checksum is None and not content.compressions:
        reason = f"{why}, fetched by range, then read again for the checksum"
        return Plan(Route.PLACE, reason, random=True)
    raise errors.ScratchRequired(reason=offer.two_passes)


def _raw(offer: Offer, forward: str, *, at_random: bool) -> Plan:
    if offer.extents and at_random:
        return Plan(Route.EXTENTS, "raw disk, the source reports its holes: only data is copied", random=True)
    if at_random:
        return Plan(Route.STREAM, "raw disk, parallel ranges written directly to the target", random=True)
    if offer.runs:
        return Plan(Route.EXTENTS, "raw disk, the stream marks its holes: only data is written")
    return Plan(Route.STREAM, f"raw disk, ordered stream: {forward}")


def _mapped(forward: str, *, at_random: bool) -> Plan:
    if at_random:
        reason = "raw disk, by its map: only mapped ranges are fetched, each verified by its checksum"
        return Plan(Route.EXTENTS, reason, random=True)
    return Plan(Route.STREAM, f"raw disk, ordered stream, verified by its map: {forward}")


def _chain(offer: Offer, content: Content) -> Plan:
    _check_random(offer)
    what = f"clusters of {len(content.chain)} files fetched by range, the newest of each written"
    return Plan(Route.PLACE, f"qcow2 {what}", random=True)


def _delta(request: Request, offer: Offer, content: Content, _scratch: int | None) -> Plan:
    """Return the plan of a delta stage; no other route may touch the disk of an earlier stage."""
    at_random = offer.ranges and request.checksum is None
    why = f"changes since checkpoint {request.stage.previous}"
    if content.chain:
        _check_random(offer)
        return Plan(Route.UPDATE, f"{why}: qcow2 clusters fetched by range, written in place", random=True)
    if content.format == "qcow2":
        if request.existing == "compare":
            reason = f"{why} in qcow2, which only qemu-img can apply; compare the whole disk instead"
            raise errors.Unsupported(reason=reason)
        return Plan(
            Route.MERGE,
            f"{why}: downloaded to scratch, committed to the disk",
            random=at_random,
            scratch=True,
        )
    if content.format == "raw" and offer.extents and at_random:
        return Plan(Route.UPDATE, f"{why}, written to the disk in place", random=True)
    raise errors.Unsupported(reason=f"source {request.source!r}: does not support checkpoints")


def _check_random(offer: Offer) -> None:
    if not offer.ranges:
        reason = "the source offers no byte ranges, which the layers of a disk need; copy the files first"
        raise errors.Unsupported(reason=reason)


def _why_forward(request: Request, offer: Offer, content: Content) -> str:
    if content.compressions:
        return f"compressed with {', then '.join(content.compressions)}"
    if not offer.ranges:
        return "the source offers no byte ranges"
    if request.checksum is not None or offer.checksum:
        return "the checksum needs every byte in order"
    return ""


def _check_form(request: Request, size: int) -> None:
    """Raise ``errors.Unsupported`` if the format of the target's file has no room for a disk of this size."""
    form = request.form
    if form is not None and size > form.most:
        most = units.format_size(form.most)
        clusters = f"clusters of {form.cluster_size} bytes hold at most {most}"
        raise errors.Unsupported(reason=f"qcow2: {clusters}; use a larger cluster_size")


def check_room(size: int, content: Content, request: Request, space: Space) -> None:
    """Raise ``errors.TooLarge`` if the target has no room for a disk of ``size`` bytes."""
    if size - content.footer > space.available and not space.thin:
        is_limit = request.is_exact and request.disk_size == space.available
        raise errors.TooLarge(virtual_size=size, available=space.available, is_limit=is_limit)


def _blank(request: Request, space: Space) -> Plan:
    asked = request.disk_size
    if asked is not None and (space.block or request.is_exact) and asked > space.usable:
        raise errors.TooLarge(virtual_size=asked, available=space.usable)
    _check_form(request, asked or 0)
    # A pod creates the largest disk that fits.
    size = asked if space.block and asked is not None else space.usable
    kept = "every byte zeroed" if request.is_exact else "nothing to write"
    how = "every byte written" if request.preallocation else kept if space.block else "sparse"
    return Plan(Route.BLANK, f"blank disk, {how}", virtual_size=size)


def _unpack(request: Request, offer: Offer, content: Content, space: Space) -> Plan:
    if content.format != "tar":
        raise errors.Unsupported(reason=f"content type archive needs a tar archive, this is {content.format}")
    if space.block and request.content_type == request_module.CLONE:
        where = "cloned file system" if offer.runs else "tar archive of a cloned file system"
        return Plan(Route.EXTRACT, f"disk in the {where}, written to the device")
    if space.block:
        raise errors.RequestError("an archive needs a volume with a file system, not a block device")
    what = "disk and tar archive of a cloned file system" if offer.runs else "tar archive"
    return Plan(Route.UNPACK, f"{what}, unpacked while it is read, moved into place when complete")


def _check_scratch(chosen: Plan, offer: Offer, scratch: int | None) -> None:
    if scratch is None:
        raise errors.ScratchRequired(reason=chosen.reason)
    # A conversion by ranges keeps the disk there, whose size says nothing about its data.
    if chosen.route is not Route.CONVERT and offer.size is not None and offer.size > scratch:
        raise errors.ScratchTooSmall(size=offer.size, available=scratch)
