"""A misbehaving NBD server (the NBD protocol, doc/proto.md of NetworkBlockDevice/nbd)."""

from __future__ import annotations

import contextlib
import socketserver
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

SIZE = 1 << 20

_OPTION = struct.Struct(">8sII")
_REQUEST = struct.Struct(">IHHQQI")
_GO, _STRUCTURED = 7, 8
_ACK, _INFO, _UNKNOWN = 1, 3, (1 << 31) + 1
_READ = 0


class Sparing(socketserver.StreamRequestHandler):
    """Serve a disk of 0x41; a structured reply omits the second half of the range requested."""

    def handle(self) -> None:
        """Negotiate, then answer reads until the client disconnects."""
        self.wfile.write(b"NBDMAGICIHAVEOPT" + struct.pack(">H", 3))
        self.rfile.read(4)
        structured = self._negotiate()
        while len(request := self.rfile.read(_REQUEST.size)) == _REQUEST.size:
            _, _, kind, cookie, offset, length = _REQUEST.unpack(request)
            if kind != _READ:
                return
            if structured:
                half = struct.pack(">Q", offset) + b"A" * (length // 2)
                self.wfile.write(struct.pack(">IHHQI", 0x668E33EF, 1, 1, cookie, len(half)) + half)
            else:
                self.wfile.write(struct.pack(">IIQ", 0x67446698, 0, cookie) + b"A" * length)

    def _negotiate(self) -> bool:
        """Answer options until NBD_OPT_GO; return whether structured replies were negotiated."""
        structured = False
        while True:
            _, option, length = _OPTION.unpack(self.rfile.read(_OPTION.size))
            self.rfile.read(length)
            if option == _GO:
                self._answer(option, _INFO, struct.pack(">HQH", 0, SIZE, 1))
                self._answer(option, _ACK)
                return structured
            structured = structured or option == _STRUCTURED
            self._answer(option, _ACK if option == _STRUCTURED else _UNKNOWN)

    def _answer(self, option: int, kind: int, data: bytes = b"") -> None:
        self.wfile.write(struct.pack(">QIII", 0x3E889045565A9, option, kind, len(data)) + data)


@contextlib.contextmanager
def serve(path: Path, handler: type[socketserver.BaseRequestHandler]) -> Iterator[str]:
    """Serve on a unix socket at ``path`` and yield the path as text."""
    with socketserver.ThreadingUnixStreamServer(str(path), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield str(path)
        finally:
            server.shutdown()
