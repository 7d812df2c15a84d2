"""The upload server role: paths, methods, status codes, and when it ends (contract, Upload server)."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import pathlib
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent import futures
from typing import Final

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract, execute, report
from cdi_worker.importer.result import Result
from cdi_worker.importer.upload import form, headers, http, resumable
from cdi_worker.importer.upload import listener as upload_listener
from cdi_worker.importer.upload import running as upload_running
from cdi_worker.importer.upload import settings as upload_settings
from cdi_worker.importer.upload.http import Answer, Exchange, Refusal, Request
from cdi_worker.sources import upload

log = logging.getLogger(__name__)

_PATH: Final = re.compile("/v1(?:beta1|alpha1)/([a-z-]+)(?:/([^/]*))?")
KINDS = ("upload", "upload-async", "upload-form", "upload-form-async", "upload-archive")
#: Clients ask with HEAD whether the server has these.
PROBED = ("upload-async", "upload-form-async")
RESUMABLE = "upload-resumable"


def run(env: Mapping[str, str], paths: contract.Paths, cancel: cancelling.Cancel) -> report.Report:
    """Serve with the settings of an environment; see ``Server.serve``."""
    return Server(upload_settings.read(env, paths), cancel).serve()


class Server:
    """Accept one upload at a time until one succeeds."""

    def __init__(self, settings: upload_settings.Settings, cancel: cancelling.Cancel) -> None:
        self.running: upload_running.Running | None = None
        self._settings = settings
        self._cancel = cancel
        #: Set when an upload has ended.
        self._wake = threading.Event()
        #: Held from the check whether an upload may begin until it has begun.
        self._admitting = threading.Lock()
        self._ending = False
        self._patience = settings.request.fetch.no_progress
        self._resumable = resumable.Resumable(self.begin, settings.client_name, self._patience)

    def serve(self) -> report.Report:
        """Serve until one upload is on storage, the deadline passes, or ``cancel`` is set.

        Raises ``errors.Error``.
        """
        deadline = self._settings.deadline
        # Loaded before the first client connects, so that no upload waits for it.
        execute.load_frequent()
        with self.listen(), self._cancel.on_set(self._wake.set):
            while not (self._has_succeeded or self._cancel.is_set()):
                left = None
                if deadline is not None:
                    seconds = (deadline - dt.datetime.now(dt.UTC)).total_seconds()
                    left = min(max(0.0, seconds), threading.TIMEOUT_MAX)
                if left == 0 and self.is_idle:
                    log.info("deadline passed deadline=%s", deadline)
                    break
                # After the deadline, the end of the running upload is waited for.
                self._wake.wait(left or None)
                self._wake.clear()
        # An upload that was admitted before the end has finished by now, perhaps with success.
        if self._has_succeeded and self.running is not None:
            done, order = self.running.work.result(), self.running.order
            # CDI always reports files that were cloned into a folder as preallocated.
            is_folder = order.clone == headers.FILESYSTEM and pathlib.Path(order.request.target).is_dir()
            return report.uploaded(clone=bool(order.clone), preallocated=done.preallocated or is_folder)
        if self._cancel.is_set():
            raise errors.Cancelled
        return report.deadline_passed()

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Answer requests in the block; at its end, those of the uploads already admitted."""
        settings, request = self._settings, self._settings.request
        limits = http.Limits(settings.idle, self._patience, request.fetch.min_speed)
        listener = upload_listener.Listener(settings.tls.context(), self._answer, limits)
        with listener.listen(settings.host, settings.port, self._end) as port:
            log.info("listening address=%r port=%d target=%r", settings.host, port, request.target)
            yield

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
        return self.running is None or self.running.has_failed

    @property
    def _has_succeeded(self) -> bool:
        """Whether an upload has been written and synced."""
        running = self.running
        return running is not None and running.work.done() and running.work.exception() is None

    def _answer(self, request: Request, exchange: Exchange) -> Answer:
        """Process one request and return the answer. Raises ``Refusal``."""
        if request.path == "/healthz" and request.method in {"GET", "HEAD"}:
            return Answer(text="OK")
        found = _PATH.fullmatch(request.path)
        kind, name = found.groups() if found else ("", None)
        if kind == RESUMABLE:
            return self._resumable.answer(request, exchange, name or "")
        if kind not in KINDS or name is not None:
            raise Refusal(404)
        if request.method == "HEAD" and kind in PROBED:
            return Answer(headers={headers.OFFER: headers.EXTENTS} if kind == "upload-async" else {})
        http.authorize(request, self._settings.client_name, "POST")
        try:
            if "content-range" in request.headers:
                # Clients in browsers send large files in parts (RFC 9110, 14.4).
                hint = "send all of it in one request, or use upload-resumable"
                raise errors.RequestError(f"Content-Range: the request has only a part of the file; {hint}")
            content: upload.Content = request.content
            size = request.length
            if kind.startswith("upload-form"):
                content, size = form.FormFile(request.headers.get("content-type", ""), content), None
            running = self.begin(request.headers, size, archive=kind == "upload-archive")
            exchange.send_continue()
            if failure := running.receive(content):
                running.fail(failure)
            else:
                running.body.end()
            running.wait(early=kind.endswith("-async"))
        except errors.Error as err:
            return http.failed(err)
        return Answer()

    def begin(
        self, fields: Mapping[str, str], size: int | None, *, archive: bool = False
    ) -> upload_running.Running:
        """Begin an upload with the headers of a request. Raises ``Refusal`` and ``RequestError``."""
        with self._admitting:
            self._resumable.drop_abandoned()
            if self._ending:
                raise Refusal(503, headers.LEAVING, "the upload server is ending")
            if self.running is not None and not self.running.work.done():
                raise Refusal(503, reason="another upload is running, or its disk is being written")
            if self._has_succeeded:
                raise Refusal(409, reason="an earlier upload has succeeded")
            order = upload_running.order(self._settings.request, fields, archive=archive)
            self.running = upload_running.Running(order, size, self._cancel)
            self.running.work.add_done_callback(self._ended)
            log.info("upload started size=%r clone=%r", size, order.clone)
            return self.running

    def _ended(self, work: futures.Future[Result]) -> None:
        failure = work.exception()
        if isinstance(failure, errors.Error):
            log.error("upload failed: %s", failure)
        elif failure is not None:
            log.error("internal error", exc_info=failure)
        self._wake.set()
