"""Malicious images, and images damaged in a way that must be detected.

``image(disks, name)`` returns one of IMAGES, ``bomb(disks, compression)`` a decompression bomb.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from tests.support import disks as disks_module
from tests.support import processes

MiB = 1 << 20

#: The file that the hostile images try to read.
SECRET = "/etc/hostname"


def image(disks: disks_module.Disks, name: str) -> Path:
    """Return a hostile image of IMAGES."""
    return disks.once(f"hostile.{name}", lambda path: IMAGES[name](disks, path))


def bomb(disks: disks_module.Disks, compression: str) -> Path:
    """Return a small file that decompresses to 256 MiB of zeros, in many members."""
    compress = disks_module.COMPRESSIONS[compression]
    return disks.once(f"bomb.{compression}", lambda path: path.write_bytes(compress(bytes(16 * MiB)) * 16))


def _create(driver: str, *options: str) -> Callable[[disks_module.Disks, Path], None]:
    """Create an image of 8 MiB by qemu-img."""

    def make(_: disks_module.Disks, path: Path) -> None:
        processes.need("qemu-img")
        processes.run("qemu-img", "create", "-q", "-f", driver, *options, path, "8M")

    return make


def _patched(variant: str, *fields: tuple[int, str, int]) -> Callable[[disks_module.Disks, Path], None]:
    """Overwrite fields of a valid image; each is offset, struct format and value."""

    def make(disks: disks_module.Disks, path: Path) -> None:
        data = bytearray(disks.image(variant).read_bytes())
        for offset, form, value in fields:
            struct.pack_into(form, data, offset, value)
        path.write_bytes(data)

    return make


def _text(text: str) -> Callable[[disks_module.Disks, Path], None]:
    def make(_: disks_module.Disks, path: Path) -> None:
        path.write_text(text)

    return make


def _data_file(_: disks_module.Disks, path: Path) -> None:
    outside = path.with_name("outside.raw")
    options = f"data_file={outside},data_file_raw=on"
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-o", options, path, "8M")


def _two_magics(disks: disks_module.Disks, path: Path) -> None:
    """Write an ISO image that begins as a qcow2 image."""
    iso = disks.image("iso").read_bytes()
    path.write_bytes(disks.image("qcow2").read_bytes()[:512] + iso[512:])


def _truncated(variant: str) -> Callable[[disks_module.Disks, Path], None]:
    def make(disks: disks_module.Disks, path: Path) -> None:
        data = disks.image(variant).read_bytes()
        path.write_bytes(data[: len(data) * 2 // 3])

    return make


def _embedded_extent(disks: disks_module.Disks, path: Path) -> None:
    """Write a sparse VMDK whose embedded descriptor names another file."""
    data = disks.image("vmdk").read_bytes()
    start = data.index(b"RW ")
    end = data.index(b"\n", start)
    line = f'RW 16384 FLAT "{SECRET}" 0'.encode()
    path.write_bytes(data[:start] + line.ljust(end - start)[: end - start] + data[end:])


def _vhd_differencing(disks: disks_module.Disks, path: Path) -> None:
    """Write a differencing VHD with valid checksums."""
    data = bytearray(disks.image("vhd").read_bytes())
    for footer in (0, len(data) - 512):
        struct.pack_into(">I", data, footer + 60, 4)
        struct.pack_into(">I", data, footer + 64, 0)
        struct.pack_into(">I", data, footer + 64, ~sum(data[footer : footer + 512]) & 0xFFFFFFFF)
    path.write_bytes(data)


def _vhdx_parent(disks: disks_module.Disks, path: Path) -> None:
    """Set bit 1 of the file parameters' flags of a VHDX: it has a parent ([MS-VHDX] 2.6.2.1)."""
    data = bytearray(disks.image("vhdx").read_bytes())
    parameters = bytes.fromhex("3767a1ca36fa434db3b633f0aa44e76b")
    (offset,) = struct.unpack_from("<I", data, data.index(parameters) + 16)
    struct.pack_into("<I", data, data.index(b"metadata") + offset + 4, 2)
    path.write_bytes(data)


_FLAT = f"""# Disk DescriptorFile
version=1
CID=12345678
parentCID=ffffffff
createType="monolithicFlat"

# Extent description
RW 16384 FLAT "{SECRET}" 0

# The Disk Data Base
#DDB
ddb.virtualHWVersion = "4"
ddb.adapterType = "ide"
"""

#: Offsets come from the specifications: qcow2 in docs/interop/qcow2.txt of QEMU, VMDK in
#: "Virtual Disk Format 5.0", VDI as in block/vdi.c of QEMU.
IMAGES: dict[str, Callable[[disks_module.Disks, Path], None]] = {
    "qcow2-backing": _create("qcow2", "-u", "-b", SECRET, "-F", "raw"),
    "qcow2-backing-json": _create("qcow2", "-u", "-F", "raw", "-b", f'json:{{"file.filename":"{SECRET}"}}'),
    "qcow2-data-file": _data_file,
    "qcow2-luks": _patched("qcow2", (32, ">I", 2)),
    "qcow2-aes": _patched("qcow2", (32, ">I", 1)),
    "qcow2-unknown-incompatible": _patched("qcow2", (72, ">Q", 1 << 40)),
    "qcow2-dirty": _patched("qcow2", (72, ">Q", 1 << 0)),
    "qcow2-corrupt": _patched("qcow2", (72, ">Q", 1 << 1)),
    "qcow2-version": _patched("qcow2", (4, ">I", 4)),
    "qcow2-cluster-bits": _patched("qcow2", (20, ">I", 63)),
    "qcow2-huge": _patched("qcow2", (24, ">Q", 1 << 62)),
    "qcow2-l1-outside": _patched("qcow2", (40, ">Q", 1 << 40)),
    "qcow2-l1-size": _patched("qcow2", (36, ">I", 0xFFFFFFFF)),
    "qcow2-truncated": _truncated("qcow2"),
    "qcow2-zlib-truncated": _truncated("qcow2-zlib"),
    "vmdk-flat": _text(_FLAT),
    "vmdk-extent": _embedded_extent,
    "vmdk-huge": _patched("vmdk", (12, "<Q", 1 << 60)),
    "vmdk-truncated": _truncated("vmdk"),
    "vmdk-stream-truncated": _truncated("vmdk-stream"),
    "vdi-truncated": _truncated("vdi"),
    "vhd-truncated": _truncated("vhd"),
    "vhdx-truncated": _truncated("vhdx"),
    "vhdx-log-truncated": _truncated("vhdx-log"),
    "vdi-differencing": _patched("vdi", (76, "<I", 4), (440, "<I", 1)),
    "vdi-huge": _patched("vdi", (368, "<Q", 1 << 62)),
    "vhd-differencing": _vhd_differencing,
    "vhdx-parent": _vhdx_parent,
    "qed-backing": _create("qed", "-u", "-b", SECRET, "-F", "raw"),
    "two-magics": _two_magics,
}
