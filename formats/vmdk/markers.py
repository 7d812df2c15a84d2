"""Follow a stream-optimized VMDK by its markers, for streams with the tables at the end or all at the start.

Each grain has a marker with its sector on the disk and is placed on arrival. Grain tables are built from the
markers and compared with the tables of the file: one that follows its grains on arrival, after which only its
sector is kept, the others at the end.
"""

from __future__ import annotations

import array
import itertools
import operator
from collections.abc import Iterator

from cdi_worker import errors
from cdi_worker.formats import spans, views
from cdi_worker.formats.mapped import pieces
from cdi_worker.formats.mapped.layout import Arrival, Follower
from cdi_worker.formats.mapped.pieces import Piece
from cdi_worker.formats.vmdk import header as vmdk_header
from cdi_worker.formats.vmdk.header import GRAIN_MARKER, MARKER, SECTOR, TABLE_KIND, VmdkHeader

#: Maximum unconfirmed tables with grains, 2 KiB each: 1 TiB of data with the usual grains.
LIMIT = 32 << 10
#: Maximum sectors of a metadata block: the length of the longest supported directory.
LONGEST = 4096

#: Maximum markers without content: padding, of which a stream can consist without end.
MOST_EMPTY = 64 << 10

#: Metadata blocks besides grain tables: the directory, the footer, and some for future programs.
OTHERS = 8


_geometry = operator.attrgetter("flags", "capacity", "grain", "table_entries", "compression")


class MarkerFollower(Follower):
    """Follow an image with this header; see ``mapped.layout.Follower``."""

    mapped = False
    complete = False

    def __init__(self, header: VmdkHeader, inflate: pieces.Inflate) -> None:
        vmdk_header.check_placeable(header)
        self.virtual_size = header.capacity * SECTOR
        self._header = header
        self.inflate = inflate
        self._next = header.overhead * SECTOR
        # With all tables at the start, too many pieces would be expected at once: the tables are kept for
        # ``_compare`` instead.
        self._kept_until = 0 if header.directory == vmdk_header.AT_END else self._next
        self._blocks = header.directory_entries + OTHERS
        self._has_footer = False
        self._empty_sectors = 0
        self._reach = header.table_entries * header.grain * SECTOR
        # By index in the directory: tables built from markers, and the sector in the file of confirmed ones.
        self._tables: dict[int, array.array[int]] = {}
        self._confirmed = array.array("I", bytes(4 * header.directory_entries))

    def arrive(self, start: int, end: int, read: views.Read, *, last: bool) -> Arrival:
        """See ``Follower``. Both offsets are multiples of a sector, except at the end."""
        data: list[Piece] = []
        holes: list[spans.Span] = []
        keep = [(start, min(self._kept_until, end))] if self._kept_until > start else []
        while not self.complete and self._next + (MARKER.size if last else SECTOR) <= end:
            at = self._next
            sector, size, kind = MARKER.unpack(read(at, MARKER.size))
            if kind < at // SECTOR and self._is_table(at, read(at, SECTOR)):
                raise errors.ScratchRequired(reason=f"the image has a table without a marker at byte {at}")
            if not size:
                self._next = at + SECTOR + self._metadata(at, sector, kind)
                confirmed = None
                # A table across two parts of the file is kept: with the usual parts, one of 1,600.
                if kind == TABLE_KIND and self._next <= end:
                    confirmed = self._confirm(at // SECTOR + 1, read(at + SECTOR, sector * SECTOR))
                if confirmed is not None:
                    holes += confirmed
                elif sector:
                    self._kept_until = self._next
                    keep.append((at, min(self._next, end)))
                continue
            length, longest = GRAIN_MARKER.size + size, self._header.longest_grain
            if length > longest:
                reason = f"the grain at byte {at} has {size} bytes, the limit is {longest} bytes"
                raise self._invalid_grain(reason)
            if at + length > end:
                break
            data.append(self._grain(at, length, sector))
            self._next = at - (-length // SECTOR) * SECTOR
        first = sum(piece.host < start for piece in data)
        ready = [*pieces.batches(data[:first], end, gap=0), *pieces.batches(data[first:], end)]
        if self.complete:
            end = self._next
        holes_at_end = self._compare(end, read) if last or self.complete else ()
        every = ((first, after - first) for first, after in itertools.chain(holes, holes_at_end))
        return Arrival(ready, every, keep)

    def _is_table(self, at: int, data: bytes) -> bool:
        """Return whether this is a table or directory: sectors of grains or tables before ``at``, 0 and 1."""
        words = views.entries(data, "<I") if len(data) == SECTOR else ()
        first, end = self._header.overhead, at // SECTOR
        return max(words, default=0) > 1 and all(word < 2 or first <= word < end for word in words)

    def _metadata(self, at: int, sectors: int, kind: int) -> int:
        """Return the length in bytes of the table, directory or footer that follows a marker."""
        is_known = kind <= vmdk_header.FOOTER_KIND or (kind == vmdk_header.PROGRESS_KIND and not sectors)
        if not is_known or sectors > LONGEST:
            raise errors.ScratchRequired(reason=f"the image has an unknown marker at byte {at}")
        if sectors:
            # All blocks are kept, so their number must be bounded: a stream may be endless.
            self._blocks -= 1
            if self._blocks < 0:
                raise errors.ScratchRequired(reason="the image has more tables than directory entries")
            self._has_footer = kind == vmdk_header.FOOTER_KIND
        else:
            # The first marker without content after the footer ends the image.
            self.complete = self._has_footer and kind == vmdk_header.END_KIND
            self._empty_sectors += 1
            if self._empty_sectors > MOST_EMPTY:
                raise errors.Corrupt(format="vmdk", reason=f"more than {MOST_EMPTY} markers without content")
        return sectors * SECTOR

    def _grain(self, at: int, length: int, sector: int) -> Piece:
        header = self._header
        number, rest = divmod(sector, header.grain)
        if rest or sector >= header.capacity or at // SECTOR >> 32:
            raise self._invalid_grain(f"the grain at byte {at} has a marker for the invalid sector {sector}")
        which, index = divmod(number, header.table_entries)
        table = self._tables.get(which)
        if table is None:
            if self._confirmed[which]:
                raise errors.ScratchRequired(reason=f"the image has a grain after its table at byte {at}")
            if len(self._tables) == LIMIT:
                raise errors.ScratchRequired(reason="the image's grain tables are too large for memory")
            table = self._tables[which] = self._empty(which)
        if table[index]:
            raise errors.ScratchRequired(reason=f"the image has two grains for sector {sector}")
        table[index] = at // SECTOR
        guest = sector * SECTOR
        size = min(header.grain * SECTOR, self.virtual_size - guest)
        return Piece(at, length, guest, size, compressed=True)

    def _invalid_grain(self, reason: str) -> errors.Error:
        if self._header.directory == vmdk_header.AT_END:
            return errors.Corrupt(format="vmdk", reason=reason)
        # Without AT_END, tables need no markers: the bytes may be a table.
        return errors.ScratchRequired(reason=reason)

    def _empty(self, which: int) -> array.array[int]:
        header = self._header
        grains = -(-header.capacity // header.grain) - which * header.table_entries
        return array.array("I", bytes(4 * min(header.table_entries, grains)))

    def _compare(self, end: int, read: views.Read) -> Iterator[spans.Span]:
        """Check that the tables of the file match those built from the markers; return the other holes."""
        footer = self._header
        if footer.directory == vmdk_header.AT_END:
            if self._next != end:
                reason = f"the file ends at byte {end}, within a grain or metadata block"
                raise errors.Truncated(format="vmdk", reason=reason)
            footer = vmdk_header.parse_footer(footer, read(end - vmdk_header.FOOTER, vmdk_header.FOOTER))
        elif abs(self._next - end) >= SECTOR:
            reason = f"the file ends at byte {end}, within a grain or a table without a marker"
            raise self._invalid_grain(reason)
        if footer.overhead * SECTOR > end:
            reason = f"the header needs {footer.overhead * SECTOR} bytes, the file has {end} bytes"
            raise errors.Truncated(format="vmdk", reason=reason)
        if _geometry(footer) != _geometry(self._header):
            raise errors.ScratchRequired(reason="the image's footer contradicts its header")
        for which, sector in enumerate(_entries(read, footer.directory, footer.directory_entries)):
            confirmed = self._confirmed[which]
            if sector == confirmed and which not in self._tables:
                continue
            expected = self._tables.get(which) or self._empty(which)
            table = _entries(read, sector, len(expected)) if sector else self._empty(which)
            if confirmed or self._allocated(table) != expected:
                raise errors.ScratchRequired(reason="the image's tables and markers contradict each other")
        known = (
            [(which * self._reach, (which + 1) * self._reach)] if confirmed else self._grains(which)
            for which, confirmed in enumerate(self._confirmed)
        )
        return spans.gaps(itertools.chain.from_iterable(known), 0, self.virtual_size)

    def _confirm(self, sector: int, data: bytes) -> list[spans.Span] | None:
        """Return the holes of the newest table if the file has it at ``sector``, and keep only that."""
        which = next(reversed(self._tables), None)
        if which is None or sector >> 32:
            return None
        expected = self._tables[which]
        if self._allocated(views.entries(data, "<I")[: len(expected)]) != expected:
            return None
        start = which * self._reach
        holes = list(spans.gaps(self._grains(which), start, min(start + self._reach, self.virtual_size)))
        self._confirmed[which] = sector
        del self._tables[which]
        return holes

    def _allocated(self, table: array.array[int]) -> array.array[int]:
        """Return a table without its entries for grains of zeros."""
        if self._header.flags & vmdk_header.ZERO_GRAINS:
            return array.array("I", (0 if grain == 1 else grain for grain in table))
        return table

    def _grains(self, which: int) -> Iterator[spans.Span]:
        """Yield the parts of the disk that the grains of an unconfirmed table hold."""
        table = self._tables.get(which, ())
        grain, first = self._header.grain * SECTOR, which * self._header.table_entries
        for number in itertools.compress(range(first, first + len(table)), table):
            yield number * grain, (number + 1) * grain


def _entries(read: views.Read, sector: int, count: int) -> array.array[int]:
    data = read(sector * SECTOR, 4 * count)
    if len(data) < 4 * count:
        reason = f"the table at byte {sector * SECTOR} is beyond the end of the file"
        raise errors.Truncated(format="vmdk", reason=reason)
    return views.entries(data, "<I")
