"""A raw NBD client that can break the protocol, and an export of bytes in memory."""

from __future__ import annotations

import contextlib
import random
import socket
import struct

from cdi_worker.images.engine import cancelling
from cdi_worker.images.export import server

KiB, MiB = 1 << 10, 1 << 20
SERVED = random.Random(8).randbytes(5 * MiB + 333)
CONTENT = SERVED + bytes(179)  # to the end of a sector
SIZE = len(CONTENT)

REQUEST_MAGIC, REPLY_MAGIC = 0x25609513, 0x67446698
READ, WRITE, DISCONNECT, FLUSH, TRIM, WRITE_ZEROES, BLOCK_STATUS = 0, 1, 2, 3, 4, 6, 7


def from_memory(content: bytes) -> server.NbdServer:
    """Return an export that serves ``content``."""

    def read(offset: int, into: memoryview) -> None:
        into[:] = content[offset : offset + len(into)]

    return server.NbdServer(read, len(content), cancelling.Cancel())


class Client:
    """A raw NBD connection to ``export``; each method sends or receives one protocol element."""

    def __init__(self, export: server.NbdServer) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        self.socket.connect(export.socket)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def receive(self, length: int) -> bytes:
        """Receive ``length`` bytes; fewer if the server closes."""
        data = b""
        while len(data) < length and (more := self.socket.recv(length - len(data))):
            data += more
        return data

    def hung_up(self) -> bool:
        """Report whether the server has closed the connection."""
        with contextlib.suppress(ConnectionError):
            return self.socket.recv(1) == b""
        return True

    def greet(self, flags: int = 3) -> None:
        """Check the server's greeting and send the client flags."""
        assert self.receive(18) == b"NBDMAGICIHAVEOPT\x00\x03"
        self.socket.sendall(struct.pack(">I", flags))

    def option(self, number: int, data: bytes = b"", length: int | None = None) -> None:
        """Send an option; ``length`` overrides the length field."""
        length = len(data) if length is None else length
        self.socket.sendall(b"IHAVEOPT" + struct.pack(">II", number, length) + data)

    def option_reply(self) -> tuple[int, int, bytes]:
        """Receive an option reply: option, reply type and data."""
        magic, option, kind, length = struct.unpack(">QIII", self.receive(20))
        assert magic == 0x3E889045565A9
        return option, kind, self.receive(length)

    def go(self) -> None:
        """Negotiate with NBD_OPT_GO until transmission starts."""
        self.greet()
        self.option(7, struct.pack(">IH", 0, 0))
        kinds = [self.option_reply()[1] for _ in range(3)]
        assert kinds == [3, 3, 1]

    def request(self, kind: int, offset: int, length: int, cookie: int = 7, flags: int = 0) -> None:
        """Send a transmission request."""
        self.socket.sendall(struct.pack(">IHHQQI", REQUEST_MAGIC, flags, kind, cookie, offset, length))

    def reply(self, length: int) -> tuple[int, int, bytes]:
        """Receive a simple reply with ``length`` bytes of data: error, cookie and data."""
        magic, error, cookie = struct.unpack(">IIQ", self.receive(16))
        assert magic == REPLY_MAGIC
        return error, cookie, self.receive(length)
