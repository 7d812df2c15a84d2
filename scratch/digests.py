"""Keyed digests of the finished parts of a disk, with which a later attempt verifies what storage holds.

A disk is cut into units of 64 KiB. Each has a GMAC (NIST SP 800-38D) of its bytes and its position: it costs
50 ms of CPU per GiB, SHA-256 took 750 ms and BLAKE2b 1600 ms on the same machine. When all units of a granule
are finished, their tags are replaced by one digest, so that a disk of any size has at most ``GRANULES``.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from cdi_worker.scratch import ranges

#: Bytes of a unit: the cluster size of most images. Shorter pieces wait in memory for the rest of their unit.
UNIT: Final = 64 << 10
#: Bytes of a tag. A forger who does not know the key has one attempt for each import that he interrupts.
TAG: Final = 8
#: Maximum number of granules.
GRANULES: Final = 8 << 10
#: Maximum number of units of a granule: of a disk, the first 64 TiB are recorded.
_LARGEST: Final = 128 << 10
#: Maximum number of units of data that are remembered one by one.
PLACES: Final = 32
#: The tag of a unit, and of a granule, of zeros: they are compared with zeros, not hashed.
ZERO: Final = b"all zero"
_ABSENT: Final = bytes(TAG)
_ZEROS: Final = bytes(UNIT)
# Limits in memory. What does not fit is not recorded: a resumed import fetches it again.
_OPEN_UNITS: Final = 2 << 20
_BUFFERS: Final = 256
_EDGES: Final = 16 << 10
# Units of open granules in ``records``: they fit into a journal.
_LOOSE: Final = 8 << 10


class Record(NamedTuple):
    """Finished bytes. ``tags``: one for each unit, or for a ``whole`` granule the digest of all of them."""

    start: int
    end: int
    tags: bytes
    whole: bool

    @property
    def is_zero(self) -> bool:
        """Whether all bytes are zero."""
        return self.tags == ZERO * (len(self.tags) // TAG)


class Places:
    """A random sample of the units of data, by their starts (algorithm R of Vitter).

    The digest of a granule does not show which of its units are data.
    """

    def __init__(self, of: int = 0, starts: Iterable[int] = ()) -> None:
        #: Number of units that these were chosen from.
        self.of = of
        self.starts = list(starts)

    def add(self, start: int) -> None:
        self.of += 1
        if len(self.starts) < PLACES:
            self.starts.append(start)
        elif (at := int(random.random() * self.of)) < PLACES:  # noqa: S311  (no secret)
            self.starts[at] = start


class Digests:
    """The digests of the bytes from ``start``, a multiple of ``UNIT``, to ``end``. Not thread-safe.

    ``key``: a secret of 32 bytes. ``granules``: at most this many digests.
    """

    def __init__(self, key: bytes, start: int, end: int, *, granules: int = GRANULES) -> None:
        self.start = start
        self.end = max(start, min(end, start + granules * _LARGEST * UNIT))
        self._key = key
        self._per = 1  # units of a granule
        while granules * self._per * UNIT < self.end - start:
            self._per *= 2
        #: Bytes of a granule.
        self.granule = self._per * UNIT
        self._whole: dict[int, bytes] = {}
        self._open: dict[int, _Open] = {}
        self._edges: dict[int, _Edge] = {}
        self._buffers = 0
        self.places = Places()

    def tags(self, start: int, data: memoryview) -> bytes:
        """Return the tags of whole units from ``start``. Thread-safe."""
        encrypt = self._encrypt
        found = []
        for offset in range(0, len(data), UNIT):
            unit = data[offset : offset + UNIT]
            if _ZEROS.startswith(unit):
                found.append(ZERO)
            else:
                found.append(encrypt((start + offset).to_bytes(12), b"", unit)[:TAG])
        return b"".join(found)

    def zero_tags(self, start: int, end: int) -> bytes:
        """Return the tags of units of zeros."""
        return ZERO * -(-(end - start) // UNIT)

    def whole_units(self, start: int, end: int) -> ranges.Range:
        """Return the part of a range that consists of whole units; the last one of the disk may be short."""
        start, end = max(start, self.start), min(end, self.end)
        last = end if end == self.end else end // UNIT * UNIT
        return min(-(-start // UNIT) * UNIT, max(last, start)), last

    def add(self, start: int, tags: bytes) -> None:
        """Add whole units that are finished."""
        for index in range(len(tags) // TAG):
            if tags[index * TAG : (index + 1) * TAG] != ZERO:
                self.places.add(start + index * UNIT)
        self._add(start, tags)

    def _add(self, start: int, tags: bytes) -> None:
        while tags:
            number, index = divmod((start - self.start) // UNIT, self._per)
            count = min(len(tags) // TAG, self._per - index)
            now, tags = tags[: count * TAG], tags[count * TAG :]
            if count == self._per and number not in self._open:
                # Most writes: a whole granule at once.
                self._whole.setdefault(number, self._digest(now))
            else:
                self._put(number, index, now)
            start += count * UNIT

    def add_zeros(self, start: int, end: int) -> None:
        """Add whole units of zeros. Cheap also for a hole of many TiB."""
        while start < end:
            number, index = divmod((start - self.start) // UNIT, self._per)
            after = self._span(number)[1]
            stop = min(end, after)
            if not index and stop == after and number not in self._open:
                self._whole.setdefault(number, ZERO)
            else:
                self._put(number, index, self.zero_tags(start, stop))
            start = stop

    def add_part(self, start: int, end: int, data: memoryview | None) -> None:
        """Add a part of one unit; ``data`` None: zeros."""
        start, end = max(start, self.start), min(end, self.end)
        unit = start // UNIT * UNIT
        if start >= end:
            return
        edge = self._take_edge(unit)
        if edge is None:
            number, index = divmod((unit - self.start) // UNIT, self._per)
            if number in self._whole or (number in self._open and self._open[number].has(index)):
                return  # the unit is finished
            edge = _Edge(min(UNIT, self.end - unit))
        edge.add(start - unit, end - unit, data)
        if edge.is_full:
            self.add(unit, ZERO if edge.data is None else self.tags(unit, memoryview(edge.data)))
            return
        self._edges[unit] = edge  # the newest last
        self._buffers += edge.data is not None
        while len(self._edges) > _EDGES or self._buffers > _BUFFERS:
            self._take_edge(next(iter(self._edges)))

    def cut(self, end: int) -> None:
        """Set the end of a disk that is smaller than was expected: its last unit and granule are shorter."""
        if end >= self.end:
            return
        self.end = end
        number, index = divmod(max(0, end - 1 - self.start) // UNIT, self._per)
        unit = self.start + (number * self._per + index) * UNIT
        table, edge = self._open.get(number), self._take_edge(unit)
        if table is not None:
            table.cut(index + 1)
        if edge is not None and edge.cut(end - unit):
            self.add(unit, ZERO if edge.data is None else self.tags(unit, memoryview(edge.data)))
        elif table is not None and table.is_full:
            del self._open[number]
            self._whole[number] = self._digest(bytes(table.tags))

    def granules(self) -> tuple[list[ranges.Range], bytes]:
        """Return the finished granules as ranges, and their digests in order."""
        numbers, spans = sorted(self._whole), []
        for _, run in itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0]):
            adjacent = [number for _, number in run]
            spans.append((self._span(adjacent[0])[0], self._span(adjacent[-1])[1]))
        return spans, b"".join(map(self._whole.__getitem__, numbers))

    def units(self) -> list[Record]:
        """Return the finished units of the newest other granules, in order."""
        found: list[Record] = []
        left = _LOOSE
        for number, table in reversed(self._open.items()):
            first, end = self._span(number)
            for index, tags in table.runs():
                start, part = first + index * UNIT, tags[: left * TAG]
                left -= len(part) // TAG
                found.append(Record(start, min(end, start + len(part) // TAG * UNIT), part, whole=False))
                if not left:
                    return sorted(found)
        return sorted(found)

    def records(self) -> list[Record]:
        """Return what is finished, in order."""
        found = [Record(*self._span(number), tags, whole=True) for number, tags in self._whole.items()]
        return sorted(found + self.units())

    def load(self, records: Iterable[Record]) -> None:
        """Add the records of an earlier attempt."""
        for record in records:
            if record.whole:
                self._whole[(record.start - self.start) // self.granule] = record.tags
            else:
                self._add(record.start, record.tags)

    def differing(self, record: Record, tags: bytes) -> list[ranges.Range]:
        """Return the parts of a record that differ from ``tags``, the tags of the bytes on storage."""
        if record.whole:
            is_complete = len(tags) // TAG == -(-(record.end - record.start) // UNIT)
            return [] if is_complete and self._digest(tags) == record.tags else [(record.start, record.end)]
        return [
            (record.start + index * UNIT, min(record.end, record.start + (index + 1) * UNIT))
            for index in range(len(record.tags) // TAG)
            if record.tags[index * TAG : (index + 1) * TAG] != tags[index * TAG : (index + 1) * TAG]
        ]

    def discard(self, start: int, end: int) -> None:
        """Remove whole granules, or units of a granule that is not finished."""
        while start < end:
            number, index = divmod((start - self.start) // UNIT, self._per)
            stop = min(end, self._span(number)[1])
            self._whole.pop(number, None)
            if number in self._open:
                self._open[number].clear(index, -(-(stop - start) // UNIT))
            start = stop

    # -- granules

    def _span(self, number: int) -> ranges.Range:
        start = self.start + number * self.granule
        return start, min(self.end, start + self.granule)

    def _put(self, number: int, index: int, tags: bytes) -> None:
        if number in self._whole:
            return
        table = self._open.pop(number, None)
        if table is None:
            start, end = self._span(number)
            table = _Open(-(-(end - start) // UNIT))
        table.put(index, tags)
        if table.is_full:
            self._whole[number] = self._digest(bytes(table.tags))
            return
        self._open[number] = table  # the newest last
        if len(self._open) * self._per > _OPEN_UNITS:
            del self._open[next(iter(self._open))]

    def _digest(self, tags: bytes) -> bytes:
        if tags == ZERO * (len(tags) // TAG):
            return ZERO
        return hashlib.blake2b(tags, digest_size=TAG, key=self._key).digest()

    def _take_edge(self, unit: int) -> _Edge | None:
        edge = self._edges.pop(unit, None)
        if edge is not None and edge.data is not None:
            self._buffers -= 1
        return edge

    @functools.cached_property
    def _encrypt(self) -> Callable[[bytes, bytes, memoryview], bytes]:
        from cryptography.hazmat.primitives.ciphers import aead

        # Only the tag is used: the bytes are associated data. The position is the nonce.
        return aead.AESGCM(self._key[:16]).encrypt


class _Open:
    """The tags of a granule that is not finished."""

    def __init__(self, units: int) -> None:
        self.tags = bytearray(units * TAG)
        self._left = units

    @property
    def is_full(self) -> bool:
        return not self._left

    def has(self, index: int) -> bool:
        return self.tags[index * TAG : (index + 1) * TAG] != _ABSENT

    def put(self, index: int, tags: bytes) -> None:
        """Add units; those that are already present are kept: what is written again is the same."""
        count = len(tags) // TAG
        span = slice(index * TAG, (index + count) * TAG)
        if self.tags[span] == _ABSENT * count:
            self.tags[span] = tags
            self._left -= count
            return
        for offset in range(count):
            if not self.has(index + offset):
                self.put(index + offset, tags[offset * TAG : (offset + 1) * TAG])

    def cut(self, units: int) -> None:
        """Leave the first ``units``; those after them are not finished."""
        self._left -= len(self.tags) // TAG - units
        del self.tags[units * TAG :]

    def clear(self, index: int, count: int) -> None:
        for each in range(index, index + count):
            self._left += self.has(each)
        self.tags[index * TAG : (index + count) * TAG] = _ABSENT * count

    def runs(self) -> Iterator[tuple[int, bytes]]:
        """Yield the first index and the tags of adjacent units."""
        first = 0
        # In C: two million units are looked at for one save, while other threads wait.
        for is_present, group in itertools.groupby(memoryview(self.tags).cast("Q"), bool):
            end = first + len(list(group))
            if is_present:
                yield first, bytes(self.tags[first * TAG : end * TAG])
            first = end


class _Edge:
    """A unit of which a part is finished. ``data``: None while all of that is zeros."""

    def __init__(self, size: int) -> None:
        self.data: bytearray | None = None
        self._size = size
        self._covered = ranges.Ranges()

    @property
    def is_full(self) -> bool:
        return self._covered.is_all(0, self._size)

    def cut(self, size: int) -> bool:
        """Make the unit shorter; return whether it is finished then."""
        self._size = size
        if self.data is not None:
            del self.data[size:]
        return self.is_full

    def add(self, start: int, end: int, data: memoryview | None) -> None:
        if data is not None and self.data is None:
            self.data = bytearray(self._size)
        if self.data is not None:
            self.data[start:end] = bytes(end - start) if data is None else data[: end - start]
        self._covered.add(start, end)
