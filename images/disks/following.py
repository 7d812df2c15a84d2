"""Disks of images with tables (qcow2, vmdk, vdi, vhd, vhdx) that come as a stream, which is not stored.

``formats.mapped.passing`` interprets the bytes.
"""

from __future__ import annotations

import bisect
import collections
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Self

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.formats.mapped import layout
from cdi_worker.formats.mapped.pieces import Batch
from cdi_worker.images import directio
from cdi_worker.images.disks import base, tables
from cdi_worker.images.engine import cancelling
from cdi_worker.scratch import space

#: Bytes of a chunk: a multiple of every cluster size, and the length of the longest compressed cluster.
CHUNK = 4 << 20

#: Threads of a disk. Decompression is most of the work, and two threads are as fast as most sources.
WORKERS = 2
#: Maximum running and queued jobs.
JOBS = 4


class FollowingDisk(base.Disk):
    """The disk of an image with tables whose file passes once, without being stored.

    ``opened`` opens the file; it is read until the disk is complete, not to its end. ``follower`` makes a new
    interpreter of it. ``spill`` takes what must be kept beyond memory; None: no scratch. ``direct``: see
    ``tables.MappedDisk``. ``workers``: threads that place what has arrived.

    ``deliver`` raises ``errors.ScratchRequired`` if the disk cannot be delivered in one pass, or without
    scratch.
    """

    tentative = True

    def __init__(
        self,
        opened: base.OpenStream,
        follower: Callable[[], layout.Follower],
        size: int,
        scope: cancelling.Cancel,
        *,
        spill: space.Spill | None = None,
        direct: bool = False,
        workers: int = WORKERS,
    ) -> None:
        self._workers = workers
        self._opened = opened
        self._follower = follower
        self.size: int = size
        self._scope = scope
        self._spill = spill
        self._direct = direct

    def deliver(self, sink: base.Sink, missing: base.Missing, meter: base.DeliveryMeter) -> int:
        """See ``base.Disk``. A failure sets the scope, which must end the read in progress."""
        follower = self._follower()
        placer = tables.Placer(sink, direct=self._direct)
        # At most RECENT + 2 + JOBS buffers: of the history, of the newest chunk, and one for each job.
        free: list[directio.Buffer] = []
        history = History(self._spill)
        start, last = 0, False

        def put(batch: Batch, data: memoryview) -> None:
            placer.put(batch, data, follower.inflate)
            meter.moved(batch.length)

        crew = _Placers(put, self._scope, self._workers)
        with self._opened(meter.advance) as reader, crew:
            while not (last or follower.complete):
                self._scope.check()
                chunk = Chunk(free, start)
                last = not chunk.fill(reader)
                history.add(chunk)
                arrival = follower.arrive(start, chunk.end, history.read, last=last)
                for offset, length in arrival.holes:
                    sink.zero(offset, length)
                for batch in arrival.ready:
                    is_here = batch.offset >= start
                    crew.submit(batch, chunk if is_here else history.read(batch.offset, batch.length))
                for span in arrival.keep:
                    history.keep(*span)
                if follower.mapped:
                    history.forget()
                start = chunk.end
            crew.finish()
        return self.size


class _Placers:
    """Place batches in threads. A failure sets the scope, which ends the read of the stream with it."""

    def __init__(
        self, put: Callable[[Batch, memoryview], None], scope: cancelling.Cancel, workers: int
    ) -> None:
        self._put_batch = put
        self._scope = scope
        self._executor = futures.ThreadPoolExecutor(workers, "place")
        self._jobs: collections.deque[futures.Future[None]] = collections.deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def submit(self, batch: Batch, source: Chunk | bytes) -> None:
        """Place a batch; ``source``: the chunk that holds it, or its bytes."""
        if len(self._jobs) >= JOBS:
            self._jobs.popleft().result()
        if isinstance(source, Chunk):
            source.hold()
        self._jobs.append(self._executor.submit(self._put, batch, source))

    def finish(self) -> None:
        while self._jobs:
            self._jobs.popleft().result()

    def _put(self, batch: Batch, source: Chunk | bytes) -> None:
        try:
            if isinstance(source, Chunk):
                data = source.view[batch.offset - source.start :][: batch.length]
            else:
                data = memoryview(source)
            self._put_batch(batch, data)
        except BaseException as err:
            # Any failure must end the read in progress, which is in another thread.
            self._scope.fail(err)
            raise
        finally:
            if isinstance(source, Chunk):
                source.release()


#: Maximum bytes kept in memory; more are written to scratch.
MEMORY = 64 << 20

#: Chunks kept besides the newest. QEMU writes compressed data at most a few clusters before the table that
#: maps it.
RECENT = 2


class Chunk:
    """A part of the stream from ``start``; the last ``release`` adds its buffer to the ``free`` ones."""

    def __init__(self, free: list[directio.Buffer], start: int) -> None:
        self.start = start
        self._free = free
        # Only one thread takes buffers.
        self._buffer = free.pop() if free else directio.Buffer(CHUNK)
        self.view = self._buffer.view
        self._users = 1
        self._lock = threading.Lock()

    @property
    def end(self) -> int:
        return self.start + len(self.view)

    def fill(self, reader: readers.Reader) -> bool:
        """Fill the buffer; return False if the reader ended before it was full."""
        filled = readers.fill(reader, self.view)
        is_full = filled == len(self.view)
        self.view = self.view[:filled]
        return is_full

    def hold(self) -> None:
        with self._lock:
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            unused = not self._users
        if unused:
            self._free.append(self._buffer)


class History:
    """Read earlier bytes of the stream: the recent chunks, and spans that were kept.

    ``spill`` None: no scratch.
    """

    def __init__(self, spill: space.Spill | None) -> None:
        self._spill = spill
        self._recent: collections.deque[Chunk] = collections.deque()
        self._room = MEMORY
        # The kept spans in ascending order: starts, ends, and the bytes (None: in scratch).
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._bytes: list[bytes | None] = []

    def add(self, chunk: Chunk) -> None:
        """Add the newest chunk and release the oldest one."""
        self._recent.append(chunk)
        if len(self._recent) > RECENT + 1:
            self._recent.popleft().release()

    def keep(self, start: int, end: int) -> None:
        """Keep a span of the newest chunk."""
        chunk = self._recent[-1]
        data = chunk.view[start - chunk.start : end - chunk.start]
        fits = len(data) <= self._room
        if fits:
            self._room -= len(data)
        elif self._spill is not None:
            self._spill.write(start, data)
        else:
            reason = f"more than {MEMORY >> 20} MiB of the image precede the tables that map them"
            raise errors.ScratchRequired(reason=reason)
        self._starts.append(start)
        self._ends.append(end)
        self._bytes.append(bytes(data) if fits else None)

    def forget(self) -> None:
        """Discard the kept spans."""
        self._room = MEMORY
        for column in (self._starts, self._ends, self._bytes):
            column.clear()

    def read(self, offset: int, length: int) -> bytes:
        """Return earlier bytes that are still available; fewer only at the end of the file."""
        parts: list[bytes] = []
        while length:
            part = self._part(offset, length)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return b"".join(parts)

    def _part(self, offset: int, length: int) -> bytes:
        for chunk in self._recent:
            if chunk.start <= offset < chunk.end:
                return bytes(chunk.view[offset - chunk.start :][:length])
        if offset >= self._recent[-1].end:
            return b""
        index = bisect.bisect_right(self._starts, offset) - 1
        if index < 0 or offset >= self._ends[index]:
            reason = f"the bytes at {offset} of the image are needed, but were not kept"
            raise errors.ScratchRequired(reason=reason)
        start, kept = self._starts[index], self._bytes[index]
        length = min(length, self._ends[index] - offset)
        if kept is not None:
            return kept[offset - start :][:length]
        return self._spill.read(offset, length) if self._spill is not None else b""
