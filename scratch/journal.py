"""The journal of finished ranges, with which a later attempt resumes a killed transfer."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Self

log = logging.getLogger(__name__)

#: Bytes of a slot. Two slots are written in turn, so that a torn write leaves the older one intact.
SLOT: Final = 256 << 10
#: Maximum number of ranges: an image with clusters in random order has one for each cluster.
MOST: Final = 32 << 10
_PAGE: Final = 4096
_MAGIC: Final = b"cdi-worker journal 1"
_HEADER: Final = len(_MAGIC) + len(b" 01234567 012345\n")


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    """Where the two slots are stored: a file or device that exists during the transfer, and an offset.

    ``withheld``: number of bytes at the start of the disk that are written only by ``commit``.
    """

    path: str
    offset: int
    withheld: int


class Journal:
    """The ranges of a transfer of ``total`` bytes that are on stable storage. Thread-safe.

    ``identity``: the source (URL and ETag) and a secret of this job. An earlier owner of the device must not
    know it: a forged journal would make his bytes part of the disk. Only its SHA-256 is stored. A slot is
    ASCII text, which is never a valid boot sector, partition table or superblock.
    """

    def __init__(self, slots: Slots | None, identity: str, total: int, *, seconds: float = 10.0) -> None:
        self._slots = slots
        self._withheld = slots.withheld if slots else 0
        self._identity = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
        self._total = total
        self._seconds = seconds
        self._sequence = 0
        self._done = Ranges()
        self._next = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._saving = threading.Lock()

    @classmethod
    def open(cls, slots: Slots | None, identity: str, total: int, *, seconds: float = 10.0) -> Self:
        """Read the journal of an earlier attempt; empty if it is damaged or has another identity.

        Call it before the target is opened, because the result decides whether to resume. Call ``forget`` if
        the target was not ``resumed``. ``seconds``: interval of ``checkpoint``. Slots None: keep no journal.
        """
        journal = cls(slots, identity, total, seconds=seconds)
        if slots is not None:
            journal._load(slots)
        return journal

    @property
    def covered(self) -> int:
        """Number of finished bytes."""
        with self._lock:
            return self._done.covered()

    def done(self, start: int, end: int) -> None:
        """Add a range that was written to the target."""
        with self._lock:
            self._done.add(max(start, self._withheld), end)
            if len(self._done) > MOST:
                self._done = Ranges(_longest_half(list(self._done)))

    def forget(self) -> None:
        """Remove all ranges: the target does not hold the bytes of the earlier attempt."""
        with self._lock:
            self._done = Ranges()

    def missing(self, start: int, end: int) -> list[Range]:
        """Return the unfinished parts of a range."""
        with self._lock:
            return self._done.missing(start, end)

    def checkpoint(self, flush: Callable[[], None]) -> None:
        """Save if the interval has passed. Cheap enough to call after every range."""
        if time.monotonic() >= self._next and self._saving.acquire(blocking=False):
            try:
                self._save(flush)
            finally:
                self._saving.release()

    def save(self, flush: Callable[[], None]) -> None:
        """Sync the data with ``flush``, which may raise, then store the ranges that were finished before."""
        with self._saving:
            self._save(flush)

    def _save(self, flush: Callable[[], None]) -> None:
        if self._slots is None:
            return
        with self._lock:
            done = list(self._done)
        flush()
        self._sequence += 1
        try:
            self._write(self._slots, _encode(self._identity, self._total, self._sequence, done))
        except OSError as err:
            # The transfer works without a journal, only a later attempt cannot resume.
            log.warning("journal disabled path=%r error=%r", self._slots.path, err.strerror)
            self._slots = None
        self._next = time.monotonic() + self._seconds

    def _write(self, slots: Slots, slot: bytes) -> None:
        fd = os.open(slots.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(fd, slot, slots.offset + self._sequence % 2 * SLOT)
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def _load(self, slots: Slots) -> None:
        for slot in _read(slots):
            try:
                sequence, done = _decode(slot, self._identity, self._total)
            except (ValueError, KeyError, TypeError, RecursionError) as err:
                log.debug("journal slot ignored path=%r reason=%r", slots.path, str(err))
                continue
            if sequence > self._sequence:
                self._sequence, self._done = sequence, done


def _read(slots: Slots) -> list[bytes]:
    try:
        fd = os.open(slots.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        return [os.pread(fd, SLOT, slots.offset + number * SLOT) for number in range(2)]
    except OSError as err:
        log.debug("journal unreadable path=%r error=%r", slots.path, err.strerror)
        return []
    finally:
        os.close(fd)


def _encode(identity: str, total: int, sequence: int, done: list[Range]) -> bytes:
    while True:
        record = {"identity": identity, "total": total, "sequence": sequence, "done": done}
        body = json.dumps(record, separators=(",", ":")).encode("ascii")
        if _HEADER + len(body) <= SLOT:
            break
        done = _longest_half(done)
    slot = b"%s %08x %06d\n%s" % (_MAGIC, zlib.crc32(body), len(body), body)
    return slot.ljust(-(-len(slot) // _PAGE) * _PAGE, b"\n")


def _longest_half(done: list[Range]) -> list[Range]:
    """Drop the shorter half of the ranges: a resumed transfer fetches them again."""
    longest = sorted(done, key=lambda each: each[0] - each[1])[: len(done) // 2]
    return sorted(longest)


def _decode(slot: bytes, identity: str, total: int) -> tuple[int, Ranges]:
    if not slot.startswith(_MAGIC):
        raise ValueError("not a journal")
    checksum, length = slot[len(_MAGIC) : _HEADER].split()
    body = slot[_HEADER : _HEADER + int(length)]
    if zlib.crc32(body) != int(checksum, 16):
        raise ValueError("damaged")
    record = json.loads(body)
    if (record["identity"], record["total"]) != (identity, total):
        raise ValueError("other identity or size")
    done = [(int(start), int(end)) for start, end in record["done"]]
    if any(not 0 <= start < end <= total for start, end in done):
        raise ValueError("ranges beyond the disk")
    return int(record["sequence"]), Ranges(done)


Range = tuple[int, int]


class Ranges:
    """A set of bytes, as ascending half-open ranges ``(start, end)`` that neither overlap nor touch."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self.add(start, end)

    def __iter__(self) -> Iterator[Range]:
        return zip(self._starts, self._ends, strict=True)

    def __len__(self) -> int:
        return len(self._starts)

    def covered(self) -> int:
        """Return the number of bytes in the set."""
        return sum(self._ends) - sum(self._starts)

    def add(self, start: int, end: int) -> None:
        if start >= end:
            return
        first = bisect.bisect_left(self._ends, start)
        after = bisect.bisect_right(self._starts, end)
        if first < after:
            start = min(start, self._starts[first])
            end = max(end, self._ends[after - 1])
        self._starts[first:after] = [start]
        self._ends[first:after] = [end]

    def missing(self, start: int, end: int) -> list[Range]:
        """Return the parts of a range that are not in the set."""
        gaps = []
        for index in range(bisect.bisect_right(self._ends, start), len(self._starts)):
            if self._starts[index] >= end:
                break
            if start < self._starts[index]:
                gaps.append((start, self._starts[index]))
            start = self._ends[index]
        if start < end:
            gaps.append((start, end))
        return gaps
