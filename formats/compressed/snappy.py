"""Compress and decompress the snappy framing format, in bounded memory.

https://github.com/google/snappy/blob/main/framing_format.txt. The library decompresses a chunk and checks its
CRC-32C. Chunks are delimited here, because the library's own stream reader keeps the whole stream in memory
and ignores bytes after a broken chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import ModuleType

from cdi_worker import errors
from cdi_worker.formats import readers

IDENTIFIER = b"\xff\x06\x00\x00sNaPpY"
#: Maximum bytes of a chunk before compression (section 4.2), and after it with the checksum.
BLOCK = 64 << 10
_LONGEST = 4 + 32 + BLOCK + BLOCK // 6

_COMPRESSED, _PLAIN, _START = 0x00, 0x01, 0xFF
_HEADER = 4
_INPUT = 1 << 20
#: Bytes compressed in one call.
PIECE = 1 << 20
_ZEROS = bytes(PIECE)


class SnappyReader(readers.Wrapper):
    """Decompress a snappy stream. Raises ``errors.Corrupt`` and ``errors.Truncated``."""

    def __init__(self, reader: readers.Reader) -> None:
        super().__init__(reader)
        # The library expects the stream identifier before the chunks of each call: it is written into the
        # bytes before them, so there is always room for it.
        self._input = bytearray(len(IDENTIFIER) + _INPUT)
        self._view = memoryview(self._input)
        self._at = self._end = len(IDENTIFIER)
        self._taken = 0
        self._started = False
        self._rest = readers.BytesReader(b"")

    def readinto(self, into: memoryview, /) -> int:
        count = self._rest.readinto(into)
        if count or not len(into):
            return count
        if len(into) < BLOCK:
            block = bytearray(BLOCK)
            self._rest = readers.BytesReader(bytes(block[: self._inflate(memoryview(block))]))
            return self._rest.readinto(into)
        # Several chunks at once: the readers above this one do their work for each call.
        while len(into) - count >= BLOCK and (got := self._inflate(into[count : count + BLOCK])):
            count += got
        return count

    def _inflate(self, into: memoryview) -> int:
        """Decompress the next chunk with data, of at most BLOCK bytes; return 0 at the end."""
        while length := self._next():
            at, self._at = self._at, self._at + length
            if self._input.startswith(zero_chunk(), at):
                into[:BLOCK] = _ZEROS[:BLOCK]
                return BLOCK
            start = at - len(IDENTIFIER)
            self._input[start:at] = IDENTIFIER
            try:
                count = int(_library().snappy.decompress_into(self._view[start : self._at], into))
            except _library().DecompressionError as err:
                raise _corrupt(f"{err} (before byte {self._taken})") from err
            if count:
                return count
        return 0

    def _next(self) -> int:
        """Go to the next data chunk; return its length with the header, 0 at the end."""
        while self._fill(_HEADER):
            length = int.from_bytes(self._input[self._at + 1 : self._at + _HEADER], "little")
            kind = self._input[self._at]
            if kind in {_COMPRESSED, _PLAIN} and self._started:
                if not 4 <= length <= (_LONGEST if kind == _COMPRESSED else 4 + BLOCK):
                    raise _corrupt(f"a chunk has an invalid length of {length} bytes")
                self._fill(_HEADER + length, required=True)
                return _HEADER + length
            self._skip(kind, length)
        if not self._started:
            raise errors.Truncated(format="snappy", reason="the stream is empty")
        return 0

    def _skip(self, kind: int, length: int) -> None:
        if kind == _START:
            self._fill(min(_HEADER + length, len(IDENTIFIER)), required=True)
            if not self._input.startswith(IDENTIFIER, self._at):
                raise _corrupt("invalid stream identifier")
            self._started = True
        elif not self._started:
            raise _corrupt("the stream identifier is missing at the start")
        elif kind < 0x80:
            raise _corrupt(f"unknown chunk type {kind:#04x}")
        left = _HEADER + length
        while left:
            self._fill(min(left, _INPUT), required=True)
            step = min(left, self._end - self._at)
            self._at += step
            left -= step

    def _fill(self, count: int, *, required: bool = False) -> bool:
        """Buffer ``count`` bytes of input; return False at the end of the input, unless they are required."""
        first = len(IDENTIFIER)
        held = self._end - self._at
        if self._at + count > len(self._input):
            self._input[first : first + held] = self._input[self._at : self._end]
            self._at, self._end = first, first + held
        while held < count and (got := self._reader.readinto(self._view[self._end :])):
            self._end += got
            self._taken += got
            held += got
        if held < count and (held or required):
            raise errors.Truncated(format="snappy", reason=f"the stream ends at byte {self._taken}")
        return held >= count


def frames(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the snappy stream of ``pieces``, each of at most PIECE bytes. Zeros are not compressed again."""
    yield memoryview(IDENTIFIER)
    for piece in pieces:
        if len(piece) == PIECE and _ZEROS.startswith(piece):
            yield memoryview(zero_chunk() * (PIECE // BLOCK))
        else:
            yield _compress(piece)


@functools.cache
def zero_chunk() -> bytes:
    """Return the chunk of BLOCK zeros; this library and Go's (upstream CDI) encode it identically."""
    return bytes(_compress(memoryview(_ZEROS)[:BLOCK]))


def _compress(piece: memoryview) -> memoryview:
    return memoryview(_library().snappy.compress(piece))[len(IDENTIFIER) :]


@functools.cache
def _library() -> ModuleType:
    with errors.optional("a clone", package="cramjam", extra="upload"):
        import cramjam
    return cramjam


def _corrupt(reason: str) -> errors.Corrupt:
    return errors.Corrupt(format="snappy", reason=reason)
