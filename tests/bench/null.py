"""A server that discards what it receives: the lower bound for the time of an upload.

``python -m tests.bench.null PORT CERTIFICATE KEY`` answers one PUT or POST after the other, over TLS.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import sys

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def serve(port: int, certificate: str, key: str) -> None:
    """Serve until killed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    buffer = bytearray(1 << 20)
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            plain, _ = listener.accept()
            with (
                contextlib.suppress(OSError),
                plain,
                context.wrap_socket(plain, server_side=True) as connection,
            ):
                _take(connection, buffer)


def _take(connection: socket.socket, buffer: bytearray) -> None:
    head = b""
    while b"\r\n\r\n" not in head:
        more = connection.recv(65536)
        if not more:
            return
        head += more
    head, _, rest = head.partition(b"\r\n\r\n")
    if re.search(rb"(?i)expect: 100-continue", head):
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    found = re.search(rb"(?i)content-length: (\d+)", head)
    left = int(found[1]) - len(rest) if found else 0
    while left > 0 and (count := connection.recv_into(buffer)):
        left -= count
    connection.sendall(ANSWER)


if __name__ == "__main__":
    serve(int(sys.argv[1]), *sys.argv[2:])
