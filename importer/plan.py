"""The plan of an import: the route and its reason, decided before the first byte is written, without I/O."""

from __future__ import annotations

import enum
from typing import NamedTuple

from cdi_worker import errors, units
from cdi_worker.formats import detect, facts
from cdi_worker.importer import package
from cdi_worker.importer import request as request_module
from cdi_worker.importer.request import Request
from cdi_worker.importer.survey import Survey
from cdi_worker.sources.base import Facts
from cdi_worker.sources.trust import Demanded


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


class Plan(NamedTuple):
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


def plan(request: Request, demanded: Demanded, stated: Facts, survey: Survey, two_passes: str = "") -> Plan:
    """Return the plan with the best possible route. ``demanded``: of the disk, ``stated``: by its source.

    ``two_passes``: why the disk cannot be delivered while its image passes once, as a failed attempt has
    shown; empty: not known.
    Raises ``TooLarge``, ``ScratchRequired``, ``ScratchTooSmall`` and ``Unsupported`` if there is none, and
    the obstacle of the source.
    """
    if stated.obstacle is not None:
        raise stated.obstacle
    if stated.blank:
        asked = request.disk_size
        if asked is not None and survey.block and asked > survey.usable:
            raise errors.TooLarge(virtual_size=asked, available=survey.usable)
        _check_asked(request, survey, asked or 0, asked or 0)
        # A pod creates the largest disk that fits.
        blank = asked if survey.block and asked is not None else survey.usable
        kept = "every byte zeroed" if request.is_exact else "nothing to write"
        how = "every byte written" if request.preallocation else kept if survey.block else "sparse"
        return Plan(Route.BLANK, f"blank disk, {how}", virtual_size=blank)
    detect.refuse_stranger(survey.format, survey.head)
    if request.is_archive:
        return _unpack(request, survey)
    if survey.format == "tar":
        raise package.not_a_disk(request, survey)
    size = survey.virtual_size
    if size is not None:
        check_room(size, request, survey)
    asked = 0 if request.is_delta else request.disk_size or 0
    _check_asked(request, survey, asked, max(size or 0, asked))
    # A protocol whose disks are VMDKs sends all of a disk, in each stage.
    if request.is_delta and stated.format != "vmdk":
        chosen = _delta(request, demanded, survey)
    else:
        chosen = _choose(demanded, stated, survey, two_passes)
        is_update = request.compares or request.existing == "update"
        if request.is_delta or (is_update and survey.present):
            done = "nothing is written to it" if request.compares else "only what differs is written"
            reason = f"{chosen.reason}; compared with the target, {done}"
            chosen = chosen._replace(reason=reason, compared=True)
    if chosen.scratch and survey.scratch is None:
        raise errors.ScratchRequired(reason=chosen.reason)
    if chosen.scratch and stated.size is not None and stated.size > (survey.scratch or 0):
        raise errors.ScratchTooSmall(size=stated.size, available=survey.scratch)
    # On the command line a size is that of the disk. In a pod it is that of the volume, a device.
    is_kept = request.is_delta or (survey.block and not request.is_exact)
    grow_to = 0 if is_kept else min(asked, survey.usable)
    return chosen._replace(virtual_size=size, grow_to=grow_to)


def _choose(demanded: Demanded, stated: Facts, survey: Survey, two_passes: str) -> Plan:
    """Return the plan for a whole disk."""
    seekable = survey.ranges and not survey.compressions
    at_random = seekable and demanded.checksum is None and not stated.checksum
    forward = ""
    if survey.compressions:
        forward = f"compressed with {', then '.join(survey.compressions)}"
    elif not survey.ranges:
        forward = "the source offers no byte ranges"
    elif not at_random:
        forward = "the checksum needs every byte in order"
    if survey.chain and not survey.ordered:
        _check_random(survey)
        what = f"clusters of {len(survey.chain)} files fetched by range, the newest of each written"
        return Plan(Route.PLACE, f"qcow2 {what}", random=True)
    if survey.is_raw and survey.ordered:
        return Plan(Route.STREAM, f"raw disk, ordered stream: {forward or 'the target is written in order'}")
    if survey.is_raw and at_random and survey.extents:
        how = "the source reports its holes: only data is copied"
        return Plan(Route.EXTENTS, f"raw disk, {how}", random=True)
    if survey.is_raw and at_random:
        return Plan(Route.STREAM, "raw disk, parallel ranges written directly to the target", random=True)
    if survey.is_raw and survey.runs:
        return Plan(Route.EXTENTS, "raw disk, the stream marks its holes: only data is written")
    if survey.is_raw:
        return Plan(Route.STREAM, f"raw disk, ordered stream: {forward}")
    if survey.ordered:
        return _in_order(survey, at_random=at_random)
    if survey.layout is not None:
        return _place(demanded, stated, survey, forward, two_passes)
    why = f"{survey.format}{': ' + survey.unplaceable if survey.unplaceable else ''}"
    if at_random or (seekable and demanded.checksum is None and survey.scratch is None):
        again = "" if at_random else ", then read again for the checksum"
        how = f"converted by QEMU with random reads, no scratch{again}"
        return Plan(Route.CONVERT, f"{why}, {how}", random=True)
    how = "must be downloaded completely before conversion"
    return Plan(Route.SPOOL, f"{why}, {how}: {forward}", scratch=True)


def _in_order(survey: Survey, *, at_random: bool) -> Plan:
    """Return the plan for an image whose disk is written in order, which QEMU can read in order."""
    why = f"{survey.format} is not in the order of the disk"
    if at_random and not survey.chain:
        how = "read in that order by QEMU with random reads, no scratch"
        return Plan(Route.CONVERT, f"{why}: {how}", random=True)
    if survey.scratch is None or survey.chain:
        remedy = errors.Remedy(
            [("name a file or a device as the target", "command"), ("scratch space", "scratch")]
        )
        raise errors.Unsupported(reason=f"{why}, and standard output is written in order", remedy=remedy)
    return Plan(Route.SPOOL, f"{why}: downloaded, then read in that order by QEMU", scratch=True)


def _place(demanded: Demanded, stated: Facts, survey: Survey, forward: str, two_passes: str) -> Plan:
    """Return the plan for an image with a ``layout``, which our own reader supports."""
    layout, scratch, form = survey.layout, survey.scratch, survey.format
    assert layout is not None  # noqa: S101  (see ``_choose``)
    if not forward:
        how = "fetched by range and written to their offsets"
        return Plan(Route.PLACE, f"{form} {layout.unit} {how}", random=True)
    if two_passes and scratch is not None and stated.once:
        reason = f"it must be read twice ({two_passes}), but this source can be read only once"
        raise errors.Unsupported(reason=reason, remedy=errors.Remedy([("convert it first", "flatten")]))
    if two_passes and scratch is not None:
        facts.check_table(form, layout.map_length)
        return Plan(Route.SPOOL, f"{form}: {two_passes}, downloaded before conversion", scratch=True)
    if two_passes:
        # Only for the checksum that the server itself states: one that lies about its bytes can lie about
        # their checksum.
        if survey.ranges and not stated.once and demanded.checksum is None and not survey.compressions:
            how = "fetched by range, then read again for the checksum"
            return Plan(Route.PLACE, f"{form}: {two_passes}, {how}", random=True)
        raise errors.ScratchRequired(reason=two_passes)
    crowded = layout.crowded and layout.map_length <= facts.MAX_TABLE
    if crowded and stated.once and (stated.size or 0) <= (-1 if scratch is None else scratch):
        # A source that can be read again is spooled only after an attempt has failed in one pass.
        why = "may have too many pieces to write in one pass, and the source can be read only once"
        return Plan(Route.SPOOL, f"{form} {why}", scratch=True)
    how = f"written to their offsets from an ordered stream: {forward}"
    return Plan(Route.PLACE, f"{form} {layout.unit} {how}", spill=True)


def _delta(request: Request, demanded: Demanded, survey: Survey) -> Plan:
    """Return the plan of a delta stage; no other route may touch the disk of an earlier stage."""
    at_random = survey.ranges and demanded.checksum is None
    why = f"changes since checkpoint {request.stage.previous}"
    if survey.chain:
        _check_random(survey)
        return Plan(Route.UPDATE, f"{why}: qcow2 clusters fetched by range, written in place", random=True)
    if survey.format == "qcow2":
        if request.compares:
            reason = f"{why} in qcow2, which only qemu-img can apply; compare the whole disk instead"
            raise errors.Unsupported(reason=reason)
        return Plan(
            Route.MERGE,
            f"{why}: downloaded to scratch, committed to the disk",
            random=at_random,
            scratch=True,
        )
    if survey.format == "raw" and survey.extents and at_random:
        return Plan(Route.UPDATE, f"{why}, written to the disk in place", random=True)
    raise errors.Unsupported(reason=f"source {request.source!r}: does not support checkpoints")


def _check_random(survey: Survey) -> None:
    if not survey.ranges:
        reason = "the source offers no byte ranges, which the layers of a disk need; copy the files first"
        raise errors.Unsupported(reason=reason)


def _check_asked(request: Request, survey: Survey, asked: int, size: int) -> None:
    """Raise an error if there is no room for the size ``asked``, or a qcow2 file cannot hold ``size``."""
    if asked > survey.usable and request.is_exact:
        raise errors.TooLarge(virtual_size=asked, available=survey.usable)
    form = request.form
    if form is not None and size > form.most:
        most = units.format_size(form.most)
        clusters = f"clusters of {form.cluster_size} bytes hold at most {most}"
        raise errors.Unsupported(reason=f"qcow2: {clusters}; use a larger cluster_size")


def check_room(size: int, request: Request, survey: Survey) -> None:
    """Raise ``errors.TooLarge`` if the target has no room for a disk of ``size`` bytes."""
    if size - survey.footer > survey.available and not survey.thin:
        is_limit = request.is_exact and request.disk_size == survey.available
        raise errors.TooLarge(virtual_size=size, available=survey.available, is_limit=is_limit)


def _unpack(request: Request, survey: Survey) -> Plan:
    if survey.format != "tar":
        raise errors.Unsupported(reason=f"content type archive needs a tar archive, this is {survey.format}")
    if survey.block and request.content_type == request_module.CLONE:
        where = "cloned file system" if survey.runs else "tar archive of a cloned file system"
        return Plan(Route.EXTRACT, f"disk in the {where}, written to the device")
    if survey.block:
        raise errors.RequestError("an archive needs a volume with a file system, not a block device")
    what = "disk and tar archive of a cloned file system" if survey.runs else "tar archive"
    return Plan(Route.UNPACK, f"{what}, unpacked while it is read, moved into place when complete")
