"""HTTP client of an upload server: a request body is sent until it ends or the server closes."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import logging
import os
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping

from cdi_worker import errors, masking
from cdi_worker.images.engine import cancelling
from cdi_worker.importer.upload import tls as upload_tls
from cdi_worker.sources import certificates, responses, sockets

log = logging.getLogger(__name__)

#: Seconds to connect, and to send one piece of a body.
CONNECT, SEND = 20.0, 180.0
_ANSWER = 64 << 10
_REDIRECTS = frozenset({301, 302, 307, 308})
#: Bytes of a piece below which it is copied into one TLS record with its chunk header.
_SHORT = 4096

Headers = Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The server's response; ``text`` is at most 64 KiB."""

    status: int
    headers: Mapping[str, str]
    text: str

    def header(self, name: str) -> str:
        """Return a header by its name in any letter case; empty without it."""
        return next((value for key, value in self.headers.items() if key.lower() == name.lower()), "")

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_leaving(self) -> bool:
        """Whether the server ends, and another one may follow it; see ``upload.headers.LEAVING``."""
        return self.status == 503 and bool(self.header("Retry-After"))

    def reason(self) -> str:
        """Return the status and the text as one line of a message; a web page is left out."""
        is_page = self.text.lstrip()[:1] == "<" or "html" in self.header("Content-Type")
        text = "" if is_page else " ".join(masking.quoted(self.text, 1000).split())
        return f"{self.status} {http.client.responses.get(self.status, '')}{': ' if text else ''}{text}"


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """A request body. ``length`` in bytes; None: sent in chunks until ``pieces`` end.

    ``sent``: called with the length of each piece that was sent.
    """

    pieces: Iterable[bytes | memoryview]
    sent: Callable[[int], object]
    length: int | None = None


class Moved(Exception):
    """The server redirects to the URL ``to``."""

    def __init__(self, to: str) -> None:
        super().__init__(to)
        self.to = to


class Client:
    """Makes requests to one server, each on a new connection.

    ``headers`` are sent with every request. ``proxy``: the URL of an http proxy; empty: none. ``stall``:
    seconds for an answer that needs no work. Setting ``cancel`` ends a running request. Raises
    ``errors.Transient`` for failures that may be retried, ``errors.Unreachable``, ``Cancelled``, and
    ``Moved`` for a redirect if ``follows`` is set.
    """

    #: Seconds between two lines that say what is waited for.
    reminder = 60.0

    def __init__(
        self,
        url: str,
        tls: ssl.SSLContext,
        cancel: cancelling.Cancel,
        headers: Headers | None = None,
        proxy: str = "",
        *,
        follows: bool = False,
        stall: float = SEND,
    ) -> None:
        parts, port = parse_url(url)
        self._origin = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self.url = self._origin + parts.path
        self.path = parts.path
        self._host, self._port = parts.hostname or "", port
        self._tls = tls if parts.scheme == "https" else None
        self._cancel = cancel
        self._headers = dict(headers or {})
        self._follows = follows
        self._stall = stall
        self._proxy = urllib.parse.urlsplit(proxy)
        if self._proxy.scheme == "https":
            raise errors.RequestError("uploads through a proxy that is reached over https are not supported")
        masking.register(self, *masking.address(url), *masking.headers(self._headers.items()))

    def ask(
        self,
        method: str,
        path: str,
        headers: Headers | None = None,
        body: Body | None = None,
        *,
        work: str = "",
    ) -> Answer:
        """Make one request and return the answer of any status.

        ``work``: what the server does before it answers, which may take hours. The end of a body has some.
        """
        headers = {**self._headers, **(headers or {})}
        # Joined, not resolved: in a URL reference, what follows two slashes is a host.
        target = url = self._origin + path
        if self._proxy.hostname and self._tls is None:
            headers |= self._proxy_headers
        else:
            target = path
        with self._connect() as connection:
            connection.putrequest(method, target, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            if body is not None and body.length is None:
                connection.putheader("Transfer-Encoding", "chunked")
            elif body is not None or method in {"POST", "PATCH"}:
                connection.putheader("Content-Length", str(body.length if body else 0))
            connection.endheaders()
            if body is not None and self._send(connection, body):
                work = "has everything; waiting until the disk is on storage there"
            # TCP keep-alive detects a dead server.
            connection.sock.settimeout(None)
            with self._remind(work) if work else self._limit_silence(connection.sock):
                response = connection.getresponse()
                text = response.read(_ANSWER).decode("utf-8", "replace")
        if response.status == 400 and self._tls is None:
            from cdi_worker.sources import wire

            if advice := wire.advice(self.url, text):
                raise errors.Unreachable(url=self.url, reason=f"400 Bad Request{advice}")
        if self._follows and response.status in _REDIRECTS and (to := response.headers.get("Location")):
            raise Moved(urllib.parse.urljoin(url, to))
        return Answer(response.status, dict(response.headers), text)

    @property
    def _proxy_headers(self) -> Headers:
        from cdi_worker.sources.web import proxies

        value = proxies.authorization(self._proxy.geturl())
        return {"Proxy-Authorization": value} if value else {}

    @contextlib.contextmanager
    def _remind(self, work: str) -> Iterator[None]:
        """Log now and then what is waited for in the block."""
        over, began = threading.Event(), time.monotonic()

        def remind() -> None:
            while not over.wait(self.reminder):
                log.warning("%s: %s for %.0f s", self.url, work, time.monotonic() - began)

        reminding = threading.Thread(target=remind, name="reminder", daemon=True)
        reminding.start()
        try:
            yield
        finally:
            over.set()
            reminding.join()

    @contextlib.contextmanager
    def _limit_silence(self, sock: socket.socket) -> Iterator[None]:
        """End the block after the time for an answer, however slowly one arrives."""
        late = threading.Event()

        def end() -> None:
            late.set()
            sockets.shut(sock)

        timer = threading.Timer(self._stall, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (OSError, http.client.HTTPException) as err:
            if late.is_set():
                raise TimeoutError(f"no answer within {self._stall:g} s") from err
            raise
        finally:
            timer.cancel()
            # The socket must not be closed, and its descriptor used again, while the timer shuts it.
            timer.join()
        if late.is_set():
            raise TimeoutError(f"no answer within {self._stall:g} s")

    def _send(self, connection: http.client.HTTPConnection, body: Body) -> bool:
        """Send a body; return whether the server has taken all of it."""
        try:
            if body.length is None:
                self._send_chunks(connection, body)
                return True
            for piece in body.pieces:
                self._cancel.check()
                connection.send(piece)
                body.sent(len(piece))
        except (ConnectionError, ssl.SSLError) as err:
            # A server that refuses the body closes early, after an answer with the reason.
            log.debug("send error=%s", err)
            return False
        return True

    def _send_chunks(self, connection: http.client.HTTPConnection, body: Body) -> None:
        # Each call makes a TLS record and wakes the receiver, so a chunk's end is sent with the next header.
        previous_end = b""
        for piece in body.pieces:
            self._cancel.check()
            frame = b"%s%x\r\n" % (previous_end, len(piece))
            if len(piece) < _SHORT:
                connection.send(frame + piece)
            else:
                connection.send(frame)
                connection.send(piece)
            body.sent(len(piece))
            previous_end = b"\r\n"
        connection.send(previous_end + b"0\r\n\r\n")

    @contextlib.contextmanager
    def _connect(self) -> Iterator[http.client.HTTPConnection]:
        try:
            with contextlib.closing(self._open_connection()) as connection:
                sock = connection.sock
                sock.settimeout(SEND)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
                with self._cancel.on_set(lambda: sockets.shut(sock)):
                    yield connection
        except (OSError, http.client.HTTPException) as err:
            if self._cancel.is_set():
                raise errors.Cancelled from err
            if isinstance(err, ssl.SSLError):
                from cdi_worker.sources import wire

                if cause := wire.handshake(self.url, err):
                    raise errors.Unreachable(url=self.url, **cause._asdict()) from err
            if str(err).startswith("Tunnel connection failed: 4"):
                reason = f"the proxy refuses: {str(err).partition(': ')[2]}; check the proxy's credentials"
                raise errors.Unreachable(url=self.url, reason=reason) from err
            raise errors.Transient(url=self.url, reason=_reason(err)) from err

    def _open_connection(self) -> http.client.HTTPConnection:
        host, port = self._host, self._port
        if self._proxy.hostname:
            host, port = self._proxy.hostname, self._proxy.port or 80
        if self._tls is None:
            made = http.client.HTTPConnection(host, port, timeout=CONNECT)
        else:
            made = http.client.HTTPSConnection(host, port, timeout=CONNECT, context=self._tls)
            if self._proxy.hostname:
                made.set_tunnel(self._host, self._port, dict(self._proxy_headers))
        made.response_class = responses.Response

        def connect() -> None:
            try:
                made.connect()
            except BaseException:
                # A TLS handshake that failed leaves the socket open.
                made.close()
                raise

        # A connect that was abandoned still uses the socket, so its own thread closes it.
        cancelling.run_apart(connect, self._cancel, late=made.close)
        return made


def parse_url(url: str) -> tuple[urllib.parse.SplitResult, int | None]:
    """Return the parts of an http(s) URL and its port. Errors omit the URL: it may contain secrets."""
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in {"http", "https"} and parts.hostname:
            return parts, parts.port
    raise errors.RequestError("malformed upload URL; expected http(s)://host[:port]/path")


def context(authority: str, certificate: str, key: str) -> ssl.SSLContext:
    """Return a client's TLS context from PEM texts. Raises ``errors.RequestError`` for malformed ones."""
    made = certificates.context()
    certificates.load(made, certificates.usable(authority.encode(errors="surrogateescape"), "SERVER_CA_CERT"))
    upload_tls.load_texts(made, certificate, key, "CLIENT_CERT, CLIENT_KEY")
    return made


def _reason(err: Exception) -> str:
    if isinstance(err, http.client.RemoteDisconnected):
        return "the server closed the connection without an answer"
    if isinstance(err, OSError) and err.errno and not isinstance(err, ssl.SSLError):
        return os.strerror(err.errno).lower() if err.errno > 0 else str(err)
    return str(err) or type(err).__name__
