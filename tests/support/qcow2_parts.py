"""qcow2 headers and tables, made by hand."""

from __future__ import annotations

import struct

CLUSTER = 65536
COPIED = 1 << 63
PACKED = 1 << 62


def header(
    *,
    version: int = 3,
    backing: int = 0,
    bits: int = 16,
    size: int = 1 << 20,
    crypt: int = 0,
    l1: tuple[int, int] = (1, 3 * CLUSTER),
    refcounts: tuple[int, int] = (CLUSTER, 1),
    snapshots: tuple[int, int] = (0, 0),
    features: int = 0,
    autoclear: int = 0,
    order: int = 4,
    length: int = 112,
    compression: int = 0,
    extensions: bytes = b"",
) -> bytes:
    """Return the first cluster of an image; the arguments are fields of the specification."""
    head = struct.pack(
        ">4sIQIIQIIQQIIQ", b"QFI\xfb", version, backing, 8, bits, size, crypt, *l1, *refcounts, *snapshots
    )
    if version == 3:
        head += struct.pack(">QQQIIB7x", features, 0, autoclear, order, length, compression)
    return (head + extensions).ljust(CLUSTER, b"\0")


def extension(kind: int, data: bytes) -> bytes:
    """Return a header extension."""
    return struct.pack(">II", kind, len(data)) + data + bytes(-len(data) % 8)


def image(
    *, version: int = 3, size: int = 1 << 20, l1: int = 4 * CLUSTER, l2: list[int] | None = None
) -> bytes:
    """Return an image of eight clusters: header, two of refcounts, L1, L2, three of data."""
    entries = l2 or []
    return b"".join(
        part.ljust(CLUSTER, b"\0")
        for part in (
            header(version=version, size=size),
            *(b"", b""),
            struct.pack(">Q", l1),
            struct.pack(f">{len(entries)}Q", *entries),
            *(b"\x11", b"\x22", b"\x33"),
        )
    )
