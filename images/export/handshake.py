"""The server side of the NBD handshake (fixed newstyle) for one read-only export with an empty name.

https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

_INIT_MAGIC = b"NBDMAGIC"
_OPTION_MAGIC = b"IHAVEOPT"
_REPLY_MAGIC = 0x0003E889045565A9

_FIXED_NEWSTYLE, _NO_ZEROES = 1, 2
_HAS_FLAGS, _READ_ONLY, _CAN_MULTI_CONN = 1, 2, 1 << 8
_FLAGS = _HAS_FLAGS | _READ_ONLY | _CAN_MULTI_CONN

_EXPORT_NAME, _ABORT, _LIST, _INFO, _GO = 1, 2, 3, 6, 7
_ACK, _SERVER, _REPLY_INFO = 1, 2, 3
_UNSUPPORTED, _INVALID, _UNKNOWN = (1 << 31) + 1, (1 << 31) + 3, (1 << 31) + 6
_INFO_EXPORT, _INFO_BLOCK_SIZE = 0, 3

_OPTION = struct.Struct(">8sII")
_REPLY = struct.Struct(">QIII")

# An export name has at most 4096 bytes, the rest of an option is short.
_LONGEST_OPTION = 8 << 10
_MOST_OPTIONS = 64


class Gone(Exception):
    """The client closed the connection or violated the protocol."""


class Connection:
    """A connection to a client: one thread receives, any thread sends whole messages."""

    def __init__(self, accepted: socket.socket) -> None:
        self._socket = accepted
        self._requests = accepted.makefile("rb", 64 << 10)
        self._lock = threading.Lock()

    def receive(self, length: int) -> bytes:
        """Return exactly ``length`` bytes. Raises ``Gone`` at the end of the connection."""
        data: bytes = self._requests.read(length)
        if len(data) < length:
            raise Gone
        return data

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all parts as one message. Thread-safe."""
        left = [memoryview(part) for part in parts if len(part)]
        with self._lock:
            while left:
                sent = self._socket.sendmsg(left)
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if left:
                    left[0] = left[0][sent:]

    def shutdown(self) -> None:
        """End ``receive`` and ``send`` in all threads."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shutdown()
        # The descriptor must not be closed, and its number reused, while another thread sends to it.
        with self._lock:
            self._requests.close()
            self._socket.close()


def negotiate(connection: Connection, size: int, longest: int) -> None:
    """Negotiate the export of ``size`` bytes with reads of up to ``longest`` bytes. Raises ``Gone``."""
    connection.send(_INIT_MAGIC, _OPTION_MAGIC, struct.pack(">H", _FIXED_NEWSTYLE | _NO_ZEROES))
    (flags,) = struct.unpack(">I", connection.receive(4))
    if flags & ~(_FIXED_NEWSTYLE | _NO_ZEROES):
        raise Gone
    for _ in range(_MOST_OPTIONS):
        magic, option, length = _OPTION.unpack(connection.receive(_OPTION.size))
        if magic != _OPTION_MAGIC or length > _LONGEST_OPTION:
            raise Gone
        data = connection.receive(length)
        if option == _EXPORT_NAME:
            # NBD_OPT_EXPORT_NAME has no error reply: for an unknown name the server must disconnect.
            if data:
                raise Gone
            connection.send(struct.pack(">QH", size, _FLAGS), bytes(0 if flags & _NO_ZEROES else 124))
            return
        if _answer(connection, option, data, (size, longest)):
            return
    raise Gone


def _answer(connection: Connection, option: int, data: bytes, export: tuple[int, int]) -> bool:
    """Answer one option; return whether the transmission phase begins."""
    if option == _ABORT:
        _reply(connection, option, _ACK)
        raise Gone
    if option == _LIST:
        if data:
            _reply(connection, option, _INVALID)
        else:
            _reply(connection, option, _SERVER, struct.pack(">I", 0))
            _reply(connection, option, _ACK)
        return False
    if option not in {_INFO, _GO}:
        _reply(connection, option, _UNSUPPORTED)
        return False
    name = _name(data)
    if name is None or name:
        _reply(connection, option, _INVALID if name is None else _UNKNOWN)
        return False
    size, longest = export
    _reply(connection, option, _REPLY_INFO, struct.pack(">HQH", _INFO_EXPORT, size, _FLAGS))
    # Minimum block size 1: formats have tables at any offset.
    _reply(connection, option, _REPLY_INFO, struct.pack(">HIII", _INFO_BLOCK_SIZE, 1, 4096, longest))
    _reply(connection, option, _ACK)
    return option == _GO


def _name(data: bytes) -> bytes | None:
    """Return the export name in NBD_OPT_INFO or NBD_OPT_GO, None if the option is malformed."""
    if len(data) < 6:
        return None
    (length,) = struct.unpack_from(">I", data)
    if length > len(data) - 6:
        return None
    (requests,) = struct.unpack_from(">H", data, 4 + length)
    return data[4 : 4 + length] if len(data) == 6 + length + 2 * requests else None


def _reply(connection: Connection, option: int, kind: int, data: bytes = b"") -> None:
    connection.send(_REPLY.pack(_REPLY_MAGIC, option, kind, len(data)), data)
