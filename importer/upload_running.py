"""One upload under way: bytes from the network's thread to the one that makes a disk of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent import futures
from typing import Any

from images import retry
from importer import errors, upload_job
from sources import upload

log = logging.getLogger(__name__)


#: A body as it comes.
Pieces = AsyncIterator[bytes]


async def pieces(read: Callable[[], Awaitable[bytes]], patience: float) -> Pieces:
    """Yield a body as it comes; ``TimeoutError`` when nothing did for ``patience`` seconds."""
    while True:
        async with asyncio.timeout(patience):
            data = await read()
        if not data:
            return
        yield data


class Running:
    """An upload that has begun. ``size``: bytes that will come, None if unknown.

    ``work`` ends, well or not, when the disk does. ``accepted`` is set when all bytes are there.
    """

    def __init__(self, order: upload_job.Order, size: int | None, cancel: retry.Cancel) -> None:
        loop = asyncio.get_running_loop()
        self.order = order
        self.size = size
        self.accepted = asyncio.Event()
        self._room = asyncio.Event()
        self.body = upload.Body(on_room=lambda: loop.call_soon_threadsafe(self._room.set))
        # A thread of its own: programs that it starts live no longer than it (images.process).
        self._executor = futures.ThreadPoolExecutor(1, "upload")
        self.work = loop.run_in_executor(
            self._executor,
            upload_job.carry_out,
            order,
            self.body,
            size,
            lambda: loop.call_soon_threadsafe(self.accepted.set),
            cancel,
        )
        self.work.add_done_callback(self._ended)

    def _ended(self, _work: asyncio.Future[None]) -> None:
        self.body.close()
        self._executor.shutdown(wait=False)

    async def feed(self, content: Pieces) -> None:
        """Hand bytes over as fast as they are used."""
        async for piece in content:
            self._room.clear()
            if not self.body.put(piece):
                await self._room.wait()

    async def take(self, content: Pieces) -> BaseException | None:
        """Feed all of ``content``, unless the work ends before; return what went wrong with it."""
        feeding = asyncio.create_task(self.feed(content))
        either: list[asyncio.Future[None]] = [feeding, self.work]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            feeding.cancel()
            (failure,) = await asyncio.gather(feeding, return_exceptions=True)
        return None if isinstance(failure, asyncio.CancelledError) else failure

    def broken(self, failure: BaseException) -> None:
        """End the work: the rest of the bytes will not come."""
        reason = str(failure) or type(failure).__name__
        log.info("upload broken received=%d reason=%r", self.body.received, reason)
        if not isinstance(failure, errors.Error):
            failure = errors.TransferFailed(url=upload.NAME, offset=self.body.received, reason=reason)
        self.body.fail(failure)

    async def answer(self, *, early: bool) -> None:
        """Wait for the end, or with ``early`` for all bytes to be accepted. Raises what failed."""
        if not early:
            await asyncio.shield(self.work)
            return
        accepting = asyncio.create_task(self.accepted.wait())
        either: list[asyncio.Future[Any]] = [accepting, self.work]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            accepting.cancel()
        if self.work.done():
            self.work.result()
