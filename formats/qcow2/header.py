"""The qcow2 header: its fields, and whether the image is safe and supported.

Specification: docs/interop/qcow2.rst of QEMU. Limits that the specification leaves open are those of QEMU's
block/qcow2.c, so that QEMU accepts every value accepted here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from cdi_worker import errors
from cdi_worker.formats import facts

MAGIC = b"QFI\xfb"

#: First bytes of the file that hold everything read here.
HEAD_SIZE = 64 * 1024

_V2 = struct.Struct(">4sIQIIQIIQQIIQ")
_V3 = struct.Struct(">QQQII")
_EXTENSION = struct.Struct(">II")

# A dirty image was written with lazy refcounts and not closed cleanly. Only its refcounts may be stale
# (specification, "incompatible_features" bit 0). They are not read here, so a dirty image is read like any
# other, as QEMU does with one opened read-only.
_DIRTY, _CORRUPT, _DATA_FILE, _COMPRESSION, _EXTENDED_L2 = (1 << bit for bit in range(5))
_KNOWN = _DIRTY | _CORRUPT | _DATA_FILE | _COMPRESSION | _EXTENDED_L2

_RAW_DATA_FILE = 2  # in the autoclear features

_END, _LUKS = 0, 0x0537BE77
BACKING_FORMAT, BITMAPS = 0xE2792ACA, 0x23852875
_NONE: Final[Mapping[int, bytes]] = MappingProxyType({})
_COMPRESSIONS = {0: "zlib", 1: "zstd"}

_MAX_L1_BYTES = 32 << 20
_MAX_REFCOUNT_TABLE_BYTES = 8 << 20
_MAX_SNAPSHOTS = 65536
_LONGEST_NAME = 1023


class Qcow2Header(NamedTuple):
    """The header of an image that passed every check. Sizes and offsets in bytes.

    ``backing``: the name of the backing file: it is compared, never opened. ``extensions``: data by type.
    """

    version: int
    virtual_size: int
    cluster_bits: int
    l1_offset: int
    l1_entries: int
    refcount_offset: int
    refcount_clusters: int
    snapshots: int
    snapshots_offset: int
    compression: str = "zlib"
    extended_l2: bool = False
    backing: str | None = None
    extensions: Mapping[int, bytes] = _NONE

    @property
    def cluster_size(self) -> int:
        return 1 << self.cluster_bits

    @property
    def table_entries(self) -> int:
        """Entries of one L2 table."""
        return self.cluster_size // (16 if self.extended_l2 else 8)

    @property
    def reach(self) -> int:
        """Bytes of the disk that one L2 table maps."""
        return self.table_entries << self.cluster_bits

    @property
    def l1_needed(self) -> int:
        """Number of L1 entries for the virtual size; those after them map the VM state of snapshots."""
        return -(-self.virtual_size // self.reach)


def parse(head: bytes, *, backed: bool = False) -> Qcow2Header:
    """Read the header from the first ``HEAD_SIZE`` bytes of the file (all of a smaller one).

    ``backed``: it may name a backing file.

    Raises ``errors.Refused`` if a safety rule forbids the image, ``errors.Unsupported`` if another program
    may be able to read it, ``errors.Corrupt`` or ``errors.Truncated`` if it is invalid.
    """
    if len(head) < _V2.size:
        raise errors.Truncated(format="qcow2", reason=f"the file has {len(head)} bytes, less than a header")
    fields = _V2.unpack_from(head)
    magic, version, backing, name_length, cluster_bits, virtual_size, crypt = fields[:7]
    if magic != MAGIC:
        raise errors.Corrupt(format="qcow2", reason="the magic number is missing")
    if version not in (2, 3):
        raise errors.Unsupported(reason=f"qcow2 version {version}; supported: 2 and 3")
    if not 9 <= cluster_bits <= 21:
        raise errors.Corrupt(format="qcow2", reason=f"cluster_bits is {cluster_bits}, expected 9 to 21")
    if backing and not backed:
        layers = "name that one as SOURCE and this one with --layer"
        reason = "the image has a backing file"
        raise facts.refuse("qcow2", "backing_file", reason, (layers, "command"), ("flatten it", "flatten"))
    if crypt:
        raise facts.refuse(
            "qcow2", "encryption", f"the image is encrypted (method {crypt}); decrypt it first"
        )
    features, compression, end = _version_3(head) if version == 3 else (0, "zlib", _V2.size)
    name = None
    if backing:
        data = head[backing : backing + name_length]
        if name_length > _LONGEST_NAME or len(data) < name_length:
            reason = f"the name of the backing file has {name_length} bytes at byte {backing}"
            raise facts.refuse("qcow2", "backing_file", reason)
        name = data.decode("utf-8", "replace")
    header = Qcow2Header(
        version,
        virtual_size,
        cluster_bits,
        l1_offset=fields[8],
        l1_entries=fields[7],
        refcount_offset=fields[9],
        refcount_clusters=fields[10],
        snapshots=fields[11],
        snapshots_offset=fields[12],
        compression=compression,
        extended_l2=bool(features & _EXTENDED_L2),
        backing=name,
        extensions=dict(_extensions(head, end, 1 << cluster_bits)),
    )
    _check_sizes(header)
    return header


def _version_3(head: bytes) -> tuple[int, str, int]:
    """Return (incompatible features, compression, offset of the header extensions)."""
    if len(head) < _V2.size + _V3.size:
        raise errors.Truncated(format="qcow2", reason=f"the file has {len(head)} bytes, less than a header")
    features, _, autoclear, refcount_order, length = _V3.unpack_from(head, _V2.size)
    if features & ~_KNOWN:
        raise facts.refuse(
            "qcow2", "unknown_features", f"the image needs unknown features ({features & ~_KNOWN:#x})"
        )
    if features & _DATA_FILE:
        raise facts.refuse(
            "qcow2", "data_file", "the data is in an external data file; convert the image with qemu-img"
        )
    if features & _CORRUPT:
        remedy = errors.Remedy([("repair it", "repair")])
        raise errors.Corrupt(format="qcow2", reason="the image is marked as corrupt", remedy=remedy)
    if autoclear & _RAW_DATA_FILE:
        raise errors.Corrupt(format="qcow2", reason="the raw data file flag is set without a data file")
    if refcount_order > 6:
        raise errors.Corrupt(format="qcow2", reason=f"refcount_order is {refcount_order}, expected 0 to 6")
    if length < _V2.size + _V3.size or length % 8:
        raise errors.Corrupt(format="qcow2", reason=f"invalid header length of {length} bytes")
    kind = head[104] if length > 104 and len(head) > 104 else 0
    if kind not in _COMPRESSIONS:
        raise errors.Unsupported(reason=f"qcow2 compression type {kind}")
    if (kind != 0) != bool(features & _COMPRESSION):
        raise errors.Corrupt(format="qcow2", reason="compression type and feature bit contradict each other")
    return features, _COMPRESSIONS[kind], length


def _extensions(head: bytes, offset: int, cluster_size: int) -> Iterator[tuple[int, bytes]]:
    """Yield type and data of the header extensions from ``offset`` on."""
    end = min(len(head), cluster_size)
    if offset > end:
        raise errors.Corrupt(format="qcow2", reason=f"invalid header length of {offset} bytes")
    while offset + _EXTENSION.size <= end:
        kind, length = _EXTENSION.unpack_from(head, offset)
        if kind == _LUKS:
            raise facts.refuse("qcow2", "encryption", "the image has an encryption header; decrypt it first")
        if length > end - offset - _EXTENSION.size:
            raise errors.Corrupt(format="qcow2", reason=f"the header extension at {offset} is too long")
        if kind == _END:
            return
        offset += _EXTENSION.size
        yield kind, head[offset : offset + length]
        offset += -(-length // 8) * 8


def _check_sizes(header: Qcow2Header) -> None:
    faults = {
        "virtual size is not a multiple of 512": header.virtual_size % 512,
        "L1 table is larger than 32 MiB": header.l1_entries * 8 > _MAX_L1_BYTES,
        "L1 table is too small for the virtual size": header.l1_entries < header.l1_needed,
        "L1 table is not at a cluster boundary": header.l1_offset % header.cluster_size,
        "refcount table is missing": not header.refcount_clusters,
        "refcount table is larger than 8 MiB": header.refcount_clusters << header.cluster_bits
        > _MAX_REFCOUNT_TABLE_BYTES,
        "refcount table is not at a cluster boundary": header.refcount_offset % header.cluster_size,
        "offsets are not below 2^63": max(header.l1_offset, header.refcount_offset) >> 63,
        "snapshot table is not at a cluster boundary": header.snapshots_offset % header.cluster_size,
        "more than 65536 snapshots": header.snapshots > _MAX_SNAPSHOTS,
        "subclusters are smaller than 512 bytes": header.extended_l2 and header.cluster_bits < 14,
    }
    for reason, wrong in faults.items():
        if wrong:
            raise errors.Corrupt(format="qcow2", reason=reason)
