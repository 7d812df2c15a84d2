"""Safety check of VMware disks: one sparse extent with an embedded descriptor.

Virtual Disk Format 5.0, VMware 2011, and QEMU's block/vmdk.c. Every other kind refers to its data by path
and is refused.
"""

from __future__ import annotations

import re

from cdi_worker import errors, masking
from cdi_worker.formats import facts, views
from cdi_worker.formats.vmdk import header as vmdk_header
from cdi_worker.formats.vmdk import layout
from cdi_worker.formats.vmdk.header import AT_END, SECTOR, VmdkHeader

#: Maximum directory entries: 64 TiB need 2 Mi with the usual grains of 64 KiB.
_MAX_DIRECTORY = facts.MAX_TABLE // 4
#: Maximum sectors of a compressed grain. QEMU allocates three of them for each of 16 reads, and decompresses
#: the whole grain for each. VMware writes grains of 64 KiB.
_MAX_COMPRESSED = 2 << 11
#: Zeros after the end of an image, in bytes, behind which its footer is searched.
MOST_ZEROS = 64 << 20

#: In a descriptor in lower case: its createType, and the types that keep the data in the same file.
_TYPE = re.compile(r'createtype="([^"]*)"')
_TYPES = ("monolithicsparse", "streamoptimized")
#: An empty line, a comment, the disk database, a field, or an extent.
_LINE = re.compile(r"|#.*|ddb.*|[^ =]*=.*|(rw|rdonly|noaccess)( .*)?")
_EXTENT = re.compile(r"(rw|rdonly|noaccess)(\s|$)")
#: In GBK, Big5 and Shift-JIS, the second byte of a character may be a backslash. The name of the file is not
#: used: neither here nor by QEMU.
_SPARSE = re.compile(r'\w+ \s*\d+\s+sparse\s+"(?:[^"/\\]|\ufffd\\)+"')


def check(view: views.View) -> facts.ImageFacts:
    """Refuse everything except one sparse extent without a parent."""
    if not view.head.startswith(vmdk_header.MAGIC):
        reason = (
            "the data is in other files, or the image has the format of an ESX server; "
            "export it as streamOptimized or monolithicSparse"
        )
        raise facts.refuse("vmdk", "subformat", reason)
    header = vmdk_header.parse(view.head)
    if header.flags & vmdk_header.COMPRESSED and header.grain > _MAX_COMPRESSED:
        reason = f"compressed grains of {header.grain} sectors, at most {_MAX_COMPRESSED} are supported"
        raise facts.refuse("vmdk", "table", reason)
    # QEMU opens the files in the descriptor if the capacity is 0.
    facts.check_size("vmdk", header.capacity * SECTOR)
    if header.directory_entries > _MAX_DIRECTORY:
        raise facts.refuse("vmdk", "table", "the grains are too small for the virtual size")
    text = view.head[vmdk_header.DESCRIPTOR]
    if re.search(rb"parentfilenamehint", text, re.IGNORECASE):
        raise facts.refuse("vmdk", "parent", "the image has a parent image; merge them first")
    text = text.partition(b"\0")[0]
    parent = re.search(rb"^\s*parentCID\s*=\s*(\w+)", text, re.IGNORECASE | re.MULTILINE)
    if parent and parent[1].lower() != b"ffffffff":
        raise facts.refuse("vmdk", "parent", "the image depends on a parent image; merge them first")
    _check_descriptor(header, view.head)
    size = header.capacity * SECTOR
    found = facts.ImageFacts("vmdk", size, complete=view.random or header.directory != AT_END)
    footer = None
    if header.directory == AT_END and view.random:
        footer, end = _footer(header, view)
        found = found._replace(length=end)
    try:
        return found._replace(layout=layout.VmdkLayout(header, footer))
    except errors.Unsupported as err:
        return found._replace(unplaceable=str(err))


def _footer(header: VmdkHeader, view: views.View) -> tuple[VmdkHeader, int]:
    """Return the footer and the end of the image, which zeros may follow: storage pads files."""
    end = size = view.size or 0
    if not view.tail(vmdk_header.FOOTER).startswith(vmdk_header.MAGIC, SECTOR):
        end = -(-view.end_of_data(MOST_ZEROS) // SECTOR) * SECTOR + SECTOR
    if end > size or end < vmdk_header.FOOTER or end % SECTOR:
        raise errors.Truncated(format="vmdk", reason=f"the file of {size} bytes does not end with a footer")
    return vmdk_header.parse_footer(header, view.at(end - vmdk_header.FOOTER, vmdk_header.FOOTER)), end


def _check_descriptor(header: VmdkHeader, head: bytes) -> None:
    """Refuse a descriptor with a line of an unknown kind, as OpenStack does since CVE-2024-32498.

    The rules are those of ``VMDKInspector`` in ``oslo_utils/imageutils/format_inspector.py``.
    """
    start, size = header.descriptor_offset * SECTOR, header.descriptor_size * SECTOR
    if start != vmdk_header.DESCRIPTOR.start or start + size > min(len(head), vmdk_header.HEAD_SIZE):
        reason = f"the descriptor of {size} bytes at byte {start} does not follow the header"
        raise facts.refuse("vmdk", "descriptor", reason)
    # Keywords are ASCII, in any case. Names and comments have the encoding of the host: their other bytes are
    # replaced.
    descriptor = head[start : start + size].partition(b"\0")[0]
    text = descriptor.decode("ascii", errors="replace").lower()
    kind = _TYPE.search(text)
    if kind is None or kind[1] not in _TYPES:
        raise facts.refuse("vmdk", "descriptor", f"the createType is not one of {', '.join(_TYPES)}")
    lines = [line.strip() for line in text.split("\n")]
    for line in lines:
        if not _LINE.fullmatch(line):
            reason = f"the descriptor has an unknown line: {masking.quoted(line)!r}"
            raise facts.refuse("vmdk", "descriptor", reason)
    extents = [line for line in lines if _EXTENT.match(line)]
    if len(extents) != 1 or not _SPARSE.fullmatch(extents[0]):
        raise facts.refuse("vmdk", "extents", "the image is not one sparse extent in one file")


def required_length(view: views.View) -> int:
    """Return the minimum length in bytes of a file with this grain directory and its tables."""
    header = vmdk_header.parse(view.at(0, SECTOR))
    if header.directory == AT_END:
        header, _ = _footer(header, view)
    count = header.directory_entries
    required = header.directory * SECTOR + 4 * count
    last = 0
    for _, directory in view.table(header.directory * SECTOR, count, "<I"):
        offsets = {entry * SECTOR for entry in directory if entry}
        for table in view.tables(offsets, 4 * header.table_entries):
            last = max(last, *views.entries(table, "<I"))
    if last < 2:
        return required  # 0: never written, 1: reads as zeros
    length = header.grain * SECTOR
    if header.flags & vmdk_header.COMPRESSED:
        marker = vmdk_header.GRAIN_MARKER
        length = marker.size + marker.unpack(view.at(last * SECTOR, marker.size))[1]
    return max(required, last * SECTOR + length)
