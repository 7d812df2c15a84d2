"""Ranges of a virtual disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """A range of the virtual disk in bytes, as a source reports it. ``zero``: it reads as zeros."""

    offset: int
    length: int
    zero: bool


def joined(ranges: Iterable[tuple[int, int]], gap: int = 0) -> Iterator[tuple[int, int]]:
    """Yield ascending ranges (start, end); those with at most ``gap`` bytes between them as one."""
    last: tuple[int, int] | None = None
    for start, end in ranges:
        if last is not None and start - last[1] <= gap:
            last = last[0], end
            continue
        if last is not None:
            yield last
        last = start, end
    if last is not None:
        yield last
