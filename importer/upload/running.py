"""One upload under way: what its requests bring, and the thread that makes a disk of it."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent import futures

from cdi_worker import errors, execute, progress, request
from cdi_worker.formats import checksum
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.sources import upload
from cdi_worker.upload import clone as clone_target
from cdi_worker.upload import headers as upload_headers

log = logging.getLogger(__name__)


class Running:
    """An upload that has begun. ``size``: bytes that will come, None if unknown.

    ``work`` ends, well or not, when the disk does.
    """

    def __init__(self, order: Order, size: int | None, cancel: retry.Cancel) -> None:
        self.order = order
        self.body = upload.Body()
        #: Set when all bytes are there, the image is known to be safe and to fit, or the work has ended.
        self._accepted = threading.Event()
        # A thread of its own: programs that it starts live no longer than it (images.tools.process).
        self._executor = futures.ThreadPoolExecutor(1, "upload")
        self.work = self._executor.submit(carry_out, order, self.body, size, self._accepted.set, cancel)
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


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """What to make of the bytes.

    ``clone``: a content type of ``upload_headers.CLONES``, or empty; ``extents``: as our own source sends it.
    """

    wanted: request.Request
    clone: str
    extents: bool


class Accepted(progress.NullProgress):
    """Tells once when the bytes are all there, safe, and fit: what is left is processing."""

    #: The phases that begin after the last byte was verified (``routes.job``, the routes).
    AFTER = frozenset({"convert", "sync"})

    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell = tell
        self._told = False

    def phase(self, name: str, total: int | None) -> None:
        if name in self.AFTER and not self._told:
            self._told = True
            self._tell()


def order(settings: request.Request, headers: Mapping[str, str], *, archive: bool) -> Order:
    """Return what a request asks for; a clone is one on every path. Raises ``RequestError``."""
    content_type = headers.get(upload_headers.CONTENT_TYPE, "")
    wanted = dataclasses.replace(settings, checksum=headers.get(upload_headers.CHECKSUM) or None)
    if wanted.checksum is not None:
        checksum.parse(wanted.checksum)
    clone = content_type if content_type in upload_headers.CLONES else ""
    if archive and not clone:
        if pathlib.Path(wanted.target).is_block_device():
            raise errors.RequestError("an archive needs a volume with a file system, not a block device")
        folder = str(pathlib.Path(wanted.target).parent)
        wanted = dataclasses.replace(wanted, content_type="archive", target=folder)
    extents = bool(clone) and headers.get(upload_headers.CHOICE) == upload_headers.EXTENTS
    return Order(wanted, clone, extents)


def carry_out(
    what: Order, body: upload.Body, size: int | None, accepted: Callable[[], object], cancel: retry.Cancel
) -> None:
    """Bring the bytes of ``body`` to the target. Raises ``errors.Error``; nothing usable is left then."""
    shown = progress.Several(progress.Lines(sys.stderr), Accepted(accepted))
    if what.clone:
        clone_target.receive(
            what.wanted, what.clone, body, shown, cancel, give_up=body.stop, ours=what.extents
        )
    else:
        execute.bring(upload.UploadSource(body, size), what.wanted, shown, cancelling.Stop(cancel))
