"""The size that a compressed file states of its content: to be shown, and checked when it is decompressed.

An xz file has it in the index at its end (xz file format 1.2.1), a zstd file in the header of its frame
(RFC 8878). gzip states it modulo 4 GiB, bzip2 not at all.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

from cdi_worker.formats import views

_FOOTER: Final = struct.Struct("<IIH2s")
#: Bytes of an index, or of a first frame, that are read, and streams of a file that are looked at: xz makes
#: one of each file.
_LARGEST: Final = 1 << 20
_STREAMS: Final = 16
#: Bytes at the end of a stream that are read for its padding.
_TAIL: Final = 4 << 10
_MAGIC: Final = b"\x28\xb5\x2f\xfd"
#: Ends a zstd file of many frames: its table of them (zstd's contrib/seekable_format).
_SEEKABLE: Final = b"\xb1\xea\x92\x8f"


def size(kind: str, head: bytes, read: views.Read | None, length: int | None) -> int | None:
    """Return the bytes of the content, or None if they are not stated, or not in a way that can be read.

    ``head``: the first bytes of the file, ``length``: its bytes. Without ``read`` only these are looked at.
    """
    if kind == "zst":
        found = _frame(head)
        # One frame is hardly larger than its content: a file that is has more of them.
        if found is None or length is None or length > found[0] + found[0] // 128 + 512:
            return None
        return found[0] if _is_alone(found[1], head, read, length) else None
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


def _frame(head: bytes) -> tuple[int, int] | None:
    """Return the content of the first frame, and where its blocks begin."""
    if len(head) < 5 or not head.startswith(_MAGIC):
        return None
    flags = head[4]
    is_single, kind = flags & 0x20, flags >> 6
    count = 1 << kind if kind or is_single else 0
    start = 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
    if not count or len(head) < start + count:
        return None
    return int.from_bytes(head[start : start + count], "little") + 256 * (count == 2), start + count


def _is_alone(position: int, head: bytes, read: views.Read | None, length: int) -> bool:
    """Return whether the frame is the only one, as far as the first bytes and the last ones show it.

    ``position``: where its blocks begin.
    """
    if read is not None:
        if read(length - 4, 4) == _SEEKABLE:
            return False
        head += read(len(head), max(0, min(length, _LARGEST) - len(head)))
    is_last = False
    while not is_last:
        header = int.from_bytes(head[position : position + 3], "little")
        if position + 3 > len(head):
            # It ends behind what is read: most files have one frame.
            return True
        is_last, is_repeated = bool(header & 1), header & 6 == 2
        position += 3 + (1 if is_repeated else header >> 3)
    return position + (head[4] & 4) == length


def _stream(read: views.Read, end: int) -> tuple[int, int] | None:
    """Return the content of the stream that ends at ``end``, and where it begins."""
    # Padding is zeros, four at a time. More of it than is read here is not worth the requests.
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
    found = _records(records[1:-4])
    if found is None:
        return None
    packed, content = found
    begin = end - 24 - index - packed
    return (content, begin) if begin >= 0 else None


def _records(data: bytes) -> tuple[int, int] | None:
    """Return the bytes of all blocks with their padding, and those of their content."""
    packed = content = position = 0
    numbers = []
    while position < len(data):
        number = shift = 0
        while True:
            if position == len(data) or shift > 56:
                return None
            byte = data[position]
            number |= (byte & 0x7F) << shift
            position, shift = position + 1, shift + 7
            if byte < 0x80:
                break
        numbers.append(number)
        if len(numbers) == 2 * numbers[0] + 1:
            break
    if not numbers or len(numbers) != 2 * numbers[0] + 1:
        return None
    for size, plain in zip(numbers[1::2], numbers[2::2], strict=True):
        packed += -(-size // 4) * 4
        content += plain
    return packed, content
