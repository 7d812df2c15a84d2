"""The survey before an import: facts about the source, its content, the target and scratch."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cdi_worker import errors, lazy, units
from cdi_worker.formats import detect, facts, safety, views
from cdi_worker.formats.compressed import layers
from cdi_worker.images import targets
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.importer import plan
from cdi_worker.importer.request import Request
from cdi_worker.scratch import space
from cdi_worker.sources import base

#: Bytes that are read one after the other until they show the content. 1 MiB holds a compressed block of
#: bzip2 (900 kB of plain data), 72 MiB more than a decompressor reads without output.
HEADS = (1 << 20, 8 << 20, 72 << 20)
MIB = 1 << 20
#: Maximum bytes of content that are read in advance to find the tables of an image in a stream.
LONGEST = 8 << 20
#: Bytes of the footer of a VHD.
FOOTER = 512
#: The space assumed when no target is named, in bytes.
ANYTHING = 1 << 62

log = logging.getLogger(__name__)


class Survey(NamedTuple):
    """The planner's inputs. ``scratch``: free bytes, None without scratch."""

    offer: plan.Offer
    content: plan.Content
    space: plan.Space
    scratch: int | None

    def plan(self, request: Request) -> plan.Plan:
        """Return the plan. Raises ``errors.MissingTool`` too: no byte is fetched for a missing program."""
        chosen = plan.plan(request, self.offer, self.content, self.space, self.scratch)
        for module in _tools(chosen, self.content):
            # Imported when used: most imports start no program (start-up time).
            lazy.load("cdi_worker.images.tools.process").require(
                *lazy.load(f"cdi_worker.images.tools.{module}:PROGRAM")
            )
        return chosen

    def with_two_passes(self, reason: str) -> Survey:
        """Return these facts, and that the image must be read twice."""
        return self._replace(offer=self.offer._replace(two_passes=reason))


def _tools(chosen: plan.Plan, content: plan.Content) -> list[str]:
    """Return the modules of the programs that a plan needs."""
    converts = chosen.route in {plan.Route.CONVERT, plan.Route.SPOOL, plan.Route.MERGE}
    return ["qemu_img"] * converts + ["xz"] * ("xz" in content.compressions)


def survey(
    image: base.Image,
    request: Request,
    cancel: cancelling.Cancel,
    two_passes: str = "",
    held: targets.Claim | None = None,
) -> Survey:
    """Examine the open ``image``, the target and scratch, without changing anything.

    ``two_passes``: see ``plan.Offer``. ``held``: the target's claim, if there is one. Raises
    ``errors.NoRanges`` if it does not serve the ranges that it announces.
    """
    stated = image.facts
    content = plan.Content(format="raw", virtual_size=0)
    if not stated.blank:
        content = _sized(stated, examine(image.files, request, cancel))
    if request.blocks is not None and content.virtual_size is None and content.format in {"raw", "iso"}:
        # Of what is compressed, the size is otherwise known at its end.
        size = units.whole_sectors(request.blocks.map.size)
        content = dataclasses.replace(content, virtual_size=size, footer=0)
    ranges = all(each.seeks for each in image.files)
    offer = plan.Offer(
        name=stated.name,
        size=stated.size,
        identity=stated.identity,
        checksum=bool(stated.checksum),
        ranges=ranges,
        extents=ranges and stated.extents is not None,
        runs=stated.runs is not None or stated.folder is not None,
        once=stated.once,
        blank=stated.blank,
        obstacle=stated.obstacle,
        two_passes=two_passes,
    )
    return Survey(offer, content, room(request, held, thin=stated.thin), spare(request))


def _sized(source: base.Facts, content: plan.Content) -> plan.Content:
    """Return the content with the size that the protocol states. Raises ``errors.Refused`` for another."""
    stated = source.disk_size
    if stated is None or content.format not in detect.DISKS:
        return content
    if content.virtual_size is None:
        return dataclasses.replace(content, virtual_size=units.whole_sectors(stated))
    if content.raw is None:
        check_stated(source, content.virtual_size)
    return content


def check_stated(source: base.Facts, size: int) -> None:
    """Raise ``errors.Refused`` if the protocol states another size of the disk than ``size`` bytes."""
    stated = source.disk_size
    if stated is not None and units.whole_sectors(stated) != units.whole_sectors(size):
        reason = f"{source.name}: a disk of {stated} bytes is stated, this one has {size}"
        raise errors.Refused(format="disk", rule="size", reason=reason)


def examine(images: Sequence[base.Image], request: Request, cancel: cancelling.Cancel) -> plan.Content:
    """Detect the format and run the safety checks that the first bytes (or ranges) allow."""
    if is_chain(images, request):
        return _chain(images, request, cancel)
    (only,) = images
    source = only.facts
    # The routes read these bytes again from memory: they cannot change after the check.
    read = only.checked(cancel)
    if source.format is not None:
        return _declared(source, source.format, read, request)
    detected = _look(only, read, request, cancel)
    content = plan.Content(detected.format, detected.compressions, head=detected.head)
    if request.is_archive or detected.format not in detect.DISKS:
        return content
    form = detected.format
    if form == "raw" and len(detected.head) < facts.MIN_VIRTUAL_SIZE and request.checksum is None:
        # The whole content: ``_look`` reads more of a longer one. A wrong checksum, which the route finds, is
        # reported first.
        facts.check_size(form, len(detected.head))
    if detect.is_luks(detected.head):
        log.warning("the disk begins with a LUKS header, imported as it is: only the guest can decrypt it")
    if read is None or detected.compressions:
        head, checked = _check_head(
            form, detected.head, functools.partial(_look, only, read, request, cancel)
        )
    else:
        if form in {"raw", "iso"} and _is_fixed_vhd(read, source.size or 0):
            form = "vhd"
        head, checked = detected.head, safety.check(form, detected.head, read=read, size=source.size)
    is_raw, in_order = form in {"raw", "iso"}, read is None or bool(detected.compressions)
    return dataclasses.replace(
        content,
        format=form,
        head=head,
        virtual_size=_raw_size(source, detected) if is_raw else checked.virtual_size,
        layout=checked.layout,
        unplaceable=checked.unplaceable,
        raw=checked.raw,
        footer=FOOTER if is_raw and in_order else 0,
    )


def _raw_size(source: base.Facts, detected: layers.Content) -> int | None:
    """Return the size of a raw disk; None if it is not known before it has been read."""
    return None if detected.compressions or source.size is None else units.whole_sectors(source.size)


def _check_head(form: str, head: bytes, look: Callable[[int], layers.Content]) -> tuple[bytes, facts.Facts]:
    """Check an image that is read in order; return its first bytes and its facts.

    ``look(length)`` reads in advance as much of the content as the check needs, at most ``LONGEST``.
    """
    checked = safety.check(form, head)
    while len(head) < checked.needs <= LONGEST:
        longer = look(-(-checked.needs // MIB) * MIB).head
        if len(longer) <= len(head):
            break  # the content ends there
        head = longer
        checked = safety.check(form, head)
    return head, checked


def is_chain(images: Sequence[base.Image], request: Request) -> bool:
    """Return whether they are the files of a chain, perhaps only the one with what has changed."""
    return len(images) > 1 or (request.is_delta and request.location.of_files)


def _chain(images: Sequence[base.Image], request: Request, cancel: cancelling.Cancel) -> plan.Content:
    """Check each file of a chain, and whether they are one."""
    # Imported when used: few imports need it (start-up time).
    from cdi_worker.formats.qcow2 import chain
    from cdi_worker.sources import chained

    files = []
    for each in images:
        source, read = each.facts, each.checked(cancel)
        if read is None or not source.size:
            return plan.Content("qcow2", chain=(chain.File(source.name, "", 0, facts.Facts("qcow2", 0)),))
        content = _look(each, read, request, cancel)
        if content.compressions:
            reason = f"{source.name}: is compressed with {content.compressions[0]}; decompress it first"
            raise errors.Unsupported(reason=f"{reason}, layers are read by range")
        checked = safety.check(content.format, content.head, read=read, size=source.size, layer=True)
        if content.format in {"raw", "iso"}:
            checked = checked._replace(virtual_size=units.whole_sectors(source.size))
        files.append(chain.File(source.name, chained.base_name(source), source.size, checked))
    chain.check(files, request.stage.previous or None)
    return plan.Content("qcow2", virtual_size=files[-1].virtual_size, chain=tuple(files))


def _declared(source: base.Facts, form: str, read: views.Read | None, request: Request) -> plan.Content:
    """Return the content in the format that the protocol declares: a disk, a delta, or an archive."""
    if form not in detect.DISKS:
        return plan.Content(form, head=source.head)
    previous = request.stage.previous or None
    checked = safety.check(form, source.head, read=read, size=source.size, allow_backing=previous)
    if form == "qcow2" and request.is_delta and checked.backing is None:
        # Then it is a full disk, and committing it would leave old data where it has holes.
        reason = f"it has no backing file; a delta must have the backing file {previous!r}"
        raise errors.Refused(format=form, rule="backing_file", reason=reason)
    size = checked.virtual_size if form != "raw" or source.size is None else units.whole_sectors(source.size)
    return plan.Content(form, (), size, checked.layout, checked.unplaceable, head=source.head)


def _is_fixed_vhd(read: views.Read, size: int) -> bool:
    """Return whether a raw disk is a fixed VHD, by the footer in its last sector."""
    # Imported when used: only raw disks need it (start-up time).
    from cdi_worker.formats import vhd

    length = min(vhd.FOOTER, size)
    return vhd.is_fixed(read(size - length, length))


def room(request: Request, held: targets.Claim | None = None, *, thin: bool = False) -> plan.Space:
    """Return the space on the target (contract, Sizes), unlimited if no target is named.

    ``thin``: the source may be larger than a file system with space for its data.
    """
    space = _room(request, held)
    return space._replace(thin=(thin or space.thin) and not space.block)


def _room(request: Request, held: targets.Claim | None) -> plan.Space:
    if not request.target:
        return plan.Space(block=True, available=ANYTHING, usable=ANYTHING)
    if request.existing == "compare":
        # The size of the image is a part of the comparison.
        return plan.Space(False, ANYTHING, targets.facts(request.target, held).size, present=True)
    # An update uses the space of the disk again.
    is_removed = request.existing in {"remove", "update"}
    target = targets.facts(request.target, held, removed=is_removed)
    if request.is_archive and target.kind != "block":
        target = targets.facts(f"{request.target}/disk.img", removed=is_removed)
    if target.kind == "missing":
        raise errors.TargetError(path=request.target, reason="no such directory or device")
    if target.kind == "stream":
        limit = ANYTHING if request.disk_size is None else request.disk_size
        return plan.Space(block=False, available=limit, usable=limit, ordered=True)
    if target.kind == "block":
        return plan.Space(block=True, available=target.available, usable=target.available, present=True)
    return _grown(request, target) if request.form is not None else _file_room(request, target)


def _file_room(request: Request, target: targets.TargetFacts) -> plan.Space:
    """Return the space for a raw file."""
    available, size = target.available, request.disk_size
    if request.room.limit is not None:
        available = min(available, request.room.limit)
    if size is not None and not request.is_exact:
        available = min(available, size)
    usable = units.usable_space(available, request.room.overhead)
    if size is not None and request.is_exact:
        available, usable = min(available, size), min(usable, size)
    return plan.Space(block=False, available=available, usable=usable, present=bool(target.size))


def _grown(request: Request, target: targets.TargetFacts) -> plan.Space:
    """Return the space for a qcow2 file, which needs none for zeros: its disk may have any size."""
    form, size = request.form, ANYTHING if request.disk_size is None else request.disk_size
    # How well data compresses, or how much of it the backing file has, is not known before.
    is_unknown = form is not None and (form.compress or bool(form.backing))
    available = ANYTHING if is_unknown else target.available
    return plan.Space(block=False, available=available, usable=size, thin=True, present=bool(target.size))


def spare(request: Request) -> int | None:
    """Return the free bytes of scratch, None without scratch; unlimited if no target is named."""
    if not request.target:
        return ANYTHING
    scratch = space.facts(request.scratch, request.target)
    return None if scratch is None else scratch.available


def _look(
    image: base.Image,
    read: views.Read | None,
    request: Request,
    cancel: cancelling.Cancel,
    enough: int = layers.ENOUGH,
) -> layers.Content:
    """Detect the content; read more of the image until ``enough`` of its first bytes are known."""
    head, size = image.facts.head, image.facts.size
    is_whole = size is not None and len(head) >= size
    most = max(detect.HEAD, enough)
    content = layers.look(head, whole=is_whole, size=most)
    for length in HEADS:
        if is_whole or len(content.head) >= enough:
            break
        longer = functools.partial(image.head, length, cancel, read)
        head = retry.patiently(longer, request.connect_patience, cancel)
        is_whole = len(head) < length or len(head) == size
        content = layers.look(head, whole=is_whole, size=most)
    if content.format == layers.UNKNOWN:
        reason = f"its first {len(head) >> 20} MiB decompress to nothing"
        raise errors.Refused(format=content.compressions[-1], rule="head", reason=reason)
    return content
