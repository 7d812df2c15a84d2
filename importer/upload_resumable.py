"""Uploads in several requests, in the manner of the tus protocol 1.0 (https://tus.io)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from typing import TYPE_CHECKING

from aiohttp import web

from importer import errors, upload_http, upload_job, upload_running

if TYPE_CHECKING:
    from importer import upload_server

log = logging.getLogger(__name__)

VERSION = "1.0.0"
SAYS = {"Tus-Resumable": VERSION, "Cache-Control": "no-store"}
OFFERS = {"Tus-Version": VERSION, "Tus-Extension": "creation,creation-defer-length,termination"}
CONTENT = "application/offset+octet-stream"


class Session:
    """One upload. ``length`` in bytes; None: its last request ends it."""

    def __init__(self, running: upload_running.Running, length: int | None, metadata: str) -> None:
        self.name = secrets.token_hex(16)
        self.running = running
        self.length = length
        self.metadata = metadata
        self._feeding: asyncio.Task[BaseException | None] | None = None
        self._patience: asyncio.TimerHandle | None = None

    @property
    def offset(self) -> int:
        return self.running.body.received

    @property
    def is_connected(self) -> bool:
        return self._feeding is not None

    def headers(self) -> dict[str, str]:
        said = {**SAYS, "Upload-Offset": str(self.offset)}
        said |= {"Upload-Defer-Length": "1"} if self.length is None else {"Upload-Length": str(self.length)}
        return said | ({"Upload-Metadata": self.metadata} if self.metadata else {})

    async def detach(self) -> None:
        """End a request that still brings bytes: its client has come again, so that one is dead."""
        if self._feeding is not None:
            self._feeding.cancel()
            await asyncio.wait({self._feeding})

    def wait(self, seconds: float) -> None:
        """Give the upload up after so many seconds without a request."""
        self.stop_waiting()
        gone = TimeoutError(f"nobody went on with it for {seconds:.0f} s")
        self._patience = asyncio.get_running_loop().call_later(seconds, self.running.broken, gone)

    def stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    async def feed(self, content: upload_running.Pieces) -> BaseException | None:
        """Take what a request brings; return what broke it."""
        self._feeding = asyncio.create_task(self.running.take(content))
        try:
            await asyncio.wait({self._feeding})
            if self._feeding.cancelled():
                return ConnectionError("another request goes on with the upload")
            return self._feeding.result()
        finally:
            self._feeding = None


class Resumable:
    """The handlers. There is one upload at a time, here as everywhere else in the server."""

    def __init__(self, server: upload_server.Server) -> None:
        self._server = server
        self._session: Session | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request to the collection or to the upload in it."""
        self._server.authorize(request, "OPTIONS", "POST", "HEAD", "PATCH", "DELETE")
        if request.method == "OPTIONS":
            return web.Response(status=204, headers=OFFERS)
        if request.headers.get("Tus-Resumable", VERSION) != VERSION:
            return web.Response(status=412, headers=OFFERS)
        name = request.match_info.get("name")
        if request.method == "POST" and name is None:
            return await self._create(request)
        session = self._session
        if session is None or name not in {None, session.name}:
            return web.Response(status=404, headers=SAYS)
        await session.detach()
        if request.method == "HEAD":
            return web.Response(headers=session.headers())
        if request.method == "PATCH":
            return await self._patch(request, session)
        session.running.broken(ConnectionError("the client has ended it"))
        return web.Response(status=204, headers=SAYS)

    async def _create(self, request: web.Request) -> web.StreamResponse:
        await self._server.admit()
        try:
            length = _length(request)
            order = upload_job.order(self._server.settings.wanted, request.headers, archive=False)
        except errors.RequestError as err:
            return upload_http.failed(err)
        running = self._server.start(order, length)
        session = Session(running, length, request.headers.get("Upload-Metadata", ""))
        self._session = session
        running.work.add_done_callback(lambda _work: self._ended(session))
        session.wait(self._server.patience)
        where = f"{request.path}/{session.name}"
        return web.Response(status=201, headers={**session.headers(), "Location": where})

    async def _patch(self, request: web.Request, session: Session) -> web.StreamResponse:
        if request.content_type != CONTENT:
            return web.Response(status=415, headers=SAYS)
        more = request.content_length or 0
        if request.headers.get("Upload-Offset") != str(session.offset):
            return web.Response(status=409, headers=session.headers())
        if session.length is not None and session.offset + more > session.length:
            return web.Response(status=413, headers=session.headers())
        session.stop_waiting()
        await upload_http.say_continue(request)
        failure = await session.feed(self._server.body(request))
        if session.length is not None and session.offset > session.length:
            session.running.broken(errors.RequestError("more bytes came than Upload-Length says"))
        elif failure is not None or session.offset < (session.length or 0):
            session.wait(self._server.patience)
        else:
            session.running.body.end()
        if failure is not None:
            log.info("upload interrupted offset=%d reason=%r", session.offset, str(failure))
            return web.Response(status=400, headers=session.headers())
        if self._waits(session):
            return web.Response(status=204, headers=session.headers())
        try:
            await session.running.answer(early=False)
        except errors.Error as err:
            return upload_http.failed(err)
        return web.Response(status=204, headers=session.headers())

    async def drop_abandoned(self) -> None:
        """End an upload that waits for its client: another one begins."""
        session = self._session
        if session is not None and not session.is_connected and not session.running.body.is_complete:
            session.running.broken(ConnectionError("another upload has begun"))
            with contextlib.suppress(errors.Error):
                await session.running.answer(early=False)

    def _waits(self, session: Session) -> bool:
        return not session.running.body.is_complete and not session.running.work.done()

    def _ended(self, session: Session) -> None:
        session.stop_waiting()
        if session is self._session and session.running.work.exception() is not None:
            self._session = None


def _length(request: web.Request) -> int | None:
    text = request.headers.get("Upload-Length", "")
    if text.isascii() and text.isdigit():
        return int(text)
    if not text and request.headers.get("Upload-Defer-Length") == "1":
        return None
    raise errors.RequestError(f"Upload-Length {text!r} is no number")
