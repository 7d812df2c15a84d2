"""Safety check of qcow2 images, and the minimum length of the file."""

from __future__ import annotations

import posixpath
import struct

from cdi_worker.formats import facts, views
from cdi_worker.formats.qcow2 import layout

#: Header fields: offset and length of the backing file's name (specification, "Header").
_BACKING = struct.Struct(">8xQI")
_BACKING_FIELDS = slice(8, 20)
#: As in the specification.
_LONGEST_NAME = 1023


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
    # Imported when used: few images are layers (start-up time).
    from cdi_worker.formats.qcow2 import extensions

    name = _backing_name(view.head)
    head[_BACKING_FIELDS] = bytes(12)
    found = layout.read_layout(bytes(head))
    facts.check_size("qcow2", found.virtual_size)
    return facts.Facts(
        "qcow2",
        found.virtual_size,
        backing=name,
        backing_format=extensions.backing_format(view.head) if name is not None else "",
        bitmaps=extensions.bitmaps(view),
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
        # Imported when used: only a refusal needs it (start-up time).
        from cdi_worker.formats.qcow2 import chain

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
