"""One upload under way: what its requests bring, and the thread that makes a disk of it."""

from __future__ import annotations

import logging
import threading
from concurrent import futures

from images import retry
from importer import errors, upload_job
from sources import upload

log = logging.getLogger(__name__)


class Running:
    """An upload that has begun. ``size``: bytes that will come, None if unknown.

    ``work`` ends, well or not, when the disk does.
    """

    def __init__(self, order: upload_job.Order, size: int | None, cancel: retry.Cancel) -> None:
        self.order = order
        self.body = upload.Body()
        #: Set when all bytes are there, the image is known to be safe and to fit, or the work has ended.
        self._accepted = threading.Event()
        # A thread of its own: programs that it starts live no longer than it (images.process).
        self._executor = futures.ThreadPoolExecutor(1, "upload")
        self.work = self._executor.submit(
            upload_job.carry_out, order, self.body, size, self._accepted.set, cancel
        )
        self.work.add_done_callback(self._ended)

    def _ended(self, _work: futures.Future[None]) -> None:
        self.body.end()
        self._accepted.set()
        self._executor.shutdown(wait=False)

    def take(self, content: upload.Content) -> Exception | None:
        """Let the work read all of ``content``, unless it ends before; return what broke the content."""
        failure = self.body.lend(content)
        if failure is not None:
            log.info("request broken received=%d reason=%r", self.body.received, _reason(failure))
        return failure

    def broken(self, failure: Exception) -> None:
        """End the work: the rest of the bytes will not come."""
        if not isinstance(failure, errors.Error):
            failure = errors.TransferFailed(
                url=upload.NAME, offset=self.body.received, reason=_reason(failure)
            )
        self.body.fail(failure)

    def wait(self, *, early: bool = False) -> None:
        """Wait for the end, or with ``early`` for all bytes to be accepted. Raises what failed."""
        if early:
            self._accepted.wait()
            if not self.work.done():
                return
        self.work.result()


def _reason(failure: Exception) -> str:
    return str(failure) or type(failure).__name__
