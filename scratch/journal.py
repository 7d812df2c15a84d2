"""What of a transfer is done already, remembered across a kill."""

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

#: Two slots are written in turn: a torn write never takes the older one with it.
SLOT: Final = 256 << 10
#: Ranges remembered at most: a disk stored in no order at all has one for each cluster.
MOST: Final = 32 << 10
_PAGE: Final = 4096
_MAGIC: Final = b"cdi-worker journal 1"
_HEADER: Final = len(_MAGIC) + len(b" 01234567 012345\n")


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    """Where two slots fit: a file or device that exists once the transfer begins, and an offset in it.

    ``withheld``: so many bytes at the start of the disk are stored only at the very end.
    """

    path: str
    offset: int
    withheld: int


class Journal:
    """The ranges of ``total`` bytes that are on stable storage, of which identity. Thread-safe.

    The identity names the bytes (URL and ETag) and this very job, by something that no earlier owner
    of a dirty device can know: who could forge a journal could have his own bytes taken for done.
    Only its hash is stored. All text is ASCII: no boot sector, partition table or superblock is.
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
        """Read what an earlier attempt left; nothing where that is damaged or of something else.

        To be called before the target is opened: that decides whether it is gone on with. Where the
        target was not ``resumed`` after all, ``forget``.
        ``seconds``: how often ``checkpoint`` saves. Slots None: nothing is remembered.
        """
        journal = cls(slots, identity, total, seconds=seconds)
        if slots is not None:
            journal._load(slots)
        return journal

    @property
    def covered(self) -> int:
        """How many bytes are done."""
        with self._lock:
            return self._done.covered()

    def done(self, start: int, end: int) -> None:
        """Remember that a range was given to the target."""
        with self._lock:
            self._done.add(max(start, self._withheld), end)
            if len(self._done) > MOST:
                self._done = Ranges(_longest_half(list(self._done)))

    def forget(self) -> None:
        """Start over: what an earlier attempt left was not gone on with."""
        with self._lock:
            self._done = Ranges()

    def missing(self, start: int, end: int) -> list[Range]:
        """Return what of a range is still to do."""
        with self._lock:
            return self._done.missing(start, end)

    def checkpoint(self, flush: Callable[[], None]) -> None:
        """Save when it is time; cheap enough to be called after every range."""
        if time.monotonic() >= self._next and self._saving.acquire(blocking=False):
            try:
                self._save(flush)
            finally:
                self._saving.release()

    def save(self, flush: Callable[[], None]) -> None:
        """Make what is done so far survive a kill. ``flush`` syncs the data and may raise."""
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
            # The transfer does not need it; only a later attempt would have been shorter.
            log.warning("no journal path=%r error=%r", self._slots.path, err.strerror)
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
    """Forget the short ones: that costs only their transfer."""
    longest = sorted(done, key=lambda run: run[0] - run[1])[: len(done) // 2]
    return sorted(longest)


def _decode(slot: bytes, identity: str, total: int) -> tuple[int, Ranges]:
    if not slot.startswith(_MAGIC):
        raise ValueError("no journal")
    checksum, length = slot[len(_MAGIC) : _HEADER].split()
    body = slot[_HEADER : _HEADER + int(length)]
    if zlib.crc32(body) != int(checksum, 16):
        raise ValueError("damaged")
    record = json.loads(body)
    if (record["identity"], record["total"]) != (identity, total):
        raise ValueError("of other bytes")
    done = [(int(start), int(end)) for start, end in record["done"]]
    if any(not 0 <= start < end <= total for start, end in done):
        raise ValueError("ranges outside")
    return int(record["sequence"]), Ranges(done)


Range = tuple[int, int]


class Ranges:
    """Half-open ranges ``(start, end)``, ascending, none touching the next."""

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
        """Return how many bytes are in the set."""
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
        """Return what of a range is not in the set."""
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
