"""Check images in memory by the safety rules."""

from __future__ import annotations

import struct

from cdi_worker.formats import detect, safety, vhd


def kind(data):
    """Return the detected format of an image."""
    found = detect.detect(data[: detect.HEAD])
    return "vhd" if found == "raw" and vhd.is_fixed(data) else found


def reader_arguments(data):
    """Return the arguments by which the safety rules read an image."""
    return {"read": lambda offset, length: data[offset : offset + length], "size": len(data)}


def check(data, **options):
    """Check an image and return what ``safety.check`` returns."""
    return safety.check(kind(data), data[: detect.HEAD], **reader_arguments(data), **options)


def check_length(data):
    """Return the length that an image must have."""
    return safety.check_length(kind(data), **reader_arguments(data))


def with_footer(data):
    """Return QEMU's stream-optimized VMDK rewritten like VMware's, with the real header at the end."""
    header = bytearray(data[:512])
    struct.pack_into("<Q", header, 56, (1 << 64) - 1)
    marker = struct.pack("<QII496x", 1, 0, 3)
    return bytes(header) + data[512:] + marker + data[:512] + bytes(512)


def image(disks, variant, content="mixed"):
    """Return the bytes of a disk in a variant, or in ``vmdk-footer``."""
    if variant == "vmdk-footer":
        return with_footer(disks.image("vmdk-stream", content).read_bytes())
    return disks.image(variant, content).read_bytes()
