"""A range of a virtual disk, as a source reports it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """A range of the virtual disk, in bytes. ``zero``: it reads as zeros."""

    offset: int
    length: int
    zero: bool
