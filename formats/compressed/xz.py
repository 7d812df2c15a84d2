"""Decompress the blocks of an xz stream in several threads (xz-file-format.txt).

Each block is passed to liblzma as a stream of its own, with an index and a footer made for it. liblzma
verifies its sizes and its check; the index and the footer of the file must be those of all blocks.
"""

from __future__ import annotations

import collections
import itertools
import lzma
import struct
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent import futures

from cdi_worker import errors

Read = Callable[[memoryview], int]

_THREADS = 2
#: Bytes of input, and of output, of one call of liblzma.
_PIECE = 1 << 20
#: Bytes of the check by its identifier. liblzma does not verify the others, which no tool writes.
_CHECKS = {0: 0, 1: 4, 4: 8, 10: 32}
#: Longest index: of some two million blocks. It is kept until the end.
_INDEX = 16 << 20
#: Most blocks without content, which no tool writes.
_EMPTY = 1 << 10

#: Bytes from the start of a stream to the flags of its first block.
_START = 14


def start(peek: Callable[[int], memoryview], read: Read, memory: int) -> Stream | lzma.LZMADecompressor:
    """Return the decompressor of a stream: in threads, if its first block states its sizes.

    Only the multi-threaded encoder writes them (3.1.2). A header of size 0 is the index: there are no blocks.
    """
    head = peek(_START)
    if len(head) >= _START and head[12] != 0 and head[13] & 0xC0 == 0xC0:
        return Stream(read, memory)
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=memory)


class Stream:
    """A stream whose blocks state their sizes, with the interface of ``lzma.LZMADecompressor``.

    It reads its input itself: ``read`` fills a part of a buffer, or raises an error. ``memory``: bytes of the
    blocks in work.
    """

    needs_input = False
    unused_data = b""

    def __init__(self, read: Read, memory: int) -> None:
        self._pieces = _decompress(read, memory)
        self._rest = memoryview(b"")
        self.eof = False

    def decompress(self, _: object, *, max_length: int) -> memoryview:
        if not self._rest:
            self.eof = (piece := next(self._pieces, None)) is None
            self._rest = memoryview(piece or b"")
        result, self._rest = self._rest[:max_length], self._rest[max_length:]
        return result

    def close(self) -> None:
        """Wait for the blocks that are being decompressed."""
        self._pieces.close()


def _decompress(read: Read, memory: int) -> Generator[bytes, None, None]:
    head = _exactly(read, 12)
    if head[7] not in _CHECKS:
        raise errors.Unsupported(reason=f"the xz stream has checks of an unknown type ({head[7]})")
    flags, check = head[6:8], _CHECKS[head[7]]
    count, empty, records = 0, 0, bytearray()
    working: collections.deque[tuple[int, futures.Future[list[bytes]]]] = collections.deque()
    pool = futures.ThreadPoolExecutor(_THREADS, "xz")
    try:
        while size := _exactly(read, 1)[0]:
            header = bytes([size]) + _exactly(read, 4 * size + 3)
            packed, plain = _sizes(header)
            record = _number(len(header) + packed + check) + _number(plain)
            count, empty = count + 1, empty + (not plain)
            records += record
            if empty > _EMPTY:
                reason = f"more than {_EMPTY} of its blocks have no content"
                raise errors.Refused(format="xz", rule="no content", reason=reason)
            if len(records) > _INDEX:
                reason = (
                    f"the xz stream has an index of more than {_INDEX} bytes; compress it in larger blocks"
                )
                raise errors.Unsupported(reason=reason)
            length, tail = packed + -packed % 4 + check, _tail(1, record, flags)
            # A dictionary uses memory for the content that it has seen, which is at most that of its block.
            needed = length + 2 * plain
            # The first block is returned while it is read: it shows what the content is.
            is_alone = count == 1 or needed > memory // 2
            while working and (
                is_alone or len(working) > _THREADS or needed + sum(cost for cost, _ in working) > memory
            ):
                yield from working.popleft()[1].result()
            if is_alone:
                yield from _block(itertools.chain([head + header], _inputs(read, length), [tail]), memory)
            else:
                block = head + header, _exactly(read, length), tail
                working.append((needed, pool.submit(lambda block: list(_block(block, memory)), block)))
        for _, future in working:
            yield from future.result()
        end = _tail(count, records, flags)
        if b"\0" + _exactly(read, len(end) - 1) != end:
            raise lzma.LZMAError("the index is not that of the blocks")
    finally:
        pool.shutdown(cancel_futures=True)


def _exactly(read: Read, count: int) -> bytearray:
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        rest = rest[read(rest) :]
    return data


def _inputs(read: Read, length: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_PIECE))
    while length:
        count = read(buffer[:length])
        yield buffer[:count]
        length -= count


def _block(inputs: Iterable[bytes | bytearray | memoryview], memory: int) -> Generator[bytes, None, None]:
    """Decompress the stream of one block."""
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=memory)
    for data in inputs:
        piece = decoder.decompress(data, _PIECE)
        while piece or not (decoder.needs_input or decoder.eof):
            if piece:
                yield piece
            piece = b"" if decoder.eof else decoder.decompress(b"", _PIECE)
    if not decoder.eof or decoder.unused_data:
        raise lzma.LZMAError("a block does not end where it should")


def _sizes(header: bytes) -> tuple[int, int]:
    """Return the compressed and the uncompressed size in the header of a block (3.1), not yet verified."""
    if header[1] & 0xC0 != 0xC0:
        raise errors.Unsupported(
            reason="the xz stream states the sizes of some blocks only; compress it again"
        )
    found = [*itertools.islice(numbers(header[2:-4]), 2)]
    if len(found) < 2:
        raise lzma.LZMAError("the header of a block is too short")
    return found[0], found[1]


def numbers(data: bytes) -> Iterator[int]:
    """Decode numbers (1.2), up to one that is malformed or not complete."""
    number = shift = 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if shift > 63:
            return
        if not byte & 0x80:
            yield number
            number = shift = 0


def _number(value: int) -> bytes:
    """Encode a number (1.2)."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def _tail(count: int, records: bytes | bytearray, flags: bytes | bytearray) -> bytes:
    """Return the index (4) and the footer (2.1.2) of a stream."""
    index = b"\0" + _number(count) + records
    index += bytes(-len(index) % 4)
    index += struct.pack("<I", zlib.crc32(index))
    footer = struct.pack("<I", len(index) // 4 - 1) + flags
    return index + struct.pack("<I", zlib.crc32(footer)) + footer + b"YZ"
