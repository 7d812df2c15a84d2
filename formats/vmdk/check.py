"""Safety check of VMware disks: one sparse extent with an embedded descriptor.

Virtual Disk Format 5.0, VMware 2011, and QEMU's block/vmdk.c. Every other kind refers to its data by path
and is refused.
"""

from __future__ import annotations

import re

from cdi_worker import errors
from cdi_worker.formats import facts, views
from cdi_worker.formats.vmdk import header as vmdk_header
from cdi_worker.formats.vmdk import layout
from cdi_worker.formats.vmdk.header import AT_END, SECTOR

#: Maximum directory entries: 64 TiB need 2 Mi with the usual grains of 64 KiB.
_MAX_DIRECTORY = facts.MAX_TABLE // 4
#: Maximum sectors of a compressed grain. QEMU allocates three of them for each of 16 reads, and decompresses
#: the whole grain for each. VMware writes grains of 64 KiB.
_MAX_COMPRESSED = 2 << 11

#: In a descriptor in lower case: its createType, and the types that keep the data in the same file.
_TYPE = re.compile(r'createtype="([^"]*)"')
_TYPES = ("monolithicsparse", "streamoptimized")
#: An empty line, a comment, the disk database, a field, or an extent.
_LINE = re.compile(r"|#.*|ddb.*|[^ =]*=.*|(rw|rdonly|noaccess)( .*)?")
_EXTENT = re.compile(r"(rw|rdonly|noaccess)(\s|$)")
_SPARSE = re.compile(r'\w+ \s*\d+\s+sparse\s+"[^"/\\]+"')


def check(view: views.View) -> facts.Facts:
    """Refuse everything except one sparse extent without a parent."""
    header = _parse(view.head)
    at_end = header.directory == AT_END
    size, complete = header.capacity * SECTOR, view.random or not at_end
    footer = _footer(header, view) if at_end and view.random else None
    try:
        return facts.Facts("vmdk", size, complete, layout=layout.Layout(header, footer))
    except errors.Unsupported as err:
        return facts.Facts("vmdk", size, complete, unplaceable=str(err))


def _footer(header: vmdk_header.Header, view: views.View) -> vmdk_header.Header:
    if (size := view.size or 0) % SECTOR:
        raise errors.Truncated(format="vmdk", reason=f"the file of {size} bytes does not end with a footer")
    return vmdk_header.parse_footer(header, view.tail(vmdk_header.FOOTER))


def _parse(head: bytes) -> vmdk_header.Header:
    if not head.startswith(vmdk_header.MAGIC):
        reason = (
            "the data is in other files, or the image has the format of an ESX server; "
            "export it as streamOptimized or monolithicSparse"
        )
        raise facts.refuse("vmdk", "subformat", reason)
    header = vmdk_header.parse(head)
    if header.flags & vmdk_header.COMPRESSED and header.grain > _MAX_COMPRESSED:
        reason = f"compressed grains of {header.grain} sectors, at most {_MAX_COMPRESSED} are supported"
        raise facts.refuse("vmdk", "table", reason)
    # QEMU opens the files in the descriptor if the capacity is 0.
    facts.check_size("vmdk", header.capacity * SECTOR)
    if header.directory_entries > _MAX_DIRECTORY:
        raise facts.refuse("vmdk", "table", "the grains are too small for the virtual size")
    _check_parent(head[vmdk_header.DESCRIPTOR])
    _check_descriptor(_descriptor(header, head))
    return header


def _check_parent(text: bytes) -> None:
    if re.search(rb"parentfilenamehint", text, re.IGNORECASE):
        raise facts.refuse("vmdk", "parent", "the image has a parent image; merge them first")
    text = text.partition(b"\0")[0]
    parent = re.search(rb"^\s*parentCID\s*=\s*(\w+)", text, re.IGNORECASE | re.MULTILINE)
    if parent and parent[1].lower() != b"ffffffff":
        raise facts.refuse("vmdk", "parent", "the image depends on a parent image; merge them first")


def _descriptor(header: vmdk_header.Header, head: bytes) -> str:
    """Return the descriptor in lower case: it is ASCII and not case-sensitive."""
    start, size = header.descriptor_offset * SECTOR, header.descriptor_size * SECTOR
    if start != vmdk_header.DESCRIPTOR.start or start + size > min(len(head), vmdk_header.HEAD_SIZE):
        reason = f"the descriptor of {size} bytes at byte {start} does not follow the header"
        raise facts.refuse("vmdk", "descriptor", reason)
    text = head[start : start + size].partition(b"\0")[0]
    if not text.isascii():
        raise facts.refuse("vmdk", "descriptor", "the descriptor is not ASCII")
    return text.decode("ascii").lower()


def _check_descriptor(text: str) -> None:
    """Refuse a descriptor with a line of an unknown kind, as OpenStack does since CVE-2024-32498.

    The rules are those of ``VMDKInspector`` in ``oslo_utils/imageutils/format_inspector.py``.
    """
    kind = _TYPE.search(text)
    if kind is None or kind[1] not in _TYPES:
        raise facts.refuse("vmdk", "descriptor", f"the createType is not one of {', '.join(_TYPES)}")
    lines = [line.strip() for line in text.split("\n")]
    for line in lines:
        if not _LINE.fullmatch(line):
            raise facts.refuse("vmdk", "descriptor", f"the descriptor has an unknown line: {line[:80]!r}")
    extents = [line for line in lines if _EXTENT.match(line)]
    if len(extents) != 1 or not _SPARSE.fullmatch(extents[0]):
        raise facts.refuse("vmdk", "extents", "the image is not one sparse extent in one file")


def required_length(view: views.View) -> int:
    """Return the minimum length in bytes of a file with this grain directory and its tables."""
    header = vmdk_header.parse(view.at(0, SECTOR))
    if header.directory == AT_END:
        header = vmdk_header.parse_footer(header, view.tail(vmdk_header.FOOTER))
    count = header.directory_entries
    required = header.directory * SECTOR + 4 * count
    last = 0
    for _, directory in view.table(header.directory * SECTOR, count, "<I"):
        offsets = {entry * SECTOR for entry in directory if entry}
        for table in view.tables(offsets, 4 * header.table_entries):
            last = max(last, *views.entries(table, "<I"))
    # 0: never written, 1: reads as zeros.
    return max(required, _grain_end(view, header, last * SECTOR)) if last > 1 else required


def _grain_end(view: views.View, header: vmdk_header.Header, offset: int) -> int:
    if header.flags & vmdk_header.COMPRESSED:
        size: int = vmdk_header.GRAIN_MARKER.unpack(view.at(offset, vmdk_header.GRAIN_MARKER.size))[1]
        return offset + vmdk_header.GRAIN_MARKER.size + size
    return offset + header.grain * SECTOR
