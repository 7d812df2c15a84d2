"""The snappy framing format, both ways, at a bounded memory.

https://github.com/google/snappy/blob/main/framing_format.txt. The library inflates and checks the
CRC-32C of many chunks in one call; which bytes are chunks is found out here, because it keeps a whole
stream in memory and passes over what follows a broken one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import ModuleType

from cdi_worker import errors
from cdi_worker.formats import readers

IDENTIFIER = b"\xff\x06\x00\x00sNaPpY"
#: Bytes in a chunk, at most, before compression; and after it, with its checksum.
BLOCK = 64 << 10
_LONGEST = 4 + 32 + BLOCK + BLOCK // 6

_COMPRESSED, _PLAIN, _PADDING, _START = 0x00, 0x01, 0xFE, 0xFF
_HEADER = 4
_INPUT = 1 << 20
#: What is compressed at once.
PIECE = 1 << 20
_ZEROS = bytes(PIECE)


class Reader:
    """Reads what a snappy stream holds. Raises ``errors.Corrupt`` and ``errors.Truncated``."""

    def __init__(self, reader: readers.Reader) -> None:
        self._reader = reader
        # In front of the chunks there is always room for the identifier that the library wants to see.
        self._input = bytearray(len(IDENTIFIER) + _INPUT)
        self._view = memoryview(self._input)
        self._at = self._end = len(IDENTIFIER)
        self._taken = 0
        self._started = False
        self._rest = readers.Bytes(b"")

    def readinto(self, into: memoryview, /) -> int:
        if not len(into):
            return 0
        if len(into) >= BLOCK:
            return self._rest.readinto(into) or self._inflate(into)
        if not (count := self._rest.readinto(into)):
            block = bytearray(BLOCK)
            self._rest = readers.Bytes(bytes(block[: self._inflate(memoryview(block))]))
            count = self._rest.readinto(into)
        return count

    def close(self) -> None:
        self._reader.close()

    def _inflate(self, into: memoryview) -> int:
        """Fill ``into`` with as many whole chunks as are at hand and fit, at least one; 0 at the end."""
        while (length := self._next()) is not None:
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
            if count := self._call(into, end):
                return count
        return 0

    def _call(self, into: memoryview, end: int) -> int:
        start = self._at - len(IDENTIFIER)
        self._input[start : self._at] = IDENTIFIER
        self._at = end
        try:
            return int(library().decompress_into(self._view[start:end], into))
        except library_error() as err:
            raise _corrupt(f"{err}, before byte {self._taken}") from err

    def _next(self) -> int | None:
        """Go to the next chunk of data and return its length with its header, None at the end."""
        while self._fill(_HEADER):
            kind, length = self._header(self._at)
            if kind in {_COMPRESSED, _PLAIN} and self._started:
                _check(kind, length)
                self._need(_HEADER + length)
                return _HEADER + length
            self._pass_over(kind, length)
        if not self._started:
            raise errors.Truncated(format="snappy", reason="ends before it has begun")
        return None

    def _following(self, at: int) -> int:
        """Return the length of a chunk of data that follows in memory, 0 if there is none."""
        if self._end - at < _HEADER or self._input.startswith(zero_chunk(), at):
            return 0
        kind, length = self._header(at)
        if kind not in {_COMPRESSED, _PLAIN} or self._end - at < _HEADER + length:
            return 0
        _check(kind, length)
        return _HEADER + length

    def _pass_over(self, kind: int, length: int) -> None:
        if kind == _START:
            self._need(min(_HEADER + length, len(IDENTIFIER)))
            if not self._input.startswith(IDENTIFIER, self._at):
                raise _corrupt("a stream identifier is wrong")
            self._started = True
        elif not self._started:
            raise _corrupt("it does not begin with the stream identifier")
        elif kind < 0x80:
            raise _corrupt(f"a chunk is of the unknown type {kind:#04x}")
        left = _HEADER + length
        while left:
            self._need(min(left, _INPUT))
            step = min(left, self._end - self._at)
            self._at += step
            left -= step

    def _header(self, at: int) -> tuple[int, int]:
        return self._input[at], int.from_bytes(self._input[at + 1 : at + _HEADER], "little")

    def _need(self, count: int) -> None:
        if not self._fill(count):
            raise errors.Truncated(format="snappy", reason=f"ends at byte {self._taken}")

    def _fill(self, count: int) -> bool:
        """Get ``count`` bytes of input to hand; False at the end, where there is none left."""
        first = len(IDENTIFIER)
        held = self._end - self._at
        if self._at + count > len(self._input):
            self._input[first : first + held] = self._input[self._at : self._end]
            self._at, self._end = first, first + held
        while held < count and (got := self._reader.readinto(self._view[self._end :])):
            self._end += got
            self._taken += got
            held += got
        if 0 < held < count:
            raise errors.Truncated(format="snappy", reason=f"ends at byte {self._taken}")
        return held >= count


def frames(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the stream of ``pieces``, each of at most PIECE bytes. Zeros cost a comparison."""
    yield memoryview(IDENTIFIER)
    for piece in pieces:
        if len(piece) == PIECE and _ZEROS.startswith(piece):
            yield _zero_frames()
        else:
            yield _compress(piece)


@functools.cache
def zero_chunk() -> bytes:
    """Return the chunk that stands for a block of zeros, the same from this library and from Go's."""
    return bytes(_compress(memoryview(_ZEROS)[:BLOCK]))


@functools.cache
def _zero_frames() -> memoryview:
    return memoryview(zero_chunk() * (PIECE // BLOCK))


def _compress(piece: memoryview) -> memoryview:
    return memoryview(library().compress(piece))[len(IDENTIFIER) :]


@functools.cache
def library() -> ModuleType:
    """Return the library. Raises ``errors.MissingExtra``."""
    with errors.optional("a clone", package="cramjam", extra="upload"):
        from cramjam import snappy
    return snappy


@functools.cache
def library_error() -> type[Exception]:
    """Return what the library raises on bytes that it cannot read."""
    from cramjam import DecompressionError

    return DecompressionError


def _check(kind: int, length: int) -> None:
    longest = _LONGEST if kind == _COMPRESSED else 4 + BLOCK
    if not 4 <= length <= longest:
        raise _corrupt(f"a chunk is of {length} bytes")


def _corrupt(reason: str) -> errors.Corrupt:
    return errors.Corrupt(format="snappy", reason=reason)
