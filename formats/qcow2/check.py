"""Safety check of qcow2 images, and the minimum length of the file."""

from __future__ import annotations

import posixpath
import struct
from typing import Final

from cdi_worker.formats import facts, smalljson, views
from cdi_worker.formats.mapped import image
from cdi_worker.formats.qcow2 import header as qcow2_header
from cdi_worker.formats.qcow2.header import Qcow2Header
from cdi_worker.formats.qcow2.layout import Qcow2Layout

_BITMAPS_FIELDS = struct.Struct(">I4xQQ")
#: A bitmap's entry in the directory (specification, "Bitmap directory"): lengths of name and extra data.
_ENTRY = struct.Struct(">18xHI")
#: The most bitmaps that QEMU writes, and the longest directory: names of ordinary length.
_MOST_BITMAPS = 65535
_LONGEST_DIRECTORY = 1 << 20
#: Nested nodes of a ``json:`` name that are searched.
_NESTED: Final = 8
#: Shown in place of a ``json:`` name without a file name: it may contain a password.
_OTHER: Final = "json:…"


def check(view: views.View) -> facts.ImageFacts:
    """Refuse backing files except the allowed one, data files, encryption and unknown features."""
    header = qcow2_header.parse(view.head, backed=view.layer or view.allow_backing is not None)
    facts.check_size("qcow2", header.virtual_size)
    name = header.backing
    if view.layer:
        backing_format = header.extensions.get(qcow2_header.BACKING_FORMAT, b"").decode("utf-8", "replace")
        return facts.ImageFacts(
            "qcow2",
            header.virtual_size,
            backing=name,
            backing_format="" if name is None else backing_format,
            bitmaps=_bitmaps(header, view),
            layout=Qcow2Layout(header),
        )
    if name is not None and posixpath.basename(name) != view.allow_backing:
        # Only the base name: the rest may be a URL with a password.
        reason = f"the backing file is {backing_base_name(name)!r}, expected {view.allow_backing!r}"
        raise facts.refuse("qcow2", "backing_file", reason)
    # An image with a backing file is not a complete disk and cannot be placed.
    layout = Qcow2Layout(header) if name is None else None
    return facts.ImageFacts("qcow2", header.virtual_size, backing=name, layout=layout)


def required_length(view: views.View) -> int:
    """Return the minimum length in bytes of a file with these tables. A backing file is ignored."""
    header = qcow2_header.parse(view.head, backed=True)
    return image.required_length(Qcow2Layout(header), view.at, view.size or 0)


def backing_base_name(name: str) -> str:
    """Return the base name that a header's backing file has, also in the ``json:`` form of QEMU."""
    if not name.startswith("json:"):
        return _base_name(name.removeprefix("file:"))
    try:
        document = smalljson.parse(name.removeprefix("json:"))
    except ValueError:
        return _OTHER
    for _ in range(_NESTED):
        if not isinstance(document, dict):
            break
        opened = document.get("filename", document.get("file.filename", document.get("path")))
        if isinstance(opened, str):
            return _base_name(opened)
        document = document.get("file")
    return _OTHER


def _base_name(name: str) -> str:
    """Return the last part of a path or URL. The query of a URL may be a signature, and is no part of it."""
    return posixpath.basename(name.partition("?")[0] if "://" in name else name)


def _bitmaps(header: Qcow2Header, view: views.View) -> tuple[str, ...]:
    """Return the names of the dirty bitmaps; none if their directory cannot be read at random.

    Raises ``errors.Refused`` for a directory that is not as in the specification.
    """
    fields = header.extensions.get(qcow2_header.BITMAPS, b"")
    if len(fields) < _BITMAPS_FIELDS.size or not view.random:
        return ()
    count, length, offset = _BITMAPS_FIELDS.unpack_from(fields)
    if count > _MOST_BITMAPS or length > _LONGEST_DIRECTORY:
        reason = f"the directory of {count} bitmaps has {length} bytes"
        raise facts.refuse("qcow2", "bitmaps", reason)
    directory, at, names = view.at(offset, length), 0, []
    for _ in range(count):
        if at + _ENTRY.size > len(directory):
            raise facts.refuse("qcow2", "bitmaps", f"the directory ends before its {count} bitmaps")
        name, extra = _ENTRY.unpack_from(directory, at)
        start = at + _ENTRY.size + extra
        names.append(directory[start : start + name].decode("utf-8", "replace"))
        at = -(-(start + name) // 8) * 8
    return tuple(names)
