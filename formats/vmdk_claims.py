"""Which parts of a VMDK file serve which purpose: none may serve two."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from formats import vmdk_header
from formats.pieces import Piece
from formats.vmdk_header import SECTOR
from importer import errors


class Claims:
    """The header, the tables and the grains spoken for so far.

    ``size``: bytes of the file, ``passing.UNKNOWN`` for a stream. The tables are kept as spans, one
    for each that has no neighbour. Of grains one byte is kept for each place that a grain could have,
    at most ``LIMIT``: 4 TiB of 64 KiB grains; none for compressed grains, which say themselves whose
    they are.
    """

    LIMIT = 64 << 20

    def __init__(self, header: vmdk_header.Header, fixed: Iterable[tuple[int, int]], size: int) -> None:
        self.size = size
        #: The least length that a file with these claims has.
        self.required = 0
        self._grain = header.grain * SECTOR
        # The sector of its place that a grain begins in, counted from 1: two that begin in places next to
        # each other overlap when the second begins earlier in its own.
        self._begins = bytearray()
        self._spans = sorted(fixed)
        self._reach(header.overhead * SECTOR)
        self._join_spans()

    def take_tables(self, tables: Iterable[Piece], /) -> None:
        """Claim for the grain tables."""
        self._spans += [(table.host, table.host + table.length) for table in tables]
        self._spans.sort()
        self._join_spans()

    def _join_spans(self) -> None:
        joined: list[tuple[int, int]] = []
        for start, end in self._spans:
            self._reach(end)
            if joined and start < joined[-1][1]:
                raise _twice(start)
            if joined and start == joined[-1][1]:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((start, end))
        self._spans = joined

    def take_pieces(self, found: Iterable[Piece], /) -> None:
        """Claim for data, given in the file's order."""
        for piece in found:
            # How long a compressed grain is its marker tells, and one byte follows that.
            length = vmdk_header.GRAIN_MARKER.size + 1 if piece.packed else piece.length
            end = piece.host + length
            self._reach(end)
            index = bisect.bisect_left(self._spans, (end, 0))
            if index and self._spans[index - 1][1] > piece.host:
                raise _twice(piece.host)
            if not piece.packed:
                self._take_grains(piece)

    def _take_grains(self, piece: Piece) -> None:
        first, within = divmod(piece.host, self._grain)
        begin = within // SECTOR + 1
        end = first - (-piece.length // self._grain)
        if end >= self.LIMIT:
            raise errors.Unsupported(reason=f"vmdk of more than {self.LIMIT} grains")
        if end >= len(self._begins):
            self._begins.extend(bytes(end + 1 - len(self._begins)))
        begins = self._begins
        before = begins[first - 1] if first else 0
        if begins.count(0, first, end) < end - first or before > begin or 0 < begins[end] < begin:
            raise _twice(piece.host)
        begins[first:end] = bytes([begin]) * (end - first)

    def _reach(self, end: int) -> None:
        if end > self.size:
            reason = f"the tables need {end} bytes, the file has {self.size}"
            raise errors.Truncated(format="vmdk", reason=reason)
        self.required = max(self.required, end)


def _twice(host: int) -> errors.Corrupt:
    return errors.Corrupt(format="vmdk", reason=f"what is at {host} is used twice")
