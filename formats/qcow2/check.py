"""Safety check of qcow2 images, and the minimum length of the file."""

from __future__ import annotations

import posixpath
import struct

from cdi_worker.formats import facts, views
from cdi_worker.formats.qcow2 import layout

#: Header fields: offset and length of the backing file's name (specification, "Header").
_BACKING = struct.Struct(">8xQI")
_BACKING_FIELDS = slice(8, 20)


def check(view: views.View) -> facts.Facts:
    """Refuse backing files except the allowed one, data files, encryption and unknown features."""
    head = bytearray(view.head)
    backing = _backing(view.head, view.allow_backing) if view.allow_backing is not None else None
    if backing is not None:
        head[_BACKING_FIELDS] = bytes(12)
    found = layout.read_layout(bytes(head))
    facts.check_size("qcow2", found.virtual_size)
    # An image with a backing file is not a complete disk and cannot be placed.
    return facts.Facts("qcow2", found.virtual_size, backing=backing, layout=None if backing else found)


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
    offset, length = _BACKING.unpack_from(head)
    if not offset:
        return None
    name = head[offset : offset + length].decode()
    if len(name.encode()) != length or posixpath.basename(name) != allowed:
        raise facts.refuse("qcow2", "backing_file", f"the backing file is {name!r}, expected {allowed!r}")
    return name
