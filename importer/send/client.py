"""HTTP client of an upload server: a request body is sent until it ends or the server closes."""

from __future__ import annotations

import contextlib
import dataclasses
import email.message
import http.client
import logging
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping

from cdi_worker import errors, masking
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import certificates, responses, sockets

log = logging.getLogger(__name__)

#: Seconds to connect, and to send one piece of a body.
CONNECT, SEND = 20.0, 180.0
_ANSWER = 64 << 10
_REDIRECTS = frozenset({301, 302, 307, 308})
#: Bytes of a piece below which it is copied into one TLS record with its chunk header.
_SHORT = 4096

Headers = Mapping[str, str]


class Leaving(errors.Transient):
    """The server ends, and another one may follow it; see ``upload.headers.LEAVING``."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The server's response; ``text`` is at most 64 KiB."""

    status: int
    headers: email.message.Message
    text: str

    def header(self, name: str) -> str:
        """Return a header by its name in any letter case; empty without it."""
        return str(self.headers.get(name, ""))

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300

    def reason(self) -> str:
        """Return the status and the text as one line of a message; a web page is left out."""
        is_page = self.text.lstrip()[:1] == "<" or "html" in self.header("Content-Type")
        text = "" if is_page else " ".join(masking.quoted(self.text, 1000).split())
        # Our server's text begins with it.
        text = text.removeprefix(f"{self.status}: ")
        return f"{self.status} {http.client.responses.get(self.status, '')}{': ' if text else ''}{text}"


@dataclasses.dataclass(frozen=True)
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
    seconds without a byte of an answer that needs no work. Setting ``cancel`` ends a running request. Raises
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
        parts = parse_url(url)
        self._origin = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self.url = self._origin + parts.path
        self.path = parts.path
        self._address = parts.hostname or "", parts.port
        self._tls = tls if parts.scheme == "https" else None
        self._cancel = cancel
        self._headers = dict(headers or {})
        self._follows = follows
        self._stall = stall
        self._proxy: tuple[str, int] | None = None
        self._proxy_headers: Headers = {}
        if proxy:
            # Imported when used: a clone has no proxy.
            from cdi_worker.sources.web import proxies

            through = urllib.parse.urlsplit(proxy)
            if through.scheme == "https":
                reason = "uploads through a proxy that is reached over https are not supported"
                raise errors.RequestError(reason)
            self._proxy = through.hostname or "", through.port or 80
            self._proxy_headers = proxies.headers(proxy)
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
        if self._proxy and self._tls is None:
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
            # During work TCP keep-alive detects a dead server. Otherwise see ``responses``.
            connection.sock.settimeout(None if work else self._stall)
            with self._remind(work) if work else contextlib.nullcontext():
                response = connection.getresponse()
                text = response.read(_ANSWER).decode("utf-8", "replace")
                responses.log_answer(method, self._origin + path, response.status, response.headers)
        if response.status == 400 and self._tls is None:
            from cdi_worker.sources import wire

            if advice := wire.advice(self.url, text):
                raise errors.Unreachable(url=self.url, reason=f"400 Bad Request{advice}")
        if self._follows and response.status in _REDIRECTS and (to := response.headers.get("Location")):
            raise Moved(urllib.parse.urljoin(url, to))
        answer = Answer(response.status, response.headers, text)
        if answer.status == 503 and answer.header("Retry-After"):
            raise Leaving(url=self.url, reason=answer.reason())
        return answer

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

    def _send(self, connection: http.client.HTTPConnection, body: Body) -> bool:
        """Send a body; return whether the server has taken all of it.

        Each call of ``send`` makes a TLS record and wakes the receiver: a chunk's end is sent with the next
        header.
        """
        previous_end = b""
        try:
            for piece in body.pieces:
                self._cancel.check()
                frame = b"" if body.length is not None else b"%s%x\r\n" % (previous_end, len(piece))
                if frame and len(piece) >= _SHORT:
                    connection.send(frame)
                    frame = b""
                connection.send(frame + piece if frame else piece)
                body.sent(len(piece))
                previous_end = b"\r\n"
            if body.length is None:
                connection.send(previous_end + b"0\r\n\r\n")
        except (ConnectionError, ssl.SSLError) as err:
            # A server that refuses the body closes early, after an answer with the reason.
            log.debug("send error=%s", err)
            return False
        return True

    @contextlib.contextmanager
    def _connect(self) -> Iterator[http.client.HTTPConnection]:
        """Yield a new connection, which ``cancel`` ends. Translates the errors of the block, too."""
        host, port = self._proxy or self._address
        connection = http.client.HTTPConnection(host, port, timeout=CONNECT)
        if self._tls is not None:
            connection = http.client.HTTPSConnection(host, port, timeout=CONNECT, context=self._tls)
            if self._proxy:
                connection.set_tunnel(*self._address, headers=self._proxy_headers)
        connection.response_class = responses.Response
        try:
            # A connect that was abandoned still uses the socket, so its own thread closes it.
            cancelling.run_apart(connection.connect, self._cancel, late=connection.close)
            sock = connection.sock
            with contextlib.closing(connection), self._cancel.on_set(lambda: sockets.shut(sock)):
                sock.settimeout(SEND)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
                yield connection
        except (OSError, http.client.HTTPException) as err:
            # A TLS handshake that failed leaves the socket open.
            connection.close()
            if self._cancel.is_set():
                raise errors.Cancelled from err
            # Imported when used: it takes as long as the rest of a clone's start.
            from cdi_worker.sources import wire

            # Anything else may pass, also a refused connection: the server may still be starting.
            is_refused = str(err).startswith("Tunnel connection failed: 4")
            is_final = is_refused or wire.handshake(self.url, err) is not None
            raise wire.failure(self.url, err, first=is_final) from err


def parse_url(url: str) -> urllib.parse.SplitResult:
    """Return the parts of an http(s) URL. Errors omit the URL: it may contain secrets."""
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(url)
        # As it is looked up: an empty label is a ``UnicodeError``.
        host = (parts.hostname or "").encode("idna")
        if parts.scheme in {"http", "https"} and host and parts.port != 0:
            return parts
    raise errors.RequestError("malformed upload URL; expected http(s)://host[:port]/path")


def context(authority: str, certificate: str, key: str) -> ssl.SSLContext:
    """Return a client's TLS context from PEM texts. Raises ``errors.RequestError`` for malformed ones."""
    made = certificates.context()
    certificates.load(made, certificates.usable(authority.encode(errors="surrogateescape"), "SERVER_CA_CERT"))
    pair = certificate.encode(errors="surrogateescape"), key.encode(errors="surrogateescape")
    certificates.load_pair(made, *pair, "CLIENT_CERT, CLIENT_KEY")
    return made
