"""A misbehaving NBD server (the NBD protocol, doc/proto.md of NetworkBlockDevice/nbd)."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import itertools
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

SIZE = 1 << 20

_OPTION = struct.Struct(">8sII")
_REQUEST = struct.Struct(">IHHQQI")
_LIST, _GO, _STRUCTURED, _LIST_CONTEXTS, _SET_CONTEXTS = 3, 7, 8, 9, 10
_ACK, _SERVER, _INFO, _CONTEXT = 1, 2, 3, 4
_UNKNOWN, _UNKNOWN_EXPORT = (1 << 31) + 1, (1 << 31) + 6
_READ, _STATUS = 0, 7
#: Commands of a client that writes.
WRITE, FLUSH, ZERO = 1, 3, 6
_NONE, _DATA, _HOLE, _EXTENTS, _DONE = 0, 1, 2, 5, 1
#: NBD_FLAG_HAS_FLAGS and NBD_FLAG_CAN_MULTI_CONN.
FLAGS, MULTI = 1, 1 << 8
#: With NBD_FLAG_SEND_FLUSH and NBD_FLAG_SEND_WRITE_ZEROES.
WRITABLE = FLAGS | 1 << 2 | 1 << 6
#: NBD reply types: an error at an offset, an error.
_ERROR = (1 << 15) + 2
_FAILED = (1 << 15) + 1
_CHUNKS = frozenset({"empty", "data", "holes", "void", "errors", "faults"})

BITMAP = "monday"
#: Extents for a request: pairs of length and flags.
Extents = list[tuple[int, int]]
#: A part of a read: its offset and length, and whether it is data or a hole.
Chunk = tuple[int, int, bool]


def one_extent(_offset: int, length: int) -> Extents:
    """Return one extent of data."""
    return [(length, 0)]


@dataclasses.dataclass
class Disk:
    """A disk of 0x41, and how it is served.

    ``sizes``: of the first, second, … connection; the last one counts for all others. ``cut``: each
    connection ends within the reply after so many. ``silent``: no reply after so many. ``malformed``: after
    so many of all connections, each reply is not NBD. ``part``: a read gets one of so many parts. ``chunks``:
    the chunks of a reply to a read: offset and length within it, as data or a hole. ``status``: the extents
    for an offset and a length. ``dirty``: those of the bitmap ``BITMAP``, if the disk has one. ``endless``:
    what never ends: chunks of a read, of a kind in ``_CHUNKS``; ``status``, or the list of ``contexts`` or of
    ``exports``.
    ``failing``: NBD's error for a command of a client that writes. ``refusing``, ``reading``: the one for
    extents from an offset, and for the next read; 0: none.
    ``written``: bytes of all writes.
    ``pause``: seconds between two of them; 0: as many as the client receives.
    """

    sizes: tuple[int, ...] = (SIZE,)
    flags: int = FLAGS
    cut: int | None = None
    silent: int | None = None
    malformed: int | None = None
    part: int = 1
    chunks: Callable[[int], list[Chunk]] | None = None
    status: Callable[[int, int], Extents] = one_extent
    dirty: Callable[[int, int], Extents] | None = None
    endless: str = ""
    pause: float = 0.0
    failing: dict[int, int] = dataclasses.field(default_factory=dict)
    refusing: Callable[[int], int] = lambda _offset: 0
    reading: Callable[[], int] = lambda: 0
    written: int = 0
    connections: int = 0
    requests: int = 0
    released: threading.Event = dataclasses.field(default_factory=threading.Event)

    def handler(self) -> type[socketserver.StreamRequestHandler]:
        """Return a handler of connections to this disk."""
        disk = self

        class Handler(_Handler):
            served = disk

        return Handler


class _Handler(socketserver.StreamRequestHandler):
    served: Disk

    def handle(self) -> None:
        """Negotiate, then answer requests until the client disconnects."""
        disk = self.served
        size = disk.sizes[min(disk.connections, len(disk.sizes) - 1)]
        disk.connections += 1
        with contextlib.suppress(OSError, struct.error):
            self.wfile.write(b"NBDMAGICIHAVEOPT" + struct.pack(">H", 3))
            self.rfile.read(4)
            self._negotiate(size)
            for count in itertools.count():
                request = self.rfile.read(_REQUEST.size)
                if len(request) < _REQUEST.size or not self._reply(count, *_REQUEST.unpack(request)[2:]):
                    return

    def _reply(self, count: int, kind: int, cookie: int, offset: int, length: int) -> bool:
        disk = self.served
        disk.requests += 1
        if kind == WRITE:
            self.rfile.read(length)
            disk.written += length
        if disk.silent is not None and count >= disk.silent:
            disk.released.wait(60)
            return False
        if disk.malformed is not None and disk.requests > disk.malformed:
            self.wfile.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            return True
        if kind in {WRITE, FLUSH, ZERO} and not (disk.cut is not None and count >= disk.cut):
            error = disk.failing.get(kind, 0)
            data = struct.pack(">IH", error, 0) if error else b""
            reply = _FAILED if error else _NONE
            self.wfile.write(struct.pack(">IHHQI", 0x668E33EF, _DONE, reply, cookie, len(data)) + data)
            return True
        error = disk.refusing(offset) if kind == _STATUS else disk.reading() if kind == _READ else 0
        if error:
            data = struct.pack(">IH", error, 0)
            self.wfile.write(struct.pack(">IHHQI", 0x668E33EF, _DONE, _FAILED, cookie, len(data)) + data)
            return True
        if disk.endless == "bytes" and kind == _READ:
            for at in range(length):
                self._flood(_chunk(cookie, offset + at, 1, is_data=True), once=True)
        if disk.endless in _CHUNKS and kind == _READ:
            self._flood(_endless(disk.endless, cookie, offset))
        if disk.endless == "status" and kind == _STATUS:
            data = _packed(1, [(length, 0)])
            self._flood(struct.pack(">IHHQI", 0x668E33EF, 0, _EXTENTS, cookie, len(data)) + data)
        if kind == _READ and disk.chunks is not None:
            for start, size, is_data in disk.chunks(length):
                self.wfile.write(_chunk(cookie, offset + start, size, is_data))
            self.wfile.write(struct.pack(">IHHQI", 0x668E33EF, _DONE, _NONE, cookie, 0))
            return True
        if kind == _READ:
            data = struct.pack(">Q", offset) + b"A" * (length // disk.part)
            chunk = _DATA
        elif kind == _STATUS:
            if disk.dirty is not None:
                data = _packed(2, disk.dirty(offset, length))
                self.wfile.write(struct.pack(">IHHQI", 0x668E33EF, 0, _EXTENTS, cookie, len(data)) + data)
            data = _packed(1, disk.status(offset, length))
            chunk = _EXTENTS
        else:
            return False
        if disk.cut is not None and count >= disk.cut:
            data = data[: len(data) // 2]
            self.wfile.write(struct.pack(">IHHQI", 0x668E33EF, _DONE, chunk, cookie, len(data) * 2) + data)
            return False
        self.wfile.write(struct.pack(">IHHQI", 0x668E33EF, _DONE, chunk, cookie, len(data)) + data)
        return True

    def _negotiate(self, size: int) -> None:
        """Answer options until NBD_OPT_GO. The metadata contexts are base:allocation and the bitmap."""
        while True:
            _, option, length = _OPTION.unpack(self.rfile.read(_OPTION.size))
            asked = self.rfile.read(length)
            if option == _LIST_CONTEXTS and self.served.endless == "contexts":
                self._flood(_answered(option, _CONTEXT, struct.pack(">I", 0) + b"qemu:dirty-bitmap:day"))
            if option == _LIST and self.served.endless == "exports":
                self._flood(_answered(option, _SERVER, struct.pack(">I", 3) + b"day"))
            if option == _GO and self.served.endless == "exports":
                self._answer(option, _UNKNOWN_EXPORT)
                continue
            if option == _GO:
                self._answer(option, _INFO, struct.pack(">HQH", 0, size, self.served.flags))
                self._answer(option, _ACK)
                return
            if option == _SET_CONTEXTS and b"base:allocation" in asked:
                self._answer(option, _CONTEXT, struct.pack(">I", 1) + b"base:allocation")
            if option == _SET_CONTEXTS and self.served.dirty is not None and BITMAP.encode() in asked:
                self._answer(option, _CONTEXT, struct.pack(">I", 2) + b"qemu:dirty-bitmap:" + BITMAP.encode())
            known = option in {_STRUCTURED, _LIST_CONTEXTS, _SET_CONTEXTS}
            self._answer(option, _ACK if known else _UNKNOWN)

    def _answer(self, option: int, kind: int, data: bytes = b"") -> None:
        self.wfile.write(_answered(option, kind, data))

    def _flood(self, part: bytes, *, once: bool = False) -> None:
        pause = self.served.pause
        many = part if pause else part * (1 + (1 << 20) // len(part))
        while not self.served.released.wait(pause):
            self.wfile.write(many)
            if once:
                return


def _answered(option: int, kind: int, data: bytes) -> bytes:
    return struct.pack(">QIII", 0x3E889045565A9, option, kind, len(data)) + data


def _endless(what: str, cookie: int, offset: int) -> bytes:
    """Return a chunk of a read that is not the last."""
    kind, data = {
        "empty": (_NONE, b""),
        "data": (_DATA, struct.pack(">Q", offset) + b"A" * 4096),
        "holes": (_HOLE, struct.pack(">QI", offset, 4096)),
        "void": (_HOLE, struct.pack(">QI", offset, 0)),
        "errors": (_FAILED, struct.pack(">IH", 5, 0)),
        "faults": (_ERROR, struct.pack(">IHQ", 5, 0, offset)),
    }[what]
    return struct.pack(">IHHQI", 0x668E33EF, 0, kind, cookie, len(data)) + data


def _chunk(cookie: int, offset: int, length: int, is_data: bool) -> bytes:
    data = b"A" * length if is_data else struct.pack(">I", length)
    data = struct.pack(">Q", offset) + data
    return struct.pack(">IHHQI", 0x668E33EF, 0, _DATA if is_data else _HOLE, cookie, len(data)) + data


def _packed(context: int, found: Extents) -> bytes:
    numbers = array.array("I", itertools.chain((context,), *found))
    numbers.byteswap()
    return numbers.tobytes()


@contextlib.contextmanager
def serve(path: Path, disk: Disk) -> Iterator[str]:
    """Serve on a unix socket at ``path`` and yield the path as text."""
    with socketserver.ThreadingUnixStreamServer(str(path), disk.handler()) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield str(path)
        finally:
            disk.released.set()
            server.shutdown()
