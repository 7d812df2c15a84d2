"""Connections of requests and urllib3, as far as ours: whom they trust, where they go, how a wait ends.

What is overridden here has no public API yet:

- The TLS context. requests has a hook for it since 2.32 (``get_connection_with_tls_context``), but its
  ``cert_verify`` would add its own authorities; what is missing is ``verify=`` with a context
  (psf/requests#2118, closed).
- The address, checked before the first byte is sent (``_new_conn``): a hook for addresses is proposed in
  urllib3#3675.
- The end of a wait for a connection, or for an answer to begin (``connect``, ``getresponse``).
  ``HTTPResponse.shutdown()`` (urllib3 2.3) ends only the reads of an answer that has begun; for the time
  before it there is nothing (urllib3#1602, closed).
- Reading into a buffer without a copy in between (``read``): urllib3#1540.
"""

from __future__ import annotations

import functools
import http.client
import ipaddress
import socket
import ssl
from collections.abc import Callable
from typing import Any

import requests
import requests.adapters
import urllib3
import urllib3.connection

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import wire

#: One read of a body without a length; the work in Python is for each of these.
READ_SIZE = 512 * 1024

#: Where the machine's own keys are to be had, beside link-local addresses: at AWS, Google, Alibaba, Azure.
CLOUDS = frozenset({"fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16"})


class LedInside(Exception):
    """A server outside leads to what is open to this machine alone."""


class Border:
    """What a session that began outside may not be led across; one that began inside is free.

    The first connection goes where the user said; where later ones go is for servers and name servers to
    say. So the address that was reached counts, not the name. Private networks are no secret: a cluster's
    mirrors are there. What a proxy reaches is outside, and for it to forbid.
    """

    def __init__(self) -> None:
        self._is_free: bool | None = None

    def cross(self, peer: str | None) -> None:
        """Take note of a connection to ``peer``, None for a proxy's; raise ``LedInside`` if it may not be."""
        inside = peer is not None and is_inside(peer)
        if self._is_free is None:
            self._is_free = inside
        if inside and not self._is_free:
            raise LedInside(
                f"led to {peer}, inside this machine or its cloud; if meant, give that URL itself"
            )


def is_inside(address: str) -> bool:
    """Tell whether an IP address is this machine's alone, its link's, or its cloud's."""
    found = ipaddress.ip_address(address)
    found = getattr(found, "ipv4_mapped", None) or found
    return found.is_loopback or found.is_link_local or found.is_unspecified or str(found) in CLOUDS


class Adapter(requests.adapters.HTTPAdapter):
    """An adapter whose TLS context decides, alone, what is trusted, and whose waits end with ``cancel``.

    requests would add its own list of authorities to the context otherwise. ``context`` is not asked for
    one before it is needed: to read the system's authorities takes 20 ms, of which plain http has no use.
    """

    def __init__(
        self, context: Callable[[], ssl.SSLContext], connections: int, cancel: cancelling.Cancel
    ) -> None:
        self._context = context
        # A pool hands on to its connections what it does not know itself.
        shared: dict[str, Any] = {"cancel": cancel, "border": Border()}
        self._pools = {
            "http": functools.partial(_PlainPool, **shared),
            "https": functools.partial(_SecurePool, **shared),
        }
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


class _Plain(urllib3.connection.HTTPConnection):
    """A connection that crosses the border, and whose waits end with ``cancel`` until an answer begins.

    From then on the answer is what is read, and ``pinned`` ends that.
    """

    #: Kept for ``read``.
    answer: http.client.HTTPResponse
    #: What the answer is read from, also when the connection is not kept.
    answering: Any = None
    _is_left = False

    def __init__(self, *args: Any, cancel: cancelling.Cancel, border: Border, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cancel = cancel
        self._border = border

    # A class there, of which nothing is wanted but to be called.
    def response_class(self, *args: Any, **kwargs: Any) -> http.client.HTTPResponse:  # type: ignore[override]
        self.answer = http.client.HTTPResponse(*args, **kwargs)
        return self.answer

    def connect(self) -> None:
        try:
            # The socket is known only after the handshakes: there is none to shut down before.
            cancelling.apart(super().connect, self._cancel, grace=0, late=super().close)
        except errors.Cancelled:
            self._is_left = True
            raise

    def close(self) -> None:
        """Close it, unless a connect left behind will.

        To close a socket in the hands of its thread would give its descriptor's number to another file,
        for TLS to begin on.
        """
        if not self._is_left:
            super().close()

    def _new_conn(self) -> socket.socket:
        made = super()._new_conn()
        try:
            # Before anything is said: what is inside may act on the first bytes, be they TLS.
            self._border.cross(None if self.proxy else made.getpeername()[0])
        except BaseException:
            made.close()
            raise
        return made

    def getresponse(self) -> Any:
        self.answering = self.sock
        response = None
        try:
            with self._cancel.ending(lambda: wire.shut(self.answering)):
                response = super().getresponse()
        except errors.Cancelled:
            if response is not None:
                response.close()
            raise
        return response


class _Secure(_Plain, urllib3.connection.HTTPSConnection):
    pass


class _PlainPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Plain


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _Secure
