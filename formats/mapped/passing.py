"""A mapped image that comes once and in order: what to do with the bytes as they pass.

Most writers put a table before the data it maps, so that data usually knows its place when it comes.
What does not is to be kept until the table has passed.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from itertools import chain, islice
from operator import attrgetter

from cdi_worker import errors
from cdi_worker.formats import views
from cdi_worker.formats.mapped import pieces
from cdi_worker.formats.mapped.layout import Arrival, Follower, Layout
from cdi_worker.formats.mapped.pieces import Piece

#: Tables and pieces that may be known before they come: some 50 MiB as objects.
LIMIT = 256 << 10
#: The size of a file that is not known: more than any has.
UNKNOWN = 1 << 63

_SECTOR = 512
_host = attrgetter("host")


class Passing(Follower):
    """Follows one image whose layout is known; see ``layout.Follower``."""

    def __init__(self, layout: Layout) -> None:
        self.virtual_size = layout.virtual_size
        self.inflate = layout.inflate
        self._layout = layout
        self._claims = layout.claims(UNKNOWN)
        self._tables: list[Piece] | None = None  # those still to come, the last one first
        self._expected: list[Piece] = []  # in the file's order

    @property
    def mapped(self) -> bool:
        return self._tables is not None and not self._tables

    def arrive(self, start: int, end: int, read: views.Read, *, last: bool) -> Arrival:
        """See ``Follower``."""
        holes: list[tuple[int, int]] = []
        if self._tables is None:
            self._read_directory(end, read, holes)
        late, tables = self._read_tables(start, end, read, holes)
        now, waiting = self._sort_out(end, last=last)
        unknown: Iterable[tuple[int, int]] = ()
        if not self.mapped:
            known = [_span(piece) for piece in chain(tables, now, waiting)]
            unknown = pieces.gaps(sorted([*known, *self._layout.fixed]), start, end)
        if last:
            self._check_end(end)
        first = bisect.bisect_left(now, start, key=_host)
        ready = [
            *pieces.batches(sorted(late + now[:first]), end, gap=0),
            *pieces.batches(now[first:], end),
        ]
        return Arrival(
            ready, holes, [_whole(span, start) for span in unknown if span[1] - span[0] >= _SECTOR]
        )

    def _read_directory(self, end: int, read: views.Read, holes: list[tuple[int, int]]) -> None:
        offset, length = self._layout.directory
        if end < offset + length:
            return
        directory = views.entries(read(offset, length) if length else b"", self._layout.entry)
        tables = _limited(self._layout.tables(directory))
        self._claims.take_tables(tables)
        holes.extend(pieces.holes(tables, 0, self._layout.virtual_size))
        self._tables = sorted(tables, reverse=True)

    def _read_tables(
        self, start: int, end: int, read: views.Read, holes: list[tuple[int, int]]
    ) -> tuple[list[Piece], list[Piece]]:
        """Read the tables that have come; return pieces that passed before, and these tables."""
        done: list[Piece] = []
        late: list[Piece] = []
        while self._tables and self._tables[-1].host + self._tables[-1].length <= end:
            table = self._tables.pop()
            found = self._layout.decode(read(table.host, table.length), table.guest)
            holes.extend(pieces.holes(found, table.guest, table.guest + table.size))
            found.sort()
            self._claims.take_pieces(found)
            for piece in found:
                passed, coming = _cut(piece, start)
                late.extend(passed)
                self._expected.extend(coming)
            done.append(table)
        if done:
            self._expected = sorted(_limited(self._expected))
        return late, done

    def _sort_out(self, end: int, *, last: bool) -> tuple[list[Piece], list[Piece]]:
        """Take from the expected pieces what has come whole; return it, and what has not, in part."""
        ready: list[Piece] = []
        waiting: list[Piece] = []
        # How long compressed data is shows in itself: at the end of the file it may be shorter than said.
        slack = pieces.BATCH if last else 0
        count = bisect.bisect_left(self._expected, end, key=_host)
        for piece in self._expected[:count]:
            whole, rest = _cut(piece, end + slack if piece.packed else end)
            ready.extend(whole)
            waiting.extend(rest)
        self._expected[:count] = waiting
        return ready, waiting

    def _check_end(self, size: int) -> None:
        required = sum(self._layout.directory) if self._tables is None else self._claims.required
        if required > size or not self.mapped or self._expected:
            reason = f"the tables need {required} bytes, the file has {size}"
            raise errors.Truncated(format=self._layout.format, reason=reason)


def _span(piece: Piece) -> tuple[int, int]:
    return piece.host, piece.host + piece.length


def _whole(span: tuple[int, int], start: int) -> tuple[int, int]:
    """Add what may belong to the span: compressed data ends somewhere in its last sector.

    What fits between two compressed clusters without a sector of its own is taken for such an end.
    """
    return max(start, span[0] - _SECTOR), span[1]


def _cut(piece: Piece, at: int) -> tuple[list[Piece], list[Piece]]:
    """Return what is before an offset and what is not; compressed data waits until it is whole."""
    first = at - piece.host
    if first >= piece.length:
        return [piece], []
    if first <= 0 or piece.packed:
        return [], [piece]
    host, length, guest, _, _ = piece
    rest = length - first
    return [Piece(host, first, guest, first, False)], [Piece(at, rest, guest + first, rest, False)]


def _limited(found: Iterable[Piece]) -> list[Piece]:
    limited = list(islice(found, LIMIT + 1))
    if len(limited) > LIMIT:
        raise errors.ScratchRequired(reason="the image's mapping is too large to be held in memory")
    return limited
