"""The upload server: paths, methods and status codes (contract, Upload server)."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent import futures

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer.result import Result
from cdi_worker.importer.upload import form, headers, http, resumable
from cdi_worker.importer.upload import listener as upload_listener
from cdi_worker.importer.upload import running as upload_running
from cdi_worker.importer.upload import settings as upload_settings
from cdi_worker.importer.upload.http import Answer, Exchange, Refusal, Request
from cdi_worker.sources import upload

log = logging.getLogger(__name__)

VERSIONS = ("v1beta1", "v1alpha1")
KINDS = ("upload", "upload-async", "upload-form", "upload-form-async", "upload-archive")
#: Clients ask with HEAD whether the server has these.
PROBED = ("upload-async", "upload-form-async")
RESUMABLE = "upload-resumable"


class Server:
    """Accept one upload at a time until one succeeds; ``done`` is set then."""

    def __init__(self, settings: upload_settings.Settings, cancel: cancelling.Cancel) -> None:
        self.settings = settings
        self.cancel = cancel
        self.running: upload_running.Running | None = None
        self.done = threading.Event()
        #: Set when an upload has ended; see ``role.serve``.
        self.wake = threading.Event()
        #: Held from the check whether an upload may begin until it has begun.
        self._admitting = threading.Lock()
        self._ending = False
        self._patience = settings.request.fetch.no_progress
        self._resumable = resumable.Resumable(self.begin, settings.client_name, self._patience)

    @contextlib.contextmanager
    def listen(self) -> Iterator[int]:
        """Yield the port while the server listens; at the end, answer the requests already admitted."""
        settings = self.settings
        limits = http.Limits(settings.idle, self._patience, settings.request.fetch.slowest)
        listener = upload_listener.Listener(settings.tls.context(), self.answer, limits)
        with listener.listen(settings.host, settings.port, self._end) as port:
            log.info("listening address=%r port=%d target=%r", settings.host, port, settings.request.target)
            yield port

    def _end(self) -> None:
        """Admit no more uploads, cancel the running one and wait for it."""
        with self._admitting:
            self._ending = True
        if self.running is not None and not self.running.work.done():
            self.running.fail(errors.Cancelled())
            futures.wait({self.running.work})

    @property
    def is_idle(self) -> bool:
        """Whether no upload is running and none has succeeded."""
        return self.running is None or (self.running.work.done() and not self.has_succeeded)

    @property
    def has_succeeded(self) -> bool:
        """Whether an upload has been written and synced."""
        running = self.running
        return running is not None and running.work.done() and running.work.exception() is None

    def answer(self, request: Request, exchange: Exchange) -> Answer:
        """Process one request and return the answer. Raises ``Refusal``."""
        if request.path == "/healthz" and request.method in {"GET", "HEAD"}:
            return Answer(text="OK")
        root, _, path = request.path.partition("/")
        version, _, rest = path.partition("/")
        kind, _, name = rest.partition("/")
        if root:
            raise Refusal(404)
        if version in VERSIONS and kind == RESUMABLE and "/" not in name:
            return self._resumable.answer(request, exchange, name)
        if version in VERSIONS and rest in KINDS:
            return self._upload(request, exchange, kind)
        raise Refusal(404)

    def _upload(self, request: Request, exchange: Exchange, kind: str) -> Answer:
        if request.method == "HEAD" and kind in PROBED:
            return Answer(headers={headers.OFFER: headers.EXTENTS} if kind == "upload-async" else {})
        http.authorize(request, self.settings.client_name, "POST")
        try:
            if "content-range" in request.headers:
                # Clients in browsers send large files in parts (RFC 9110, 14.4).
                hint = "send all of it in one request, or use upload-resumable"
                raise errors.RequestError(f"Content-Range: the request has only a part of the file; {hint}")
            content: upload.Content = request.content
            with self._admit():
                size = request.length
                if kind.startswith("upload-form"):
                    content, size = form.FormFile(request.headers, content), None
                running = self._start(request.headers, size, archive=kind == "upload-archive")
            exchange.send_continue()
            if failure := running.receive(content):
                running.fail(failure)
            else:
                running.body.end()
            running.wait(early=kind.endswith("-async"))
        except errors.Error as err:
            return http.failed(err)
        return Answer()

    @contextlib.contextmanager
    def _admit(self) -> Iterator[None]:
        """Hold the lock under which an upload begins. Raises ``Refusal`` if one runs or has succeeded."""
        with self._admitting:
            self._resumable.drop_abandoned()
            if self._ending:
                raise Refusal(503, headers.LEAVING)
            if self.running is not None and not self.running.work.done():
                raise Refusal(503)
            if self.has_succeeded:
                raise Refusal(409)
            yield

    def begin(self, fields: Mapping[str, str], size: int | None) -> upload_running.Running:
        """Begin a resumable upload with the headers of a request. Raises ``Refusal`` and ``RequestError``."""
        with self._admit():
            return self._start(fields, size)

    def _start(
        self, fields: Mapping[str, str], size: int | None, *, archive: bool = False
    ) -> upload_running.Running:
        order = upload_running.order(self.settings.request, fields, archive=archive)
        self.running = upload_running.Running(order, size, self.cancel)
        self.running.work.add_done_callback(self._ended)
        log.info("upload started size=%r clone=%r", size, order.clone)
        return self.running

    def _ended(self, work: futures.Future[Result]) -> None:
        failure = work.exception()
        if failure is None:
            self.done.set()
        elif isinstance(failure, errors.Error):
            log.error("upload failed: %s", failure)
        else:
            log.error("internal error", exc_info=failure)
        self.wake.set()
