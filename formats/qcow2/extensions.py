"""The qcow2 header extensions that describe a layer of a chain: the backing file's format, dirty bitmaps."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from cdi_worker.formats import facts, views

_EXTENSION = struct.Struct(">II")
#: Offset of the first extension in version 2, and of the field with it in version 3.
_FIRST, _LENGTH = 72, struct.Struct(">100xI")
_END, _BACKING_FORMAT, _BITMAPS = 0, 0xE2792ACA, 0x23852875
_BITMAPS_FIELDS = struct.Struct(">I4xQQ")
#: A bitmap's entry in the directory (specification, "Bitmap directory"): lengths of name and extra data.
_ENTRY = struct.Struct(">18xHI")
#: QEMU writes at most so many bitmaps; a directory of them with names of ordinary length.
_MOST_BITMAPS = 65535
_LONGEST_DIRECTORY = 1 << 20


def backing_format(head: bytes) -> str:
    """Return the format of the backing file that a checked header names; empty if it names none."""
    for kind, data in _extensions(head):
        if kind == _BACKING_FORMAT:
            return data.decode("utf-8", "replace")
    return ""


def bitmaps(view: views.View) -> tuple[str, ...]:
    """Return the names of the dirty bitmaps; none if their directory cannot be read at random.

    Raises ``errors.Refused`` for a directory that is not as in the specification.
    """
    for kind, data in _extensions(view.head):
        if kind == _BITMAPS and len(data) >= _BITMAPS_FIELDS.size and view.random:
            count, length, offset = _BITMAPS_FIELDS.unpack_from(data)
            if count > _MOST_BITMAPS or length > _LONGEST_DIRECTORY:
                reason = f"the directory of {count} bitmaps has {length} bytes"
                raise facts.refuse("qcow2", "bitmaps", reason)
            return tuple(_names(view.at(offset, length), count))
    return ()


def _extensions(head: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield type and data of the extensions of a checked header."""
    offset = _FIRST
    if int.from_bytes(head[4:8], "big") > 2:
        (offset,) = _LENGTH.unpack_from(head)
    while offset + _EXTENSION.size <= len(head):
        kind, length = _EXTENSION.unpack_from(head, offset)
        if kind == _END:
            return
        offset += _EXTENSION.size
        yield kind, head[offset : offset + length]
        offset += -(-length // 8) * 8


def _names(directory: bytes, count: int) -> Iterator[str]:
    at = 0
    for _ in range(count):
        if at + _ENTRY.size > len(directory):
            raise facts.refuse("qcow2", "bitmaps", f"the directory ends before its {count} bitmaps")
        name, extra = _ENTRY.unpack_from(directory, at)
        start = at + _ENTRY.size + extra
        yield directory[start : start + name].decode("utf-8", "replace")
        at = -(-(start + name) // 8) * 8
