"""Client of resumable uploads, in as many requests as needed (server: ``upload.resumable``)."""

from __future__ import annotations

import abc
import base64
import contextlib
import dataclasses
import logging
import urllib.parse
from collections.abc import Callable, Generator

from cdi_worker import errors
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.importer import progress
from cdi_worker.importer.send import client as upload_client
from cdi_worker.importer.upload import headers as upload_headers

log = logging.getLogger(__name__)

HEADERS = {"Tus-Resumable": "1.0.0"}
CONTENT = {"Content-Type": "application/offset+octet-stream"}
#: The key in ``Upload-Metadata`` that identifies the bytes.
FINGERPRINT = "fingerprint"
#: How often an upload continues after the server has lost it, or all of a long attempt.
LOSSES = 5
#: Statuses of servers that do not support resumable uploads.
UNKNOWN = frozenset({400, 404, 405, 501})


class Stream(abc.ABC):
    """Bytes that can be produced again from any offset. ``length`` in bytes, None if unknown."""

    length: int | None = None

    def __init__(self, reporter: progress.Progress) -> None:
        self._reporter = reporter
        self._reported = 0

    def _report(self, end: int, count: Callable[[int], None]) -> None:
        """Report to ``count`` the bytes before ``end`` that were not reported yet."""
        if end > self._reported:
            count(end - self._reported)
            self._reported = end

    @abc.abstractmethod
    def chunks(self, offset: int, /) -> Generator[bytes | memoryview, None, None]:
        """Yield the bytes from ``offset`` on; each piece is valid until the next."""

    @abc.abstractmethod
    def restart(self, kept: str, /) -> None:
        """Begin again for a server that has lost the upload; ``kept``: see ``upload.headers.KEPT``."""


@dataclasses.dataclass
class Sender:
    """Sends one stream to ``path``, the tus collection; fails after an outage of ``patience`` seconds.

    ``headers`` are sent with the request that creates the upload. ``reporter`` counts the bytes sent and the
    failures that are retried. ``fingerprint`` identifies the bytes for a later run; without it no run resumes
    the upload.
    """

    client: upload_client.Client
    path: str
    cancel: cancelling.Cancel
    patience: float
    headers: upload_client.Headers
    reporter: progress.Progress
    fingerprint: str = ""
    #: What the server has of the content that ``headers`` state.
    kept: str = ""
    #: The path of the upload. Another client's upload may take its place on the server.
    _place: str = dataclasses.field(default="", init=False)

    def begin(self, length: int | None) -> bool:
        """Create the upload on the server; return whether the server supports resumable uploads."""
        more = {"Upload-Defer-Length": "1"} if length is None else {"Upload-Length": str(length)}
        if self.fingerprint:
            more["Upload-Metadata"] = self._metadata
        headers = {**HEADERS, **more, **self.headers}
        work = "reads back what it has of the clone" if upload_headers.CONTENT in headers else ""
        # Safe to repeat: the server drops an upload whose answer was lost when the next one is created.
        answer = self._ask("POST", self.path, headers, work)
        if answer.status in UNKNOWN and "Saving stream failed" not in answer.text:
            return False
        check(self.client, answer)
        self._go(answer.header("Location"))
        self.kept = answer.header(upload_headers.KEPT)
        return True

    def left_over(self, length: int | None) -> int | None:
        """Return how many bytes of this upload the server has from an earlier run, None if it has none.

        Without a ``length``, only an upload counts of which the server has everything.
        """
        answer = self.client.ask("HEAD", self.path, HEADERS)
        offset, is_same = _offset(answer), answer.header("Upload-Metadata") == self._metadata
        if not is_same or answer.header("Upload-Length") != str(offset if length is None else length):
            return None
        self._go(answer.header("Content-Location"))
        return offset

    def _ask(
        self, method: str, path: str, headers: upload_client.Headers, work: str = ""
    ) -> upload_client.Answer:
        return retry.patiently(
            lambda: self.client.ask(method, path, headers, work=work),
            self.patience,
            self.cancel,
            self.reporter.retry,
        )

    def _go(self, location: str) -> None:
        """Send later requests to the upload whose name ends ``location``: proxies may change the rest."""
        name = urllib.parse.urlsplit(location).path.rpartition("/")[2]
        self._place = f"{self.path}/{name}" if name else self.path

    def send(self, stream: Stream, offset: int = 0) -> None:
        """Send ``stream`` and return when the server has the disk on storage. Raises ``errors.Error``."""
        patience = self._new_patience()
        losses, furthest = 0, offset
        while (failure := self._attempt(stream, offset)) is not None:
            # The outage begins now, however long the attempt lasted.
            # None: the server has no such upload.
            now = _offset(self._ask("HEAD", self._place, HEADERS))
            if now is not None and now > furthest:
                patience.progress(now - furthest, self.client.url, now)
                furthest = now
            elif now is None or (patience.is_over and not isinstance(failure.__cause__, TimeoutError)):
                # The server has restarted, or has nothing of a long attempt. It may lose again and again.
                losses += 1
                if losses > LOSSES or (now is None and not self.begin(stream.length)):
                    raise errors.UploadFailed(
                        url=self.client.url, reason="the server lost the upload; run it again"
                    )
                if now is None:
                    stream.restart(self.kept)
                patience = self._new_patience()
                now = furthest = now or 0
            patience.wait(failure, now)
            log.info("upload resumed offset=%d", now)
            offset = now

    def _new_patience(self) -> retry.Patience:
        return retry.Patience(self.patience, self.cancel, min_speed=0, retried=self.reporter.retry)

    def _attempt(self, stream: Stream, offset: int) -> errors.Transient | None:
        """Send the stream from ``offset`` on in one request; return why it did not end, None if it did."""
        headers = {**HEADERS, **CONTENT, "Upload-Offset": str(offset)}
        length = None if stream.length is None else stream.length - offset
        try:
            # A failed request leaves the generator open, and with it perhaps a running tar.
            with contextlib.closing(stream.chunks(offset)) as pieces:
                body = upload_client.Body(pieces, self.reporter.read, length)
                answer = self.client.ask("PATCH", self._place, headers, body)
        except errors.Transient as err:
            log.info("upload interrupted reason=%s", err)
            return err
        if answer.status in {404, 409} or (answer.status == 400 and answer.header("Upload-Offset")):
            # The server received only a part, or has restarted and lost the upload.
            return errors.Transient(url=self.client.url, reason=answer.reason())
        check(self.client, answer)
        return None

    @property
    def _metadata(self) -> str:
        return f"{FINGERPRINT} {base64.b64encode(self.fingerprint.encode()).decode()}"


def _offset(answer: upload_client.Answer) -> int | None:
    return upload_headers.number(answer.header("Upload-Offset")) if answer.is_good else None


def check(client: upload_client.Client, answer: upload_client.Answer) -> None:
    """Raise ``errors.UploadFailed`` if the server refused."""
    if not answer.is_good:
        login = errors.Remedy([("give the client's certificate", "certificate"), ("a token", "token")])
        remedy = login if answer.status == 401 else None
        raise errors.UploadFailed(url=client.url, reason=answer.reason(), remedy=remedy)
