"""Connections of requests and urllib3, as far as they are ours: whom they trust, and how a wait ends."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any

import requests
import requests.adapters
import urllib3
import urllib3.connection

#: One read of a body without a length; the work in Python is for each of these.
READ_SIZE = 512 * 1024

Waiting = set["urllib3.connection.HTTPConnection | _Attempt"]


class Adapter(requests.adapters.HTTPAdapter):
    """An adapter whose TLS context decides, alone, what is trusted, and which can be interrupted.

    requests would add its own list of authorities to the context otherwise. ``context`` is not asked for
    one before it is needed: to read the system's authorities takes 20 ms, of which plain http has no use.
    """

    def __init__(self, context: Callable[[], ssl.SSLContext], connections: int) -> None:
        self._context = context
        self._waiting: Waiting = set()
        self._pools = _pools(self._waiting)
        super().__init__(pool_connections=4, pool_maxsize=connections + 2, max_retries=0)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = self._pools

    def get_connection_with_tls_context(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_secure(request.url):
            self.poolmanager.connection_pool_kw["ssl_context"] = self._context()
        return super().get_connection_with_tls_context(request, *args, **kwargs)

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        context = self._context()
        manager = super().proxy_manager_for(proxy, **kwargs, ssl_context=context, proxy_ssl_context=context)
        manager.pool_classes_by_scheme = self._pools
        return manager

    def cert_verify(self, conn: Any, url: str, verify: Any, cert: Any) -> None:
        if _is_secure(url):
            conn.cert_reqs = self._context().verify_mode

    def interrupt(self) -> None:
        """End the waits of other threads for an answer to begin; what is asked later is not concerned."""
        for waiting in list(self._waiting):
            if isinstance(waiting, _Attempt):
                waiting.leave()
            elif waiting.sock is not None:
                with contextlib.suppress(OSError):
                    waiting.sock.shutdown(socket.SHUT_RDWR)


def read(raw: Any, into: memoryview) -> int:
    """Read the next of a body, as much as one call of the kernel gives; 0 at the end.

    ``raw``: urllib3's answer. Its ``readinto`` loops until all is full, and what came before a reset is
    lost; its ``read1`` makes a copy with all other threads held. So all but the last byte comes straight
    to its place, and the last one tells urllib3 that the body has ended.
    """
    answer, left = getattr(raw.connection, "answer", None), raw.length_remaining
    if answer is not None and answer.fp is not None and left and answer.length == left > 1:
        count: int = answer.fp.readinto1(into[: left - 1])
        answer.length -= count
        raw.length_remaining -= count
        if count:
            return count
    data = raw.read1(min(len(into), READ_SIZE))
    into[: len(data)] = data
    return len(data)


def _is_secure(url: str) -> bool:
    return url.lower().startswith("https:")


def interrupt(session: requests.Session) -> None:
    """End the waits of other threads for an answer of this session."""
    for adapter in session.adapters.values():
        if isinstance(adapter, Adapter):
            adapter.interrupt()


def _pools(waiting: Waiting) -> dict[str, Any]:
    """Return pools by scheme whose connections are in ``waiting`` until an answer begins.

    The read of an answer that has begun can be ended through the answer; before, there is none.
    ``answer`` is kept for ``read``.
    """

    class Plain(urllib3.connection.HTTPConnection):
        answer: http.client.HTTPResponse

        # A class there, of which nothing is wanted but to be called.
        def response_class(self, *args: Any, **kwargs: Any) -> http.client.HTTPResponse:  # type: ignore[override]
            self.answer = http.client.HTTPResponse(*args, **kwargs)
            return self.answer

        def connect(self) -> None:
            attempt = _Attempt(super().connect, self.close)
            waiting.add(attempt)
            try:
                attempt.run()
            finally:
                waiting.discard(attempt)

        def getresponse(self) -> Any:
            waiting.add(self)
            try:
                return super().getresponse()
            finally:
                waiting.discard(self)

    class Secure(Plain, urllib3.connection.HTTPSConnection):
        pass

    class PlainPool(urllib3.HTTPConnectionPool):
        ConnectionCls = Plain

    class SecurePool(urllib3.HTTPSConnectionPool):
        ConnectionCls = Secure

    return {"http": PlainPool, "https": SecurePool}


class _Attempt:
    """A connect in a thread that can be left behind, to ``close`` what it comes to.

    Nothing else ends the wait for a name server, and a socket is known only after the handshakes.
    """

    def __init__(self, connect: Callable[[], None], close: Callable[[], None]) -> None:
        self._connect = connect
        self._close = close
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._is_left = False
        self._failure: BaseException | None = None

    def run(self) -> None:
        threading.Thread(target=self._work, name="connect", daemon=True).start()
        self._over.wait()
        if self._is_left:
            raise ConnectionAbortedError("given up")
        if self._failure is not None:
            raise self._failure

    def leave(self) -> None:
        with self._lock:
            if not self._over.is_set():
                self._is_left = True
                self._over.set()

    def _work(self) -> None:
        try:
            self._connect()
        except BaseException as err:  # noqa: BLE001  (raised again in the thread that waits)
            self._failure = err
        with self._lock:
            self._over.set()
        if self._is_left:
            self._close()
