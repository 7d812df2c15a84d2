"""A web server that repeats its clients' secrets, in every place of a response and in every encoding."""

from __future__ import annotations

import base64
import contextlib
import html
import json
import re
import socketserver
import ssl
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tests.support import threaded, tls

#: Where a response repeats secrets. ``failure``: in the reason, the headers, the body and the trailer.
#: ``success``: in the reason and the headers of a response with a disk. ``redirect``: in the address.
WHERE = ("failure", "redirect", "success")
#: A disk that has no format of its own.
DISK = bytes(range(256)) * 256


def forms(secret: str) -> list[str]:
    """Return a secret as servers repeat it; all are searched in what leaves the process."""
    data = secret.encode()
    return [
        secret,
        data.decode("latin-1"),
        urllib.parse.quote(secret, safe=""),
        urllib.parse.quote_plus(secret),
        re.sub("%..", lambda found: found[0].lower(), urllib.parse.quote_plus(secret)),
        html.escape(secret),
        html.escape(secret, quote=False),
        base64.b64encode(data).decode(),
        base64.urlsafe_b64encode(f"me:{secret}".encode()).decode(),
        json.dumps(secret)[1:-1],
        repr(data)[2:-1],
        secret.lower(),
        secret.upper(),
        "\a".join(secret),
        "\xad".join(secret),
    ]


def plain(text: str) -> str:
    """Return a text in lower case and without what is not printable, or stands for it."""
    return "".join(char for char in text if char.isprintable() and char != "\ufffd").lower()


class Request(NamedTuple):
    """What a client sent; ``text``: head and body."""

    method: str
    path: str
    text: str


#: Returns status, headers and body as the real server does; status 0: the secrets are repeated instead.
Page = Callable[[Request], tuple[int, Mapping[str, str], bytes]]


class Echo(threaded.Threaded):
    """Repeats ``secrets`` with ``status`` in the place ``where``; answers those of ``pages`` as they say."""

    def __init__(self, where: str, pair: tls.KeyPair | None = None) -> None:
        self.where = where
        self.status = 403
        self.secrets: tuple[str, ...] = ()
        #: Makes the body of an error of a text, in the form that the protocol has.
        self.words: Callable[[str], str] = str
        self.pages: dict[str, Page] = {}
        self.requests: list[Request] = []
        #: How many responses have repeated the secrets.
        self.repeated = 0
        self.pair = pair
        super().__init__(_Server(self), pair)

    @property
    def at(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The address, without a slash at the end."""
        return f"{self.scheme}://{self.at}"

    def page(self, path: str, fields: object, status: int = 200, **headers: str) -> None:
        """Answer requests below ``path`` with JSON, or with a text."""
        body = fields.encode() if isinstance(fields, str) else json.dumps(fields).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        self.pages[path] = lambda _: (status, names, body)

    @property
    def text(self) -> str:
        """The secrets as they are repeated: bytes, decoded as Latin-1."""
        found = (f"{each} {'; '.join(forms(each))}" for each in self.secrets)
        return " ".join(" ".join(found).splitlines()).encode().decode("latin-1")

    def has_received(self) -> bool:
        """Return whether a client has sent one of the secrets, in any form."""
        sent = "\n".join(each.text for each in self.requests)
        found = [form for secret in self.secrets for form in forms(secret)]
        return any(form in sent or form.encode().decode("latin-1") in sent for form in found)

    def answer(self, request: Request) -> bytes:
        """Return the response to a request."""
        self.requests.append(request)
        for path, page in self.pages.items():
            if request.path.startswith(path):
                status, headers, body = page(request)
                if status:
                    return _response(status, "OK", headers, body, request.method)
        self.repeated += 1
        if self.where == "success" and request.method == "CONNECT":
            return _response(407, self.text, {}, b"", "GET")
        if self.where == "success":
            more = {"ETag": f'"{self.text}"', "X-Odd": self.text, "Content-Disposition": self.text}
            return _response(200, self.text, more, DISK, request.method)
        return self._failed(request)

    def _failed(self, request: Request) -> bytes:
        text = self.text
        if self.where == "redirect":
            first = self.secrets[0] if self.secrets else ""
            # What an address cannot contain is encoded, as a server must.
            there = f"http://{urllib.parse.quote(first)}:bad/?x={text.replace(' ', '%20')}"
            return _response(302, "Found", {"Location": there}, b"", request.method)
        more = {"X-Odd": text, "ETag": f'"{text}"', "WWW-Authenticate": f'Odd realm="{text}"'}
        fields = "".join(f"{name}: {value}\r\n" for name, value in more.items())
        head = f"HTTP/1.1 {self.status} {text}\r\n{fields}Connection: close\r\n"
        if request.method == "HEAD":
            return f"{head}\r\n".encode("latin-1")
        body = self.words(text.encode("latin-1").decode()).encode()
        chunks = b"%x\r\n%s\r\n0\r\n" % (len(body), body)
        trailer = f"X-Odd: {text}\r\n{text}\r\n\r\n".encode("latin-1")
        return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode("latin-1") + chunks + trailer


def _response(status: int, reason: str, headers: Mapping[str, str], body: bytes, method: str) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status} {reason}\r\n{lines}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode("latin-1", "replace") + (b"" if method == "HEAD" else body)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    #: Handed to the handlers.
    echo: Echo

    def __init__(self, echo: Echo) -> None:
        self.echo = echo
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients may leave."""


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):
            self._handle()

    def _handle(self) -> None:
        if self.rfile.peek(1)[:1] == b"\x16":
            return  # TLS, which this server does not speak
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = self.rfile.readline(65536)
            if not line:
                return
            head += line
        lines = head.decode("latin-1").split("\r\n")
        fields = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        if "100-continue" in fields.get("expect", ""):
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self.rfile.read(int(fields.get("content-length", 0)))
        method, path, _ = lines[0].split(" ", 2)
        request = Request(method, path, (head + body).decode("latin-1"))
        self.wfile.write(self.server.echo.answer(request))
