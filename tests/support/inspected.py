"""Images in memory, and what the rules of safety say of them."""

from __future__ import annotations

import struct

from cdi_worker.formats import detect, safety, vhd


def kind(data):
    found = detect.detect(data[: detect.HEAD])
    return "vhd" if found == "raw" and vhd.is_fixed_vhd(data) else found


def seen(data):
    return {"read": lambda offset, length: data[offset : offset + length], "size": len(data)}


def check(data, **options):
    return safety.check(kind(data), data[: detect.HEAD], **seen(data), **options)


def check_length(data):
    return safety.check_length(kind(data), **seen(data))


def with_footer(data):
    """Make of QEMU's stream-optimized VMDK one like VMware's, whose true header is at the end."""
    header = bytearray(data[:512])
    struct.pack_into("<Q", header, 56, (1 << 64) - 1)
    marker = struct.pack("<QII496x", 1, 0, 3)
    return bytes(header) + data[512:] + marker + data[:512] + bytes(512)


def image(disks, variant, content="mixed"):
    if variant == "vmdk-footer":
        return with_footer(disks.image("vmdk-stream", content).read_bytes())
    return disks.image(variant, content).read_bytes()
