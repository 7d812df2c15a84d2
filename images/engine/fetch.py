"""The fetch engine: fetch ranges of a random-access source in parallel; deliver them in order or on arrival.

Retries, back-off and the no-progress limit are implemented here, not in the sources. Memory is bounded: one
buffer per connection for delivery on arrival, a fixed ring of buffers for delivery in order. A request may be
longer than a buffer, which is delivered and filled again.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from cdi_worker import errors
from cdi_worker.formats import readers, remembered
from cdi_worker.images import directio
from cdi_worker.images.engine import cancelling, crew, filled, pace, retry, seams

MIB = 1 << 20
#: Bytes delivered at once where one request serves several reads: they stay in the CPU cache. With six plain
#: connections, 2 GiB took 0.8 s and 0.9 s of CPU in such pieces, 1.2 s and 1.4 s in pieces of 4 MiB.
PIECE = 1 * MIB
#: A request should last at least so many times the server's latency, as long as there is one for each
#: connection. It never lasts less than the latency: a server that computes for each request does not compute
#: several of them faster in parallel.
_WORTH = 4
#: Bytes of a request for a large object: with requests of 4 MiB, 1 GiB took a fifth more of our CPU time.
#: Near the end, a connection still gets at least ``_TURNS`` requests of its share, so that all end together.
_LARGE = 16 * MIB
_TURNS = 2
#: Seconds that the last requests take. Those of a stream take at most twice as long: its reader waits for
#: them one after the other.
_BRIEF = 0.25
#: Reading this many unused bytes between two ranges is cheaper than another request.
GAP = 256 << 10


class ByteRange(NamedTuple):
    """The bytes of the source from ``offset`` to ``offset + length``."""

    offset: int
    length: int


T = TypeVar("T")
#: Takes a fetched range. Called from the engine's threads; the data is only valid during the call.
Deliver = Callable[[int, memoryview], None]


@dataclasses.dataclass(frozen=True)
class FetchOptions:
    """Options of the fetch engine. Sizes in bytes, times in seconds.

    ``chunk``: bytes of a request for a small object; from 4 MiB on the cost of a request on the network no
    longer matters (virt-v2v measured the same). ``window``: chunks in memory for delivery in order.
    ``min_speed``: bytes per second, on average over ``no_progress`` seconds; fewer are none, 0: any is.
    """

    connections: int = 6
    chunk: int = 4 * MIB
    window: int = 12
    no_progress: float = 180.0
    min_speed: float = retry.MIN_SPEED


def split(start: int, end: int, chunk: int) -> Iterator[ByteRange]:
    """Split ``start`` to ``end`` at multiples of ``chunk``, so that a later attempt has the same ranges."""
    while start < end:
        stop = min(end, (start // chunk + 1) * chunk)
        yield ByteRange(start, stop - start)
        start = stop


def _together(ranges: Iterable[ByteRange], longest: Callable[[int], int]) -> Iterator[list[ByteRange]]:
    """Group nearby ranges for requests of at most ``longest(offset)`` bytes.

    A longer range is a group of its own.
    """
    group: list[ByteRange] = []
    start = end = most = 0
    for item in ranges:
        after = item.offset + item.length
        if group and not (end <= item.offset <= end + GAP and after - start <= most):
            yield group
            group = []
        if not group:
            start, most = item.offset, longest(item.offset)
        group.append(item)
        end = after
    if group:
        yield group


def _span(ranges: list[ByteRange]) -> ByteRange:
    """Return the range from the first to the last of ``ranges``."""
    start, last = ranges[0].offset, ranges[-1]
    return ByteRange(start, last.offset + last.length - start)


class Fetcher:
    """Fetch ranges from one source of ``size`` bytes.

    ``scope``: the cancel of the attempt. It ends the source's reads (``cancelling.Reads``), and a failure of
    one thread sets it for the others. ``known``: bytes that were read before and are not fetched again.
    ``advance`` gets the number of bytes as they arrive, including known ones, but not those that are read
    again to confirm others; ``retried`` gets each failure that is retried. ``name``: of the source.
    """

    def __init__(
        self,
        reader: readers.RandomReader,
        size: int,
        options: FetchOptions,
        *,
        name: str = "the source",
        scope: cancelling.Cancel,
        known: remembered.Remembered = remembered.NOTHING,
        advance: Callable[[int], None] = lambda _: None,
        retried: Callable[[errors.Transient], None] = lambda _: None,
    ) -> None:
        self.size = size
        self.options = options
        # A source that serves one read of several nearby ranges faster than a read for each.
        self._is_batching = getattr(reader, "batching", False)
        self._reader = reader
        self._name = name
        self._seams = reader if isinstance(reader, seams.Seams) else None
        #: The best length for the ranges of ``each``.
        self.step = options.chunk if self._seams is None else min(PIECE, options.chunk)
        self.pace = pace.Pace() if self._seams is None else self._seams.pace
        self._scope = scope
        self._known = known
        self._advance = advance
        self._retried = retried
        self._shared = retry.Shared()
        self._thread = threading.local()

    def request_length(self, start: int, ahead: int | None = None) -> int:
        """Return the length of a request from ``start`` to a server, in bytes.

        ``ahead``: limit for the requests of all connections together. Default: by the server's latency.
        """
        cost, most = self.pace.cost, self.size // self.options.connections
        brief = self.pace.within(_BRIEF) or self.options.chunk
        if ahead is None:
            left = (self.size - start) // self.options.connections
            share = max(_WORTH * cost, min(_LARGE, left // _TURNS))
        else:
            share = min(ahead // self.options.connections, max(_WORTH * cost, _TURNS * brief))
        length = max(min(self.options.chunk, brief), cost, min(share, most, pace.MOST))
        # In whole pieces: a shorter rest is another request.
        return -(-length // self.step) * self.step

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly these bytes, for headers and tables, and check them by another request.

        Raises ``errors.Truncated`` past the end.
        """
        if offset < 0 or length < 0 or offset + length > self.size:
            raise errors.Truncated(
                format="image",
                reason=f"{length} bytes at byte {offset} needed, the file has {self.size} bytes",
            )
        data = bytearray(length)
        self.fill_confirmed(offset, memoryview(data))
        return bytes(data)

    def fill_confirmed(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` with a part of a table; see ``seams.Seams.expect``."""
        self.expect([ByteRange(offset, len(into))], tables=True)
        self.fill(offset, into)

    def fill(self, offset: int, into: memoryview, advance: Callable[[int], None] | None = None) -> None:
        """Fill ``into`` from ``offset``, retrying as long as there is progress.

        ``advance``: instead of the fetcher's.
        """
        advance = advance or self._advance
        # That of this thread: many short reads may be too slow together, each before its limit.
        patience: retry.Patience | None = getattr(self._thread, "patience", None)
        if patience is None:
            patience = self._thread.patience = retry.Patience(
                self.options.no_progress,
                self._scope,
                min_speed=self.options.min_speed,
                retried=self._retried,
                shared=self._shared,
            )
        patience.resume()
        done = self._known.known_length(offset, len(into))
        if done:
            advance(done)
        while done < len(into):
            self._scope.check()
            try:
                count = filled.read(self._reader.read_range, offset + done, into[done:], self._name)
            except errors.Transient as err:
                if self._scope.is_set():
                    raise self._scope.error() from err
                patience.wait(err, offset + done)
                continue
            done += count
            advance(count)
            patience.progress(count, self._name, offset + done)
        self._known.restore(offset, into)

    def each(
        self,
        ranges: Iterable[ByteRange],
        deliver: Deliver,
        *,
        tables: bool = False,
        first: Iterable[Callable[[], None]] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Fetch all ``ranges``, nearby ones with one request, and deliver each as it arrives.

        ``tables``: each request is confirmed by another one. ``first``: calls that the threads make
        before they fetch, such as deliveries of data that is here. ``meanwhile`` is called in this thread,
        while others fetch and deliver. Raises the first failure of a read or of ``deliver``, after ending the
        others. When this returns, no thread is in ``deliver`` or will be.
        """
        at_once = tables or self._is_batching
        # One read, and a buffer for all of it. 0: a read for each range.
        most = self.options.chunk if self._seams is not None or self._is_batching else 0
        is_long = self._seams is not None and not tables
        pending = _together(ranges, self.request_length if is_long else lambda _: most)
        calls = iter(first)
        gate = threading.Lock()
        workers = crew.Crew(self._scope)

        def take(coming: Iterator[T]) -> T | None:
            with gate:
                return None if self._scope.is_set() else next(coming, None)

        def work() -> None:
            while (call := take(calls)) is not None:
                with workers.hold_close():
                    call()
            buffer = directio.Buffer(self.step)
            while (group := take(pending)) is not None:
                self.expect(group, tables=tables)
                for items in [group] if at_once else [[item] for item in group]:
                    start, length = _span(items)
                    if length > buffer.size:
                        buffer = directio.Buffer(length)
                    view = buffer.view[:length]
                    if len(items) == 1:
                        self.fill(start, view)
                    else:
                        # What is read between the ranges is not progress.
                        self.fill(start, view, lambda _: None)
                        self._advance(sum(item.length for item in items))
                    helpers.call()
                    for item in items:
                        with workers.hold_close():
                            deliver(item.offset, view[item.offset - start :][: item.length])

        # NBD and its like have no answers that the engine could time: their client times the reads.
        answers = getattr(self._reader, "pace", None) or self.pace
        helpers = _Helpers(workers, work, answers, self.options.connections)
        with workers:
            helpers.call()
            meanwhile()
            workers.wait(helpers.look)

    def expect(self, group: list[ByteRange], *, tables: bool = False) -> None:
        """Announce ranges that this thread will read; see ``seams.Seams``, if the source has one."""
        if self._seams is not None:
            self._seams.expect(*_span(group), tables=tables)

    def stream(self, start: int = 0) -> OrderedStream:
        """Return a reader from ``start`` to the end that fetches ahead in parallel."""
        return OrderedStream(self, self._scope, start)


class _Helpers:
    """Start the threads of a crew: first a few, and all ``most`` once the few are not enough."""

    def __init__(self, workers: crew.Crew, job: Callable[[], None], answers: pace.Pace, most: int) -> None:
        self._workers = workers
        self._job = job
        self._answers = answers
        self._most = most
        self._started = 0
        self._calls = self._seen = 0
        self._lock = threading.Lock()

    def call(self) -> None:
        """Start missing threads. To be called for each piece that has arrived."""
        if self._started < self._most:
            self._calls += 1
            self._start(self._answers.enough(self._most))

    def look(self) -> None:
        """Start all threads if no piece has arrived since the last look: the few may wait for the server."""
        if self._calls == self._seen:
            self._start(self._most)
        self._seen = self._calls

    def _start(self, wanted: int) -> None:
        with self._lock:
            missing = wanted - self._started
            if missing > 0:
                self._started = wanted
                self._workers.start(self._job, missing)


class OrderedStream:
    """Fetch from ``start`` in parallel, read in order, with a ring of buffers of ``options.window`` chunks.

    Pieces get their buffers in order, so the piece that the reader waits for always has one: no deadlock. A
    request may be longer than the ring; its later pieces, and later requests, wait until the reader has come
    closer. So the longer the requests, the fewer are open at the same time.
    """

    def __init__(self, fetcher: Fetcher, scope: cancelling.Cancel, start: int) -> None:
        self._fetcher = fetcher
        self._scope = scope
        self._crew = crew.Crew(scope)
        options = fetcher.options
        self._size = options.window * options.chunk
        pieces = split(start, fetcher.size, fetcher.step)
        self._requests = _together(pieces, lambda start: fetcher.request_length(start, self._size))
        self._taken = 0
        self._taking = threading.Lock()
        self._changed = threading.Condition()
        self._ring = [directio.Buffer(fetcher.step) for _ in range(self._size // fetcher.step)]
        self._lengths = [0] * len(self._ring)
        self._arrived = [False] * len(self._ring)
        self._given = 0
        self._used = 0
        self._left = fetcher.size - start
        self._waking = scope.notifying(self._changed)
        most = min(options.connections, options.window)
        self._helpers = _Helpers(self._crew, self._work, fetcher.pace, most)
        self._helpers.call()

    def readinto(self, into: memoryview, /) -> int:
        if not self._left or not len(into):
            return 0
        slot = self._given % len(self._ring)
        with self._changed:
            while not self._arrived[slot]:
                self._crew.check()
                if not self._changed.wait(crew.INTERVAL):
                    self._helpers.look()
        count = min(len(into), self._lengths[slot] - self._used)
        into[:count] = self._ring[slot].view[self._used : self._used + count]
        self._used += count
        self._left -= count
        if self._used == self._lengths[slot]:
            with self._changed:
                self._arrived[slot] = False
                self._given += 1
                self._used = 0
                self._changed.notify_all()
        return count

    def close(self) -> None:
        self._crew.close("closed before the end" if self._left else None)
        self._waking.close()
        self._ring.clear()

    def _work(self) -> None:
        while True:
            with self._taking:
                request = next(self._requests, []) if self._is_free(self._taken) else []
                # The pieces of the request, with their numbers; none at the end.
                pieces = list(enumerate(request, self._taken))
                self._taken += len(pieces)
            if not pieces:
                return
            self._fetcher.expect([item for _, item in pieces])
            for number, item in pieces:
                if not self._is_free(number):
                    return
                slot = number % len(self._ring)
                self._fetcher.fill(item.offset, self._ring[slot].view[: item.length])
                self._helpers.call()
                with self._changed:
                    self._lengths[slot] = item.length
                    self._arrived[slot] = True
                    self._changed.notify_all()

    def _is_free(self, number: int) -> bool:
        """Wait for the buffer of a piece. Return False if the scope is set."""
        with self._changed:
            while number - self._given >= len(self._ring) and not self._scope.is_set():
                self._changed.wait()
            return not self._scope.is_set()
