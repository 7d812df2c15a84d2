"""Compress and decompress the snappy framing format, in bounded memory.

https://github.com/google/snappy/blob/main/framing_format.txt. The library decompresses many chunks in one
call and checks their CRC-32C. Chunks are delimited here, because the library's own stream reader keeps the
whole stream in memory and ignores bytes after a broken chunk.
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
        if not len(into):
            return 0
        if len(into) >= BLOCK:
            return self._rest.readinto(into) or self._inflate(into)
        if not (count := self._rest.readinto(into)):
            block = bytearray(BLOCK)
            self._rest = readers.BytesReader(bytes(block[: self._inflate(memoryview(block))]))
            count = self._rest.readinto(into)
        return count

    def _inflate(self, into: memoryview) -> int:
        """Decompress at least one chunk, and as many buffered ones as fit; return 0 at the end."""
        while length := self._next():
            if self._input.startswith(zero_chunk(), self._at):
                into[:BLOCK] = _ZEROS[:BLOCK]
                self._at += length
                return BLOCK
            end = self._at + length
            for _ in range(len(into) // BLOCK - 1):
                following = self._following(end)
                if not following:
                    break
                end += following
            start = self._at - len(IDENTIFIER)
            self._input[start : self._at] = IDENTIFIER
            self._at = end
            try:
                count = int(_library().snappy.decompress_into(self._view[start:end], into))
            except _library().DecompressionError as err:
                raise _corrupt(f"{err} (before byte {self._taken})") from err
            if count:
                return count
        return 0

    def _next(self) -> int:
        """Go to the next data chunk; return its length with the header, 0 at the end."""
        while self._fill(_HEADER):
            kind, length = self._header(self._at)
            if kind in {_COMPRESSED, _PLAIN} and self._started:
                _check(kind, length)
                self._fill(_HEADER + length, required=True)
                return _HEADER + length
            self._skip(kind, length)
        if not self._started:
            raise errors.Truncated(format="snappy", reason="the stream is empty")
        return 0

    def _following(self, at: int) -> int:
        """Return the length of the buffered data chunk at ``at``, 0 if it is not a whole data chunk."""
        if self._end - at < _HEADER or self._input.startswith(zero_chunk(), at):
            return 0
        kind, length = self._header(at)
        if kind not in {_COMPRESSED, _PLAIN} or self._end - at < _HEADER + length:
            return 0
        _check(kind, length)
        return _HEADER + length

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

    def _header(self, at: int) -> tuple[int, int]:
        return self._input[at], int.from_bytes(self._input[at + 1 : at + _HEADER], "little")

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


def _check(kind: int, length: int) -> None:
    longest = _LONGEST if kind == _COMPRESSED else 4 + BLOCK
    if not 4 <= length <= longest:
        raise _corrupt(f"a chunk has an invalid length of {length} bytes")


def _corrupt(reason: str) -> errors.Corrupt:
    return errors.Corrupt(format="snappy", reason=reason)
