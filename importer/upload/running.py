"""One running upload: its import request, its HTTP requests' bytes, and the thread that imports them."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent import futures

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import execute, progress
from cdi_worker.importer import request as request_module
from cdi_worker.importer.request import Request
from cdi_worker.importer.result import Result
from cdi_worker.importer.upload import headers
from cdi_worker.sources import clone, upload
from cdi_worker.sources.clone import SentDisk

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Order:
    """The import that an HTTP request asks for.

    ``clone``: a content type of ``headers.CLONES``, or empty; ``ours``: the body is in our own clone format.
    ``encoding``: the Content-Encoding of the body. ``content``: what a clone states to send.
    """

    request: Request
    clone: str
    ours: bool
    encoding: str = ""
    content: SentDisk | None = None

    def source(
        self,
        body: upload.Body,
        size: int | None,
        cancel: cancelling.Cancel,
        keep: Callable[[tuple[int, int]], object],
    ) -> upload.UploadSource:
        """Return the source of the bytes. ``size``: of the body, None if unknown.

        ``keep``: see ``clone.CloneSource``.
        """
        if self.clone:
            is_tar = self.clone == headers.FILESYSTEM
            return clone.CloneSource(
                body, cancel, is_tar=is_tar, ours=self.ours, content=self.content, keep=keep
            )
        return upload.UploadSource(body, size, cancel, encoding=self.encoding)


def order(settings: Request, fields: Mapping[str, str], *, archive: bool) -> Order:
    """Return the import for the header ``fields`` of a request. A clone header overrides the path, as in CDI.

    Raises ``RequestError``.
    """
    content_type = fields.get(headers.CONTENT_TYPE, "")
    kind = content_type if content_type in headers.CLONES else ""
    form = "archive" if archive and not kind else "kubevirt"
    if kind == headers.FILESYSTEM:
        form = request_module.CLONE
    chosen = fields.get(headers.CHOICE, "") if kind else ""
    if chosen not in {"", headers.EXTENTS}:
        # A source that has asked another server, which was replaced by this one.
        raise errors.RequestError(f"unknown clone format {chosen!r}; this server offers {headers.EXTENTS!r}")
    ours = bool(chosen)
    content = SentDisk.parse(fields.get(headers.CONTENT, "")) if ours and kind == headers.BLOCK else None
    # No other user of the volume knows the token: see ``attempt.Attempt.journal``.
    owner = content.token if content else ""
    request = request_module.for_upload(settings, form, fields.get(headers.CHECKSUM), owner)
    return Order(request, kind, ours, fields.get("content-encoding", ""), content)


class Running:
    """An upload in progress. ``size``: bytes of all its requests, None if unknown.

    ``work`` is done when the import has succeeded or failed. Thread-safe.
    """

    def __init__(self, order: Order, size: int | None, cancel: cancelling.Cancel) -> None:
        self.order = order
        self.body = upload.Body()
        #: The part of a clone's disk that the target holds; an empty one if the job has ended.
        self.kept: futures.Future[tuple[int, int]] = futures.Future()
        #: Set when the job has accepted the bytes or has ended.
        self._accepted = threading.Event()
        # Not a shared pool: the programs that the import starts die with their thread (images.tools.process).
        self._executor = futures.ThreadPoolExecutor(1, "upload")
        #: Ends what the import does without bytes, such as reading back.
        self._failing = cancel.child()
        self.work = self._executor.submit(self._import, size)
        self.work.add_done_callback(self._ended)

    @property
    def has_failed(self) -> bool:
        return self.work.done() and self.work.exception() is not None

    def _import(self, size: int | None) -> Result:
        with (
            progress.Logged() as reporter,
            self._failing,
            cancelling.Reads(self._failing) as reads,
        ):
            request = self.order.request
            source = self.order.source(self.body, size, reads, self.kept.set_result)
            return execute.run_source(source, request, reporter, reads, accepted=self._accepted.set)

    def _ended(self, _work: futures.Future[Result]) -> None:
        self.body.end()
        self._accepted.set()
        if not self.kept.done():
            self.kept.set_result((0, 0))
        self._executor.shutdown(wait=False)

    def receive(self, content: upload.Content) -> Exception | None:
        """Let the import read ``content`` until one of them ends; return the error that broke the content."""
        failure = self.body.lend(content)
        if failure is not None:
            log.info("request interrupted received=%d reason=%r", self.body.received, _reason(failure))
        return failure

    def fail(self, failure: Exception) -> None:
        """Abort the import with ``failure``: no more bytes will be received."""
        if not isinstance(failure, errors.Error):
            failure = errors.TransferFailed(
                url=upload.NAME, offset=self.body.received, reason=_reason(failure)
            )
        self.body.fail(failure)
        self._failing.fail(failure)

    def wait(self, *, early: bool = False) -> None:
        """Wait until the import has ended, or with ``early`` has accepted the bytes. Raises its error."""
        if early:
            self._accepted.wait()
            if not self.work.done():
                return
        self.work.result()


def _reason(failure: Exception) -> str:
    if isinstance(failure, OSError) and failure.errno:
        return errors.words(failure)
    return str(failure) or type(failure).__name__
