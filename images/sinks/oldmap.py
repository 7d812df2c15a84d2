"""An update by the map of the old disk: what has the checksums of the map is neither read nor written."""

from __future__ import annotations

import bisect
import hashlib
import random
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

from cdi_worker import errors, units
from cdi_worker.images import directio
from cdi_worker.images.sinks import base, compared

if TYPE_CHECKING:
    from cdi_worker.formats import bmap
    from cdi_worker.images.targets.storage import Storage

#: Longer ranges are not compared by their checksums: all of one is in memory meanwhile.
LONGEST: Final = 16 << 20
#: Bytes of all ranges of which a part has passed. Beyond, the oldest is compared with the disk.
_MOST: Final = 48 << 20
#: Ranges, and holes, that are sampled: the first and last ones, which a guest changes whenever it runs, and
#: random ones.
_ENDS: Final = 4
_RANDOM: Final = 8

#: An offset, and data or the length of zeros.
_Piece: TypeAlias = "tuple[int, memoryview | bytes | int]"


def check(stored: Storage, blocks: bmap.Map) -> None:
    """Raise ``errors.TargetError`` if a sample of the disk is not what its map says."""
    data = [each for each in blocks.ranges if each[1] - each[0] <= LONGEST]
    zeros = [(start, min(end, start + units.MIB), b"") for start, end in blocks.holes()]
    for start, end, digest in [*_sample(data), *_sample(zeros)]:
        if digest:
            is_same = hashlib.new(blocks.algorithm, stored.read(start, end - start)).digest() == digest
        else:
            is_same = not any(stored.nonzero(start, end))
        if not is_same:
            reason = f"bytes {start} to {end - 1} are not what its map says (--have); update it without"
            raise errors.TargetError(path=stored.path, reason=reason)


def _sample(parts: list[bmap.Range]) -> list[bmap.Range]:
    """Return the first, the last, and some random parts."""
    rest = parts[_ENDS:-_ENDS]
    return [*parts[:_ENDS], *random.sample(rest, min(_RANDOM, len(rest))), *parts[_ENDS:][-_ENDS:]]


class OldMap(base.Passing):
    """Pass on to ``to`` what differs from ``blocks``, the map of the disk that ``to`` updates. Thread-safe.

    A range is compared when all of it has passed; until then what has passed is copied and waits.
    """

    def __init__(self, to: compared.Updating, blocks: bmap.Map) -> None:
        super().__init__(to)
        self._updating = to
        self._blocks = blocks
        self._starts = [start for start, _, _ in blocks.ranges]
        #: What waits, by the number of its range.
        self._waiting: dict[int, list[_Piece]] = {}
        self._size = 0
        #: Ranges that are compared with the disk.
        self._given_up: set[int] = set()
        self._lock = threading.Lock()

    def write(self, offset: int, data: memoryview, /) -> None:
        """See ``base.Sink``."""
        for start, end, number in self._split(offset, offset + len(data)):
            part = data[start - offset : end - offset]
            if number is not None:
                self._take(number, (start, part))
            elif start < self._blocks.size and directio.is_zero(part):
                self._updating.same(start, end - start)
            else:
                self._to.write(start, part)

    def zero(self, offset: int, length: int, /) -> None:
        """See ``base.Sink``."""
        for start, end, number in self._split(offset, offset + length):
            if number is not None:
                self._take(number, (start, end - start))
            elif start < self._blocks.size:
                self._updating.same(start, end - start)
            else:
                self._to.zero(start, end - start)

    def end(self) -> None:
        """Pass on what has waited in vain: the new disk ends within a range."""
        for pieces in self._waiting.values():
            self._pass_on(pieces)
        self._waiting.clear()

    def _split(self, start: int, end: int) -> Iterator[tuple[int, int, int | None]]:
        """Split by the ranges of the map, with their numbers, and by its end."""
        ranges, size = self._blocks.ranges, self._blocks.size
        while start < end:
            after = bisect.bisect_right(self._starts, start)
            number: int | None = after - 1
            if after and start < ranges[after - 1][1]:
                stop = min(end, ranges[after - 1][1])
            else:
                number = None
                border = ranges[after][0] if after < len(ranges) else size if start < size else end
                stop = min(end, border)
            yield start, stop, number
            start = stop

    def _take(self, number: int, piece: _Piece) -> None:
        start, end, _ = self._blocks.ranges[number]
        if _length(piece) == end - start <= LONGEST:
            self._compare(number, [piece])
            return
        offset, content = piece
        if isinstance(content, memoryview):
            content = bytes(content)
        complete: list[_Piece] = []
        passed: list[_Piece] = []
        with self._lock:
            if end - start > LONGEST or number in self._given_up:
                passed = [piece]
            else:
                waiting = self._waiting.setdefault(number, [])
                waiting.append((offset, content))
                self._size += _kept(waiting[-1])
                if sum(map(_length, waiting)) >= end - start:
                    complete = self._pop(number)
                elif self._size > _MOST:
                    oldest = next(iter(self._waiting))
                    self._given_up.add(oldest)
                    passed = self._pop(oldest)
        if complete:
            self._compare(number, complete)
        self._pass_on(passed)

    def _pop(self, number: int) -> list[_Piece]:
        """Return what waits of a range, in order. Under the lock."""
        pieces = self._waiting.pop(number)
        self._size -= sum(map(_kept, pieces))
        return sorted(pieces, key=lambda piece: piece[0])

    def _compare(self, number: int, pieces: list[_Piece]) -> None:
        """Compare a range, and pass it on if it differs."""
        start, end, digest = self._blocks.ranges[number]
        hashed, at = hashlib.new(self._blocks.algorithm), start
        for offset, content in pieces:
            if offset != at:
                break
            for part in [content] if not isinstance(content, int) else _zeros(content):
                hashed.update(part)
            at += _length((offset, content))
        if at == end and hashed.digest() == digest:
            self._updating.same(start, end - start)
        else:
            self._pass_on(pieces)

    def _pass_on(self, pieces: Iterable[_Piece]) -> None:
        for offset, content in pieces:
            if isinstance(content, int):
                self._to.zero(offset, content)
            else:
                self._to.write(offset, memoryview(content))


def _length(piece: _Piece) -> int:
    return piece[1] if isinstance(piece[1], int) else len(piece[1])


def _kept(piece: _Piece) -> int:
    """Return the bytes of memory that a piece needs."""
    return 0 if isinstance(piece[1], int) else len(piece[1])


def _zeros(length: int) -> Iterator[memoryview]:
    zeros = directio.zeros()
    for start in range(0, length, len(zeros)):
        yield zeros[: length - start]
