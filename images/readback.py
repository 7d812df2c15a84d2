"""Read back what an earlier attempt wrote, before it is trusted."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Self

from cdi_worker import errors
from cdi_worker.images import volume
from cdi_worker.images.engine import cancelling, crew
from cdi_worker.images.targets import storage
from cdi_worker.scratch import digests, journal

log = logging.getLogger(__name__)


class Compare:
    """Compare the records of a journal with the parts of a disk, which are read in order.

    Records that differ are missing in the journal from then on; ``missing`` is called with their length.
    ``path``: of the disk, for the log.
    """

    def __init__(
        self, noted: journal.Journal, path: str, missing: Callable[[int], object] = lambda _: None
    ) -> None:
        self._noted = noted
        self._path = path
        self._missing = missing
        self._digest = 0
        #: The ranges that were not read to their end, each with its record.
        self.left = collections.deque((span, record) for record in noted.records() for span in record.spans)
        #: Bytes to compare; bytes of records that differ, and the offset of the first.
        self.total = sum(end - start for (start, end), _ in self.left)
        self.differing = 0
        self.first: int | None = None

    def take(self, part: volume.Part) -> None:
        """Compare a part, which begins and ends with whole units."""
        after = part.offset + part.length
        while self.left and self.left[0][0][0] < after:
            (start, end), record = self.left[0]
            if isinstance(part, volume.Data):
                start = max(start, part.offset)
                self._digest ^= self._noted.tag(start, part.data[start - part.offset : end - part.offset])
            if end > after:
                return
            self.left.popleft()
            if end == record.spans[-1][1]:
                self._compare(record, self._digest)
                self._digest = 0

    def end(self) -> None:
        """Report the rest as different: a file that was cut off has no bytes to compare."""
        for (_, end), record in self.left:
            if end == record.spans[-1][1]:
                self._compare(record, None)

    def _compare(self, record: digests.Record, digest: int | None) -> None:
        if self._noted.compare(record, digest):
            return
        length = sum(end - start for start, end in record.spans)
        first = record.spans[0][0]
        log.debug("differs path=%r offset=%d length=%d", self._path, first, length)
        self.differing += length
        self.first = first if self.first is None else self.first
        self._missing(length)


class ReadBack:
    """Compare the records of a journal with storage, past the page cache, in a thread.

    The thread runs from the start of the ``with`` block; its failure sets ``scope``. Ranges that differ are
    missing in the journal from then on; ``missing`` is called with their length. What the block writes may be
    read too: it has the same digests.
    """

    def __init__(
        self,
        stored: storage.Storage,
        noted: journal.Journal,
        scope: cancelling.Cancel,
        missing: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._stored = stored
        self._noted = noted
        self._scope = scope
        self._compare = Compare(noted, stored.path, missing)
        self._crew = crew.Crew(scope)

    def __enter__(self) -> Self:
        if self._compare.left:
            self._crew.start(self._run, 1)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._crew.close(None if kind is None else kind.__name__)

    def wait(self) -> int:
        """Wait until everything was compared; return the number of bytes that differ."""
        self._crew.wait()
        return self._compare.differing

    def _run(self) -> None:
        spans = journal.Ranges()
        for (start, end), _ in self._compare.left:
            spans.add(start // volume.CHUNK * volume.CHUNK, -(-end // volume.CHUNK) * volume.CHUNK)
        for part in parts(self._stored, self._noted.total, spans):
            self._scope.check()
            self._compare.take(part)
        self._compare.end()


def parts(stored: storage.Storage, size: int, spans: Iterable[journal.Range]) -> Iterator[volume.Part]:
    """Yield the parts of a disk of ``size`` bytes in ``spans`` of whole chunks, past the page cache.

    Raises ``errors.TargetError``.
    """
    stored.drop_cache()
    try:
        opened = volume.Volume(stored.readable) if stored.is_raw else volume.StoredVolume(stored, size)
        with opened as disk:
            for start, end in spans:
                yield from disk.pieces(start, end)
    except (errors.Unreachable, errors.TransferFailed) as err:
        reason = f"read back: {err.fields['reason']}"
        raise errors.TargetError(path=stored.path, reason=reason) from err
