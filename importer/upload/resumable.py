"""Uploads in several requests, in the manner of the tus protocol 1.0 (https://tus.io)."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import TypeAlias

from cdi_worker import errors
from cdi_worker.upload import http
from cdi_worker.upload import running as upload_running
from cdi_worker.upload.http import Answer, Exchange, Refusal, Request

log = logging.getLogger(__name__)

VERSION = "1.0.0"
#: With every answer.
SAYS = {"Tus-Resumable": VERSION, "Cache-Control": "no-store"}
OFFERS = {"Tus-Version": VERSION, "Tus-Extension": "creation,creation-defer-length,termination"}
CONTENT = "application/offset+octet-stream"
#: No length has so many.
DIGITS = 19
#: Seconds for a request to notice that another one has come.
TURN = 0.1

#: Begins the upload that the headers ask for. Size in bytes, None if unknown. Raises ``Refusal`` and
#: ``RequestError``.
Begin: TypeAlias = Callable[[Mapping[str, str], int | None], upload_running.Running]


class Session:
    """One upload. ``length`` in bytes; None: not told yet, or never (see ``_is_all``)."""

    def __init__(self, running: upload_running.Running, length: int | None, metadata: str) -> None:
        self.name = secrets.token_hex(16)
        self.running = running
        self.length = length
        self.metadata = metadata
        self._turn = threading.Lock()
        self._patience: threading.Timer | None = None

    @property
    def offset(self) -> int:
        return self.running.body.received

    @property
    def waits(self) -> bool:
        """Whether more is to come."""
        return not self.running.body.is_complete and not self.running.work.done()

    @property
    def has_failed(self) -> bool:
        return self.running.work.done() and self.running.work.exception() is not None

    def headers(self) -> dict[str, str]:
        said = {"Upload-Offset": str(self.offset)}
        said |= {"Upload-Defer-Length": "1"} if self.length is None else {"Upload-Length": str(self.length)}
        return said | ({"Upload-Metadata": self.metadata} if self.metadata else {})

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Be the only request. One that still brings bytes is ended: its client has come again."""
        self.running.body.withdraw()
        while not self._turn.acquire(timeout=TURN):
            self.running.body.withdraw()
        try:
            yield
        finally:
            self._turn.release()

    def wait(self, seconds: float) -> None:
        """Give the upload up after so many seconds without a request."""
        self.stop_waiting()
        gone = TimeoutError(f"nobody went on with it for {seconds:.0f} s")
        self._patience = threading.Timer(seconds, self.running.broken, (gone,))
        self._patience.daemon = True
        self._patience.start()

    def stop_waiting(self) -> None:
        # The work's thread stops it too.
        timer, self._patience = self._patience, None
        if timer is not None:
            timer.cancel()


class Resumable:
    """The handlers. There is one upload at a time, here as everywhere else in the server.

    ``patience``: seconds that an upload waits for its next request.
    """

    def __init__(self, begin: Begin, client_name: str, patience: float) -> None:
        self._begin = begin
        self._client_name = client_name
        self._patience = patience
        self._session: Session | None = None

    def answer(self, request: Request, exchange: Exchange, name: str) -> Answer:
        """Answer a request to the collection (no ``name``) or to the upload in it."""
        # For clients that have but GET and POST.
        request.method = request.headers.get("x-http-method-override", request.method)
        try:
            said = self._answer(request, exchange, name)
        except Refusal as refusal:
            said = refusal.answer
        return dataclasses.replace(said, headers={**SAYS, **said.headers})

    def _answer(self, request: Request, exchange: Exchange, name: str) -> Answer:
        http.authorize(request, self._client_name, "OPTIONS", "POST", "HEAD", "PATCH", "DELETE")
        if request.method == "OPTIONS":
            return Answer(204, headers=OFFERS)
        if request.headers.get("tus-resumable", VERSION) != VERSION:
            return Answer(412, headers=OFFERS)
        if request.method == "POST" and not name:
            return self._create(request)
        session = self._session
        if session is None or session.has_failed or name not in {"", session.name}:
            raise Refusal(404)
        if request.method == "PATCH":
            return self._patch(request, exchange, session)
        with session.turn():
            if request.method == "HEAD":
                return Answer(headers=session.headers())
            if request.method == "DELETE":
                return _delete(session)
        raise Refusal(404)

    def _create(self, request: Request) -> Answer:
        try:
            length = _length(request)
            running = self._begin(request.headers, length)
            session = Session(running, length, request.headers.get("upload-metadata", ""))
            session.wait(self._patience)
            self._session = session
            running.work.add_done_callback(lambda _: session.stop_waiting())
            if length == 0:
                # It is complete: no request follows that could be told what becomes of it.
                running.body.end()
                running.wait()
        except errors.Error as err:
            return http.failed(err)
        return Answer(
            201, headers={**session.headers(), "Location": f"{request.path.rstrip('/')}/{session.name}"}
        )

    def _patch(self, request: Request, exchange: Exchange, session: Session) -> Answer:
        with session.turn():
            if refused := _refused(request, session):
                return refused
            if session.length is None:
                session.length = _told_length(request)
            session.stop_waiting()
            exchange.say_continue()
            failure = session.running.take(request.content)
            if session.length is not None and session.offset > session.length:
                session.running.broken(errors.RequestError("more bytes came than Upload-Length says"))
            elif session.offset == session.length or (failure is None and _is_all(request, session)):
                # Whatever broke behind the last byte: a client that asks learns that all is there.
                session.running.body.end()
            if session.waits:
                session.wait(self._patience)
                return Answer(204 if failure is None else 400, headers=session.headers())
        try:
            session.running.wait()
        except errors.Error as err:
            return http.failed(err)
        return Answer(204, headers=session.headers())

    def drop_abandoned(self) -> None:
        """End an upload that waits for its client: another one begins."""
        session = self._session
        if session is not None and session.waits and not session.running.body.is_lent:
            session.running.broken(ConnectionError("another upload has begun"))
            futures.wait({session.running.work})


def _delete(session: Session) -> Answer:
    if not session.waits:
        # Whoever was told that it is gone would be told wrong: all has come, and becomes a disk.
        raise Refusal(409 if session.running.work.done() else 503)
    session.running.broken(ConnectionError("the client has ended it"))
    futures.wait({session.running.work})
    return Answer(204)


def _refused(request: Request, session: Session) -> Answer | None:
    """Return what a PATCH that does not fit is told."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != CONTENT:
        return Answer(415)
    if request.headers.get("upload-offset") != str(session.offset):
        return Answer(409, headers=session.headers())
    try:
        length = _told_length(request) if session.length is None else session.length
    except errors.RequestError as err:
        return http.failed(err)
    if length is not None and session.offset + (request.length or 0) > length:
        return Answer(413, headers=session.headers())
    return None


def _is_all(request: Request, session: Session) -> bool:
    """Tell whether an upload of no told length ends with a request: with one that has none either.

    Of pieces whose lengths are told, more may come; the last of them tells the whole length.
    """
    return session.length is None and request.length is None


def _told_length(request: Request) -> int | None:
    """Return the length that a client tells with a later request. Raises ``RequestError``."""
    return _length(request) if "upload-length" in request.headers else None


def _length(request: Request) -> int | None:
    text = request.headers.get("upload-length", "")
    if text.isascii() and text.isdigit() and len(text) < DIGITS:
        return int(text)
    if not text and request.headers.get("upload-defer-length") == "1":
        return None
    raise errors.RequestError(f"Upload-Length {text!r} is no number")
