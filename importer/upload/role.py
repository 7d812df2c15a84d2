"""The upload server role: serve until one upload succeeds, then report (contract, Upload server)."""

from __future__ import annotations

import datetime as dt
import logging
import pathlib
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract, execute, report
from cdi_worker.importer.upload import headers
from cdi_worker.importer.upload import settings as upload_settings

if TYPE_CHECKING:
    from cdi_worker.importer.upload import server as upload_server

log = logging.getLogger(__name__)


def run(env: Mapping[str, str], paths: contract.Paths, cancel: cancelling.Cancel) -> report.Report:
    """Serve until one upload is on storage, the deadline passes, or ``cancel`` is set."""
    return serve(make(upload_settings.read(env, paths), cancel))


def make(settings: upload_settings.Settings, cancel: cancelling.Cancel) -> upload_server.Server:
    """Return a server. Raises ``errors.MissingExtra``."""
    with errors.optional("the upload server", package="h11 or multipart", extra="upload"):
        from cdi_worker.importer.upload import server as upload_server
    return upload_server.Server(settings, cancel)


def serve(server: upload_server.Server) -> report.Report:
    """Serve until an upload succeeds or the deadline passes. Raises ``errors.Error``."""
    settings = server.settings
    # Loaded before the first client connects, so that no upload waits for it.
    execute.load_frequent()
    with server.listen(), server.cancel.on_set(server.wake.set):
        while not (server.done.is_set() or server.cancel.is_set()):
            left = None
            if settings.deadline is not None:
                seconds = (settings.deadline - dt.datetime.now(dt.UTC)).total_seconds()
                left = min(max(0.0, seconds), threading.TIMEOUT_MAX)
            if left == 0 and server.is_idle:
                log.info("deadline passed deadline=%s", settings.deadline)
                break
            # After the deadline, the end of the running upload is waited for.
            server.wake.wait(left or None)
            server.wake.clear()
    # An upload that was admitted before the end has finished by now, perhaps with success.
    if server.has_succeeded and server.running is not None:
        done, order = server.running.work.result(), server.running.order
        # CDI always reports files that were cloned into a folder as preallocated.
        is_folder = order.clone == headers.FILESYSTEM and pathlib.Path(order.request.target).is_dir()
        return report.uploaded(clone=bool(order.clone), preallocated=done.preallocated or is_folder)
    if server.cancel.is_set():
        raise errors.Cancelled
    return report.deadline_passed()
