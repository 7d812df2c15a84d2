"""A body sent in as many requests as it takes (``upload.resumable`` is the other end)."""

from __future__ import annotations

import abc
import base64
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Generator

from cdi_worker import errors
from cdi_worker.images.engine import retry
from cdi_worker.send import client as upload_client

log = logging.getLogger(__name__)

SAYS = {"Tus-Resumable": "1.0.0"}
CONTENT = {"Content-Type": "application/offset+octet-stream"}
#: What names the bytes, in ``Upload-Metadata``.
FINGERPRINT = "fingerprint"
#: How often an upload starts over whose server has been started anew.
RESTARTS = 5
#: What a server answers that knows nothing of this way.
UNKNOWN = frozenset({400, 404, 405, 501})


class Stream(abc.ABC):
    """Bytes that can be made again from any offset. ``length``: None: as many as come."""

    length: int | None

    @abc.abstractmethod
    def chunks(self, offset: int, /) -> Generator[bytes | memoryview, None, None]:
        """Yield what follows ``offset``, each piece valid until the next."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sender:
    """``path``: of the collection. ``patience``: seconds without progress until it is given up.

    ``headers`` go with the request that begins. ``retried`` is told of every failure that another request
    may mend. ``fingerprint`` names the bytes, empty: nobody asks for them again.
    """

    client: upload_client.Client
    path: str
    cancel: retry.Cancel
    patience: float
    headers: upload_client.Headers
    retried: Callable[[errors.Error], object]
    fingerprint: str = ""

    def begin(self, length: int | None) -> bool:
        """Make an upload on the server; False: the server offers none in this way."""
        more = {"Upload-Defer-Length": "1"} if length is None else {"Upload-Length": str(length)}
        if self.fingerprint:
            more["Upload-Metadata"] = self._metadata
        headers = {**SAYS, **more, **self.headers}
        # One that nobody has heard the answer of is dropped for the next.
        answer = retry.patiently(
            lambda: self.client.ask("POST", self.path, headers), self.patience, self.cancel
        )
        if answer.status in UNKNOWN and "Saving stream failed" not in answer.text:
            return False
        _check(self.client, answer)
        return True

    def left_over(self, length: int) -> int | None:
        """Return how much of this very upload the server has from an earlier run, None if nothing."""
        answer = self.client.ask("HEAD", self.path, SAYS)
        same = answer.header("Upload-Metadata") == self._metadata
        return _offset(answer) if same and answer.header("Upload-Length") == str(length) else None

    def send(self, stream: Stream, offset: int = 0) -> None:
        """Send everything; return when the disk is on the other's storage. Raises ``errors.Error``."""
        patience = retry.Patience(self.patience, self.cancel)
        restarts = 0
        while not self._attempt(stream, offset, patience):
            now = self._where(patience)
            if now is None:
                restarts += 1
                if restarts > RESTARTS or not self.begin(stream.length):
                    raise errors.UploadFailed(url=self.client.url, reason="the server has lost the upload")
                now = 0
            elif now > offset:
                patience.progress()
            log.info("upload goes on offset=%d", now)
            offset = now

    def _attempt(self, stream: Stream, offset: int, patience: retry.Patience) -> bool:
        """Send what follows ``offset`` in one request; False: there is more to send."""
        headers = {**SAYS, **CONTENT, "Upload-Offset": str(offset)}
        length = None if stream.length is None else stream.length - offset
        try:
            # A request that breaks leaves its stream half-way, perhaps with a program behind it.
            with contextlib.closing(stream.chunks(offset)) as pieces:
                body = upload_client.Body(pieces, length)
                answer = self.client.ask("PATCH", self.path, headers, body)
        except errors.Transient as err:
            log.info("upload broken reason=%s", err)
            self.retried(err)
            patience.wait(err, offset)
            return False
        if answer.status in {404, 409} or (answer.status == 400 and answer.header("Upload-Offset")):
            # Not all that was sent has arrived, or the server is another one now.
            patience.wait(errors.Transient(url=self.client.url, reason=answer.reason()), offset)
            return False
        _check(self.client, answer)
        return True

    def _where(self, patience: retry.Patience) -> int | None:
        """Ask, until it answers, how much the server has; None: it knows nothing of the upload."""
        while True:
            try:
                return _offset(self.client.ask("HEAD", self.path, SAYS))
            except errors.Transient as err:
                patience.wait(err, 0)

    @property
    def _metadata(self) -> str:
        return f"{FINGERPRINT} {base64.b64encode(self.fingerprint.encode()).decode()}"


def _offset(answer: upload_client.Answer) -> int | None:
    text = answer.header("Upload-Offset")
    return int(text) if answer.is_good and text.isascii() and text.isdigit() else None


def _check(client: upload_client.Client, answer: upload_client.Answer) -> None:
    if not answer.is_good:
        raise errors.UploadFailed(url=client.url, reason=answer.reason())
