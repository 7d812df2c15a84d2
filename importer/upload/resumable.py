"""Resumable uploads, in several requests, after the tus protocol 1.0 (https://tus.io)."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent import futures

from cdi_worker import errors
from cdi_worker.formats import coding
from cdi_worker.importer.upload import headers, http
from cdi_worker.importer.upload import running as upload_running
from cdi_worker.importer.upload.http import Answer, Exchange, Refusal, Request

log = logging.getLogger(__name__)

VERSION = "1.0.0"
#: Headers of every answer.
HEADERS = {"Tus-Resumable": VERSION, "Cache-Control": "no-store"}
CAPABILITIES = {"Tus-Version": VERSION, "Tus-Extension": "creation,creation-defer-length,termination"}
CONTENT = "application/offset+octet-stream"


class Session:
    """One upload. ``length`` in bytes; None: not declared yet, or never."""

    def __init__(self, running: upload_running.Running, length: int | None, metadata: str) -> None:
        self.name = secrets.token_hex(16)
        self.running = running
        self.length = length
        self.metadata = metadata
        self._patience: threading.Timer | None = None

    @property
    def offset(self) -> int:
        return self.running.body.received

    @property
    def is_open(self) -> bool:
        """Whether more bytes are expected."""
        return not self.running.body.is_complete and not self.running.work.done()

    def headers(self) -> dict[str, str]:
        fields = {"Upload-Offset": str(self.offset)}
        fields |= {"Upload-Defer-Length": "1"} if self.length is None else {"Upload-Length": str(self.length)}
        return fields | ({"Upload-Metadata": self.metadata} if self.metadata else {})

    def wait(self, seconds: float) -> None:
        """Abort the upload after ``seconds`` without a request."""
        self.stop_waiting()
        abandoned = TimeoutError(f"upload abandoned: no data for {seconds:.0f} s")
        self._patience = threading.Timer(seconds, self.running.fail, (abandoned,))
        self._patience.daemon = True
        self._patience.start()

    def stop_waiting(self) -> None:
        # Also called by the import's thread, so the timer is taken first.
        timer, self._patience = self._patience, None
        if timer is not None:
            timer.cancel()


class Resumable:
    """Request handlers of the tus protocol, for one upload at a time.

    ``begin``: see ``Server.begin``. ``patience``: seconds that an upload waits for its next request.
    """

    def __init__(
        self,
        begin: Callable[[Mapping[str, str], int | None], upload_running.Running],
        client_name: str,
        patience: float,
    ) -> None:
        self._begin = begin
        self._client_name = client_name
        self._patience = patience
        self._session: Session | None = None

    def answer(self, request: Request, exchange: Exchange, name: str) -> Answer:
        """Answer a request to the collection (empty ``name``) or to the upload ``name``."""
        # tus 1.0, X-HTTP-Method-Override: for clients that can send only GET and POST.
        request.method = request.headers.get("x-http-method-override", request.method)
        try:
            answer = self._answer(request, exchange, name)
        except Refusal as refusal:
            answer = refusal.answer
        except errors.Error as err:
            answer = http.failed(err)
            if isinstance(err, errors.Cancelled):
                # Another server may continue the upload.
                answer = dataclasses.replace(answer, status=503, headers=headers.LEAVING)
        return dataclasses.replace(answer, headers={**HEADERS, **answer.headers})

    def _answer(self, request: Request, exchange: Exchange, name: str) -> Answer:
        http.authorize(request, self._client_name, "OPTIONS", "POST", "HEAD", "PATCH", "DELETE")
        if request.method == "OPTIONS":
            return Answer(204, headers=CAPABILITIES)
        if request.headers.get("tus-resumable", VERSION) != VERSION:
            return Answer(412, headers=CAPABILITIES)
        if request.method == "POST" and not name:
            return self._create(request)
        session = self._session
        if session is None or session.running.has_failed or name not in {"", session.name}:
            raise Refusal(404)
        if request.method == "PATCH":
            return self._patch(request, exchange, session)
        with session.running.body.take_over():
            if request.method == "HEAD":
                return Answer(headers={**session.headers(), "Content-Location": _location(request, session)})
            if request.method == "DELETE":
                if not session.is_open:
                    # All bytes have been received and become a disk: 204 would report them as deleted.
                    if session.running.work.done():
                        raise Refusal(409, reason="the upload has succeeded")
                    raise Refusal(503, reason="all bytes have arrived, and the disk is being written")
                session.running.fail(ConnectionError("deleted by the client"))
                futures.wait({session.running.work})
                return Answer(204)
        raise Refusal(404)

    def _create(self, request: Request) -> Answer:
        length = _length(request)
        running = self._begin(request.headers, length)
        session = Session(running, length, request.headers.get("upload-metadata", ""))
        with session.running.body.take_over():
            self._session = session
            running.work.add_done_callback(lambda _: session.stop_waiting())
            if length == 0:
                # An empty upload is already complete: no PATCH follows that could report the result.
                running.body.end()
                running.wait()
            more = {"Location": _location(request, session)}
            if running.order.content is not None:
                # A clone: the target is read back first, which takes its time.
                start, end = running.kept.result()
                if running.work.done():
                    running.wait()
                more |= {headers.KEPT: f"{start}-{end}"} if start < end else {}
            if session.is_open:
                session.wait(self._patience)
        return Answer(201, headers={**session.headers(), **more})

    def _patch(self, request: Request, exchange: Exchange, session: Session) -> Answer:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # The offsets are those of the file, not of a compressed one.
        encoding = coding.normal(request.headers.get("content-encoding", ""))
        if kind != CONTENT or encoding != coding.IDENTITY:
            raise Refusal(415)
        with session.running.body.take_over():
            if request.headers.get("upload-offset") != str(session.offset):
                raise Refusal(409, session.headers())
            length = session.length
            if length is None and "upload-length" in request.headers:
                # tus 1.0, creation-defer-length
                length = _length(request)
            if length is not None and session.offset + (request.length or 0) > length:
                raise Refusal(413, session.headers())
            session.length = length
            session.stop_waiting()
            exchange.send_continue()
            failure = session.running.receive(request.content)
            if length is not None and session.offset > length:
                session.running.fail(errors.RequestError("received more bytes than Upload-Length declares"))
            elif session.offset == length or (failure is None and length is None and request.length is None):
                # An upload without a length ends with a request without one: after one with a length,
                # more may follow, and the last one declares the length of the upload.
                # A connection that breaks after the last byte does not matter: HEAD returns the full offset.
                session.running.body.end()
                # HEAD then shows that all has arrived, also of an upload that never declares its length.
                session.length = session.offset
            if session.is_open:
                session.wait(self._patience)
                return Answer(204 if failure is None else 400, headers=session.headers())
        session.running.wait()
        return Answer(204, headers=session.headers())

    def drop_abandoned(self) -> None:
        """Abort an upload that waits for its client's next request, so that another can begin."""
        session = self._session
        if session is not None and session.is_open and not session.running.body.is_lent:
            session.running.fail(ConnectionError("replaced by another upload"))
            futures.wait({session.running.work})


def _location(request: Request, session: Session) -> str:
    """Return the path of the upload, for a request to it or to the collection."""
    return f"{request.path.rstrip('/').removesuffix(f'/{session.name}')}/{session.name}"


def _length(request: Request) -> int | None:
    """Return the length that a request declares, None if it is to follow. Raises ``RequestError``."""
    text = request.headers.get("upload-length", "")
    if (length := headers.number(text)) is not None:
        return length
    if not text and request.headers.get("upload-defer-length") == "1":
        return None
    raise errors.RequestError(f"Upload-Length: {text!r} is not a number of bytes")
