"""One ordered stream made of as many connections as it takes."""

from __future__ import annotations

from collections.abc import Callable

from isal import isal_zlib

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images.engine import cancelling, retry

SKIP_SIZE = 1 << 20
#: Readings from the beginning that break before anything new came, until the stream is given up.
FRUITLESS_RESTARTS = 5


class Resuming:
    """Reads ``open_at(0)`` to the end, opened again where it broke.

    Where the server cannot go to an offset (``errors.NoRanges``) the stream is read again from its
    beginning and what was already delivered is skipped. A running CRC of the delivered bytes tells
    whether the second reading is of the same bytes: without an identity nothing else does.
    ``size``: the expected length in bytes, None if unknown. ``delivered``: the beginning, which the caller
    has already; it gets what follows.
    """

    def __init__(
        self,
        open_at: Callable[[int], readers.Reader],
        size: int | None,
        *,
        name: str,
        no_progress: float,
        cancel: cancelling.Cancel,
        delivered: bytes = b"",
        advance: Callable[[int], None] = lambda _: None,
        retried: Callable[[errors.Transient], None] = lambda _: None,
    ) -> None:
        self._open_at = open_at
        self._size = size
        self._name = name
        self._cancel = cancel
        self._patience = retry.Patience(no_progress, cancel)
        self._advance = advance
        self._retried = retried
        self._reader: readers.Reader | None = None
        self._closed = False
        self._crc = isal_zlib.crc32(delivered)
        self._fruitless = 0
        self.position = len(delivered)

    def readinto(self, into: memoryview, /) -> int:
        while not self._closed:
            self._cancel.check()
            try:
                if self._reader is None:
                    self._reader = self._reopen()
                count = self._reader.readinto(into)
                self._check_end(count)
            except errors.Transient as err:
                self._drop()
                self._retried(err)
                self._patience.wait(err, self.position)
                continue
            self._crc = isal_zlib.crc32(into[:count], self._crc)
            self.position += count
            self._advance(count)
            self._patience.progress()
            self._fruitless = 0
            return count
        return 0

    def close(self) -> None:
        """Let go of the connection: what is read from now on is the end, not the beginning again."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _check_end(self, count: int) -> None:
        if not count and self._size is not None and self.position < self._size:
            raise errors.Transient(url=self._name, reason=f"ended at byte {self.position} of {self._size}")

    def _reopen(self) -> readers.Reader:
        try:
            return self._open_at(self.position)
        except errors.NoRanges as err:
            self._fruitless += 1
            if self._fruitless > FRUITLESS_RESTARTS:
                raise errors.TransferFailed(
                    url=self._name, offset=self.position, reason="breaks before this byte each time"
                ) from err
            reader = self._open_at(0)
            try:
                self._skip(reader)
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
                raise errors.Transient(url=self._name, reason="ended before the byte it broke at")
            crc = isal_zlib.crc32(buffer[:count], crc)
            left -= count
            self._patience.progress()
        if crc != self._crc:
            raise errors.SourceChanged(
                url=self._name, what="content", before=f"crc {self._crc:08x}", now=f"crc {crc:08x}"
            )
