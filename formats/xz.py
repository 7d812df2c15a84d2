"""What an xz header tells before anything is decompressed.

https://tukaani.org/xz/xz-file-format.txt, sections 2.1.1 (stream header) and 3.1 (block header).
"""

from __future__ import annotations

_MAGIC = b"\xfd7zXZ\x00"
_BLOCK_FLAGS = 12 + 1  # after the stream header and the size of the block's own
_HAS_COMPRESSED_SIZE = 0x40


def is_multi_block(head: bytes) -> bool:
    """Tell whether threads can share the stream that ``head``, its first 64 bytes or all, begins.

    Only the threaded encoder writes sizes into block headers, and only with them a decoder finds the
    next block early.
    """
    if not head.startswith(_MAGIC) or len(head) <= _BLOCK_FLAGS:
        return False
    # A size of 0 is no block but the index, of a stream without blocks.
    return head[_BLOCK_FLAGS - 1] != 0 and bool(head[_BLOCK_FLAGS] & _HAS_COMPRESSED_SIZE)
