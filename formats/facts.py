"""What is known of a disk image."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from cdi_worker import errors

if TYPE_CHECKING:
    from cdi_worker.formats.mapped import layout as mapped

#: No volume is larger, and every offset computed below stays far from 64 bits.
MAX_VIRTUAL_SIZE = 64 << 40


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """An image that passed its checks.

    ``virtual_size``: bytes of the disk inside; None: not to be seen yet (a raw stream of unknown
    length, metadata beyond the head). ``complete``: all checks were made; else they must be made
    again with random access before another program opens the image. ``backing``: the name of the
    backing file that was allowed. ``layout``: of an image that our own reader takes; ``unplaceable``: why
    it does not, where it takes others of the format.
    """

    format: str
    virtual_size: int | None
    complete: bool = True
    backing: str | None = None
    layout: mapped.Layout | None = None
    unplaceable: str = ""


def refuse(name: str, rule: str, reason: str) -> errors.Refused:
    """Make the error of a rule; ``name``: of the format."""
    return errors.Refused(format=name, rule=rule, reason=reason)


def check_size(name: str, virtual_size: int) -> None:
    """Refuse a disk without bytes, and one that no volume holds."""
    if not 0 < virtual_size <= MAX_VIRTUAL_SIZE:
        reason = f"its virtual size is {virtual_size}, not 1 to {MAX_VIRTUAL_SIZE} bytes"
        raise refuse(name, "virtual_size", reason)
