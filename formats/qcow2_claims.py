"""Which clusters of a qcow2 file serve which purpose: none may serve two."""

from __future__ import annotations

from collections.abc import Iterable

from formats import qcow2_header
from formats.pieces import Piece
from importer import errors

_SECTOR = 512


class Claims:
    """The clusters spoken for so far.

    ``size``: bytes of the file, ``passing.UNKNOWN`` for a stream. One byte per cluster is kept, at most
    ``LIMIT``: 4 TiB of 64 KiB clusters.
    """

    LIMIT = 64 << 20
    _WHOLE, _SHARED = 1, 2

    def __init__(self, header: qcow2_header.Header, size: int) -> None:
        self.size = size
        #: The least length that a file with these claims has.
        self.required = 0
        self._bits = header.cluster_bits
        self._taken = bytearray()
        self.take(0, header.cluster_size)
        self.take(header.refcount_offset, header.refcount_clusters << header.cluster_bits)
        if header.l1_entries:
            self.take(header.l1_offset, header.l1_entries * 8)

    def take(self, host: int, length: int) -> None:
        """Claim every cluster that these bytes touch, for this purpose only."""
        self._reach(host + length)
        first, end = self._span(host, length)
        if self._taken.count(0, first, end) != end - first:
            raise errors.Corrupt(format="qcow2", reason=f"the cluster at {host} is used twice")
        self._taken[first:end] = bytes([self._WHOLE]) * (end - first)

    def share(self, host: int, length: int) -> None:
        """Claim for a compressed cluster: only others of the kind may be in the same host clusters.

        Of its last sector one byte must exist: no program pads the end of the file.
        """
        self._reach(host + length - _SECTOR + 1)
        first, end = self._span(host, length)
        if self._taken.find(self._WHOLE, first, end) >= 0:
            raise errors.Corrupt(format="qcow2", reason=f"the cluster at {host} is used twice")
        self._taken[first:end] = bytes([self._SHARED]) * (end - first)

    def _reach(self, end: int) -> None:
        if end > self.size:
            reason = f"the tables need {end} bytes, the file has {self.size}"
            raise errors.Truncated(format="qcow2", reason=reason)
        self.required = max(self.required, end)

    def _span(self, host: int, length: int) -> tuple[int, int]:
        first, end = host >> self._bits, (host + length - 1 >> self._bits) + 1
        if end > self.LIMIT:
            raise errors.Unsupported(reason=f"qcow2 of more than {self.LIMIT} clusters")
        if end > len(self._taken):
            self._taken.extend(bytes(end - len(self._taken)))
        return first, end

    def take_tables(self, tables: Iterable[Piece], /) -> None:
        """Claim for the L2 tables."""
        for table in tables:
            self.take(table.host, table.length)

    def take_pieces(self, found: Iterable[Piece], /) -> None:
        """Claim for data, given in the file's order.

        Subclusters of one cluster may be several pieces: they lie equally far from their place on
        the disk. Of compressed clusters one may begin in the last sector of the one before it, not
        earlier (specification, "Compressed Clusters Descriptor").
        """
        last_host = last_sector = last_cluster = shift = -1
        for piece in found:
            end = piece.host + piece.length
            if piece.packed:
                if piece.host <= last_host or piece.host < last_sector:
                    raise errors.Corrupt(format="qcow2", reason=f"compressed data overlaps at {piece.host}")
                self.share(piece.host, piece.length)
                last_host, last_sector = piece.host, (end - 1) // _SECTOR * _SECTOR
                continue
            start = piece.host
            if piece.guest - start == shift and start >> self._bits == last_cluster:
                start = min(end, last_cluster + 1 << self._bits)
            if start < end:
                self.take(start, end - start)
            self._reach(end)
            shift, last_cluster = piece.guest - piece.host, end - 1 >> self._bits
