"""What an xz header tells before anything is decompressed.

https://tukaani.org/xz/xz-file-format.txt, sections 2.1.1 (stream header) and 3.1 (block header).
"""

from __future__ import annotations

_MAGIC = b"\xfd7zXZ\x00"
_STREAM_HEADER = 12
_HAS_COMPRESSED_SIZE = 0x40


def is_multi_block(head: bytes, size: int | None = None) -> bool:
    """Tell whether several threads can decompress the stream that ``head`` (20 bytes or more) begins.

    Only the threaded encoder writes sizes into block headers, and only with them can a decoder find
    the next block early. ``size``: length of the whole file in bytes; a first block that fills it
    is alone.
    """
    if not head.startswith(_MAGIC) or len(head) <= _STREAM_HEADER + 2:
        return False
    header_size, flags = head[_STREAM_HEADER], head[_STREAM_HEADER + 1]
    if header_size == 0 or not flags & _HAS_COMPRESSED_SIZE:
        return False
    block = _STREAM_HEADER + (header_size + 1) * 4 + _number(head[_STREAM_HEADER + 2 :])
    # Check, index and footer that end a one-block file stay below 128 bytes.
    return size is None or block + 128 < size


def _number(data: bytes) -> int:
    """Return the multi-byte integer that ``data`` begins with (section 1.2)."""
    value = 0
    for index, byte in enumerate(data[:9]):
        value |= (byte & 0x7F) << (7 * index)
        if not byte & 0x80:
            break
    return value
