"""Read the uncompressed size that a file states: it is shown, and checked when the file is decompressed.

An xz file has it in the index at its end (xz file format 1.2.1), a zstd file in the header of its frame
(RFC 8878). gzip states it modulo 4 GiB, bzip2 not at all.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from typing import Final

from cdi_worker.formats import views
from cdi_worker.formats.compressed import xz
from cdi_worker.formats.zstd import zstd

_FOOTER: Final = struct.Struct("<IIH2s")
#: Longest index, or part of a first frame, that is read. Most streams of a file: ``cat a.xz b.xz`` makes two.
_LARGEST: Final = 1 << 20
_STREAMS: Final = 16
#: Longest padding after a stream.
_TAIL: Final = 4 << 10
#: Last bytes of a zstd file with a table of its frames (zstd's contrib/seekable_format).
_SEEKABLE: Final = b"\xb1\xea\x92\x8f"


def size(kind: str, head: bytes, read: views.Read | None, length: int | None) -> int | None:
    """Return the uncompressed size in bytes; None if it is not stated or cannot be read.

    ``head``: the first bytes of the file, ``length``: its size. Without ``read``, only these are used.
    """
    if kind == "zst":
        return _frame(head, read, length)
    if kind != "xz" or read is None or length is None:
        return None
    total = 0
    for _ in range(_STREAMS):
        stream = _stream(read, length)
        if stream is None:
            return None
        content, length = stream
        total += content
        if not length:
            return total
    return None


def _frame(head: bytes, read: views.Read | None, length: int | None) -> int | None:
    """Return the uncompressed size of a file with one frame, as far as its first and last bytes show."""
    try:
        content = zstd.get_frame_info(head).decompressed_size
    except zstd.ZstdError:
        return None
    # A frame is hardly larger than its content: a larger file has several frames.
    if content is None or length is None or length > content + content // 128 + 512:
        return None
    if read is not None:
        if read(length - 4, 4) == _SEEKABLE:
            return None
        head += read(len(head), max(0, min(length, _LARGEST) - len(head)))
    try:
        return content if zstd.get_frame_size(head) == length else None
    except zstd.ZstdError:
        # The frame continues after the bytes read. Most files have one frame.
        return content


def _stream(read: views.Read, end: int) -> tuple[int, int] | None:
    """Return the uncompressed size of the stream that ends at ``end``, and its offset."""
    # Stream padding is zeros in multiples of four bytes. More than ``_TAIL`` is not worth the requests.
    tail = read(max(0, end - _TAIL), min(end, _TAIL))
    end -= (len(tail) - len(tail.rstrip(b"\0"))) // 4 * 4
    if end < 24 or not any(tail):
        return None
    crc, backward, flags, magic = _FOOTER.unpack(footer := read(end - 12, 12))
    index = (backward + 1) * 4
    if magic != b"YZ" or flags & 0xF0FF or zlib.crc32(footer[4:10]) != crc or index > min(_LARGEST, end - 24):
        return None
    records = read(end - 12 - index, index)
    if zlib.crc32(records[:-4]) != int.from_bytes(records[-4:], "little") or records[0]:
        return None
    # The number of blocks, then the sizes of each block: packed, without its padding, and uncompressed.
    numbers = xz.numbers(records[1:-4])
    blocks = next(numbers, len(records))
    sizes = [*itertools.islice(numbers, 2 * min(blocks, len(records)))]
    packed = sum(-(-size // 4) * 4 for size in sizes[::2])
    begin = end - 24 - index - packed
    return (sum(sizes[1::2]), begin) if len(sizes) == 2 * blocks and begin >= 0 else None
