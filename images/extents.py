"""Ranges of a virtual disk."""

from __future__ import annotations

from typing import NamedTuple


class Extent(NamedTuple):
    """A range of the virtual disk in bytes, as a source reports it. ``zero``: it reads as zeros."""

    offset: int
    length: int
    zero: bool
