"""The facts of a disk image that passed the safety checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cdi_worker import errors

if TYPE_CHECKING:
    from cdi_worker.formats.mapped.layout import Layout

#: Larger than any volume, and small enough that no computed offset overflows 64 bits.
MAX_VIRTUAL_SIZE = 64 << 40
#: One sector.
MIN_VIRTUAL_SIZE = 512
#: qemu-img keeps a whole block map in memory, within its limit of address space and next to our own memory
#: in a pod of 600M. The built-in readers read a map in pieces.
MAX_TABLE = 64 << 20


class ImageFacts(NamedTuple):
    """The facts of an image that passed its checks.

    ``virtual_size``: bytes of the disk; None: not known yet (a raw stream of unknown length, metadata
    beyond the head). ``complete``: all checks were made; if not, they must be repeated with random access
    before another program opens the image. ``needs``: bytes of a head with which they can be made.
    ``backing``: the name of the backing file that was allowed, and
    ``backing_format`` its format, if the image names it. ``bitmaps``: names of the dirty bitmaps of a layer.
    ``raw``: how many bytes of the file are the disk, for a format that is a raw disk and a footer.
    ``length``: bytes of the file that are the image, which zeros may follow; None: all of them.
    ``geometry``: the disk has the size of its geometry, not that of its size field (VHD).
    ``layout``: set if the built-in reader supports the image; ``unplaceable``: why it does not, although it
    supports the format. ``sector_size``: bytes of a sector, as the image states it or its partition table was
    made for; None: unknown. ``unrecognised``: nothing shows that a raw disk is one.
    """

    format: str
    virtual_size: int | None
    complete: bool = True
    needs: int = 0
    backing: str | None = None
    backing_format: str = ""
    bitmaps: tuple[str, ...] = ()
    raw: int | None = None
    length: int | None = None
    geometry: bool = False
    layout: Layout | None = None
    unplaceable: str = ""
    sector_size: int | None = None
    unrecognised: bool = False


def refuse(name: str, rule: str, reason: str, *ways: errors.Way) -> errors.Refused:
    """Return the error of a safety rule; ``name``: the format, ``ways``: what to do."""
    return errors.Refused(format=name, rule=rule, reason=reason, remedy=errors.Remedy(ways) if ways else None)


def check_size(name: str, virtual_size: int) -> None:
    """Refuse a disk without a sector, and one larger than any volume."""
    if virtual_size < MIN_VIRTUAL_SIZE:
        reason = f"{virtual_size} bytes are not a disk, which has at least {MIN_VIRTUAL_SIZE}"
        raise refuse(name, "virtual_size", f"{reason}; check the source")
    if virtual_size > MAX_VIRTUAL_SIZE:
        reason = f"the virtual size is {virtual_size} bytes, at most {MAX_VIRTUAL_SIZE} are supported"
        raise refuse(name, "virtual_size", reason)


def check_table(name: str, length: int, limit: int = MAX_TABLE) -> None:
    """Refuse a block map of more bytes than ``limit``, by default what qemu-img may use for it."""
    if length > limit:
        reason = f"the block map has {length} bytes, at most {limit} are supported"
        raise refuse(name, "table", f"{reason}; convert the image to qcow2 first")
