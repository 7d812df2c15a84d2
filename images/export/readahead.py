"""Cache and read-ahead for clients that read a source in small pieces.

qemu-img reads tables of 64 KiB and some formats in small pieces; over HTTP each would cost a round trip. A
random read fetches one block. A read that follows a cached one fetches twice its length and, when first used,
the bytes after it with several parallel fetches: like the kernel's read-ahead for files.
"""

from __future__ import annotations

import collections
import mmap
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent import futures

from cdi_worker.images.engine import cancelling, crew

#: Fills the whole buffer from the offset, or raises. Several threads call it.
ReadInto = Callable[[int, memoryview], None]

_BLOCK = 256 << 10
_LONGEST = 4 << 20
_AHEAD = 16 << 20


class CachedRange:
    """One read of the source into ``view``: queued, running or finished.

    ``place``: number of its first block in the cache's memory, None: it has memory of its own. ``follows``:
    whether it begins where another cached fetch ended.
    """

    def __init__(self, start: int, view: memoryview, place: int | None, *, follows: bool) -> None:
        self.start = start
        self.end = start + len(view)
        self.view = view
        self.place = place
        self.follows = follows
        #: The numbers of its blocks in the source.
        self.blocks = range(start // _BLOCK, -(-self.end // _BLOCK))
        #: Number of requests that use the bytes now, and number of bytes used by all requests.
        self.users = 0
        self.used = 0
        #: Done when the bytes are here, or with the error of the read.
        self.future: futures.Future[None] = futures.Future()

    def part(self, start: int, end: int) -> memoryview:
        """Return the bytes from ``start`` to ``end`` in this fetch, or raise the error of its read."""
        self.future.result()
        return self.view[max(0, start - self.start) : min(end, self.end) - self.start]


class Cache:
    """Cache a source of ``size`` bytes, which ``parallel`` threads fetch with ``read``.

    ``capacity`` bytes are cached; more only while they are in use. ``scope`` must end the calls of ``read``;
    ``close`` sets it.
    """

    def __init__(
        self,
        read: ReadInto,
        size: int,
        scope: cancelling.Cancel,
        *,
        parallel: int = 8,
        capacity: int = 64 << 20,
    ) -> None:
        self._read = read
        self._size = size
        self._lock = threading.Lock()
        self._by_block: dict[int, CachedRange] = {}
        self._recent: collections.OrderedDict[CachedRange, None] = collections.OrderedDict()
        # Blocks that are reused: page faults of fresh memory cost more than a copy to used pages.
        self._memory = memoryview(mmap.mmap(-1, capacity))
        self._used = bytearray(capacity // _BLOCK)
        self._scope = scope
        self._queue: queue.SimpleQueue[CachedRange | None] = queue.SimpleQueue()
        self._workers = [
            threading.Thread(target=self._work, name=f"readahead-{number}", daemon=True)
            for number in range(parallel)
        ]
        for worker in self._workers:
            worker.start()

    def take(self, offset: int, length: int) -> list[CachedRange]:
        """Return the fetches with these bytes, in order, starting missing ones. Call ``give`` after use."""
        found: list[CachedRange] = []
        end = offset + length
        with self._lock:
            while offset < end:
                fetch = self._by_block.get(offset // _BLOCK)
                if fetch is None or (fetch.future.done() and fetch.future.exception() is not None):
                    fetch = self._start(offset // _BLOCK, end)
                fetch.users += 1
                found.append(fetch)
                self._recent.move_to_end(fetch)
                offset = fetch.end
            last = found[-1]
            if not last.used and (last.follows or len(found) > 1):
                ahead, limit = last.end, min(last.end + _AHEAD, self._size)
                # A longer queue would delay the next request of the client.
                while ahead < limit and self._queue.qsize() < len(self._workers):
                    fetch = self._by_block.get(ahead // _BLOCK)
                    ahead = (fetch or self._start(ahead // _BLOCK, ahead)).end
        return found

    def give(self, fetches: Sequence[CachedRange], offset: int, length: int) -> None:
        """Return the fetches of ``take``: the bytes are no longer used."""
        with self._lock:
            for fetch in fetches:
                fetch.users -= 1
                fetch.used += min(fetch.end, offset + length) - max(fetch.start, offset)
                if fetch.used >= fetch.end - fetch.start and fetch in self._recent:
                    # Completely used: evict it first, so that its memory is reused while in the CPU cache.
                    self._recent.move_to_end(fetch, last=False)

    def close(self) -> None:
        """End running fetches; queued ones fail with ``errors.Cancelled``."""
        self._scope.set("closed")
        for _ in self._workers:
            self._queue.put(None)
        crew.join(self._workers)

    def _work(self) -> None:
        while (fetch := self._queue.get()) is not None:
            try:
                self._scope.check()
                self._read(fetch.start, fetch.view)
            except BaseException as err:  # noqa: BLE001  (raised again where the bytes are used)
                fetch.future.set_exception(err)
            else:
                fetch.future.set_result(None)

    def _start(self, block: int, wanted: int) -> CachedRange:
        """Fetch from ``block`` to ``wanted``, or twice the length of the fetch before it; no cached block."""
        before = self._by_block.get(block - 1)
        blocks = max(1, -(-wanted // _BLOCK) - block)
        if before is not None:
            blocks = max(blocks, 2 * (before.end - before.start) // _BLOCK)
        blocks = min(blocks, _LONGEST // _BLOCK)
        free = 1
        while free < blocks and block + free not in self._by_block:
            free += 1
        start, end = block * _BLOCK, min((block + free) * _BLOCK, self._size)
        fetch = CachedRange(start, *self._room(end - start), follows=before is not None)
        self._by_block.update(dict.fromkeys(fetch.blocks, fetch))
        self._recent[fetch] = None
        if self._scope.is_set():
            # No worker is left.
            fetch.future.set_exception(self._scope.error())
        else:
            self._queue.put(fetch)
        return fetch

    def _room(self, length: int) -> tuple[memoryview, int | None]:
        """Return memory and its first block, evicting the least recently used fetches if necessary."""
        count = -(-length // _BLOCK)
        while (first := self._used.find(bytes(count))) < 0:
            oldest = next((fetch for fetch in self._recent if fetch.future.done() and not fetch.users), None)
            if oldest is None:
                return memoryview(bytearray(length)), None
            for block in oldest.blocks:
                # A failed fetch may have been replaced there.
                if self._by_block.get(block) is oldest:
                    del self._by_block[block]
            del self._recent[oldest]
            if oldest.place is not None:
                blocks = len(oldest.blocks)
                self._used[oldest.place : oldest.place + blocks] = bytes(blocks)
        self._used[first : first + count] = b"x" * count
        return self._memory[first * _BLOCK :][:length], first
