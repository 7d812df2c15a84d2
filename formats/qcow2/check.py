"""Safety check of qcow2 images, and the minimum length of the file."""

from __future__ import annotations

import posixpath
import struct
from collections.abc import Iterator

from cdi_worker.formats import facts, views
from cdi_worker.formats.qcow2 import chain, layout

#: Header fields: offset and length of the backing file's name (specification, "Header").
_BACKING = struct.Struct(">8xQI")
_BACKING_FIELDS = slice(8, 20)
#: As in the specification.
_LONGEST_NAME = 1023
#: Type and length of a header extension.
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


def check(view: views.View) -> facts.Facts:
    """Refuse backing files except the allowed one, data files, encryption and unknown features."""
    head = bytearray(view.head)
    if view.layer:
        return _layer(view, head)
    backing = _backing(view.head, view.allow_backing) if view.allow_backing is not None else None
    if backing is not None:
        head[_BACKING_FIELDS] = bytes(12)
    found = layout.read_layout(bytes(head))
    facts.check_size("qcow2", found.virtual_size)
    # An image with a backing file is not a complete disk and cannot be placed.
    return facts.Facts("qcow2", found.virtual_size, backing=backing, layout=None if backing else found)


def _layer(view: views.View, head: bytearray) -> facts.Facts:
    """Return the facts of a layer of a chain, which may be placed although it names a backing file."""
    name = _backing_name(view.head)
    head[_BACKING_FIELDS] = bytes(12)
    found = layout.read_layout(bytes(head))
    facts.check_size("qcow2", found.virtual_size)
    return facts.Facts(
        "qcow2",
        found.virtual_size,
        backing=name,
        backing_format=_backing_format(view.head) if name is not None else "",
        bitmaps=_bitmaps(view),
        layout=found,
    )


def required_length(view: views.View) -> int:
    """Return the minimum length in bytes of a file with these tables. A backing file is ignored."""

    def masked(offset: int, length: int) -> bytes:
        data = bytearray(view.at(offset, length))
        for at in range(max(offset, _BACKING_FIELDS.start), min(offset + len(data), _BACKING_FIELDS.stop)):
            data[at - offset] = 0
        return bytes(data)

    return layout.required_length(masked, view.size or 0)


def _backing(head: bytes, allowed: str) -> str | None:
    """Return the name of the backing file, None without one. Refuse a base name that is not allowed."""
    name = _backing_name(head)
    if name is not None and posixpath.basename(name) != allowed:
        # Without the rest, which may be a URL with a password.
        reason = f"the backing file is {chain.backing_base_name(name)!r}, expected {allowed!r}"
        raise facts.refuse("qcow2", "backing_file", reason)
    return name


def _backing_name(head: bytes) -> str | None:
    """Return the name of the backing file, None without one. It is compared, never opened."""
    offset, length = _BACKING.unpack_from(head) if len(head) >= _BACKING_FIELDS.stop else (0, 0)
    if not offset:
        return None
    name = head[offset : offset + length].decode("utf-8", "replace")
    if length > _LONGEST_NAME or len(head) < offset + length:
        reason = f"the name of the backing file has {length} bytes at byte {offset}"
        raise facts.refuse("qcow2", "backing_file", reason)
    return name


# -- header extensions -------------------------------------------------------------------------


def _backing_format(head: bytes) -> str:
    """Return the format of the backing file that a checked header names; empty if it names none."""
    for kind, data in _extensions(head):
        if kind == _BACKING_FORMAT:
            return data.decode("utf-8", "replace")
    return ""


def _bitmaps(view: views.View) -> tuple[str, ...]:
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
