"""An HTTP/1.1 server that misbehaves as told by a declarative ``Page`` per path.

    with misbehave.Server() as server:
        good = misbehave.Page(data)
        server.serve("/disk", (dataclasses.replace(good, status=503), 2), good)

answers the first two GETs of ``/disk`` with 503 and then serves it; ``server.requests`` has the requests
received. To a client, another port is another host, and so is ``localhost`` instead of ``127.0.0.1``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import http.server
import itertools
import select
import socket
import struct
import termios
import threading
import time
from typing import Any

from tests.support import threaded, tls
from tests.support.pages import Page, Request

KiB = 1 << 10
PLAIN = Page()


class Server(threaded.Threaded):
    """Run a server for the duration of a ``with`` block."""

    def __init__(self, pair: tls.KeyPair | None = None, host: str = "127.0.0.1") -> None:
        self._host = host
        super().__init__(_HTTP(self, host), pair)
        self.requests: list[Request] = []
        self.busiest = 0  # the most responses sent at the same time
        self.connections = 0  # accepted
        self.open = 0  # of these
        self.most: int | None = None  # more open ones are closed at once
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        self._busy = 0
        self._pages: dict[str, list[tuple[Page, int | None]]] = {}
        self._gets: dict[str, int] = {}

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        super().__exit__()

    def serve(self, path: str, *turns: Page | tuple[Page, int]) -> str:
        """Answer the GETs of a path by pages, each for a number of requests; the last has no limit."""
        with self.lock:
            self._pages[path] = [turn if isinstance(turn, tuple) else (turn, None) for turn in turns]
            self._gets[path] = 0
        return self.url(path)

    def url(self, path: str, *, host: str = "") -> str:
        """Return the URL of a path."""
        return f"{self.scheme}://{host or self._host}:{self.port}{path}"

    def sent(self, path: str) -> int:
        """Return how many bytes of bodies were sent for a path."""
        return sum(request.sent for request in self.gets(path))

    def is_quiet(self) -> bool:
        """Report whether no response is being sent; that of a killed client ends with its connection."""
        return not self._busy

    def gets(self, path: str) -> list[Request]:
        """Return the GETs of a path, in order of arrival."""
        return [request for request in self.requests if request.path == path and request.method == "GET"]

    def turn(self, path: str, method: str) -> tuple[Page, int]:
        """Return the page to serve next, and the number of the GET. HEADs are not counted."""
        with self.lock:
            if path not in self._pages:
                return Page(b"not here", status=404, content_type="text/plain"), 0
            number = self._gets[path]
            if method == "GET":
                self._gets[path] += 1
            left = number
            for page, times in self._pages[path]:
                if times is None or left < times:
                    return page, number
                left -= times
            return self._pages[path][-1][0], number

    def is_gone(self, request: Request) -> bool:
        """Report whether a response that is being sent ends here, with a reset."""
        return False

    @contextlib.contextmanager
    def recording(self, request: Request) -> Any:
        """Record a request, and count its response as active."""
        with self.lock:
            self.requests.append(request)
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)
        try:
            yield
        finally:
            request.ended = time.monotonic()
            with self.lock:
                self._busy -= 1


class _HTTP(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, server: Server, host: str) -> None:
        self.server = server
        self.resets: set[object] = set()
        super().__init__((host, 0), _Handler)

    def verify_request(self, *_: Any) -> bool:
        """Count a connection, and refuse one too many."""
        with self.server.lock:
            self.server.connections += 1
            is_refused = self.server.most is not None and self.server.open >= self.server.most
            self.server.open += not is_refused
        return not is_refused

    def shutdown_request(self, request: Any) -> None:
        """Close abruptly where a reset is due: a shutdown would send a FIN first."""
        if request in self.resets:
            self.resets.discard(request)
            request.close()
        else:
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect early: the tests are about them."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _HTTP

    def finish(self) -> None:
        """Count the connection as closed."""
        with self.server.server.lock:
            self.server.server.open -= 1
        super().finish()

    def log_message(self, *_: object) -> None:
        """Log nothing; ``Server.requests`` has the requests."""

    def do_HEAD(self) -> None:
        """Serve the head of the page."""
        self.do_GET()

    def do_GET(self) -> None:
        """Serve the page with its faults."""
        owner = self.server.server
        headers = {name.lower(): value for name, value in self.headers.items()}
        # Not ``self.path``: http.server removes slashes at its beginning.
        target = self.requestline.split()[1]
        request = Request(self.command, target, headers)
        with owner.recording(request):
            page, number = owner.turn(target, self.command)
            if page.silent:
                self._stall()
                return
            owner.stopping.wait(page.delay)
            page = page.refusal(headers) or page
            span = page.span(headers)
            if self.command == "HEAD" and page.head != 200:
                page, span = dataclasses.replace(page, status=page.head, body=b"", to=()), None
            if page.status == 200 and span is not None and span[0] >= len(page.body):
                page, span = Page(status=416, headers={"Content-Range": f"bytes */{len(page.body)}"}), None
            self._head(page, span, number, request)
            if self.command == "GET":
                self._body(page, span, number, request)

    def _head(self, page: Page, span: tuple[int, int] | None, number: int, request: Request) -> None:
        first, last = span or (0, len(page.body) - 1)
        status = 206 if span and page.status == 200 else page.status
        headers = {"Content-Type": page.content_type, "ETag": page.etag, "Last-Modified": page.modified}
        if page.ranges if page.claims_ranges is None else page.claims_ranges:
            headers["Accept-Ranges"] = "bytes"
        if page.to:
            status = status if status in (301, 302, 303, 307, 308) else 302
            headers["Location"] = page.to[number % len(page.to)]
        if status == 206:
            headers["Content-Range"] = page.content_range.format(first=first, last=last, total=len(page.body))
        if page.framing == "length":
            headers["Content-Length"] = str(last - first + 1 + page.missing)
        elif page.framing == "chunked":
            headers["Transfer-Encoding"] = "chunked"
        if page.framing == "close" or page.missing or page.extra:
            headers["Connection"] = "close"
            self.close_connection = True
        request.status = status
        self._repeat(*page.before)
        self.send_response(status)
        for name, value in {**headers, **page.headers}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()

    def _body(self, page: Page, span: tuple[int, int] | None, number: int, request: Request) -> None:
        first, last = span or (0, len(page.body) - 1)
        data = memoryview(page.body)[first : last + 1]
        if span and page.lie is not None:
            start = page.lie(first, number) % len(page.body)
            data = memoryview((page.body + page.body)[start : start + last + 1 - first])
        data = memoryview(page.damage(first, bytes(data))) if page.damage else data
        data = memoryview(bytes(data) + b"+" * page.extra) if page.extra else data
        stall = page.stall
        if page.stall_at is not None and first <= page.stall_at <= last:
            stall = page.stall_at - first
        ends = [len(data), page.cut, stall, page.cut_range if first else None]
        ends.append(page.cut_at - first if page.cut_at is not None and page.cut_at >= first else None)
        end = min(end for end in ends if end is not None)
        step, pause = page.drip or (256 * KiB, 0.0)
        for at in range(0, end, step):
            if self.server.server.is_gone(request):
                self._reset()
                return
            # Count before sending: a client that has read everything may check before this thread runs again.
            request.sent += min(step, end - at)
            self._send(data[at : min(at + step, end)], page)
            time.sleep(pause)
        if end == stall and end < len(data):
            self._stall()
        elif end < len(data):
            self._reset()
        else:
            self._repeat(*page.tail, page)
            if page.framing == "chunked":
                self.wfile.write(b"0\r\n")
                self._repeat(*page.trailers)
                self.wfile.write(b"\r\n")

    def _send(self, piece: memoryview, page: Page) -> None:
        if page.framing == "chunked":
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), bytes(piece)))
        else:
            self.wfile.write(piece)

    def _repeat(self, data: bytes, times: int | None, page: Page = PLAIN) -> None:
        for _ in itertools.count() if times is None else range(times):
            if self.server.server.stopping.is_set():
                break
            self._send(memoryview(data), page)

    def _stall(self) -> None:
        """Wait until the client disconnects."""
        self.close_connection = True
        while not self.server.server.stopping.is_set():
            if select.select([self.connection], [], [], 0.1)[0]:
                return

    def _reset(self) -> None:
        """Send RST after everything written has arrived: a reset drops what is still queued."""
        self.close_connection = True
        while struct.unpack("i", fcntl.ioctl(self.connection, termios.TIOCOUTQ, bytes(4)))[0]:
            time.sleep(0.001)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.server.resets.add(self.connection)
