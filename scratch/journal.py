"""The journal of finished ranges and their digests, with which a later attempt resumes a killed transfer."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from cdi_worker import errors
from cdi_worker.scratch import digests, ranges, space

log = logging.getLogger(__name__)

#: Bytes of a slot. Two slots are written in turn, so that a torn write leaves the older one intact.
SLOT: Final = 352 << 10
#: Bytes of both slots.
AREA: Final = 2 * SLOT
#: Maximum number of ranges in memory: an image with clusters in random order has one for each cluster.
MOST: Final = 32 << 10
#: The shortest interval in seconds, also where syncing costs nothing.
SHORTEST_INTERVAL: Final = 1.0
#: Saves may take this part of the time: a slow sync makes the interval longer.
SHARE: Final = 0.05
#: After this many bytes, the shortest interval is enough.
MOST_UNSAVED: Final = 1 << 30
_ENDS: Final = 1 << 20
_PAGE: Final = 4096
_MAGIC: Final = b"cdi-worker journal 3"
_MAC: Final = 16
_HEADER: Final = len(_MAGIC) + len(b" ") + 2 * _MAC + len(b" 012345\n")

Range = ranges.Range
Ranges = ranges.Ranges


class Slots(NamedTuple):
    """Where the two slots are stored: a file or device that exists during the transfer, and an offset.

    ``withheld``: number of bytes at the start of the disk that are written only by ``commit``.
    ``is_apart``: the file does not contain the disk.
    """

    path: str
    offset: int
    withheld: int
    is_apart: bool = False


class Journal:
    """The ranges of a transfer of ``total`` bytes that are on stable storage, and their digests. Thread-safe.

    ``identity``: the source (URL and ETag) and a secret of this job. It is the key of the digests and of each
    slot: an earlier owner of the device who does not know it can neither forge a journal nor data that fits
    to ours. A slot is ASCII text, which is never a valid boot sector, partition table or superblock.

    It begins with the ranges of an earlier attempt in ``slots``; empty if those are damaged or have another
    identity. Make it before the target is opened: it decides whether to resume. Nothing is known about the
    bytes on storage until they have been compared with ``records``. Call ``forget`` if the target was not
    ``resumed``. Slots None: keep no journal.
    ``seconds``: the longest interval of ``checkpoint``, measured by ``clock``.
    """

    def __init__(
        self,
        slots: Slots | None,
        identity: str,
        total: int,
        *,
        seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots = slots
        self._digesting = slots is not None
        self._withheld = slots.withheld if slots else 0
        self._key = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).digest()
        #: Number of bytes that the journal is about.
        self.total = total
        self._sequence = 0
        self._done = Ranges()
        self._digests = digests.Digests(self._key, self._withheld, total)
        #: Of an earlier attempt: bytes of the source that were moved, and that need not be moved.
        self.counted = 0, 0
        #: Returns the bytes that this attempt keeps, and those that need not be moved.
        self.counting: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._moved = 0
        self._unsaved = 0
        self._seconds = seconds
        self._interval = min(seconds, SHORTEST_INTERVAL)
        self._clock = clock
        self._saved = clock()
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        if slots is not None:
            self._load(slots)

    @classmethod
    def in_memory(cls, limit: int) -> Self:
        """Return a journal that is only kept in memory, of a disk of at most ``limit`` bytes."""
        made = cls(None, secrets.token_hex(), limit)
        made._digesting = True
        return made

    def end(self, size: int) -> None:
        """Note the size of the disk, if it was not known before."""
        with self._lock:
            self._digests.cut(size)

    def store_in(self, path: str) -> None:
        """Save to ``path`` from now on, which names the open target whatever becomes of the target's name."""
        if self._slots is not None:
            self._slots = self._slots._replace(path=path)

    @property
    def covered(self) -> int:
        """Number of finished bytes."""
        with self._lock:
            return self._done.covered()

    def digest(self, offset: int, data: memoryview) -> bytes:
        """Return the tags of the whole units in ``data``, for ``wrote``.

        Call it before the bytes are written: they are still in the CPU cache, and no longer after a write.
        """
        if not self._digesting or (len(data) < digests.UNIT and offset + len(data) < self._digests.end):
            return b""
        first, last = self._digests.whole_units(offset, offset + len(data))
        return self._digests.tags(first, data[first - offset : last - offset]) if first < last else b""

    def wrote(self, offset: int, data: memoryview, tags: bytes) -> None:
        """Add bytes that were written to the target, with the result of ``digest``."""
        start, end = offset, offset + len(data)
        first, last = self._digests.whole_units(start, end)
        with self._lock:
            self._add(start, end)
            if not self._digesting:
                return
            self._unsaved += end - start
            if tags:
                self._digests.add(first, tags)
            for before, after in _outside(start, end, first, last):
                self._digests.add_part(before, after, data[before - start : after - start])

    def zeroed(self, spans: Iterable[Range]) -> None:
        """Add ranges that were zeroed on the target: other threads wait for the lock once, not for each."""
        with self._lock:
            for start, end in spans:
                self._add(start, end)
                if not self._digesting:
                    continue
                first, last = self._digests.whole_units(start, end)
                self._digests.add_zeros(first, last)
                for part in _outside(start, end, first, last):
                    self._digests.add_part(*part, None)

    def forget(self) -> None:
        """Remove all ranges: the target does not hold the bytes of the source."""
        with self._lock:
            self._done = Ranges()
            self._digests = digests.Digests(self._key, self._withheld, self.total)
        self.counted = 0, 0

    def moved(self, count: int) -> None:
        """Count ``count`` bytes of the source whose disk has been noted."""
        with self._lock:
            self._moved += count

    @property
    def figures(self) -> tuple[int, int]:
        """The bytes of the source that were moved, also by earlier attempts, and those that need not be."""
        kept, skipped = self.counting()
        return self._moved + kept, skipped

    def missing(self, start: int, end: int) -> list[Range]:
        """Return the unfinished parts of a range."""
        return self.missing_of([(start, end)])

    def missing_of(self, spans: Iterable[Range]) -> list[Range]:
        """Return the unfinished parts of many ranges, one after the other."""
        with self._lock:
            return [part for start, end in spans for part in self._done.missing(start, end)]

    def records(self) -> list[digests.Record]:
        """Return what should be on storage, in order, as the journal records it."""
        with self._lock:
            return self._digests.records()

    def tags(self, start: int, end: int, data: memoryview | None) -> bytes:
        """Return the tags of whole units, read from storage; ``data`` None: zeros."""
        return self._digests.zero_tags(start, end) if data is None else self._digests.tags(start, data)

    def compare(self, record: digests.Record, tags: bytes) -> list[Range]:
        """Return the ranges of ``record`` that storage does not hold, which are missing from now on."""
        with self._lock:
            differing = self._digests.differing(record, tags)
            for start, end in differing:
                self._discard(start, end)
        return differing

    def discard(self, start: int, end: int) -> None:
        """Remove a range whose bytes differ from those noted; it is missing from now on."""
        with self._lock:
            self._discard(start, end)

    def sample(self) -> Journal:
        """Return a journal without slots in which only a sample of the finished ranges is missing.

        The sample: the first and the last MiB, up to ``digests.PLACES`` units that got data, and as many
        random ones.
        """
        found = self.records()
        wanted = Ranges([(0, min(_ENDS, self.total)), (max(0, self.total - _ENDS), self.total)])
        for start, end in _places([record for record in found if not record.is_zero] or found):
            wanted.add(start, end)
        for start in self._digests.places.starts:
            wanted.add(start, min(self.total, start + digests.UNIT))
        made = Journal(None, "", self.total)
        for start, end in wanted.missing(0, self.total):
            made._done.add(start, end)
        for start, end in wanted:
            for gap in self.missing(start, end):
                made._done.add(*gap)
        return made

    def checkpoint(self, flush: Callable[[], None]) -> None:
        """Save if the interval has passed. Cheap enough to call after every range."""
        if self._is_due() and self._saving.acquire(blocking=False):
            try:
                if self._is_due():
                    self._save(flush)
            finally:
                self._saving.release()

    def save(self, flush: Callable[[], None]) -> None:
        """Sync the data with ``flush``, which may raise, then store the ranges that were finished before.

        Raises ``errors.TargetError`` if the file cannot be synced and contains the disk.
        """
        with self._saving:
            self._save(flush)

    def erase(self) -> None:
        """Remove all ranges, also from storage, from both slots. No data has to be synced for that.

        Raises ``errors.TargetError`` if a slot cannot be written.
        """
        self.forget()
        slots = self._slots
        with self._saving:
            for _ in range(2):
                self._save(lambda: None)
        if self._slots is not slots and slots is not None:
            raise errors.TargetError(path=slots.path, reason="the journal of another disk cannot be erased")

    def _add(self, start: int, end: int) -> None:
        """Add a finished range; the caller holds the lock."""
        self._done.add(max(start, self._withheld), end)
        if len(self._done) > MOST:
            longest = sorted(self._done, key=lambda each: each[0] - each[1])
            self._done = Ranges(sorted(longest[: len(longest) // 2]))

    def _discard(self, start: int, end: int) -> None:
        """Remove a range, and all digests that cover a part of it; the caller holds the lock."""
        first = max(self._digests.start, start // digests.UNIT * digests.UNIT)
        self._digests.discard(first, min(self._digests.end, -(-end // digests.UNIT) * digests.UNIT))
        self._done.remove(start, end)

    def _is_due(self) -> bool:
        shortest = min(self._seconds, SHORTEST_INTERVAL)
        interval = self._interval if self._unsaved < MOST_UNSAVED else shortest
        return self._clock() - self._saved >= interval

    def _save(self, flush: Callable[[], None]) -> None:
        if self._slots is None:
            return
        began = self._clock()
        with self._lock:
            granules, units = self._digests.granules(), self._digests.units()
            self._unsaved = 0
            moved = self._moved
            places = self._digests.places.of, list(self._digests.places.starts)
        kept, skipped = self.counting()
        about = {"total": self.total, "counted": (moved + kept, skipped), "places": places}
        flush()
        self._sequence += 1
        try:
            document = {**about, "sequence": self._sequence}
            self._write(self._slots, _encode(self._key, document, granules, units))
        except OSError as err:
            # The transfer works without a journal, only a later attempt cannot resume.
            log.warning("journal disabled path=%r error=%r", self._slots.path, err.strerror)
            self._slots = None
        self._saved = self._clock()
        self._interval = min(self._seconds, max(SHORTEST_INTERVAL, (self._saved - began) / SHARE))

    def _write(self, slots: Slots, slot: bytes) -> None:
        fd = os.open(slots.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, slot, slots.offset + self._sequence % 2 * SLOT)
            try:
                os.fdatasync(fd)
            except OSError as err:
                if slots.is_apart:
                    raise
                # Writes of the disk, in the same file, may be lost with it, and a later sync may not say so.
                raise errors.target_error(os.path.realpath(slots.path), err, "sync") from err
        finally:
            os.close(fd)

    def _load(self, slots: Slots) -> None:
        records: list[digests.Record] = []
        for slot in _read(slots):
            try:
                document, found = _decode(slot, self._key, self.total, self._digests)
                sequence, (moved, skipped) = int(document["sequence"]), document["counted"]
                # Journals of earlier versions have none.
                places = digests.Places(*document.get("places", ()))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as err:
                log.debug("journal slot ignored path=%r reason=%r", slots.path, str(err))
                continue
            if sequence > self._sequence:
                self._sequence, records, self.counted = sequence, found, (int(moved), int(skipped))
                self._digests.places = places
        self._digests.load(records)
        for record in records:
            self._done.add(record.start, record.end)


def is_at_end_of(path: str) -> bool:
    """Return whether a file ends with a journal, of whatever source, as an incomplete disk does."""
    with open(path, "rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) // _PAGE * _PAGE - AREA)
        file.seek(start)
        found = file.read(AREA + _PAGE)
    return any(found.startswith(_MAGIC, at) for at in range(0, len(found), _PAGE))


def _outside(start: int, end: int, first: int, last: int) -> Iterator[Range]:
    """Yield the parts of a range before and after the whole units in it, each within one unit."""
    if first >= last:
        # At most one boundary of units is within it.
        middle = min(end, max(start, -(-start // digests.UNIT) * digests.UNIT))
        first = last = middle
    if start < first:
        yield start, first
    if last < end:
        yield last, end


def _places(records: list[digests.Record]) -> Iterator[Range]:
    """Yield random units of the records."""
    weights = [record.end - record.start for record in records]
    for record in random.choices(records, weights, k=digests.PLACES) if records else ():  # noqa: S311  (no secret)
        start = record.start + random.randrange(0, record.end - record.start, digests.UNIT)  # noqa: S311  (no secret)
        yield start, min(record.end, start + digests.UNIT)


def _read(slots: Slots) -> list[bytes]:
    try:
        fd = os.open(slots.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        if slots.is_apart and not space.is_ours(os.fstat(fd), Path(slots.path).parent):
            return []
        return [os.pread(fd, SLOT, slots.offset + number * SLOT) for number in range(2)]
    except OSError as err:
        log.debug("journal unreadable path=%r error=%r", slots.path, err.strerror)
        return []
    finally:
        os.close(fd)


def _encode(
    key: bytes, about: Mapping[str, object], granules: tuple[list[Range], bytes], units: list[digests.Record]
) -> bytes:
    """Return a slot. ``granules``: ranges, and the digests of the granules in them."""
    document = dict(about)
    loose = [(each.start, each.end) for each in units], b"".join(each.tags for each in units)
    for name, (spans, tags) in (("granules", granules), ("units", loose)):
        document[name] = spans
        document[f"{name} tags"] = base64.b64encode(tags).decode()
    body = json.dumps(document, separators=(",", ":")).encode("ascii")
    if _HEADER + len(body) > SLOT:
        # The granules fit, if every second one is finished. A resumed transfer fetches the other units again.
        return _encode(key, about, granules, units[: len(units) // 2])
    slot = b"%s %s %06d\n%s" % (_MAGIC, _mac(key, body), len(body), body)
    return slot.ljust(-(-len(slot) // _PAGE) * _PAGE, b"\n")


def _mac(key: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_MAC, key=key, person=b"journal").hexdigest().encode()


def _decode(
    slot: bytes, key: bytes, total: int, grid: digests.Digests
) -> tuple[dict[str, Any], list[digests.Record]]:
    if not slot.startswith(_MAGIC):
        raise ValueError("not a journal")
    mac, length = slot[len(_MAGIC) : _HEADER].split()
    body = slot[_HEADER : _HEADER + int(length)]
    if not hmac.compare_digest(mac, _mac(key, body)):
        raise ValueError("damaged, or of another source or job")
    document: dict[str, Any] = json.loads(body)  # noqa: TID251 - authenticated above
    if document["total"] != total:
        raise ValueError("other size")
    records: list[digests.Record] = []
    for name, step in (("granules", grid.granule), ("units", digests.UNIT)):
        tags = base64.b64decode(document[f"{name} tags"], validate=True)
        for start, end in document[name]:
            records += _records((int(start), int(end)), step, tags, grid)
            tags = tags[-(-(end - start) // step) * digests.TAG :]
    return document, records


def _records(span: Range, step: int, tags: bytes, grid: digests.Digests) -> Iterator[digests.Record]:
    """Yield the records of one range: for each granule, or for all units. ``grid``: where these begin."""
    start, end = span
    if not grid.start <= start < end <= grid.end or (start - grid.start) % step:
        raise ValueError("ranges beyond the disk")
    if (end - grid.start) % step and end != grid.end:
        raise ValueError("not in whole units")
    count = -(-(end - start) // step)
    if len(tags) < count * digests.TAG:
        raise ValueError("digests are missing")
    if step == digests.UNIT != grid.granule:
        yield digests.Record(start, end, tags[: count * digests.TAG], whole=False)
        return
    for index in range(count):
        first = start + index * step
        part = tags[index * digests.TAG : (index + 1) * digests.TAG]
        yield digests.Record(first, min(end, first + step), part, whole=True)
