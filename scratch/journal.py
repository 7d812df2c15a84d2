"""The journal of finished ranges and their digests, with which a later attempt resumes a killed transfer."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import operator
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self

from cdi_worker import errors
from cdi_worker.scratch import digests, ranges, space

log = logging.getLogger(__name__)

#: Bytes of a slot. Two slots are written in turn, so that a torn write leaves the older one intact.
SLOT: Final = 352 << 10
#: Bytes of both slots.
AREA: Final = 2 * SLOT
#: The shortest interval in seconds, also where syncing costs nothing.
SHORTEST_INTERVAL: Final = 1.0
#: Saves may take this part of the time: a slow sync makes the interval longer.
SHARE: Final = 0.05
#: After this many bytes, saves may take twice that part, and there is no shortest interval.
MOST_UNSAVED: Final = 64 << 20
_ENDS: Final = 1 << 20
_PAGE: Final = 4096
_MAGIC: Final = b"cdi-worker journal 6"

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
        self._is_kept = slots is not None
        self._key = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).digest()
        #: Number of bytes that the journal is about.
        self.total = total
        self._sequence = 0
        self._finished = digests.Digests(self._key, slots.withheld if slots else 0, total)
        #: Of an earlier attempt: bytes of the source that were moved, and that need not be moved.
        self.counted = 0, 0
        #: Returns the bytes that this attempt keeps, and those that need not be moved.
        self.counting: Callable[[], tuple[int, int]] = lambda: (0, 0)
        #: Bytes of the source that this attempt has moved.
        self.moved_now = 0
        #: Whether bytes may be wrong although they are on storage: they must be compared with the source.
        self.tentative = False
        self._unsaved = 0
        self._seconds = seconds
        self._cost = 0.0  # seconds of the last save
        self._clock = clock
        self._saved = clock()
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        if slots is not None:
            self._load(slots)

    @classmethod
    def in_memory(cls, limit: int) -> Self:
        """Return a journal that is only kept in memory, of a disk of at most ``limit`` bytes."""
        kept = cls(None, os.urandom(32).hex(), limit)
        kept._is_kept = True
        return kept

    def end(self, size: int) -> None:
        """Note the size of the disk, if it was not known before."""
        with self._lock:
            self._finished.cut(size)

    def store_in(self, path: str) -> None:
        """Save to ``path`` from now on, which names the open target whatever becomes of the target's name."""
        if self._slots is not None:
            self._slots = self._slots._replace(path=path)

    @property
    def was_loaded(self) -> bool:
        """Whether an earlier attempt has saved to ``slots``, or this one."""
        return self._sequence > 0

    @property
    def covered(self) -> int:
        """Number of finished bytes."""
        with self._lock:
            return self._finished.done.covered()

    def digest(self, offset: int, data: memoryview) -> list[int]:
        """Return the tags of the whole units in ``data``, for ``wrote``.

        Call it before the bytes are written: they are still in the CPU cache, and no longer after a write.
        """
        if not self._is_kept:
            return []
        first, last = self._finished.whole_units(offset, offset + len(data))
        return self._finished.tags(first, data[first - offset : last - offset])

    def wrote(self, offset: int, data: memoryview, tags: Sequence[int]) -> None:
        """Add bytes that were written to the target, with the result of ``digest``."""
        if self._is_kept:
            with self._lock:
                self._unsaved += len(data)
                self._finished.add(offset, offset + len(data), data, tags)

    def zeroed(self, spans: Iterable[Range]) -> None:
        """Add ranges that were zeroed on the target: other threads wait for the lock once, not for each."""
        if self._is_kept:
            with self._lock:
                for span in spans:
                    self._finished.add(*span)

    def forget(self) -> None:
        """Remove all ranges: the target does not hold the bytes of the source."""
        with self._lock:
            self._finished = digests.Digests(self._key, self._finished.start, self.total)
        self.counted, self.tentative = (0, 0), False

    def moved(self, count: int) -> None:
        """Count ``count`` bytes of the source whose disk has been noted."""
        with self._lock:
            self.moved_now += count

    @property
    def figures(self) -> tuple[int, int]:
        """The bytes of the source that were moved, also by earlier attempts, and those that need not be."""
        kept, skipped = self.counting()
        return self.moved_now + kept, skipped

    def missing(self, start: int, end: int) -> list[Range]:
        """Return the unfinished parts of a range."""
        return self.missing_of([(start, end)])

    def missing_of(self, spans: Iterable[Range]) -> list[Range]:
        """Return the unfinished parts of many ranges, one after the other."""
        with self._lock:
            return [part for start, end in spans for part in self._finished.done.missing(start, end)]

    def records(self) -> list[digests.Record]:
        """Return what should be on storage, in order."""
        with self._lock:
            return self._finished.records()

    def tag(self, start: int, data: memoryview) -> int:
        """Return the digest of whole units that were read from storage, for ``compare``."""
        return functools.reduce(operator.xor, self._finished.tags(start, data), 0)

    def compare(self, record: digests.Record, digest: int | None) -> bool:
        """Return whether storage holds ``record``. If not, its bytes are missing from now on.

        ``digest``: that of the bytes read; None: some could not be read.
        """
        if digest == record.digest:
            return True
        with self._lock:
            self._finished.refute(record)
        return False

    def discard(self, start: int, end: int) -> None:
        """Remove a range whose bytes differ from those noted, with all that shares a digest with it."""
        with self._lock:
            self._finished.discard(start, end)

    def cut_at_gap(self, start: int) -> int:
        """Remove what follows the first missing byte from ``start``; return the offset of that byte."""
        gaps = self.missing(start, self.total)
        if gaps and gaps[0][1] < self.total:
            # Removes a part before it, too, if they share a digest.
            self.discard(gaps[0][0], self.total)
            gaps = self.missing(start, self.total)
        return gaps[0][0] if gaps else self.total

    def sample(self) -> Journal:
        """Return a journal without slots in which only a sample of the finished ranges is missing.

        The sample: the first and the last MiB, up to ``digests.SAMPLE`` units that got data, and as many
        random ones.
        """
        wanted = Ranges([(0, min(_ENDS, self.total)), (max(0, self.total - _ENDS), self.total)])
        for start, end in _places(self.records()):
            wanted.add(start, end)
        for _, start in self._finished.sample:
            wanted.add(start, min(self.total, start + digests.UNIT))
        sample = Journal(None, "", self.total)
        for start, end in [*wanted.missing(0, self.total), *self.missing_of(wanted)]:
            sample._finished.done.add(start, end)
        return sample

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

    def _is_due(self) -> bool:
        share, shortest = SHARE, SHORTEST_INTERVAL
        if self._unsaved >= MOST_UNSAVED:
            share, shortest = 2 * SHARE, 0.0
        return self._clock() - self._saved >= min(self._seconds, max(shortest, self._cost / share))

    def _save(self, flush: Callable[[], None]) -> None:
        if self._slots is None:
            return
        began = self._clock()
        with self._lock:
            finished, packed = self._finished.dump()
            moved = self.moved_now
            self._unsaved = 0
        kept, skipped = self.counting()
        flush()
        self._sequence += 1
        counted = moved + kept, skipped
        document = {"sequence": self._sequence, "counted": counted, "tentative": self.tentative, **finished}
        text = json.dumps(document).encode("ascii")
        slot = b"\n".join((_MAGIC, text, self._finished.seal(packed, text), b""))
        try:
            self._write(self._slots, slot.ljust(-(-len(slot) // _PAGE) * _PAGE, b"\n"))
        except OSError as err:
            # The transfer works without a journal, only a later attempt cannot resume.
            log.warning("journal disabled path=%r error=%r", self._slots.path, err.strerror)
            self._slots = None
        self._saved = self._clock()
        self._cost = self._saved - began

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
        for slot in _read(slots):
            if not slot.startswith(_MAGIC):
                continue
            try:
                _, text, sealed, _ = slot.split(b"\n", 3)
                packed = self._finished.unseal(sealed, text)
            except ValueError as err:
                log.debug("journal slot ignored path=%r reason=%r", slots.path, str(err))
                continue
            document = json.loads(text)  # noqa: TID251 - authenticated above
            if document["sequence"] > self._sequence:
                self._sequence = document["sequence"]
                self.counted, self.tentative = tuple(document["counted"]), document["tentative"]
                self._finished.load(document, packed)


def is_at_end_of(path: str) -> bool:
    """Return whether a file ends with a journal, of whatever source, as an incomplete disk does."""
    with _opened(path) as fd:
        found = os.pread(fd, AREA + _PAGE, max(0, os.fstat(fd).st_size // _PAGE * _PAGE - AREA))
    return any(is_at(found, at) for at in range(0, len(found), _PAGE))


def is_at(data: bytes, offset: int) -> bool:
    """Return whether a slot begins at an offset, of any version of this worker."""
    return data.startswith(_MAGIC.rstrip(b"0123456789"), offset)


def _places(records: list[digests.Record]) -> Iterator[Range]:
    """Yield random units of the records, of those with data if there are any."""
    spans = [span for record in records if record.digest for span in record.spans]
    spans = spans or [span for record in records for span in record.spans]
    weights = [end - start for start, end in spans]
    for start, end in random.choices(spans, weights, k=digests.SAMPLE) if spans else ():  # noqa: S311  (no secret)
        at = random.randrange(start, end, digests.UNIT)  # noqa: S311  (no secret)
        yield at, min(end, at + digests.UNIT)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    # Others may have put a pipe or a link there.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _read(slots: Slots) -> list[bytes]:
    try:
        with _opened(slots.path) as fd:
            if slots.is_apart and not space.is_ours(os.fstat(fd), Path(slots.path).parent):
                return []
            return [os.pread(fd, SLOT, slots.offset + number * SLOT) for number in range(2)]
    except OSError as err:
        log.debug("no journal path=%r error=%r", slots.path, err.strerror)
        return []
