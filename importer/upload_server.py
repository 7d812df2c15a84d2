"""The HTTP face of the upload server: paths, methods and status codes (contract, Upload server)."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import multipart, web

from images import retry
from importer import (
    errors,
    upload_http,
    upload_job,
    upload_resumable,
    upload_running,
    upload_settings,
    upload_tls,
)

log = logging.getLogger(__name__)

VERSIONS = ("v1beta1", "v1alpha1")
#: Bytes of a form's part that are taken at once.
PART = 1 << 20
#: Bytes that a connection takes from the network before it is told to wait.
WINDOW = 1 << 20
#: Seconds for a handshake.
HANDSHAKE = 10.0
#: Seconds for the other end to close its side of TLS.
FAREWELL = 1.0
#: Seconds for answers that are still being given when the server ends.
SHUTDOWN = 10.0
#: Seconds of a body that is read on, for its client to see the refusal.
LINGERING = 2.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class State(enum.Enum):
    """READY takes an upload, BUSY has one, DONE takes no more."""

    READY = enum.auto()
    BUSY = enum.auto()
    DONE = enum.auto()


class Server:
    """Takes one upload at a time until one succeeds; ``done`` is set then."""

    def __init__(self, settings: upload_settings.Settings, cancel: retry.Cancel) -> None:
        self.settings = settings
        self.cancel = cancel
        self.state = State.READY
        self.running: upload_running.Running | None = None
        self.order: upload_job.Order | None = None
        self.done = asyncio.Event()
        #: Connections that have not asked for anything yet.
        self._silent: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        self.resumable = upload_resumable.Resumable(self)

    def application(self) -> web.Application:
        """Return the routes."""
        made = web.Application(middlewares=[self._heard])
        made.router.add_get("/healthz", _healthz)
        for version in VERSIONS:
            for name in ("upload", "upload-async", "upload-form", "upload-form-async", "upload-archive"):
                path = f"/{version}/{name}"
                made.router.add_route("*", path, self._receive, expect_handler=upload_http.expect)
            for path in (f"/{version}/upload-resumable", f"/{version}/upload-resumable/{{name}}"):
                made.router.add_route("*", path, self.resumable.handle, expect_handler=upload_http.expect)
        return made

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Yield the port while the server listens; requests that were admitted are answered at the end."""
        runner = web.AppRunner(
            self.application(),
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=self.settings.idle,
            lingering_time=LINGERING,
            read_bufsize=WINDOW,
            shutdown_timeout=SHUTDOWN,
        )
        await runner.setup()
        assert runner.server is not None  # noqa: S101  (set up)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(runner.cleanup)
            listener = await self._listen(runner.server)
            # Before Python 3.12 it waits only if it began to wait before the listener was closed.
            closed = asyncio.create_task(listener.wait_closed())
            stack.push_async_callback(asyncio.wait, {closed}, timeout=SHUTDOWN)
            stack.push_async_callback(runner.cleanup)
            stack.callback(listener.close)
            stack.push_async_callback(self._end)
            yield listener.sockets[0].getsockname()[1]

    async def _listen(self, handlers: Callable[[], web.RequestHandler]) -> asyncio.Server:
        host, port = self.settings.host, self.settings.port
        context = self.settings.tls.context()
        loop = asyncio.get_running_loop()

        def connect() -> asyncio.BaseProtocol:
            # The library's own limit is on what comes after a first request.
            made = handlers()
            self._silent[made] = loop.call_later(self.settings.idle, self._cut, made)
            return made

        try:
            made = await loop.create_server(
                connect,
                host,
                port,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE,
                ssl_shutdown_timeout=FAREWELL,
            )
        except OSError as err:
            raise errors.RequestError(f"cannot listen on {host}:{port}: {err.strerror}") from err
        log.info("listening address=%r port=%d target=%r", host, port, self.settings.wanted.target)
        return made

    def _cut(self, connection: web.RequestHandler) -> None:
        self._silent.pop(connection)
        connection.force_close()

    @web.middleware
    async def _heard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if timer := self._silent.pop(request.protocol, None):
            timer.cancel()
        return await handler(request)

    async def _end(self) -> None:
        """Let go of an upload that is under way: the server was told to stop."""
        if self.running is not None and not self.running.work.done():
            self.running.broken(errors.Cancelled())
            await asyncio.wait({self.running.work})

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being uploaded or processed."""
        return self.state is State.READY

    # -- one upload

    async def _receive(self, request: web.Request) -> web.StreamResponse:
        kind = request.path.rpartition("/")[2]
        early = kind.endswith("-async")
        if kind == "upload-async" and request.method == "HEAD":
            return web.Response(headers={upload_job.OFFER: upload_job.EXTENTS})
        self.authorize(request, "POST")
        await self.admit()
        try:
            order = upload_job.order(
                self.settings.wanted, request.headers, archive=kind.startswith("upload-archive")
            )
            content, size = self.body(request), request.content_length
            if kind.startswith("upload-form"):
                content, size = self._file(request), None
            await upload_http.say_continue(request)
            running = self.start(order, size)
            await self._whole(running, content)
            await running.answer(early=early)
        except errors.Error as err:
            return upload_http.failed(err)
        return web.Response()

    def authorize(self, request: web.Request, *methods: str) -> None:
        """Raise the refusal of another method, or of a client that is not the one."""
        if request.method not in methods:
            raise web.HTTPNotFound
        if upload_tls.common_name(request.get_extra_info("peercert")) != self.settings.client_name:
            raise web.HTTPUnauthorized

    async def admit(self) -> None:
        """Raise the refusal of an upload that must not begin now."""
        await self.resumable.drop_abandoned()
        if self.state is State.BUSY:
            raise web.HTTPServiceUnavailable
        if self.state is State.DONE:
            raise web.HTTPConflict

    def start(self, order: upload_job.Order, size: int | None) -> upload_running.Running:
        """Begin the work on an upload whose bytes follow."""
        self.state = State.BUSY
        self.order = order
        running = upload_running.Running(order, size, self.cancel)
        running.work.add_done_callback(self._ended)
        self.running = running
        log.info("upload begins size=%r clone=%r", size, order.clone)
        return running

    def body(self, request: web.Request) -> upload_running.Pieces:
        """Return the bytes of a request as they come."""
        return upload_running.pieces(request.content.readany, self.patience)

    @property
    def patience(self) -> float:
        """Seconds without a byte, after which an upload is given up."""
        return self.settings.wanted.fetch.no_progress

    def _ended(self, work: asyncio.Future[None]) -> None:
        failure = work.exception()
        if failure is None:
            self.state = State.DONE
            self.done.set()
            return
        self.state = State.READY
        if isinstance(failure, errors.Error):
            log.error("upload failed: %s", failure)
        else:
            log.error("internal error", exc_info=failure)

    async def _whole(self, running: upload_running.Running, content: upload_running.Pieces) -> None:
        failure = await running.take(content)
        if failure is None:
            running.body.end()
        else:
            running.broken(failure)

    async def _file(self, request: web.Request) -> upload_running.Pieces:
        """Yield the part named ``file`` of a form; read the others and throw them away."""
        if request.content_type != "multipart/form-data":
            raise errors.RequestError("a form upload wants multipart/form-data")
        found = False
        reader = await request.multipart()
        while (part := await reader.next()) is not None:
            if not isinstance(part, multipart.BodyPartReader):
                raise errors.RequestError("a form within the form")
            wanted = part.name == "file" and not found
            found = found or wanted
            while not part.at_eof():
                async with asyncio.timeout(self.patience):
                    data = await part.read_chunk(PART)
                if wanted and data:
                    yield data
        if not found:
            raise errors.RequestError("the form has no part named file")


async def _healthz(_request: web.Request) -> web.Response:
    return web.Response(text="OK")
