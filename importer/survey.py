"""The survey before an import: facts about the source, its content, the target and scratch."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdi_worker import errors, units
from cdi_worker.formats import detect, facts, safety, vhd, views
from cdi_worker.formats.compressed import layers
from cdi_worker.images import targets
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.importer.request import Request
from cdi_worker.scratch import space
from cdi_worker.sources import base
from cdi_worker.sources.trust import Demanded

if TYPE_CHECKING:
    from cdi_worker.formats.mapped import layout as mapped
    from cdi_worker.formats.qcow2 import chain

#: Lengths of the head in bytes, tried in order until the content is known. 1 MiB holds a compressed block of
#: bzip2 (900 kB of plain data); no decompressor reads 72 MiB without output.
HEADS = (1 << 20, 8 << 20, 72 << 20)
MIB = 1 << 20
#: Maximum bytes of content that are read in advance to find the tables of an image in a stream.
LONGEST = 8 << 20
#: The space assumed when no target is named, in bytes.
ANYTHING = 1 << 62

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survey:
    """What was looked at before the first byte is written: the content, and the space for it. Sizes in bytes.

    ``ranges``, ``extents``, ``runs``: the source is read by byte ranges, reports the data and holes of its
    ranges, or sends a stream that marks holes.

    Of the content, detected from the first bytes: ``virtual_size``: None while unknown (until the end of a
    compressed raw disk). ``layout``: of an image that our own reader supports; ``unplaceable``: why it does
    not support this image of its format. ``sector_size``: see ``facts.ImageFacts``. ``raw``: bytes of the
    source that are a raw disk, if a footer follows it (fixed VHD). ``footer``: bytes at the end of a stream
    that may be such a footer, which is known only then. ``chain``: the files of a chain, or the one file with
    the changes since a checkpoint. ``head``: the first bytes after decompression, which were checked.

    Of the target: ``available`` for an image, ``usable`` for growing it. ``thin``: holes need no space, so
    that the disk may be larger. ``ordered``: it is a stream, written in order. ``present``: it holds a disk,
    or is a device, which always holds something. ``scratch``: free bytes of scratch, None without scratch.
    """

    ranges: bool = False
    extents: bool = False
    runs: bool = False
    format: str = "raw"
    compressions: tuple[str, ...] = ()
    virtual_size: int | None = None
    layout: mapped.Layout | None = None
    unplaceable: str = ""
    sector_size: int | None = None
    raw: int | None = None
    footer: int = 0
    chain: tuple[chain.ChainFile, ...] = ()
    head: bytes = dataclasses.field(default=b"", repr=False)
    block: bool = False
    available: int = 0
    usable: int = 0
    thin: bool = False
    ordered: bool = False
    present: bool = False
    scratch: int | None = None

    @property
    def is_raw(self) -> bool:
        """Whether the bytes of the source are those of the disk, in its order."""
        return self.format in {"raw", "iso"} or self.raw is not None


def look(
    image: base.Image,
    request: Request,
    demanded: Demanded,
    cancel: cancelling.Cancel,
    held: targets.Claim | None = None,
) -> Survey:
    """Examine the open ``image``, the target and scratch, without changing anything.

    ``held``: the target's claim, if there is one. Raises ``errors.NoRanges`` if the source does not serve the
    ranges that it announces.
    """
    stated, found = image.facts, Survey(virtual_size=0)
    if not stated.blank:
        found = examine(image.files, request, demanded, cancel)
    if stated.disk_size is not None and found.format in detect.DISKS and not stated.blank:
        if found.virtual_size is None:
            found = dataclasses.replace(found, virtual_size=units.whole_sectors(stated.disk_size))
        elif found.raw is None:
            check_stated(stated, found.virtual_size)
    source, ranges = image.source, all(each.seeks for each in image.files)
    found = dataclasses.replace(
        found,
        ranges=ranges,
        extents=ranges and source.extents is not None,
        runs=source.runs is not None or source.folder is not None,
        # A thin volume may be larger than a file system with space for its data.
        thin=stated.thin,
    )
    return with_room(found, request, held)


def check_stated(source: base.Facts, size: int) -> None:
    """Raise ``errors.Refused`` if the protocol states another size of the disk than ``size`` bytes."""
    stated = source.disk_size
    if stated is not None and units.whole_sectors(stated) != units.whole_sectors(size):
        reason = f"{source.name}: a disk of {stated} bytes is stated, this one has {size}"
        raise errors.Refused(format="disk", rule="size", reason=reason)


def examine(
    images: Sequence[base.Image], request: Request, demanded: Demanded, cancel: cancelling.Cancel
) -> Survey:
    """Detect the format and run the safety checks that the first bytes (or ranges) allow."""
    # The one file of a delta is one, too.
    if len(images) > 1 or (request.is_delta and request.location.of_files):
        return _chain(images, request, cancel)
    (only,) = images
    source = only.facts
    # The routes read these bytes again from memory: they cannot change after the check.
    read = only.checked(cancel)
    if source.format is not None:
        return _declared(source, source.format, read, request)
    detected = _look(only, read, request, cancel)
    is_text = detected.format == "text"
    if is_text and (request.in_pod or request.compares) and not request.is_archive:
        # As CDI does. A comparison writes nothing.
        log.warning("the source is plain text, imported as it is: check whether this is the right file")
        detected = detected._replace(format="raw")
    found = Survey(format=detected.format, compressions=detected.compressions, head=detected.head)
    if request.is_archive or detected.format not in detect.DISKS:
        return found
    form = detected.format
    if form == "raw" and len(detected.head) < facts.MIN_VIRTUAL_SIZE and demanded.checksum is None:
        # This is the whole content, as ``_look`` reads more of a longer one. With a checksum, the route
        # reports a mismatch first.
        facts.check_size(form, len(detected.head))
    if detect.is_luks(detected.head):
        log.warning("the disk begins with a LUKS header, imported as it is: only the guest can decrypt it")
    head, size = detected.head, source.size
    # No range of a compressed disk can be read.
    at_random, end = None if detected.compressions else read, b""
    if at_random is None:
        checked = safety.check(form, head)
        # As much of the content is read in advance as the check needs.
        while len(head) < checked.needs <= LONGEST:
            longer = _look(only, read, request, cancel, -(-checked.needs // MIB) * MIB).head
            if len(longer) <= len(head):
                break  # the content ends there
            head = longer
            checked = safety.check(form, head)
    else:
        if form in {"raw", "iso"} and size:
            end = at_random(max(0, size - vhd.FOOTER), min(vhd.FOOTER, size))
            form = "vhd" if vhd.is_fixed(end) else form
        checked = safety.check(form, head, read=at_random, size=size)
    virtual_size = checked.virtual_size
    if form == "raw" and checked.unrecognised and not is_text:
        if detect.is_dmg(end):
            return dataclasses.replace(found, format="dmg")
        log.warning(
            "no partition table, file system or boot sector at the start: check whether the source is a disk"
        )
    if form in {"raw", "iso"}:
        # That of a compressed disk is known only at its end.
        virtual_size = None if detected.compressions or size is None else units.whole_sectors(size)
    return dataclasses.replace(
        found,
        format=form,
        head=head,
        virtual_size=virtual_size,
        layout=checked.layout,
        unplaceable=checked.unplaceable,
        sector_size=checked.sector_size,
        raw=checked.raw,
        footer=vhd.FOOTER if form in {"raw", "iso"} and at_random is None else 0,
    )


def _chain(images: Sequence[base.Image], request: Request, cancel: cancelling.Cancel) -> Survey:
    """Check each file of a chain, and whether they are one."""
    from cdi_worker.formats.qcow2 import chain

    files = []
    for each in images:
        source, read = each.facts, each.checked(cancel)
        if read is None or not source.size:
            return Survey(
                format="qcow2", chain=(chain.ChainFile(source.name, "", 0, facts.ImageFacts("qcow2", 0)),)
            )
        content = _look(each, read, request, cancel)
        if content.compressions:
            reason = f"{source.name}: is compressed with {content.compressions[0]}; decompress it first"
            raise errors.Unsupported(reason=f"{reason}, layers are read by range")
        checked = safety.check(content.format, content.head, read=read, size=source.size, layer=True)
        if content.format in {"raw", "iso"}:
            checked = checked._replace(virtual_size=units.whole_sectors(source.size))
        files.append(chain.ChainFile(source.name, base.file_name(source.name), source.size, checked))
    chain.check(files, request.stage.previous or None)
    return Survey(format="qcow2", virtual_size=files[-1].virtual_size, chain=tuple(files))


def _declared(source: base.Facts, form: str, read: views.Read | None, request: Request) -> Survey:
    """Return the content in the format that the protocol declares: a disk, a delta, or an archive."""
    if form not in detect.DISKS:
        return Survey(format=form, head=source.head)
    detect.refuse_unfinished(source.head)
    previous = request.stage.previous or None
    checked = safety.check(form, source.head, read=read, size=source.size, allow_backing=previous)
    if form == "qcow2" and request.is_delta and checked.backing is None:
        # A full disk, whose holes would keep old data if it were committed.
        reason = f"it has no backing file; a delta must have the backing file {previous!r}"
        raise errors.Refused(format=form, rule="backing_file", reason=reason)
    size = checked.virtual_size if form != "raw" or source.size is None else units.whole_sectors(source.size)
    return Survey(
        format=form,
        virtual_size=size,
        layout=checked.layout,
        unplaceable=checked.unplaceable,
        sector_size=checked.sector_size,
        head=source.head,
    )


def with_room(found: Survey, request: Request, held: targets.Claim | None = None) -> Survey:
    """Complete a survey with the space on the target and in scratch (contract, Sizes).

    Both are unlimited if no target is named.
    """
    found = dataclasses.replace(found, scratch=spare(request))
    if not request.target:
        return dataclasses.replace(found, block=True, available=ANYTHING, usable=ANYTHING, thin=False)
    if request.compares:
        # A comparison reports another size; it does not refuse it.
        usable = targets.facts(request.target, held).size
        return dataclasses.replace(found, available=ANYTHING, usable=usable, present=True)
    # An update and a delta reuse the space of the disk.
    is_removed = request.is_delta or request.existing in {"remove", "update"}
    target = targets.facts(request.target, held, removed=is_removed)
    if request.is_archive and target.kind != "block":
        target = targets.facts(f"{request.target}/disk.img", removed=is_removed)
    if target.kind == "missing":
        raise errors.TargetError(path=request.target, reason="no such directory or device")
    available, size = target.available, request.disk_size
    if target.kind == "stream":
        limit = ANYTHING if size is None else size
        return dataclasses.replace(found, available=limit, usable=limit, ordered=True)
    if target.kind == "block":
        return dataclasses.replace(
            found, block=True, available=available, usable=available, thin=False, present=True
        )
    found = dataclasses.replace(found, present=bool(target.size))
    if request.form is not None:
        # A qcow2 file needs no space for zeros: its disk may have any size.
        usable = ANYTHING if size is None else size
        return dataclasses.replace(found, available=available, usable=usable, thin=True)
    if request.room.limit is not None:
        available = min(available, request.room.limit)
    if size is not None and not request.is_exact:
        available = min(available, size)
    usable = units.usable_space(available, request.room.overhead)
    if size is not None and request.is_exact:
        available, usable = min(available, size), min(usable, size)
    return dataclasses.replace(found, available=available, usable=usable)


def spare(request: Request) -> int | None:
    """Return the free bytes of scratch, None without scratch; unlimited if no target is named."""
    if not request.target:
        return ANYTHING
    return space.available(request.scratch, request.target)


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
