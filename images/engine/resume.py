"""Read a stream in order, with a new connection after each failure."""

from __future__ import annotations

import time
from collections.abc import Callable

from isal import isal_zlib

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images.engine import cancelling, retry, seams

SKIP_SIZE = 1 << 20
#: Restarts from the beginning without any new byte. More are made as long as there is patience.
FRUITLESS_RESTARTS = 5


class Resuming:
    """Read a stream to its end; after a failure reopen it at the current position with ``open_at``.

    It is reopened one sector earlier, and the sector is compared. If it differs, or the server cannot start
    at an offset (``errors.NoRanges``), the stream is read from the beginning and the delivered bytes are
    skipped. Their CRC is compared, because without an identity nothing else shows a change. ``size``: the
    stated length in bytes, None if unknown: a stream of another length is an error. ``delivered``: the first
    bytes, which the caller already has.
    """

    def __init__(  # noqa: PLR0913  (the settings of one stream)
        self,
        open_at: Callable[[int], readers.Reader],
        size: int | None,
        *,
        name: str,
        no_progress: float,
        min_speed: float = retry.MIN_SPEED,
        cancel: cancelling.Cancel,
        delivered: bytes = b"",
        advance: Callable[[int], None] = lambda _: None,
        retried: Callable[[errors.Transient], None] = lambda _: None,
    ) -> None:
        self._open_at = open_at
        self._size = size
        self._name = name
        self._cancel = cancel
        self._no_progress = no_progress
        self._patience = retry.Patience(no_progress, cancel, min_speed=min_speed, retried=retried)
        #: When the last new byte arrived: skipped bytes are not progress.
        self._last_new = time.monotonic()
        self._advance = advance
        self._reader: readers.Reader | None = None
        self._closed = False
        self._crc = isal_zlib.crc32(delivered)
        self._last = delivered[-seams.SECTOR :]
        self._fruitless = 0
        self.position = len(delivered)

    def readinto(self, into: memoryview, /) -> int:
        self._patience.resume()
        while not self._closed:
            self._cancel.check()
            try:
                if self._reader is None:
                    self._reader = self._reopen()
                count = self._reader.readinto(into)
                if self._size is not None and self.position + count > self._size:
                    more = f"more than {self._size}"
                    raise errors.SourceChanged(url=self._name, what="size", before=self._size, now=more)
                if not count and self._size is not None and self.position < self._size:
                    reason = f"the connection ended at byte {self.position} of {self._size}"
                    raise errors.Transient(url=self._name, reason=reason)
            except errors.Transient as err:
                self._drop()
                self._patience.wait(err, self.position)
                continue
            self._crc = isal_zlib.crc32(into[:count], self._crc)
            self._last = (self._last + bytes(into[:count][-seams.SECTOR :]))[-seams.SECTOR :]
            self.position += count
            self._advance(count)
            self._patience.progress(count, self._name, self.position)
            self._last_new = time.monotonic()
            self._fruitless = 0
            return count
        return 0

    def close(self) -> None:
        """Close the connection. Later reads return 0 instead of reopening the stream."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _reopen(self) -> readers.Reader:
        try:
            return self._open_behind()
        except errors.NoRanges as err:
            self._fruitless += 1
            silence = time.monotonic() - self._last_new
            if self._fruitless > FRUITLESS_RESTARTS and silence > self._no_progress:
                reason = (
                    f"the connection broke {self._fruitless} times before this byte, and the server cannot "
                    f"resume there: {err.fields['reason']}; no new data for {silence:.0f} s"
                )
                raise errors.TransferFailed(url=self._name, offset=self.position, reason=reason) from err
            if (more := self._fruitless - FRUITLESS_RESTARTS) > 0:
                delay = min(retry.LONGEST_DELAY, retry.FIRST_DELAY * 2**more)
                if self._cancel.wait(min(delay, max(retry.FIRST_DELAY, self._no_progress - silence))):
                    raise self._cancel.error() from err
            reader = self._open_at(0)
            try:
                self._skip(reader)
            except BaseException:
                reader.close()
                raise
            return reader

    def _open_behind(self) -> readers.Reader:
        """Open the stream at the position, and compare the bytes before it."""
        last = self._last
        reader = self._open_at(self.position - len(last))
        try:
            again = bytearray(len(last))
            if readers.fill(reader, memoryview(again)) < len(last):
                raise errors.Transient(url=self._name, reason=f"no data from byte {self.position} on")
            if again != last:
                reason = f"the server returned different data when continued at byte {self.position}"
                raise errors.NoRanges(url=self._name, reason=reason)
        except BaseException:
            reader.close()
            raise
        return reader

    def _skip(self, reader: readers.Reader) -> None:
        left, crc = self.position, 0
        buffer = memoryview(bytearray(min(left, SKIP_SIZE)))
        while left:
            self._cancel.check()
            count = reader.readinto(buffer[:left])
            if not count:
                reason = f"the connection ended before byte {self.position}, where the last one ended"
                raise errors.Transient(url=self._name, reason=reason)
            crc = isal_zlib.crc32(buffer[:count], crc)
            left -= count
            self._patience.progress(count, self._name, self.position)
        if crc != self._crc:
            raise errors.SourceChanged(
                url=self._name, what="content", before=f"crc {self._crc:08x}", now=f"crc {crc:08x}"
            )
