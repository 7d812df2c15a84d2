"""The layout of a qcow2 image: which bytes of the file belong where on the disk.

Memory is bounded for any image: at most 32 MiB of L1 table, and one byte for each cluster of the file, at
most ``Qcow2Allocation.LIMIT``.
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from isal import isal_zlib

from cdi_worker import errors
from cdi_worker.formats.mapped import passing
from cdi_worker.formats.mapped.layout import Allocation, Layout
from cdi_worker.formats.mapped.pieces import Piece
from cdi_worker.formats.qcow2 import tables as qcow2_tables
from cdi_worker.formats.qcow2.header import Qcow2Header
from cdi_worker.formats.zstd import zstd

_SECTOR = 512
# QEMU compresses with a window of 4 KiB, other programs with up to 32 KiB.
_RAW_DEFLATE = -15
_ZSTD_OPTIONS: Mapping[int, int] = {zstd.DecompressionParameter.window_log_max: 23}
# isal's type stubs declare the class as an instance.
_IsalError = cast("type[Exception]", isal_zlib.error)


class Qcow2Layout(Layout):
    """The layout of an image with this header; see ``mapped.layout.Layout``."""

    format = "qcow2"
    unit = "clusters"
    #: Tables are spread over the file: the header does not show how many pieces are expected at once.
    crowded = False
    entry = qcow2_tables.ENTRY

    def __init__(self, header: Qcow2Header) -> None:
        self.header = header
        self.virtual_size = header.virtual_size
        self.table_entries = header.table_entries
        self.directory = header.l1_offset, header.l1_needed * 8
        refcounts = header.refcount_clusters << header.cluster_bits
        self.fixed = (
            (0, header.cluster_size),
            (header.refcount_offset, header.refcount_offset + refcounts),
            (header.l1_offset, header.l1_offset + header.l1_entries * 8),
        )

    def allocation(self, size: int, /) -> Qcow2Allocation:
        return Qcow2Allocation(self.header, size)

    def tables(self, directory: array.array[int], /) -> Iterator[Piece]:
        return qcow2_tables.tables(self.header, directory)

    def decode(self, data: bytes | memoryview, guest: int, /) -> list[Piece]:
        return qcow2_tables.decode(self.header, data, guest)

    def inflate(self, data: bytes | memoryview, _piece: Piece, /) -> bytes:
        """Decompress one cluster. Bytes after its end are ignored: tables give its length in sectors only."""
        is_zlib = self.header.compression == "zlib"
        stream = (
            isal_zlib.decompressobj(wbits=_RAW_DEFLATE)
            if is_zlib
            else zstd.ZstdDecompressor(options=_ZSTD_OPTIONS)
        )
        size = self.header.cluster_size
        try:
            # One byte more than expected: at its output limit isal does not look for the end of the stream,
            # and a zstd frame may state a larger size, or none.
            result: bytes = stream.decompress(data, size + 1)
        except (_IsalError, zstd.ZstdError) as err:
            raise errors.Corrupt(format="qcow2", reason=f"a compressed cluster {err}") from err
        if not stream.eof or len(result) != size:
            reason = f"a compressed cluster does not decompress to {size} bytes"
            raise errors.Corrupt(format="qcow2", reason=reason)
        return result

    def follow(self) -> passing.StreamFollower:
        return passing.StreamFollower(self)


class Qcow2Allocation(Allocation):
    """The clusters of the file in use: one byte for each, at most ``LIMIT`` (4 TiB of 64 KiB clusters)."""

    LIMIT = 64 << 20
    _WHOLE, _SHARED = 1, 2

    def __init__(self, header: Qcow2Header, size: int) -> None:
        super().__init__("qcow2", size)
        self._bits = header.cluster_bits
        self._taken = bytearray()
        self.take(0, header.cluster_size)
        self.take(header.refcount_offset, header.refcount_clusters << header.cluster_bits)
        if header.l1_entries:
            self.take(header.l1_offset, header.l1_entries * 8)

    def take(self, host: int, length: int) -> None:
        """Take every cluster that these bytes touch, exclusively."""
        self.reach(host + length)
        first, end = self._span(host, length)
        if self._taken.count(0, first, end) != end - first:
            raise errors.Corrupt(format="qcow2", reason=f"the cluster at byte {host} is used twice")
        self._taken[first:end] = bytes([self._WHOLE]) * (end - first)

    def share(self, host: int, length: int) -> None:
        """Take a compressed cluster: it may share host clusters with other compressed clusters only.

        Its first byte must exist, and one of its last sector: programs do not pad the end of the file.
        """
        self.reach(max(host, host + length - _SECTOR) + 1)
        first, end = self._span(host, length)
        if self._taken.find(self._WHOLE, first, end) >= 0:
            raise errors.Corrupt(format="qcow2", reason=f"the cluster at byte {host} is used twice")
        self._taken[first:end] = bytes([self._SHARED]) * (end - first)

    def _span(self, host: int, length: int) -> tuple[int, int]:
        first, end = host >> self._bits, (host + length - 1 >> self._bits) + 1
        if end > self.LIMIT:
            raise errors.Unsupported(reason=f"qcow2 file of more than {self.LIMIT} clusters")
        if end > len(self._taken):
            self._taken.extend(bytes(end - len(self._taken)))
        return first, end

    def take_tables(self, tables: Iterable[Piece], /) -> None:
        for table in tables:
            self.take(table.host, table.length)

    def take_pieces(self, data: Iterable[Piece], /) -> None:
        """Take data, given in file order.

        Subclusters of one cluster may be several pieces: the distance between their offsets in the file and
        on the disk is the same. A compressed cluster may begin in the last sector of the one before it, not
        earlier (specification, "Compressed Clusters Descriptor").
        """
        last_host = last_sector = last_cluster = shift = -1
        for piece in data:
            end = piece.host + piece.length
            if piece.compressed:
                if piece.host <= last_host or piece.host < last_sector:
                    reason = f"compressed data overlaps at byte {piece.host}"
                    raise errors.Corrupt(format="qcow2", reason=reason)
                self.share(piece.host, piece.length)
                last_host, last_sector = piece.host, (end - 1) // _SECTOR * _SECTOR
                continue
            start = piece.host
            if piece.guest - start == shift and start >> self._bits == last_cluster:
                start = min(end, last_cluster + 1 << self._bits)
            if start < end:
                self.take(start, end - start)
            self.reach(end)
            shift, last_cluster = piece.guest - piece.host, end - 1 >> self._bits
