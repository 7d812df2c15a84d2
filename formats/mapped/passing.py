"""Place a mapped image from a stream: what to do with bytes that arrive once and in file order.

Most programs write a table before the data that it maps, so most data can be placed on arrival. Data before
its table is kept until the table arrives.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from itertools import chain, islice
from operator import attrgetter

from cdi_worker import errors
from cdi_worker.formats import spans, views
from cdi_worker.formats.mapped import pieces
from cdi_worker.formats.mapped.layout import Arrival, Follower, Layout
from cdi_worker.formats.mapped.pieces import Piece

#: Maximum tables, and maximum pieces, that are expected at once: about 50 MiB as Python objects.
LIMIT = 256 << 10
#: The size of a file of unknown length: larger than any file.
UNKNOWN = 1 << 63

_SECTOR = 512
_host = attrgetter("host")


class StreamFollower(Follower):
    """Follow an image with this layout; see ``layout.Follower``."""

    def __init__(self, layout: Layout) -> None:
        self.virtual_size = layout.virtual_size
        self.inflate = layout.inflate
        self._layout = layout
        self._allocation = layout.allocation(UNKNOWN)
        self._tables: list[Piece] | None = None  # not arrived yet, the last one first
        self._expected: list[Piece] = []  # in file order
        self._end = 0

    @property
    def mapped(self) -> bool:
        return self._tables is not None and not self._tables

    @property
    def complete(self) -> bool:
        return self.mapped and not self._expected and self._allocation.required <= self._end

    def arrive(self, start: int, end: int, read: views.Read, *, last: bool) -> Arrival:
        holes: list[tuple[int, int]] = []
        self._end = end
        offset, length = self._layout.directory
        if self._tables is None and end >= offset + length:
            directory = views.entries(read(offset, length) if length else b"", self._layout.entry)
            expected = _limited(self._layout.tables(directory))
            self._allocation.take_tables(expected)
            holes.extend(pieces.holes(expected, 0, self.virtual_size))
            self._tables = sorted(expected, reverse=True)
        late: list[Piece] = []  # placed now, and in bytes that arrived before
        tables: list[Piece] = []
        while self._tables and self._tables[-1].host + self._tables[-1].length <= end:
            table = self._tables.pop()
            data = self._layout.decode(read(table.host, table.length), table.guest)
            holes.extend(pieces.holes(data, table.guest, table.guest + table.size))
            data.sort()
            self._allocation.take_pieces(data)
            for piece in data:
                passed, coming = _cut(piece, start)
                late.extend(passed)
                self._expected.extend(coming)
            tables.append(table)
        if tables:
            self._expected = sorted(_limited(self._expected))
        now: list[Piece] = []
        waiting: list[Piece] = []
        # The tables give only an upper limit for the length of compressed data: at the end of the file the
        # data may be shorter.
        slack = pieces.BATCH if last else 0
        count = bisect.bisect_left(self._expected, end, key=_host)
        for piece in self._expected[:count]:
            whole, rest = _cut(piece, end + slack if piece.compressed else end)
            now.extend(whole)
            waiting.extend(rest)
        self._expected[:count] = waiting
        unknown: Iterable[tuple[int, int]] = ()
        if not self.mapped:
            known = [(piece.host, piece.host + piece.length) for piece in chain(tables, now, waiting)]
            unknown = spans.gaps(sorted([*known, *self._layout.fixed]), start, end)
        required = offset + length if self._tables is None else self._allocation.required
        if last and (required > end or not self.mapped or self._expected):
            reason = f"the tables need {required} bytes, the file has {end} bytes"
            raise errors.Truncated(format=self._layout.format, reason=reason)
        first = bisect.bisect_left(now, start, key=_host)
        ready = [*pieces.batches(sorted(late + now[:first]), end, gap=0), *pieces.batches(now[first:], end)]
        # Of compressed data only the sectors are known: a cluster may begin in the last sector of the one
        # before it, and end in the first sector of the next. Shorter spans are the unused end of a cluster.
        keep = [
            (max(start, first - _SECTOR), min(end, after + _SECTOR))
            for first, after in unknown
            if after - first >= _SECTOR
        ]
        return Arrival(ready, holes, keep)


def _cut(piece: Piece, at: int) -> tuple[list[Piece], list[Piece]]:
    """Split a piece at an offset into the parts before and after it. Compressed data is never split."""
    first = at - piece.host
    if first >= piece.length:
        return [piece], []
    if first <= 0 or piece.compressed:
        return [], [piece]
    host, length, guest = piece[:3]
    rest = length - first
    return [Piece(host, first, guest, first, False)], [Piece(at, rest, guest + first, rest, False)]


def _limited(expected: Iterable[Piece]) -> list[Piece]:
    result = list(islice(expected, LIMIT + 1))
    if len(result) > LIMIT:
        raise errors.ScratchRequired(reason="the image's mapping tables are too large for memory")
    return result
