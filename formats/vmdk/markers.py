"""A stream-optimized VMDK that comes in order, when its tables come too late or all at once.

Each grain says itself where it belongs, and is placed when it comes; the tables that it should have
been found through are made up on the way, and compared with those of the file when they are known.
"""

from __future__ import annotations

import array
from collections.abc import Iterator

from cdi_worker import errors
from cdi_worker.formats import views
from cdi_worker.formats.mapped import pieces
from cdi_worker.formats.mapped.layout import Arrival, Follower
from cdi_worker.formats.mapped.pieces import Piece
from cdi_worker.formats.vmdk import grains as vmdk_grains
from cdi_worker.formats.vmdk import header as vmdk_header
from cdi_worker.formats.vmdk.header import GRAIN_MARKER, MARKER, SECTOR

#: Tables with grains, of 2 KiB each: 1 TiB of the disk in the usual grains.
LIMIT = 32 << 10
#: Sectors: no directory that we read is longer.
LONGEST = 4096

#: Blocks that are no grain tables: the directory, the footer, and what some program may add.
OTHERS = 8


class Marked(Follower):
    """Follows one image whose header is known; see ``mapped.layout.Follower``."""

    mapped = False

    def __init__(self, header: vmdk_header.Header) -> None:
        vmdk_header.check_placeable(header)
        self.virtual_size = header.capacity * SECTOR
        self._header = header
        self._grains = vmdk_grains.Grains(header)
        self.inflate = self._grains.inflate
        self._next = header.overhead * SECTOR
        # Tables at the beginning name all grains at once: so many pieces are too many to wait for.
        self._kept_until = 0 if header.directory == vmdk_header.AT_END else self._next
        self._blocks = header.directory_entries + OTHERS
        self._made: dict[int, array.array[int]] = {}  # tables by their place in the directory

    def arrive(self, start: int, end: int, read: views.Read, *, last: bool) -> Arrival:
        """See ``Follower``. Both offsets are multiples of a sector, except at the end."""
        found: list[Piece] = []
        keep = [(start, min(self._kept_until, end))] if self._kept_until > start else []
        while self._next + (MARKER.size if last else SECTOR) <= end:
            at = self._next
            sector, size, kind = MARKER.unpack(read(at, MARKER.size))
            if not size:
                self._next = at + SECTOR + self._metadata(at, sector, kind)
                if sector:
                    self._kept_until = self._next
                    keep.append((at, min(self._next, end)))
                continue
            length = GRAIN_MARKER.size + size
            if length > self._grains.longest:
                raise self._no_grain(f"the grain at {at} takes {size} bytes")
            if at + length > end:
                break
            found.append(self._grain(at, length, sector))
            self._next = at - (-length // SECTOR) * SECTOR
        first = sum(piece.host < start for piece in found)
        ready = [*pieces.batches(found[:first], end, gap=0), *pieces.batches(found[first:], end)]
        holes = self._compare(end, read) if last else iter(())
        return Arrival(ready, holes, keep)

    def _metadata(self, at: int, sectors: int, kind: int) -> int:
        """Return the length of what follows the marker of a table, the directory or the footer."""
        if kind > vmdk_header.FOOTER_KIND or sectors > LONGEST:
            raise errors.ScratchRequired(reason=f"the image has an unknown marker at {at}")
        if sectors:
            # Each is remembered, and a stream may have no end.
            self._blocks -= 1
            if self._blocks < 0:
                raise errors.ScratchRequired(reason="the image has more tables than its directory names")
        return sectors * SECTOR

    def _grain(self, at: int, length: int, sector: int) -> Piece:
        header = self._header
        number, rest = divmod(sector, header.grain)
        if rest or sector >= header.capacity or at // SECTOR >> 32:
            raise self._no_grain(f"the grain at {at} is for sector {sector}")
        which, index = divmod(number, header.table_entries)
        table = self._made.get(which)
        if table is None:
            if len(self._made) == LIMIT:
                raise errors.ScratchRequired(reason="the image's mapping is too large to be held in memory")
            table = self._made[which] = self._empty(which)
        if table[index]:
            raise errors.ScratchRequired(reason=f"the image has two grains for sector {sector}")
        table[index] = at // SECTOR
        guest = sector * SECTOR
        return Piece(at, length, guest, min(header.grain * SECTOR, self.virtual_size - guest), packed=True)

    def _no_grain(self, reason: str) -> errors.Error:
        if self._header.directory == vmdk_header.AT_END:
            return errors.Corrupt(format="vmdk", reason=reason)
        # Tables need no markers where another one tells their place.
        return errors.ScratchRequired(reason=reason)

    def _empty(self, which: int) -> array.array[int]:
        header = self._header
        grains = -(-header.capacity // header.grain) - which * header.table_entries
        return array.array("I", bytes(4 * min(header.table_entries, grains)))

    def _compare(self, end: int, read: views.Read) -> Iterator[tuple[int, int]]:
        """Check that the file's tables tell what its grains have told; return the holes then."""
        footer = self._header
        if footer.directory == vmdk_header.AT_END:
            if self._next != end:
                raise errors.Truncated(format="vmdk", reason=f"the file ends at {end}, within a part of it")
            footer = vmdk_header.parse_footer(footer, read(end - vmdk_header.FOOTER, vmdk_header.FOOTER))
        elif abs(self._next - end) >= SECTOR:
            raise self._no_grain(f"the file ends at {end}, within a grain or what has no marker")
        if footer.overhead * SECTOR > end:
            reason = f"its header needs {footer.overhead * SECTOR} bytes, the file has {end}"
            raise errors.Truncated(format="vmdk", reason=reason)
        if _geometry(footer) != _geometry(self._header):
            raise errors.ScratchRequired(reason="the image's footer contradicts its header")
        for which, sector in enumerate(_entries(read, footer.directory, footer.directory_entries)):
            if not sector and which not in self._made:
                continue
            made = self._made.get(which) or self._empty(which)
            table = _entries(read, sector, len(made)) if sector else self._empty(which)
            if footer.flags & vmdk_header.ZERO_GRAINS:
                table = array.array("I", (0 if grain == 1 else grain for grain in table))
            if table != made:
                raise errors.ScratchRequired(reason="the image's tables and markers contradict each other")
        return ((first, after - first) for first, after in pieces.gaps(self._spans(), 0, self.virtual_size))

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Yield where the grains are on the disk, in order."""
        grain = self._header.grain * SECTOR
        for which in sorted(self._made):
            guest = which * self._header.table_entries * grain
            for index, sector in enumerate(self._made[which]):
                if sector:
                    yield guest + index * grain, guest + (index + 1) * grain


def _geometry(header: vmdk_header.Header) -> tuple[int, ...]:
    return header.flags, header.capacity, header.grain, header.table_entries, header.compression


def _entries(read: views.Read, sector: int, count: int) -> array.array[int]:
    data = read(sector * SECTOR, 4 * count)
    if len(data) < 4 * count:
        raise errors.Truncated(format="vmdk", reason=f"the table at {sector * SECTOR} is behind the end")
    return views.entries(data, "<I")
