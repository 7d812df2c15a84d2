"""Connections of requests and urllib3 with our own TLS trust, address checks and cancellation.

These overrides have no public API yet:

- The TLS context. requests has a hook since 2.32 (``get_connection_with_tls_context``), but its
  ``cert_verify`` adds its own CAs; ``verify=`` with a context is missing (psf/requests#2118, closed).
- The address, checked before the first byte is sent (``_new_conn``): a hook for addresses is proposed in
  urllib3#3675.
- Cancelling a connect or the wait for a response (``connect``, ``getresponse``).
  ``HTTPResponse.shutdown()`` (urllib3 2.3) only aborts reads of a response body (urllib3#1602, closed).
- Reading into a buffer without a copy (``read``): urllib3#1540.
- Opening connections before they are needed (``_get_conn``).
"""

from __future__ import annotations

import collections
import functools
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

import requests
import requests.adapters
import urllib3
import urllib3.connection

from cdi_worker import errors
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.sources import responses, sockets
from cdi_worker.sources.web import proxies

#: Bytes of one read of a body without a length. Larger reads mean less work in Python.
READ_SIZE = 512 * 1024

#: Metadata servers that are not link-local: AWS, Google, Alibaba, Azure. They hand out the machine's keys.
CLOUDS = frozenset({"fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16"})


class InternalAddress(Exception):
    """An external server or name server directs us to an internal address (server-side request forgery)."""


class Border:
    """Refuses connections from an external first server to internal addresses. One per session.

    The user chooses the first server; redirects and DNS choose later ones, so that the address of the peer
    counts. Private networks are allowed: mirrors of a cluster are there. A proxy counts as external.
    """

    def __init__(self) -> None:
        self._is_free: bool | None = None

    def check(self, peer: str | None) -> None:
        """Raise ``InternalAddress`` if a connection to ``peer`` is forbidden. None: through a proxy."""
        inside = peer is not None and is_inside(peer)
        if self._is_free is None:
            self._is_free = inside
        if inside and not self._is_free:
            raise InternalAddress(
                f"leads to {peer}, an internal address of this machine or its cloud; to import from there, "
                "give that URL directly"
            )


def is_inside(address: str) -> bool:
    """Return whether an IP address is loopback, link-local, unspecified or a metadata server."""
    found = ipaddress.ip_address(address)
    found = getattr(found, "ipv4_mapped", None) or found
    return found.is_loopback or found.is_link_local or found.is_unspecified or str(found) in CLOUDS


class Adapter(requests.adapters.HTTPAdapter):
    """An adapter with our own TLS context, whose waits are aborted by ``cancel``.

    requests would add its own CAs to the context otherwise. ``context`` is called only when needed: loading
    the system's CAs takes 20 ms, which plain http does not need.
    """

    def __init__(
        self,
        context: Callable[[], ssl.SSLContext],
        connections: int,
        cancel: cancelling.Cancel,
        min_speed: float = retry.MIN_SPEED,
    ) -> None:
        self._context = context
        # A pool passes unknown arguments on to its connections.
        shared: dict[str, Any] = {"cancel": cancel, "border": Border(), "min_speed": min_speed}
        self._pools = {
            "http": functools.partial(_PlainPool, **shared),
            "https": functools.partial(_SecurePool, **shared),
        }
        super().__init__(pool_connections=4, pool_maxsize=connections + 2, max_retries=0)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = self._pools

    def get_connection_with_tls_context(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.url.lower().startswith("https:"):
            self.poolmanager.connection_pool_kw["ssl_context"] = self._context()
        return super().get_connection_with_tls_context(request, *args, **kwargs)

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        context = self._context()
        manager = super().proxy_manager_for(proxy, **kwargs, ssl_context=context, proxy_ssl_context=context)
        manager.pool_classes_by_scheme = self._pools
        return manager

    def proxy_headers(self, proxy: str) -> dict[str, str]:
        """Return the credentials for a proxy. requests cannot send all passwords, nor an empty one."""
        return proxies.headers(proxy)

    def cert_verify(self, conn: Any, url: str, verify: Any, cert: Any) -> None:
        if url.lower().startswith("https:"):
            conn.cert_reqs = self._context().verify_mode

    def connect_early(
        self, response: requests.Response, count: int, *, verify: bool | str | None, timeout: float
    ) -> None:
        """Open ``count`` connections to the server of a response, whose body is not read yet.

        Not if it closes its connections: a server that handles one after the other would wait for a request
        on one of these.
        """
        connection: Any = response.raw.connection
        if connection is not None and not connection.answer.will_close:
            pool = self.get_connection_with_tls_context(response.request, verify)
            pool.connect_early(count, timeout)

    def close(self) -> None:
        """Close all connections, also those that are being opened, once they are open."""
        pools = self.poolmanager.pools
        for key in pools.keys():  # noqa: SIM118  (it cannot be iterated)
            pools[key].close()
        super().close()


def read(raw: Any, into: memoryview) -> int:
    """Read the next bytes of a body, as many as one system call returns; 0 at the end.

    ``raw``: urllib3's response. Its ``readinto`` loops until the buffer is full and loses the bytes before a
    reset; its ``read1`` copies while holding the GIL. So this reads from http.client's response, except for
    the last byte or chunk, by which urllib3 notices the end of the body.
    """
    answer, left = getattr(raw.connection, "answer", None), raw.length_remaining
    if answer is not None and answer.fp is not None:
        count: int = 0
        if left and answer.length == left > 1:
            count = answer.receive(into[: left - 1])
            raw.length_remaining -= count
        elif left is None:
            count = answer.receive_chunks(into)
        if count:
            return count
    if answer is not None:
        answer.reset()
    data = raw.read1(min(len(into), READ_SIZE))
    into[: len(data)] = data
    return len(data)


def waiting_time(response: requests.Response) -> float:
    """Return the seconds from a request to its answer, whose body is not read yet.

    Not those before the request, which ``response.elapsed`` has too: to connect, and to load the CAs.
    """
    connection = getattr(response.raw, "connection", None)
    return float(getattr(connection, "waited", response.elapsed.total_seconds()))


class _Plain(urllib3.connection.HTTPConnection):
    """A connection that checks its peer. ``cancel`` aborts its waits until a response begins.

    After that ``pinned`` aborts the reads of the response.
    """

    #: Kept for ``read``.
    answer: responses.Response
    #: Seconds from the last request to its answer.
    waited: float
    #: The socket of the response, also if the connection is not kept alive.
    answering: Any = None
    _is_abandoned = False

    def __init__(
        self, *args: Any, cancel: cancelling.Cancel, border: Border, min_speed: float, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._min_speed = min_speed
        self._cancel = cancel
        self._border = border

    # http.client only calls it; a class is not needed.
    def response_class(self, *args: Any, **kwargs: Any) -> http.client.HTTPResponse:  # type: ignore[override]  # a class attribute in http.client
        self.answer = responses.Response(*args, min_speed=self._min_speed, **kwargs)
        return self.answer

    def connect(self) -> None:
        try:
            # The socket is only accessible after the handshakes; before, it cannot be shut down.
            cancelling.run_apart(super().connect, self._cancel, grace=0, late=super().close)
        except errors.Cancelled:
            self._is_abandoned = True
            raise

    def close(self) -> None:
        """Close the connection, unless an abandoned connect still uses it and closes it later.

        Closing the socket under that thread would free the descriptor's number for another file, on which
        the thread would start TLS.
        """
        if not self._is_abandoned:
            super().close()

    def _new_conn(self) -> socket.socket:
        made = super()._new_conn()
        try:
            # Before any byte is sent: an internal service may act on the first bytes, even of TLS.
            self._border.check(None if self.proxy else made.getpeername()[0])
        except BaseException:
            made.close()
            raise
        return made

    def getresponse(self) -> Any:
        self.answering = self.sock
        response = None
        begun = time.monotonic()
        try:
            with self._cancel.ending(lambda: sockets.shut(self.answering)):
                response = super().getresponse()
        except errors.Cancelled:
            if response is not None:
                response.close()
            raise
        self.waited = time.monotonic() - begun
        return response


class _Secure(_Plain, urllib3.connection.HTTPSConnection):
    @property
    def is_connected(self) -> bool:
        """Whether an idle connection is open: a server may send tickets at any time (RFC 8446, 4.6.1)."""
        if super().is_connected:
            return True
        if not isinstance(self.sock, ssl.SSLSocket):
            return False
        self.sock.settimeout(0)
        try:
            # The end of the connection, or bytes that no request has asked for.
            self.sock.recv(1)
        except ssl.SSLWantReadError:
            return True
        except OSError:
            pass
        return False


class _PlainPool(urllib3.HTTPConnectionPool):
    """Connections to one server, which can be opened before they are needed."""

    ConnectionCls = _Plain

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: One for each connection that is being opened; set when it is in the pool or has failed.
        self._coming: collections.deque[threading.Event] = collections.deque()

    def connect_early(self, count: int, timeout: float) -> None:
        """Begin to open ``count`` connections. A failure is left to the request that needs the connection."""
        # All are taken first: what is in the pool again is connected.
        take = super()._get_conn
        for made in [take() for _ in range(count)]:
            event = threading.Event()
            made.timeout = timeout
            self._coming.append(event)
            threading.Thread(target=self._connect, args=(made, event), name="early", daemon=True).start()

    def _connect(self, made: Any, event: threading.Event) -> None:
        try:
            if made.sock is None:
                made.connect()
            self._put_conn(made)
        except Exception:  # noqa: BLE001  (the request that needs it connects itself)
            made.close()
        finally:
            event.set()

    def _get_conn(self, timeout: float | None = None) -> Any:
        """Return an open connection if there is one, or else wait for one that is being opened.

        A server that allows few connections refuses new ones while one of them is idle.
        """
        while True:
            found: Any = super()._get_conn(timeout)
            places = self.pool
            if found.sock is not None:
                return found
            if places is None or not places.empty():
                continue
            try:
                coming = self._coming.popleft()
            except IndexError:
                return found
            coming.wait()


class _SecurePool(_PlainPool, urllib3.HTTPSConnectionPool):
    ConnectionCls = _Secure

    def _validate_conn(self, conn: Any) -> None:
        """Connect. urllib3 warns of each connection that is not verified, which the user has asked for."""
        if conn.is_closed:
            conn.connect()
