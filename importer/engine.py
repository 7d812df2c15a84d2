"""The read engine of one import: retries, parallel ranges and resuming for all its sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images.engine import cancelling, fetch, seams
from cdi_worker.sources import base


class Engine:
    """Reads sources by ranges or in order (``sources.base.Engine``).

    ``retried`` is called with each failure that is retried. The ``cancel`` of a read is that of an attempt:
    a failure sets it, which ends the other reads of the attempt.
    """

    def __init__(self, options: fetch.Options, retried: Callable[[errors.Transient], None]) -> None:
        self._options = options
        self._retried = retried
        self._ranges = True
        #: Why ranges are not used any more.
        self._given_up = ""
        self._used = False
        self._seams: dict[base.Source, seams.Seams] = {}

    def seeks(self, source: base.Source) -> bool:
        """Return whether ``source`` is read by ranges."""
        return self._ranges and source.ranges() is not None and source.size is not None

    def do_without_ranges(self, failure: errors.NoRanges) -> None:
        """Read in order from now on. Raises ``failure`` if ranges were not used."""
        if not self._ranges or not self._used:
            raise failure
        self._ranges = False
        self._given_up = str(failure.fields["reason"])

    def fetcher(
        self, source: base.Source, cancel: cancelling.Cancel, advance: Callable[[int], None] = lambda _: None
    ) -> fetch.Fetcher:
        """Return a fetcher, which reads the ranges of ``source`` in parallel."""
        if not self.seeks(source):
            raise errors.NoRanges(url=source.name, reason="not offered by the source")
        self._used = True
        return fetch.Fetcher(
            self._reader(source),
            source.size or 0,
            self._tuned(source),
            name=source.name,
            scope=cancel,
            known=source.known,
            advance=advance,
            retried=self._retried,
        )

    def at_random(self, source: base.Source, cancel: cancelling.Cancel) -> Callable[[int, int], bytes] | None:
        """See ``sources.base.Engine``."""
        return self.fetcher(source, cancel).read if self.seeks(source) and source.size else None

    def ordered(
        self,
        source: base.Source,
        cancel: cancelling.Cancel,
        *,
        start: int = 0,
        advance: Callable[[int], None] = lambda _: None,
    ) -> base.Reader:
        """See ``sources.base.Engine``."""
        if self.seeks(source):
            return self.fetcher(source, cancel, advance).stream(start)
        if source.once:
            return _Once(source, advance)
        # Imported when used: sources with ranges do not need it (start-up time).
        from cdi_worker.images.engine import resume

        return resume.Resuming(
            self._opener(source),
            source.size,
            name=source.name,
            no_progress=self._options.no_progress,
            slowest=self._options.slowest,
            cancel=cancel,
            delivered=source.head[:start],
            advance=advance,
            retried=self._retried,
        )

    def _reader(self, source: base.Source) -> base.RandomReader:
        """Return a reader that compares the ranges of a server with each other."""
        ranges = source.ranges()
        if ranges is None:
            raise errors.NoRanges(url=source.name, reason="not offered by the source")
        if not isinstance(ranges, readers.Continuing):
            return ranges
        if source not in self._seams:
            self._seams[source] = seams.Seams(
                ranges,
                source.size or 0,
                name=source.name,
                head=source.head,
                known=source.known,
                pace=source.pace,
            )
        return self._seams[source]

    def _opener(self, source: base.Source) -> Callable[[int], base.Reader]:
        """Return a function that opens the stream at an offset: only at 0 if the ranges were not right."""
        if self._ranges or source.ranges() is None:
            return source.stream

        def open_at(offset: int) -> base.Reader:
            if offset:
                reason = f"cannot continue at an offset, since byte ranges failed: {self._given_up}"
                raise errors.NoRanges(url=source.name, reason=reason)
            return source.stream()

        return open_at

    def _tuned(self, source: base.Source) -> fetch.Options:
        """Return the fetch options; a source that limits the length of a read gets more connections."""
        asked = self._options
        parts = max(1, asked.chunk // (source.longest_read or asked.chunk))
        return dataclasses.replace(
            asked,
            chunk=asked.chunk // parts,
            connections=asked.connections * parts,
            window=asked.window * parts,
        )


class _Once:
    """Reader of a source that can be read only once; counts the bytes and verifies the declared size."""

    def __init__(self, source: base.Source, count: Callable[[int], None]) -> None:
        self._source = source
        self._reader = source.stream()
        self._count = count
        self._at = 0

    def readinto(self, into: memoryview, /) -> int:
        count = self._reader.readinto(into)
        self._at += count
        self._count(count)
        if self._source.size is not None and self._at > self._source.size:
            more = f"more than {self._source.size}"
            raise errors.SourceChanged(url=self._source.name, what="size", before=self._source.size, now=more)
        if not count and len(into) and self._at < (self._source.size or 0):
            reason = f"ended at byte {self._at} of {self._source.size}"
            raise errors.TransferFailed(url=self._source.name, offset=self._at, reason=reason)
        return count

    def close(self) -> None:
        self._reader.close()
