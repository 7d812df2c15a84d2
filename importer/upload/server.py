"""What the upload server answers: paths, methods and status codes (contract, Upload server)."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent import futures

from cdi_worker import errors, execute
from cdi_worker.images.engine import retry
from cdi_worker.sources import upload
from cdi_worker.upload import form, headers, http, resumable
from cdi_worker.upload import listener as upload_listener
from cdi_worker.upload import running as upload_running
from cdi_worker.upload import settings as upload_settings
from cdi_worker.upload.http import Answer, Exchange, Refusal, Request

log = logging.getLogger(__name__)

VERSIONS = ("v1beta1", "v1alpha1")
KINDS = ("upload", "upload-async", "upload-form", "upload-form-async", "upload-archive")
RESUMABLE = "upload-resumable"


class Server:
    """Takes one upload at a time until one succeeds; ``done`` is set then."""

    def __init__(self, settings: upload_settings.Settings, cancel: retry.Cancel) -> None:
        self.settings = settings
        self.cancel = cancel
        self.running: upload_running.Running | None = None
        self.done = threading.Event()
        #: Held from the question whether an upload may begin until one has.
        self._admitting = threading.Lock()
        self._ending = False
        self._resumable = resumable.Resumable(self._begin, settings.client_name, self.patience)

    @contextlib.contextmanager
    def listening(self) -> Iterator[int]:
        """Yield the port while the server listens; requests that were admitted are answered at the end."""
        settings = self.settings
        listener = upload_listener.Listener(
            settings.tls.context(), self.answer, idle=settings.idle, patience=self.patience
        )
        with listener.listening(settings.host, settings.port, self._end) as port:
            log.info("listening address=%r port=%d target=%r", settings.host, port, settings.wanted.target)
            yield port

    def _end(self) -> None:
        """Let go of an upload that is under way: the server was told to stop."""
        with self._admitting:
            self._ending = True
        if self.running is not None and not self.running.work.done():
            self.running.broken(errors.Cancelled())
            futures.wait({self.running.work})

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being uploaded or processed, nor was with success."""
        return self.running is None or (self.running.work.done() and not self.has_succeeded)

    @property
    def has_succeeded(self) -> bool:
        """Whether an upload is on storage."""
        running = self.running
        return running is not None and running.work.done() and running.work.exception() is None

    @property
    def patience(self) -> float:
        """Seconds without a byte, after which an upload is given up."""
        return self.settings.wanted.fetch.no_progress

    def answer(self, request: Request, exchange: Exchange) -> Answer:
        """Answer one request, when what it asks for is done. Raises ``Refusal``."""
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
        if kind == "upload-async" and request.method == "HEAD":
            return Answer(headers={headers.OFFER: headers.EXTENTS})
        http.authorize(request, self.settings.client_name, "POST")
        try:
            content: upload.Content = request.content
            with self._admission():
                size = request.length
                if kind.startswith("upload-form"):
                    content, size = form.File(request.headers, content), None
                running = self._start(request.headers, size, archive=kind == "upload-archive")
            exchange.say_continue()
            if failure := running.take(content):
                running.broken(failure)
            else:
                running.body.end()
            running.wait(early=kind.endswith("-async"))
        except errors.Error as err:
            return http.failed(err)
        return Answer()

    @contextlib.contextmanager
    def _admission(self) -> Iterator[None]:
        """Hold the right to begin an upload. Raises ``Refusal`` if one runs or has succeeded."""
        with self._admitting:
            self._resumable.drop_abandoned()
            if self._ending or (self.running is not None and not self.running.work.done()):
                raise Refusal(503)
            if self.has_succeeded:
                raise Refusal(409)
            yield

    def _start(
        self, said: Mapping[str, str], size: int | None, *, archive: bool = False
    ) -> upload_running.Running:
        order = upload_running.order(self.settings.wanted, said, archive=archive)
        self.running = upload_running.Running(order, size, self.cancel)
        self.running.work.add_done_callback(self._ended)
        log.info("upload begins size=%r clone=%r", size, order.clone)
        return self.running

    def _begin(self, said: Mapping[str, str], size: int | None) -> upload_running.Running:
        """Begin an upload in several requests; see ``resumable.Begin``."""
        with self._admission():
            return self._start(said, size)

    def _ended(self, work: futures.Future[execute.Result]) -> None:
        failure = work.exception()
        if failure is None:
            self.done.set()
        elif isinstance(failure, errors.Error):
            log.error("upload failed: %s", failure)
        else:
            log.error("internal error", exc_info=failure)
