"""Compare the bytes that different range requests have in common.

A server, or a cache or proxy before it, may send other bytes than those of its Content-Range: ranges counted
from 1, rounded to blocks, cut to 32 bits, or the answer to another request. So each request asks for one
sector more at both ends, and two requests that meet must agree about the two sectors around the seam. All
seams are compared, because the sectors need no request of their own. Ranges that are all shifted by the same
number of bytes agree with each other, so a place in the first bytes of the file, which were read from byte 0,
is read again.

This cannot find wrong bytes in the middle of an otherwise correct range, nor ranges whose sectors at the
seams are equal, such as zeros: only a checksum of the file does.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import readers, remembered
from cdi_worker.images.engine import pace

#: Bytes that requests have in common on each side of a seam.
SECTOR: Final = 512
#: Reading so few bytes takes no time beyond the latency.
_SHORT: Final = 2 * SECTOR
#: Seams remembered until their other side is read, 1 KiB each. A crew of threads needs one for each.
_MOST: Final = 1024
#: Bytes of a long request.
_LONG: Final = 4 << 20
#: An answer with less than this share of the requested bytes, or of a long request, is fruitless; this many
#: in a row end the ranges.
_SHARE: Final = 64
_FRUITLESS: Final = 6
#: Where offsets of 32 bits wrap, and the bytes of a request across it.
_BORDER: Final = 1 << 32
_ACROSS: Final = 64 << 10
#: Windows of ``distinctive_window`` whose uniqueness is checked: each costs a search through the data.
_CANDIDATES: Final = 16


class _Request:
    """A request for the bytes from ``first`` to ``after``, which is sent when it is made.

    ``start``, ``end``: the range without the sectors that it has in common with others. ``at``: where the
    next read begins. ``last``: at most a sector before that. ``got``: bytes of the range that were received.
    """

    def __init__(self, source: readers.RequestReader, first: int, after: int, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.at = first
        self.last = b""
        self.got = 0
        self.is_answered = False
        self.begun = time.monotonic()
        self.reader = source.open_range(first, after)


class Seams:
    """Read from ``reader``, a file of ``size`` bytes, and compare the ranges. Thread-safe.

    ``head``: the first bytes of the file, read from byte 0. ``known``: all bytes that were read before.
    ``pace`` gets the times of the answers.
    Raises ``errors.WrongRanges`` if bytes differ, and ``errors.NoRanges`` if several answers in a row have
    hardly any byte.
    """

    def __init__(
        self,
        reader: readers.RequestReader,
        size: int,
        *,
        name: str,
        head: bytes,
        known: remembered.Remembered,
        pace: pace.Pace,
    ) -> None:
        self.pace = pace
        self._reader = reader
        self._size = size
        self._name = name
        self._head = head
        self._known = known
        self._probed = False
        self._probing = threading.Lock()
        #: For each seam the bytes before and after it.
        self._seams: collections.OrderedDict[int, tuple[bytes, bytes]] = collections.OrderedDict()
        self._lock = threading.Lock()
        #: Whether a range has arrived whole.
        self._has_served = False
        #: Per thread: its open request, the range that it will read, and its fruitless answers.
        self._thread = threading.local()

    def expect(self, offset: int, length: int, *, tables: bool = False) -> None:
        """Announce the bytes that this thread will read next, in order, with gaps of at most 256 KiB.

        A read outside of them is a request of its own, and so is each read of ``tables``. A distinctive part
        of these is read again. Otherwise one answer of another range that has zeros would be a disk without
        data: the seams of a table prove nothing, because its neighbours may never be read.
        """
        self._thread.expected = offset, offset + length, tables

    def read_range(self, offset: int, into: memoryview, /) -> int:
        """Read from this thread's open request or begin one; see ``formats.readers.RandomReader``."""
        first, after, is_table = getattr(self._thread, "expected", (0, 0, False))
        end = offset + len(into)
        if not first <= offset < end <= after:
            is_table = False
        elif not is_table:
            end = after
        self._probe(offset, end)
        request = self._open_request(offset, into) or self._begin(offset, end)
        is_first, before = request.at == request.start, request.last
        count = self._take(request, into)
        if is_first:
            self._meet(offset, before, bytes(into[: min(count, SECTOR)]))
        if count == len(into) and request.at < request.end:
            self._thread.request = request
            return count
        behind = b""
        if count == len(into):
            self._thread.fruitless = 0
            self._has_served = True
            # The sector after the request, or what arrives of it.
            sector = memoryview(bytearray(min(SECTOR, self._size - request.end)))
            with contextlib.suppress(errors.Transient):  # the range itself is complete
                behind = bytes(sector[: request.reader.readinto(sector) if sector else 0])
        request.reader.close()
        self._meet(request.at, request.last, behind)
        if is_table:
            self._compare(offset, bytes(into[:count]))
        return count

    def _open_request(self, offset: int, into: memoryview) -> _Request | None:
        """Return this thread's open request if ``into`` can be read from it; ``offset`` is its next byte."""
        request: _Request | None = getattr(self._thread, "request", None)
        self._thread.request = None
        if request is None:
            return None
        if request.at <= offset < offset + len(into) <= request.end:
            with contextlib.suppress(errors.Transient):
                while request.at < offset:
                    self._take(request, into[: offset - request.at])
                return request
        request.reader.close()
        return None

    def _begin(self, offset: int, end: int, earlier: int = SECTOR) -> _Request:
        """Send a request; read the bytes before ``offset``, a sector or more."""
        first = max(0, offset - earlier)
        request = _Request(self._reader, first, min(self._size, end + SECTOR), offset, end)
        before = memoryview(bytearray(offset - first))
        if before and (count := self._take(request, before)) < len(before):
            request.reader.close()
            raise errors.CutShort(url=self._name, reason=f"the answer ended after {count} bytes")
        return request

    def _take(self, request: _Request, into: memoryview) -> int:
        """Read the next bytes of a request, which a failed read closes."""
        begun = time.monotonic() if request.is_answered else request.begun
        try:
            count = request.reader.readinto(into)
            if not count:
                raise errors.CutShort(url=self._name, reason="empty response")
        except errors.Error as err:
            request.reader.close()
            if isinstance(err, errors.CutShort):
                self._ended(request)
            raise
        # The first read of a request waits for the answer.
        if request.is_answered:
            self.pace.received(count, time.monotonic() - begun)
        elif count <= _SHORT:
            self.pace.answered(time.monotonic() - begun)
        request.is_answered = True
        if not self._known.agrees(request.at, into[:count]):
            raise self._differing(request.at)
        if request.at >= request.start:
            request.got += count
        request.at += count
        request.last = (request.last + bytes(into[:count][-SECTOR:]))[-SECTOR:]
        if count < len(into):
            self._ended(request)
        return count

    def _ended(self, request: _Request) -> None:
        """Count an answer that ended early. Raises ``errors.NoRanges`` after several fruitless ones.

        Empty answers do not count once a range has arrived: that is an outage, which may pass.
        """
        if not request.got and self._has_served:
            return
        is_fruitless = request.got * _SHARE < min(request.end - request.start, _LONG)
        self._thread.fruitless = getattr(self._thread, "fruitless", 0) + 1 if is_fruitless else 0
        if self._thread.fruitless >= _FRUITLESS:
            self._thread.fruitless = 0
            reason = f"{_FRUITLESS} answers in a row ended at once, the last at byte {request.at}"
            raise errors.NoRanges(url=self._name, reason=reason)

    def _meet(self, at: int, before: bytes, after: bytes) -> None:
        """Compare the bytes around a seam with those of an earlier request."""
        with self._lock:
            left, right = self._seams.get(at, (b"", b""))
            if not (before.endswith(left) or left.endswith(before)):
                raise self._differing(at - SECTOR)
            if not (after.startswith(right) or right.startswith(after)):
                raise self._differing(at)
            self._seams[at] = max(before, left, key=len), max(after, right, key=len)
            if len(self._seams) > _MOST:
                self._seams.popitem(last=False)

    def _differing(self, at: int) -> errors.WrongRanges:
        """Return the error for two requests that disagree about the bytes from ``at``."""
        reason = (
            f"two requests returned different data at byte {at}; the server or a cache before it is faulty"
        )
        return errors.WrongRanges(url=self._name, reason=reason)

    def _probe(self, offset: int, end: int) -> None:
        """Before the first range, read a part of the head again, at an offset other than 0.

        A long first request that continues the head begins with that part. Beyond 4 GiB, ranges of a server
        that cuts offsets to 32 bits are all wrong alike: a range across the border is checked as well.
        """
        if self._probed:
            return
        with self._probing:
            if self._probed:
                return
            if self._size > _BORDER:
                across = self._read(_BORDER - 1, min(_ACROSS, self._size - _BORDER + 1))
                self._compare(_BORDER - 1, across)
            start, length = distinctive_window(self._head)
            if offset == len(self._head) and length and end - offset >= _LONG:
                self._thread.request = self._begin(offset, end, offset - start)
            else:
                self._compare(0, self._head)
            self._probed = True

    def _compare(self, offset: int, data: bytes) -> None:
        """Compare a distinctive part of ``data``, read at ``offset``, with another request."""
        start, length = distinctive_window(data)
        if not length:
            # All bytes are equal. All but the first, so that the request is not the same again.
            start, length = 1, max(0, len(data) - 1)
        if data[start : start + length] != self._read(offset + start, length):
            raise self._differing(offset + start)

    def _read(self, offset: int, length: int) -> bytes:
        data, filled = bytearray(length), 0
        while filled < length:
            at, end = offset + filled, offset + length
            request = _Request(self._reader, at, end, at, end)
            with contextlib.closing(request.reader):
                filled += self._take(request, memoryview(data)[filled:])
        return bytes(data)


def distinctive_window(data: bytes) -> tuple[int, int]:
    """Return offset and length of a window whose content occurs nowhere else in ``data``, if possible.

    Read again, it shows whether the data came from another offset. It begins at an odd byte, so that ranges
    rounded to blocks differ. The length is 0 if all bytes are equal.
    """
    found, tried = (0, 0), 0
    for at in (*range((len(data) - SECTOR) // 2 * 2 - 1, 0, -SECTOR), 1):
        part = data[at : at + SECTOR]
        if part.count(part[:1]) >= len(part):
            continue
        found = found if found[1] else (at, len(part))
        if data.find(part) == at and data.find(part, at + 1) < 0:
            return at, len(part)
        tried += 1
        if tried == _CANDIDATES:
            break
    return found
