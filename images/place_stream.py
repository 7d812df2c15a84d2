"""Puts a mapped image that comes in order on the target, without a copy of it.

What the bytes mean, ``formats.passing`` knows; see ``images.place`` for why it is handed in.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from types import TracebackType
from typing import Protocol, Self

from images import ahead, cancelling, directio, passed, place, target_base
from importer import errors

#: Bytes taken at once: a multiple of every cluster size, as long as the longest compressed cluster.
CHUNK = 4 << 20

#: Inflating is most of the work, and two threads of it keep up with most sources.
WORKERS = 2
#: Jobs at work or waiting.
JOBS = 4


class Arrival(Protocol):
    """See ``formats.passing.Arrival``."""

    @property
    def ready(self) -> Sequence[place.Batch]: ...

    @property
    def holes(self) -> Iterable[tuple[int, int]]: ...

    @property
    def keep(self) -> Sequence[tuple[int, int]]: ...


class Passing(Protocol):
    """See ``formats.passing.Passing``."""

    inflate: place.Inflate

    @property
    def mapped(self) -> bool: ...

    def arrive(self, start: int, end: int, read: Callable[[int, int], bytes], *, last: bool) -> Arrival: ...


def from_stream(
    passing: Passing,
    reader: ahead.Source,
    target: target_base.Target,
    *,
    cancel: cancelling.Cancel,
    spill: passed.Spill | None = None,
    give_up: Callable[[], None] = lambda: None,
) -> int:
    """Place a whole image that comes in order; return how long the file was.

    The reader is read to its end, whatever the file holds after its last used cluster. Raises
    ``errors.ScratchRequired`` where more would have to be kept than memory allows and there is no
    ``spill``, and where the image cannot be placed in one pass at all. ``give_up`` is called, from another
    thread, where the read that is under way is wanted no more: it ends that soon, with ``errors.Cancelled``.
    """
    pool = directio.BufferPool((passed.RECENT + 2 + JOBS) * CHUNK, CHUNK)
    behind = passed.Passed(spill)
    start, last = 0, False
    with _Crew(place.Placer(passing.inflate, target), give_up) as crew:
        while not last:
            if cancel.is_set():
                raise errors.Cancelled
            chunk = passed.Chunk(pool, start)
            last = not chunk.fill(reader)
            behind.add(chunk)
            arrival = passing.arrive(start, chunk.end, behind.read, last=last)
            for offset, length in arrival.holes:
                target.zero(offset, length)
            for batch in arrival.ready:
                crew.submit(
                    batch, chunk if batch.offset >= start else behind.read(batch.offset, batch.length)
                )
            for span in arrival.keep:
                behind.keep(*span)
            if passing.mapped:
                behind.forget()
            start = chunk.end
        crew.finish()
    return start


class _Crew:
    """Places batches in threads; the first failure is raised by a later call."""

    def __init__(self, placer: place.Placer, give_up: Callable[[], None]) -> None:
        self._placer = placer
        self._give_up = give_up
        self._failure: BaseException | None = None
        self._executor = futures.ThreadPoolExecutor(WORKERS, "place")
        self._jobs: collections.deque[futures.Future[None]] = collections.deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(cancel_futures=True)
        if self._failure is not None and isinstance(error, errors.Cancelled):
            raise self._failure

    def submit(self, batch: place.Batch, source: passed.Chunk | bytes) -> None:
        """Place a batch, whose bytes are in a chunk or given."""
        if len(self._jobs) >= JOBS:
            self._jobs.popleft().result()
        if isinstance(source, passed.Chunk):
            source.hold()
            job = self._executor.submit(self._from_chunk, batch, source)
        else:
            job = self._executor.submit(self._put, batch, memoryview(source))
        self._jobs.append(job)

    def finish(self) -> None:
        while self._jobs:
            self._jobs.popleft().result()

    def _from_chunk(self, batch: place.Batch, chunk: passed.Chunk) -> None:
        try:
            first = batch.offset - chunk.start
            self._put(batch, chunk.view[first : first + batch.length])
        finally:
            chunk.release()

    def _put(self, batch: place.Batch, data: memoryview) -> None:
        try:
            self._placer.put(batch, data)
        except BaseException as err:
            self._failure = self._failure or err
            self._give_up()
            raise
