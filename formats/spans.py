"""Spans (start, end) of bytes, in ascending order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]


def joined(spans: Iterable[Span], gap: int = 0) -> Iterator[Span]:
    """Yield the spans; those with at most ``gap`` bytes between them as one."""
    last: Span | None = None
    for start, end in spans:
        if last is not None and start - last[1] <= gap:
            last = last[0], max(last[1], end)
            continue
        if last is not None:
            yield last
        last = start, end
    if last is not None:
        yield last


def gaps(spans: Iterable[Span], start: int, end: int) -> Iterator[Span]:
    """Yield the gaps between ``spans``, from ``start`` to ``end``."""
    for first, after in spans:
        if first > start:
            yield start, min(first, end)
        start = max(start, after)
        if start >= end:
            return
    if start < end:
        yield start, end


def common(spans: Iterable[Span], others: Sequence[Span]) -> Iterator[tuple[int, list[Span]]]:
    """Yield the number of each span that shares bytes with ``others``, and the parts that it shares.

    ``others`` do not overlap.
    """
    index = 0
    for number, (start, end) in enumerate(spans):
        while index < len(others) and others[index][1] <= start:
            index += 1
        parts = []
        at = index
        while at < len(others) and others[at][0] < end:
            parts.append((max(start, others[at][0]), min(end, others[at][1])))
            at += 1
        if parts:
            yield number, parts
