"""An open disk image, and the engine that reads all images of one import.

A source serves raw reads and states facts. What every source needs is here: retries, parallel ranges that are
compared with each other, the bytes that are known already, and the way back from ranges to one stream.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from cdi_worker import errors, lazy
from cdi_worker.formats import readers, remembered, views
from cdi_worker.images.engine import cancelling, fetch, pace, seams

#: Sources with ranges do not need it (start-up time).
_RESUMING = "cdi_worker.images.engine.resume:Resuming"


class Served(Protocol):
    """What a source serves when it is open; see ``sources.base.Source``."""

    name: str
    size: int | None
    head: bytes
    longest_read: int | None
    once: bool

    @property
    def pace(self) -> pace.Pace: ...
    def ranges(self) -> readers.RandomReader | None: ...
    def stream(self, offset: int = 0, /) -> readers.Reader: ...
    def ordered(
        self, cancel: cancelling.Cancel, advance: Callable[[int], None], /
    ) -> readers.Reader | None: ...


S = TypeVar("S", bound=Served)


class Engine:
    """Reads the images of one import. ``retried`` is called with each failure that is retried.

    They share the fate of byte ranges: if those of one are wrong, all are read in order from then on.
    """

    def __init__(
        self,
        options: fetch.Options | None = None,
        retried: Callable[[errors.Transient], None] = lambda _: None,
    ) -> None:
        self.options = options or fetch.Options()
        self.retried = retried
        #: Why ranges are not used any more; empty: they are.
        self.given_up = ""
        self.used = False

    def do_without_ranges(self, failure: errors.NoRanges) -> None:
        """Read in order from now on. Raises ``failure`` if ranges were not used."""
        if self.given_up or not self.used:
            raise failure
        self.given_up = str(failure.fields["reason"])


class Image(Generic[S]):
    """The bytes of one source that is open, as served.

    The ``cancel`` of a read is that of an attempt: a failure sets it, which ends the other reads of it.
    """

    def __init__(self, served: S, engine: Engine) -> None:
        self.served = served
        self.engine = engine
        #: The bytes of ranges that detection and checks have read, from the head on. An import gets the same.
        self.known = remembered.Remembered(served.head)
        self._seams: seams.Seams | None = None
        #: A stream that is open already, from its first byte: the result of the next ``ordered``.
        self._begun: tuple[readers.Peek, Arrivals] | None = None

    @property
    def seeks(self) -> bool:
        """Whether it is read by ranges."""
        served = self.served
        return not self.engine.given_up and served.ranges() is not None and served.size is not None

    def fetcher(
        self, cancel: cancelling.Cancel, advance: Callable[[int], None] = lambda _: None
    ) -> fetch.Fetcher:
        """Return a fetcher, which reads ranges in parallel. ``advance`` gets the bytes that arrive."""
        if not self.seeks:
            raise errors.NoRanges(url=self.served.name, reason="not offered by the source")
        self.engine.used = True
        return fetch.Fetcher(
            self._reader(),
            self.served.size or 0,
            self._tuned(),
            name=self.served.name,
            scope=cancel,
            known=self.known,
            advance=advance,
            retried=self.engine.retried,
        )

    def at_random(self, cancel: cancelling.Cancel) -> views.Read | None:
        """Return a function that reads ``(offset, length)``; None if the image is read in order."""
        return self.fetcher(cancel).read if self.seeks and self.served.size else None

    def checked(self, cancel: cancelling.Cancel) -> views.Read | None:
        """Return ``at_random`` for checks: what it reads is what the import gets, too."""
        read = self.at_random(cancel)
        return None if read is None else self.known.remembering(read)

    def head(self, length: int, cancel: cancelling.Cancel, read: views.Read | None) -> bytes:
        """Return the first ``length`` bytes, all of a shorter image. ``read``: see ``checked``.

        What is read of a stream is the beginning of the next ``ordered``.
        """
        head = self.served.head
        if read is not None:
            return head + read(len(head), max(0, min(length, self.served.size or 0) - len(head)))
        if self._begun is None:
            arrivals = Arrivals()
            self._begun = readers.Peek(self.ordered(cancel, arrivals.add), length), arrivals
        else:
            self._begun[0].extend(length)
        return self._begun[0].head

    def ordered(
        self, cancel: cancelling.Cancel, advance: Callable[[int], None] = lambda _: None
    ) -> readers.Reader:
        """Return a reader of all bytes, in order. ``advance`` gets the bytes received."""
        if self._begun is not None:
            (begun, arrivals), self._begun = self._begun, None
            arrivals.report(advance)
            return begun
        own = self.served.ordered(cancel, advance)
        return self.rest(cancel, 0, advance) if own is None else own

    def rest(
        self, cancel: cancelling.Cancel, start: int, advance: Callable[[int], None] = lambda _: None
    ) -> readers.Reader:
        """Return a reader of the bytes that the source streams, from ``start``, at most the end of its head.

        Ranges are fetched in parallel if the source supports them.
        """
        served, engine = self.served, self.engine
        if self.seeks:
            return self.fetcher(cancel, advance).stream(start)
        if served.once:
            return _Once(served, start, advance)
        resuming = lazy.load(_RESUMING)
        reader: readers.Reader = resuming(
            self._open_at,
            served.size,
            name=served.name,
            no_progress=engine.options.no_progress,
            slowest=engine.options.slowest,
            cancel=cancel,
            delivered=served.head[:start],
            advance=advance,
            retried=engine.retried,
        )
        return reader

    def _open_at(self, offset: int) -> readers.Reader:
        """Open the stream at an offset: only at 0 if the ranges were not right."""
        failed = self.engine.given_up
        if offset and failed and self.served.ranges() is not None:
            reason = f"cannot continue at an offset, since byte ranges failed: {failed}"
            raise errors.NoRanges(url=self.served.name, reason=reason)
        return self.served.stream(offset)

    def _reader(self) -> readers.RandomReader:
        """Return a reader that compares the ranges of a server with each other."""
        ranges = self.served.ranges()
        if ranges is None:
            raise errors.NoRanges(url=self.served.name, reason="not offered by the source")
        if not isinstance(ranges, readers.Continuing):
            return ranges
        if self._seams is None:
            self._seams = seams.Seams(
                ranges,
                self.served.size or 0,
                name=self.served.name,
                head=self.served.head,
                known=self.known,
                pace=self.served.pace,
            )
        return self._seams

    def _tuned(self) -> fetch.Options:
        """Return the fetch options; a source that limits the length of a read gets more connections."""
        asked = self.engine.options
        parts = max(1, asked.chunk // (self.served.longest_read or asked.chunk))
        return dataclasses.replace(
            asked,
            chunk=asked.chunk // parts,
            connections=asked.connections * parts,
            window=asked.window * parts,
        )


class Arrivals:
    """Counts the bytes that arrive before it is known who wants to know, from ``before`` on. Thread-safe."""

    def __init__(self, before: int = 0) -> None:
        self._lock = threading.Lock()
        self._before = before
        self._advance: Callable[[int], None] | None = None

    def add(self, count: int) -> None:
        """Count bytes that have arrived."""
        with self._lock:
            advance = self._advance
            if advance is None:
                self._before += count
        if advance is not None:
            advance(count)

    def report(self, advance: Callable[[int], None]) -> None:
        """Call ``advance`` with the bytes so far, and from now on with those that arrive."""
        with self._lock:
            before, self._before, self._advance = self._before, 0, advance
        advance(before)


class _Once:
    """Reader of a source that can be read only once; counts the bytes and verifies the declared size."""

    def __init__(self, served: Served, start: int, count: Callable[[int], None]) -> None:
        self._served = served
        self._reader = served.stream(start)
        self._count = count
        self._at = start

    def readinto(self, into: memoryview, /) -> int:
        count = self._reader.readinto(into)
        self._at += count
        self._count(count)
        size, name = self._served.size, self._served.name
        if size is not None and self._at > size:
            raise errors.SourceChanged(url=name, what="size", before=size, now=f"more than {size}")
        if not count and len(into) and self._at < (size or 0):
            reason = f"ended at byte {self._at} of {size}"
            raise errors.TransferFailed(url=name, offset=self._at, reason=reason)
        return count

    def close(self) -> None:
        self._reader.close()
